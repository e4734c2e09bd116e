"""``python -m cpcompat run [-m] TARGET args...``: somebody else's script or module, patched, with no change of its code.

The target runs as ``__main__`` with its own arguments, path, exit code and traceback. accelerate is patched when the target
imports it and not before, so that the environment which a script sets at its top (``HF_HOME``) still counts.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType

from .patching import patch

__all__ = ["run"]

_HOME = "accelerate.accelerator"
_RUNNERS = (__name__, "runpy", "importlib._bootstrap", "importlib._bootstrap_external", "_frozen_importlib_external")


def run(target: str, arguments: Sequence[str] = (), *, module: bool = False) -> None:
    """Run a script or a module as ``__main__``, with `patch` in force from the moment at which accelerate is imported.

    Args:
        target: a path, or with `module` the name of a module or package.
        arguments: what the target finds in ``sys.argv[1:]``.
        module: as in ``python -m``.

    Raises:
        SystemExit: the target's own.
        BaseException: whatever the target raises; the interpreter will show its traceback from the target's first frame on.
    """
    if _HOME in sys.modules:
        patch()
    else:
        sys.meta_path.insert(0, _PatchOnImport())
    sys.argv = [target, *arguments]
    if not module and not getattr(sys.flags, "safe_path", False):  # where it holds the folder of ``python -m``
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(os.path.abspath(target))
    except SystemExit:
        raise
    except BaseException as error:
        _show_from(_targets_own(error.__traceback__))
        raise


def _run_script(path: str) -> None:
    """As the interpreter does, and unlike runpy: the module stays ``__main__`` until the process ends."""
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    sys.modules["__main__"] = main
    exec(code, vars(main))


class _PatchOnImport(MetaPathFinder):
    """Lets the module that defines Accelerator load as it is, and patches the class right after."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                patch()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _targets_own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without `run` and runpy; None where the target did not come to run."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _RUNNERS:
        trace = trace.tb_next
    return trace


def _show_from(own: TracebackType | None) -> None:
    """Let the uncaught exception be shown, by whatever hook the target has set, as if nobody had called the target."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error.with_traceback(own), own)

    sys.excepthook = show
