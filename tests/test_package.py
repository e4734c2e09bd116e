"""The package as a whole: what importing costs, who imports whom, what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cpcompat

ROOT = Path(cpcompat.__file__).parent
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
TABLES = {"versions", "layouts", "torch_cp"}


def fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_import_is_light() -> None:
    code = (
        "import sys, cpcompat, cpcompat.errors, cpcompat.layouts, cpcompat.versions, cpcompat.resolve; "
        "print([m for m in ('torch', 'accelerate', 'packaging', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_get_cp_context_can_be_imported_without_loading_torch() -> None:
    assert fresh("from cpcompat import get_cp_context; import sys; print('torch' in sys.modules)") == "False"


def imports(module: str) -> set[str]:
    """The modules of the package that a module imports anywhere, inside functions too; not for type checking only."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if ast.unparse(node.test) != "TYPE_CHECKING":
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            assert not any(alias.name.split(".")[0] == "cpcompat" for alias in node.names), "relative imports only"

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            assert (node.module or "").split(".")[0] != "cpcompat", "relative imports only"
            if node.level:
                found.update({node.module.split(".")[0]} if node.module else {alias.name for alias in node.names})

    Visitor().visit(ast.parse((ROOT / f"{module}.py").read_text()))
    return found & set(MODULES)


def test_imports_go_one_way() -> None:
    graph = {module: imports(module) for module in MODULES}
    order: list[str] = []
    while graph.keys() - set(order):
        free = sorted(m for m in graph.keys() - set(order) if graph[m] <= set(order))
        assert free, f"a cycle among {sorted(graph.keys() - set(order))}"
        order += free
    assert order.index("context") < order.index("resolve")


def test_versions_are_compared_in_the_tables_only() -> None:
    """No module but the tables parses or compares a version."""
    for module in set(MODULES) - TABLES:
        tree = ast.parse((ROOT / f"{module}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "__version__" not in text, (module, text)
                assert "version_info" not in text, (module, text)
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("packaging"), module
                assert "base_version" not in {alias.name for alias in node.names}, module


def test_public_surface() -> None:
    assert set(cpcompat.__all__) >= {"CPContext", "CPError", "CPWarning", "get_cp_context", "register_layout"}
    assert sorted(cpcompat.__all__) == sorted(set(cpcompat.__all__))
    assert set(cpcompat.__all__) <= set(dir(cpcompat))
    for name in cpcompat.__all__:
        assert getattr(cpcompat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cpcompat.nothing


def test_type_checkers_see_every_name() -> None:
    text = (ROOT / "__init__.py").read_text()
    for name in set(cpcompat.__all__) - {"__version__"}:
        assert f"import {name} as {name}" in text
    assert (ROOT / "py.typed").exists()


def test_the_version_is_stated_once_in_each_place() -> None:
    project = ROOT.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("the package is not in its checkout: there is no pyproject.toml to compare with")
    assert f'version = "{cpcompat.__version__}"' in project.read_text()


def test_every_public_name_has_a_docstring_with_its_errors() -> None:
    for module in MODULES:
        tree = ast.parse((ROOT / f"{module}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}.{node.name}"
