"""Every line of docs/guarantees.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guarantees.md"


def test_every_promise_is_held_by_a_test() -> None:
    promised = PAGE.read_text(encoding="utf-8").partition("<!-- numbers")[0]
    rows = [line for line in promised.splitlines() if line.startswith("| ") and "---" not in line]
    promises = [row for row in rows if not row.endswith("| held by |")]
    assert len(promises) > 20
    for row in promises:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            assert name in found, f"{file} has no {name}"
