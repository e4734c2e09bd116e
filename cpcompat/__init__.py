"""One call for accelerate's context-parallel context, on every release: ``get_cp_context(acc)``.

Importing this package loads neither torch nor accelerate nor packaging; the names below load what they need when used.
"""

from __future__ import annotations

import importlib
from importlib.machinery import PathFinder

# What type checkers take for true, without the import of typing, which would cost more than all the rest.
TYPE_CHECKING = False

__version__ = "0.1.0"

_HOMES = {
    "AttentionUnsupported": "errors",
    "AttentionWarning": "errors",
    "BackwardOutside": "errors",
    "BatchInvalid": "errors",
    "BatchUnsupported": "errors",
    "BufferInvalid": "errors",
    "CPContext": "context",
    "CPError": "errors",
    "CPNotReady": "errors",
    "CPNotRequested": "errors",
    "CPWarning": "errors",
    "Contradiction": "errors",
    "CreationFailed": "errors",
    "EvaluationWarning": "errors",
    "Finding": "findings",
    "ForeignOwner": "errors",
    "LengthInvalid": "errors",
    "LossWarning": "errors",
    "ModelUnsupported": "errors",
    "NestedContext": "errors",
    "RankFailed": "errors",
    "RanksDiffer": "errors",
    "Report": "findings",
    "SequenceParallel": "errors",
    "StaleContext": "errors",
    "UntestedVersion": "errors",
    "VendorRefused": "errors",
    "VerifyReport": "checks",
    "VersionTooOld": "errors",
    "diagnose": "diagnosing",
    "get_cp_context": "resolve",
    "patch": "patching",
    "register_layout": "layouts",
    "unpatch": "patching",
    "verify": "verifying",
}
# A vendored copy may lack what only tests need; then the name is not its own either.
if PathFinder.find_spec(f"{__name__}.verifying", __path__) is None:
    del _HOMES["verify"]

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from typing import Any

    from .checks import VerifyReport as VerifyReport
    from .context import CPContext as CPContext
    from .diagnosing import diagnose as diagnose
    from .errors import AttentionUnsupported as AttentionUnsupported
    from .errors import AttentionWarning as AttentionWarning
    from .errors import BackwardOutside as BackwardOutside
    from .errors import BatchInvalid as BatchInvalid
    from .errors import BatchUnsupported as BatchUnsupported
    from .errors import BufferInvalid as BufferInvalid
    from .errors import Contradiction as Contradiction
    from .errors import CPError as CPError
    from .errors import CPNotReady as CPNotReady
    from .errors import CPNotRequested as CPNotRequested
    from .errors import CPWarning as CPWarning
    from .errors import CreationFailed as CreationFailed
    from .errors import EvaluationWarning as EvaluationWarning
    from .errors import ForeignOwner as ForeignOwner
    from .errors import LengthInvalid as LengthInvalid
    from .errors import LossWarning as LossWarning
    from .errors import ModelUnsupported as ModelUnsupported
    from .errors import NestedContext as NestedContext
    from .errors import RankFailed as RankFailed
    from .errors import RanksDiffer as RanksDiffer
    from .errors import SequenceParallel as SequenceParallel
    from .errors import StaleContext as StaleContext
    from .errors import UntestedVersion as UntestedVersion
    from .errors import VendorRefused as VendorRefused
    from .errors import VersionTooOld as VersionTooOld
    from .findings import Finding as Finding
    from .findings import Report as Report
    from .layouts import register_layout as register_layout
    from .patching import patch as patch
    from .patching import unpatch as unpatch
    from .resolve import get_cp_context as get_cp_context
    from .verifying import verify as verify  # type: ignore[import-not-found, unused-ignore]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
