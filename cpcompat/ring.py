"""Ring attention on CPU, forward and backward, over the ranks of a cp group in head-tail order.

Rank r of n holds chunks r and 2n-1-r of 2n. Against the keys of rank s a causal query needs: of itself the causal square;
of s < r the first chunk for all queries; of s > r both chunks for the second half of the queries. Each of these is one call of
torch's CPU flash kernel, and the results are merged by their logsumexp. Nothing here is private to a torch release but
the two kernels, which have kept their signatures since 2.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .buffers import head_tail, in_global_order
from .explaining import annotate

__all__ = ["Ring", "attention", "unshard"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Kinds of messages. With the call's number they make the tag, so that no message of a call which one rank gave up (out of
# memory, say, and caught) can be taken for one of the next: that ends in the group's timeout, and not in wrong numbers.
_FORWARD, _BACKWARD, _GRADIENT, _KINDS = 0, 1, 2, 3
_NUMBERS = 1 << 29  # tags are 31 bits in gloo
_GROUP = 1 << 20  # bytes of keys and values that travel at once


@dataclass(frozen=True)
class Ring:
    """The ranks that share one sequence.

    Attributes:
        group: the cp group.
        peers: the global rank of each cp rank.
        rank: this process's cp rank.
        rotate_method: ``"allgather"`` sends all keys and values at once, ``"alltoall"`` one peer's at a time while the one
            before is computed.
    """

    group: dist.ProcessGroup
    peers: tuple[int, ...]
    rank: int
    rotate_method: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.peers)

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Start sending a contiguous tensor to a cp rank."""
        with self._with(to):
            return dist.isend(tensor, self.peers[to], group=self.group, tag=tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Start receiving into a contiguous tensor from a cp rank."""
        with self._with(source):
            return dist.irecv(tensor, self.peers[source], group=self.group, tag=tag)

    def wait(self, transfer: Any, peer: int) -> None:
        """Wait for a transfer to or from a cp rank."""
        with self._with(peer):
            transfer.wait()

    @contextmanager
    def _with(self, peer: int) -> Iterator[None]:
        """An error in an exchange tells with whom it was."""
        try:
            yield
        except Exception as error:
            annotate(error, f"cp rank {self.rank} was waiting for cp rank {peer} (global rank {self.peers[peer]})")
            raise


class _Transfer(NamedTuple):
    """Messages on their way: one from `source` into `incoming`, one (kept until it has gone) to `reader`."""

    source: int
    incoming: Tensor
    received: Any
    reader: int
    outgoing: Tensor
    sent: Any


def _needed(kv: Tensor, source: int, reader: int, causal: bool) -> Tensor:
    """The part of a rank's keys (or of their gradient) that a reader's queries see; kv is (2, B, H, L, D)."""
    return kv[..., : kv.shape[-2] // 2, :] if causal and source < reader else kv


def _rotate(ring: Ring, kv: Tensor, causal: bool, tag: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (source rank, its needed keys and values), this rank's own first; transfers overlap the caller's work."""

    def exchange(step: int) -> _Transfer:
        reader, source = (ring.rank + step) % ring.size, (ring.rank - step) % ring.size
        incoming = torch.empty_like(_needed(kv, source, ring.rank, causal), memory_format=torch.contiguous_format)
        outgoing = _needed(kv, ring.rank, reader, causal).contiguous()
        sent = ring.send(outgoing, reader, tag)
        return _Transfer(source, incoming, ring.receive(incoming, source, tag), reader, outgoing, sent)

    exchanges: Iterator[_Transfer] = map(exchange, range(1, ring.size))
    if ring.rotate_method == "allgather":
        exchanges = iter(list(exchanges))
    sends: list[tuple[Any, int, Tensor]] = []  # what came in is the caller's; what goes out must live until it has gone
    coming = next(exchanges, None)
    yield ring.rank, kv
    while coming is not None:
        source, part = coming.source, coming.incoming
        ring.wait(coming.received, source)
        sends.append((coming.sent, coming.reader, coming.outgoing))
        coming = next(exchanges, None)
        yield source, part
    for sent, reader, _ in sends:
        ring.wait(sent, reader)


def _repeat(kv: Tensor, heads: int) -> Tensor:
    # Fewer key heads than query heads crash the CPU kernel up to torch 2.8.
    groups = heads // kv.shape[2]
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=2)


