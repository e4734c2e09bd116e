"""Bodies that compare attention inside a block with attention over the whole sequence in one process."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompat.buffers import head_tail
from ranks.context_bodies import context

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def plain(query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    return F.scaled_dot_product_attention(query, key, value, **keywords)


def relative(mine: Tensor, right: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference over the largest value of `scale` (the whole, where `right` is a shard of it)."""
    largest = (right if scale is None else scale).double().abs().max()
    return float((mine.double() - right.double()).abs().max() / largest)


def compare(rotate_method: str, dtype: str, causal: bool) -> dict[str, float]:
    """The largest relative difference of output and gradients over shapes, strides, scales and head groups.

    For bfloat16 the right numbers are those of float64, and plain bfloat16 attention is measured beside.
    """
    cp = context(rotate_method)
    size, rank = cp.size, cp.rank
    worst, plainly = 0.0, 0.0
    for (heads, key_heads), (width, value_width), chunk, scale, layout in itertools.product(
        ((4, 4), (4, 2), (4, 1)), ((16, 16), (80, 80), (16, 24), (24, 8)), (1, 5), (None, 0.3), ("bhld", "blhd")
    ):
        if layout == "blhd" and (width, chunk) != (16, 5):
            continue
        length = 2 * size * chunk
        torch.manual_seed(length * width + heads * key_heads)
        shapes = ((2, heads, length, width), (2, key_heads, length, width), (2, key_heads, length, value_width))
        whole = [torch.randn(shape, dtype=torch.float64).to(DTYPES[dtype]) for shape in shapes]
        grad = torch.randn(2, heads, length, value_width, dtype=torch.float64).to(DTYPES[dtype])

        exact = [t.to(torch.float64, copy=True).requires_grad_() for t in whole]
        right = plain(*exact, is_causal=causal, scale=scale)
        right.backward(grad.double())
        local = [head_tail(t, 2, rank, size) for t in whole]
        if layout == "blhd":
            local = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in local]
        local = [t.requires_grad_() for t in local]
        with cp():
            mine = F.scaled_dot_product_attention(*local, is_causal=causal, scale=scale, enable_gqa=heads != key_heads)
            mine.backward(head_tail(grad, 2, rank, size))
        pairs = [(mine, right), *((m.grad, r.grad) for m, r in zip(local, exact, strict=True))]
        worst = max(worst, *(relative(m.detach(), head_tail(r.detach(), 2, rank, size), r.detach()) for m, r in pairs))
        if dtype == "bfloat16":
            low = [t.clone().requires_grad_() for t in whole]
            out = plain(*low, is_causal=causal, scale=scale)
            out.backward(grad)
            pairs = [(out, right), *((m.grad, r.grad) for m, r in zip(low, exact, strict=True))]
            plainly = max(plainly, *(relative(m.detach(), r.detach()) for m, r in pairs))
    return {"worst": worst, "plain": plainly}


def three_dimensions() -> float:
    """(heads, length, width) without a batch, as plain SDPA takes it."""
    cp = context()
    length = 4 * cp.size
    torch.manual_seed(0)
    whole = [torch.randn(3, length, 16) for _ in range(3)]
    right = F.scaled_dot_product_attention(*whole, is_causal=True)
    with cp():
        mine = F.scaled_dot_product_attention(*(head_tail(t, 1, cp.rank, cp.size) for t in whole), is_causal=True)
    assert mine.shape == (3, 4, 16)
    return relative(mine, head_tail(right, 1, cp.rank, cp.size))


def backward_after_the_block() -> float:
    """With inputs that the block does not touch, a backward after it is right: the ring needs no global state."""
    cp = context("alltoall")
    length = 4 * cp.size
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    F.scaled_dot_product_attention(*whole, is_causal=True).sum().backward()
    local = [head_tail(t.detach(), 2, cp.rank, cp.size).requires_grad_() for t in whole]
    with cp():
        out = F.scaled_dot_product_attention(*local, is_causal=True)
    out.sum().backward()
    return max(relative(m.grad, head_tail(w.grad, 2, cp.rank, cp.size)) for m, w in zip(local, whole, strict=True))


def only_some_gradients() -> float:
    """Frozen keys and values: the query alone has a gradient, and the ranks still agree on the transfers."""
    cp = context("alltoall")
    length = 4 * cp.size
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 16) for _ in range(3))
    whole = query.clone().requires_grad_()
    F.scaled_dot_product_attention(whole, key, value, is_causal=True).sum().backward()
    mine = head_tail(query, 2, cp.rank, cp.size).requires_grad_()
    with cp():
        F.scaled_dot_product_attention(
            mine, *(head_tail(t, 2, cp.rank, cp.size) for t in (key, value)), is_causal=True
        ).sum().backward()
    return relative(mine.grad, head_tail(whole.grad, 2, cp.rank, cp.size))
