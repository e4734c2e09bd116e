"""Bodies that verify a live context."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ranks.equality import make_accelerator


def live(package: str, method: str, *, prepare: bool = False) -> dict[str, Any]:
    """``CPContext.verify()`` by a copy of the package, which may be broken."""
    cpcompat = importlib.import_module(package)
    acc = make_accelerator(2, fsdp2=False, rotate_method=method)
    if prepare:
        acc.prepare(torch.nn.Linear(2, 2))
    asked = {} if hasattr(acc, "parallelism_config") else {"cp_size": 2, "rotate_method": method}
    original = F.scaled_dot_product_attention
    try:
        cp = cpcompat.get_cp_context(acc, **asked)
        report = cp.verify()
    finally:
        F.scaled_dot_product_attention = original
    return {"origin": cp.origin, "first_entry_is_left": not cp._agreed, "text": str(report), **report.to_dict()}


def inside_a_block() -> str:
    """The error of verifying inside a block."""
    from cpcompat import CPError, get_cp_context

    acc = make_accelerator(2, fsdp2=False)
    cp = get_cp_context(acc, **({} if hasattr(acc, "parallelism_config") else {"cp_size": 2}))
    ids = torch.arange(8)
    with cp(buffers=[ids], buffer_seq_dims=[0]):
        try:
            cp.verify()
        except CPError as error:
            F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 8), is_causal=True)
            return type(error).__name__
    return "none"


def delegated() -> dict[str, Any]:
    """Where another library owns CP."""
    from cpcompat import get_cp_context

    acc = make_accelerator(2, fsdp2=False)
    acc.maybe_context_parallel = lambda **_: nullcontext()
    return get_cp_context(acc).verify().to_dict()


def live_groups() -> dict[str, Any]:
    """Two cp groups of two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from cpcompat.context import CPContext

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return CPContext(mesh["cp"]).verify().to_dict()