def _queries(ring: Ring, source: int, causal: bool, length: int) -> slice:
    """Which of this rank's queries see any key of a source rank."""
    return slice(length // 2, length) if causal and source > ring.rank else slice(0, length)


def _groups(key: Tensor, repeats: int) -> Iterator[tuple[slice, slice]]:
    """Cut the heads into groups, for one ring after the other: what a ring needs for a while stays small.

    Args:
        key: (B, Hkv, L, D), whose shape is the same on all ranks.
        repeats: query heads for one key head.

    Yields:
        The query heads and the key heads of a group, whose keys and values take about `_GROUP` bytes.
    """
    heads = key.shape[1]
    number = max(1, min(heads, 2 * key.numel() * key.element_size() // _GROUP))
    for at in range(number):
        first, last = at * heads // number, (at + 1) * heads // number
        yield slice(first * repeats, last * repeats), slice(first, last)


def _forward(
    ring: Ring,
    tag: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> None:
    """Fill out and lse for some of the heads."""
    heads, length = query.shape[1], query.shape[2]
    for source, part in _rotate(ring, torch.stack((key, value)), causal, tag + _FORWARD):
        rows = _queries(ring, source, causal, length)
        keys, values = _repeat(part, heads)
        block, block_lse = _flash(
            query[:, :, rows], keys, values, 0.0, causal and source == ring.rank, attn_mask=None, scale=scale
        )
        if source == ring.rank:
            out.copy_(block)
            lse.copy_(block_lse)
            continue
        # out and lse are weighted means over what was seen so far: softmax over the union of the keys.
        old = lse[:, :, rows]
        out[:, :, rows].lerp_(block.to(out.dtype), torch.sigmoid(block_lse - old).unsqueeze(-1))
        torch.logaddexp(old, block_lse.to(lse.dtype), out=old)


def _backward(
    ring: Ring,
    tag: int,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_query: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, list[_Transfer]]:
    """Fill grad_query for some of the heads; return what `_finish` makes the gradient of their keys and values of."""
    heads, length = query.shape[1], query.shape[2]
    kv = torch.stack((key, value))
    pending: list[_Transfer] = []
    for source, part in _rotate(ring, kv, causal, tag + _BACKWARD):
        rows = _queries(ring, source, causal, length)
        keys, values = _repeat(part, heads)
        block_query, block_key, block_value = _flash_backward(
            grad_out[:, :, rows],
            query[:, :, rows],
            keys,
            values,
            out[:, :, rows],
            lse[:, :, rows].contiguous(),
            0.0,
            causal and source == ring.rank,
            attn_mask=None,
            scale=scale,
        )
        grad_part = torch.stack((block_key, block_value))
        if heads != kv.shape[2]:
            grad_part = grad_part.view(*kv.shape[:3], -1, *grad_part.shape[-2:]).sum(dim=3)
        if source == ring.rank:
            grad_query.copy_(block_query)
            grad_kv = grad_part.to(grad_query.dtype)
            continue
        grad_query[:, :, rows] += block_query
        # Straight to the owner of these keys; the owner's reader at the same distance sends ours.
        reader = (2 * ring.rank - source) % ring.size
        arriving = torch.empty_like(_needed(kv, ring.rank, reader, causal), memory_format=torch.contiguous_format)
        outgoing = grad_part.contiguous()
        sent = ring.send(outgoing, source, tag + _GRADIENT)
        received = ring.receive(arriving, reader, tag + _GRADIENT)
        pending.append(_Transfer(reader, arriving, received, source, outgoing, sent))
    return grad_kv, pending


def _finish(ring: Ring, grad_kv: Tensor, pending: list[_Transfer]) -> Tensor:
    """Add what the readers of the keys and values have found to be their gradient."""
    for transfer in pending:
        ring.wait(transfer.sent, transfer.reader)
        ring.wait(transfer.received, transfer.source)
        grad_kv[..., : transfer.incoming.shape[-2], :] += transfer.incoming
    return grad_kv


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, tag: int, causal: bool, scale: float
    ) -> Tensor:
        accumulate = torch.promote_types(query.dtype, torch.float32)
        # (B, L, H, D) in memory, as the kernel has it: what follows attention joins the heads without a copy.
        out = torch.empty_like(query.transpose(1, 2), dtype=accumulate, memory_format=torch.contiguous_format)
        out = out.transpose(1, 2)
        lse = torch.empty(query.shape[:3], dtype=accumulate, device=query.device)
        for own, shared in _groups(key, query.shape[1] // key.shape[1]):
            heads = query[:, own], key[:, shared], value[:, shared], out[:, own], lse[:, own]
            _forward(ring, tag, *heads, causal, scale)
        result: Tensor = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.ring, ctx.tag, ctx.causal, ctx.scale = ring, tag, causal, scale
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_query = torch.empty_like(query, dtype=lse.dtype)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        # A group's gradients arrive while the next one is computed.
        waiting: list[tuple[slice, Tensor, list[_Transfer]]] = []

        def finish() -> None:
            shared, grad_kv, pending = waiting.pop(0)
            grad_key[:, shared], grad_value[:, shared] = _finish(ctx.ring, grad_kv, pending)

        for own, shared in _groups(key, query.shape[1] // key.shape[1]):
            begun = _backward(
                ctx.ring,
                ctx.tag,
                grad_out[:, own].contiguous(),
                query[:, own],
                key[:, shared],
                value[:, shared],
                out[:, own],
                lse[:, own],
                grad_query[:, own],
                ctx.causal,
                ctx.scale,
            )
            waiting.append((shared, *begun))
            if len(waiting) > 1:
                finish()
        finish()
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None, None


def attention(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None, number: int = 0
) -> Tensor:
    """Attention over the whole sequence, of which each rank of the ring holds a head-tail shard.

    Args:
        ring: the ranks.
        query: (B, H, L, D), this rank's shard; L is even where `causal`.
        key: (B, Hkv, L, D), with H a multiple of Hkv.
        value: (B, Hkv, L, Dv).
        causal: whether a query sees only keys at or before its own global position.
        scale: factor of the scores; None for 1 / sqrt(D).
        number: of the call, the same on all ranks and another one for the next.

    Returns:
        (B, H, L, Dv), this rank's shard of the result; differentiable in all three inputs.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    if scale is None:
        scale = float(width) ** -0.5
    if width != value_width:  # the kernel wants one width; zeros change neither scores nor the columns that are kept
        both = max(width, value_width)
        query, key, value = (torch.nn.functional.pad(t, (0, both - t.shape[-1])) for t in (query, key, value))
    tag = number % _NUMBERS * _KINDS
    out: Tensor = _RingAttention.apply(query, key, value, ring, tag, causal, scale)  # type: ignore[no-untyped-call]
    return out[..., :value_width]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ring: Ring) -> Tensor:
        ctx.dim, ctx.ring = dim, ring
        shard = tensor.detach().contiguous()
        # As bytes: gloo knows neither bool nor, in every release, bfloat16.
        flat = shard.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(ring.size)]
        dist.all_gather(parts, flat, group=ring.group)
        return in_global_order([part.view(shard.dtype).view(shard.shape) for part in parts], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = grad.to(
            torch.promote_types(grad.dtype, torch.float32), memory_format=torch.contiguous_format, copy=True
        )
        dist.all_reduce(total, group=ctx.ring.group)
        return head_tail(total, ctx.dim, ctx.ring.rank, ctx.ring.size).to(grad.dtype), None, None


def unshard(ring: Ring, tensor: Tensor, dim: int) -> Tensor:
    """Join the ranks' shards of a tensor in global order; every rank must call it.

    Args:
        ring: the ranks.
        tensor: this rank's shard, of one shape on all ranks.
        dim: the sequence dimension, not negative, of even length.

    Returns:
        The whole tensor. A shard's gradient is the sum of what all ranks made of the whole.
    """
    whole: Tensor = _Unshard.apply(tensor, dim, ring)  # type: ignore[no-untyped-call]
    return whole
