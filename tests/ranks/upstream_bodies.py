"""What torch's own context does, without cpcompat: the faults that the table of torch releases tells of."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from cpcompat.buffers import positions

SDPA = F.scaled_dot_product_attention


def _block(mesh: Any, buffers: list[torch.Tensor], dims: list[int]) -> Any:
    return context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims)


def behaviour() -> dict[str, Any]:
    """The columns of `cpcompat.layouts.TorchRelease`, as they are found here."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    found: dict[str, Any] = {}

    ids = torch.arange(2 * size)[None]
    with contextlib.suppress(KeyError), _block(mesh, [ids], [1]):
        raise KeyError("mine")
    found["restores"] = F.scaled_dot_product_attention is SDPA and ids.shape[1] == 2 * size
    F.scaled_dot_product_attention = SDPA

    short = torch.arange(size)[None]
    try:
        with _block(mesh, [short], [1]):
            found["short"] = "contiguous shards" if short[0].tolist() == [rank] else short[0].tolist()
    except AssertionError as error:
        found["short"] = "AssertionError"
        assert not str(error), "it has a text now"

    try:
        with _block(mesh, [], []):
            found["empty"] = "accepted"
    except IndexError:
        found["empty"] = "IndexError"

    index = positions(4 * size, rank, size)
    right = []
    for rows in (2, 3):
        expanded = torch.arange(4 * size).expand(rows, -1)
        with contextlib.suppress(RuntimeError), _block(mesh, [expanded], [1]):
            right.append(torch.equal(expanded, index.expand(rows, -1)))
    found["expands"] = right == [True, True]

    whole = torch.arange(4 * size + 1)[None].repeat(2, 1)
    kept = whole.clone()
    with contextlib.suppress(RuntimeError), _block(mesh, [whole[:, :-1], whole[:, 1:]], [1, 1]):
        pass
    found["views"] = torch.equal(whole, kept)
    F.scaled_dot_product_attention = SDPA
    return found
