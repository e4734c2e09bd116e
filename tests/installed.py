"""What the installed accelerate is expected to do, from the project's own table."""

from __future__ import annotations

from cpcompat.layouts import RELEASES, Release
from cpcompat.versions import base_version, installed

ACCELERATE = installed("accelerate")
assert ACCELERATE is not None


def release() -> Release:
    """The row of the installed accelerate."""
    assert ACCELERATE is not None
    base = ACCELERATE.base
    assert base is not None
    rows = [row for row in RELEASES if (since := base_version(row.since)) is not None and since <= base]
    return rows[-1]


RELEASE = release()


def _fsdp2_problem() -> str:
    """Why the installed pair has no FSDP2 with CP; empty where it has."""
    import inspect
    from pathlib import Path

    import accelerate
    import torch
    from torch.distributed.fsdp import fully_shard

    if not RELEASE.has_config:
        return "this accelerate has no ParallelismConfig, without which its FSDP2 knows no cp dimension"
    source = (Path(accelerate.__file__).parent / "utils" / "fsdp_utils.py").read_text(encoding="utf-8")
    if "ignored_params" in source and "ignored_params" not in inspect.signature(fully_shard).parameters:
        return "this accelerate passes ignored_params to FSDP2, which this torch does not know"
    if not hasattr(torch.cpu.Stream, "record_event"):
        return "this torch's FSDP2 does not run on CPU: its CPU Stream has no record_event"
    return ""


FSDP2_PROBLEM = _fsdp2_problem()
