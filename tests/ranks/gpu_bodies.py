"""Bodies for two GPUs: torch's own CP attention, driven by the engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cpcompat import CPContext
from cpcompat.buffers import head_tail


def attention(rotate_method: str) -> dict[str, float]:
    """Causal attention in float32, forward and backward, against the whole sequence on one GPU."""
    cp = CPContext(
        init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",)), rotate_method=rotate_method
    )
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, 4, 256, 64, device="cuda")
    right = F.scaled_dot_product_attention(*whole, is_causal=True)
    right.backward(grad)
    local = [head_tail(t.detach(), 2, cp.rank, cp.size).requires_grad_() for t in whole]
    ids = torch.arange(256, device="cuda")[None]
    original = F.scaled_dot_product_attention
    with cp(buffers=[ids], buffer_seq_dims=[1]):
        inside = ids.clone()
        mine = F.scaled_dot_product_attention(*local, is_causal=True)
        mine.backward(head_tail(grad, 2, cp.rank, cp.size))
    assert F.scaled_dot_product_attention is original
    assert torch.equal(inside[0], cp.positions(256))
    assert torch.equal(ids[0], torch.arange(256, device="cuda"))
    return {
        "forward": float((mine - head_tail(right, 2, cp.rank, cp.size)).abs().max()),
        "backward": max(
            float((m.grad - head_tail(w.grad, 2, cp.rank, cp.size)).abs().max())
            for m, w in zip(local, whole, strict=True)
        ),
    }
