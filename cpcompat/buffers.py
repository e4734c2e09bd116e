"""Tensors with a sequence dimension: checked, sharded in place in head-tail order, fingerprinted, restored.

A buffer is sharded by letting the same tensor object point to new storage and restored by pointing it back, so that
views of one tensor, expanded rows and a view's base all stay what they were (every torch's own context corrupts them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .errors import BufferInvalid, LengthInvalid, shown

__all__ = [
    "Buffer",
    "describe",
    "differences",
    "fingerprint",
    "head_tail",
    "in_global_order",
    "positions",
    "shard",
    "validate",
]


class Buffer(NamedTuple):
    """One tensor to shard.

    Attributes:
        tensor: the caller's object.
        dim: its sequence dimension, not negative.
        restore: False for a member of ``no_restore_buffers``.
        place: its index in the caller's list.
    """

    tensor: Tensor
    dim: int
    restore: bool
    place: int


def chunk_length(length: int, size: int) -> int:
    """The length of one of 2 x cp size chunks.

    Args:
        length: global sequence length in tokens.
        size: cp size.

    Returns:
        length / (2 x size).

    Raises:
        LengthInvalid: the length is no positive multiple (pytorch #159706, #183968).
    """
    multiple = 2 * size
    if length % multiple or not length:
        fits = max(multiple, -(-length // multiple) * multiple)
        raise LengthInvalid(
            f"a sequence of {length} tokens cannot be cut into 2 x cp size = {multiple} equal chunks",
            f"sequence length {length}, cp size {size}",
            f"pad the sequence to {fits}, the next multiple of {multiple}",
            length=length,
            multiple=multiple,
            padded_length=fits,
        )
    return length // multiple


def _invalid(index: int, problem: str, evidence: str, next_step: str, **facts: Any) -> BufferInvalid:
    return BufferInvalid(f"buffer {index} {problem}", evidence, next_step, index=index, **facts)


def describe(value: object) -> str:
    """What a value is, for a message.

    Args:
        value: a tensor, or what should have been one.
    """
    if isinstance(value, Tensor):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    return type(value).__name__


def _listed(name: str, values: Iterable[Any] | None) -> list[Any]:
    try:
        return list(values) if values is not None else []
    except Exception as error:
        raise BufferInvalid(f"{name} is no list", type(values).__name__, "pass a list, or None") from error


def _check_tensor(index: int, tensor: Any, dim: Any) -> int:
    """Check one buffer by itself; returns its dimension, not negative."""
    if not isinstance(tensor, Tensor):
        raise _invalid(index, "is not a tensor", f"{type(tensor).__name__}", "pass tensors only")
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise _invalid(
            index,
            "is a wrapper around other tensors and cannot be sharded in place",
            describe(tensor),
            "pass the plain local tensor (for a DTensor: .full_tensor())",
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        seen = "nested" if tensor.is_nested else f"layout {tensor.layout}"
        raise _invalid(index, "is not a dense tensor", seen, "make it dense before the block: .to_dense(), or padded")
    dims = tensor.dim()
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise _invalid(
            index,
            f"has no dimension {shown(dim)}",
            describe(tensor),
            f"give buffer_seq_dims[{index}] as an int from {-dims} to {dims - 1}",
            dim=dim,
        )
    if tensor.requires_grad:
        raise _invalid(
            index,
            "requires grad; a buffer is sharded in place and keeps no graph (Automodel #2931)",
            describe(tensor) + f", grad_fn {tensor.grad_fn}",
            "pass inputs such as ids, labels and positions, or shard this tensor yourself with positions()",
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise _invalid(
            index,
            "is an inference tensor and cannot be changed outside inference mode",
            describe(tensor),
            "enter the block inside torch.inference_mode(), or pass tensor.clone()",
        )
    return dim % dims


def validate(
    buffers: Sequence[Tensor] | None,
    dims: Sequence[int] | None,
    no_restore: Collection[Tensor] | None,
    size: int,
) -> list[Buffer]:
    """Check everything about the buffers, touching none.

    Args:
        buffers: the tensors, or None.
        dims: the sequence dimension of each.
        no_restore: those that keep their shard after the block.
        size: cp size.

    Returns:
        The buffers, each tensor object once.

    Raises:
        BufferInvalid, LengthInvalid: what is wrong with which buffer.
    """
    tensors, seq_dims = _listed("buffers", buffers), _listed("buffer_seq_dims", dims)
    kept = {id(tensor) for tensor in _listed("no_restore_buffers", no_restore)}
    if len(tensors) != len(seq_dims):
        raise BufferInvalid(
            "buffers and buffer_seq_dims have different lengths",
            f"{len(tensors)} buffers, {len(seq_dims)} dims",
            "give one sequence dimension for each buffer",
            buffers=len(tensors),
            dims=len(seq_dims),
        )
    unknown = kept and kept - {id(tensor) for tensor in tensors}
    if unknown:
        raise BufferInvalid(
            "no_restore_buffers holds a tensor that is not among the buffers",
            f"{len(unknown)} of {len(kept)}",
            "pass the same tensor objects in both",
        )
    found: dict[int, Buffer] = {}
    index = 0
    try:
        for index, (tensor, dim) in enumerate(zip(tensors, seq_dims, strict=True)):
            dim = _check_tensor(index, tensor, dim)
            length, device = tensor.shape[dim], tensor.device
            if not found:
                head_dim, head_length, head_device = dim, length, device
            first = found.setdefault(id(tensor), Buffer(tensor, dim, id(tensor) not in kept, index))
            if first.dim != dim:
                raise _invalid(
                    index,
                    f"is the same tensor as buffer {first.place}, with another dimension",
                    f"dims {first.dim} and {dim}",
                    "list the tensor once, or pass a clone",
                )
            if device != head_device:
                raise _invalid(
                    index,
                    "is on another device than buffer 0",
                    f"{device} and {head_device}",
                    "move all buffers to one device",
                )
            if length != head_length:
                raise _invalid(
                    index,
                    "has another sequence length than buffer 0",
                    f"{length} in dim {dim}, and {head_length} in dim {head_dim}",
                    "pass buffers of one sequence, and check buffer_seq_dims",
                )
    except BufferInvalid:
        raise
    except Exception as error:  # a lazy parameter without a shape; a subclass that refuses to be asked
        raise _invalid(
            index,
            "is a tensor that cannot be looked at",
            f"{type(tensor).__name__}; {type(error).__name__}: {error}",
            "pass a plain tensor",
        ) from error
    if tensors:
        chunk_length(head_length, size)
    return list(found.values())


def head_tail(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Chunks `rank` and 2 x `size` - 1 - `rank` of a tensor, joined: what one cp rank holds.

    Args:
        tensor: any tensor.
        dim: the dimension to cut, whose length is a multiple of 2 x size.
        rank: cp rank.
        size: cp size.

    Returns:
        A new tensor, 1 / size of the length.
    """
    length = tensor.shape[dim] // (2 * size)
    head = tensor.narrow(dim, rank * length, length)
    tail = tensor.narrow(dim, (2 * size - 1 - rank) * length, length)
    return torch.cat((head, tail), dim)


def in_global_order(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Join the shards of all ranks, undoing `head_tail`.

    Args:
        shards: one tensor for each cp rank, in rank order.
        dim: the dimension that was cut.

    Returns:
        The whole tensor.
    """
    half = shards[0].shape[dim] // 2
    heads = [shard.narrow(dim, 0, half) for shard in shards]
    tails = [shard.narrow(dim, half, half) for shard in reversed(shards)]
    return torch.cat(heads + tails, dim)


def positions(length: int, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """The global indices that a rank holds.

    Args:
        length: global sequence length in tokens.
        rank: cp rank.
        size: cp size.
        device: where to put the result.

    Returns:
        int64 of shape (length / size,).

    Raises:
        LengthInvalid: see `chunk_length`.
    """
    chunk = chunk_length(length, size)
    tail = (2 * size - 1 - rank) * chunk
    return torch.cat(
        (
            torch.arange(rank * chunk, (rank + 1) * chunk, device=device),
            torch.arange(tail, tail + chunk, device=device),
        )
    )


class Sharded(NamedTuple):
    """A buffer that was sharded.

    Attributes:
        buffer: the buffer.
        before: an alias of what its tensor was.
    """

    buffer: Buffer
    before: Tensor


def _point(tensor: Tensor, to: Tensor) -> None:
    tensor.data = to
    if not tensor.is_inference():
        # A backward that still needs the other values must fail, as it does with torch's own context.
        increment_version(tensor)


def _cut(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """`head_tail` of a tensor without graph: both chunks are one strided view, so that one operation copies them."""
    whole = whole.resolve_conj().resolve_neg()
    shape, stride = list(whole.shape), list(whole.stride())
    length = shape[dim] // (2 * size)
    step = stride[dim] * length
    shape[dim : dim + 1] = (2, length)
    stride.insert(dim, step * (2 * size - 1 - 2 * rank))
    return torch.as_strided_copy(whole, shape, stride, whole.storage_offset() + rank * step).flatten(dim, dim + 1)


def shard(buffers: Sequence[Buffer], rank: int, size: int, done: list[Sharded]) -> None:
    """Shard all buffers in place, or none.

    Args:
        buffers: validated buffers.
        rank: cp rank.
        size: cp size.
        done: filled with what `restore` needs, before the first tensor is touched.

    Raises:
        BufferInvalid: torch cannot copy or replace one: a dtype without kernels, storage that was freed, or rows made by
            ``expand`` that no memory could hold.
    """
    shards: list[Tensor] = []
    originals: list[Sharded] = []

    def cut(buffer: Buffer) -> None:
        originals.append(Sharded(buffer, buffer.tensor.data))
        shards.append(_cut(originals[-1].before, buffer.dim, rank, size))

    inference = torch.is_inference_mode_enabled()
    try:
        for buffer in buffers:
            if inference:  # what it makes is of another kind, which not every backend lets an ordinary tensor point at
                with torch.inference_mode(buffer.tensor.is_inference()):
                    cut(buffer)
            else:
                cut(buffer)
        done += originals
        for buffer, part in zip(buffers, shards, strict=True):
            _point(buffer.tensor, part)
    except (torch.OutOfMemoryError, MemoryError):  # no fault of the buffer: who catches one gets it
        raise
    except Exception as error:
        raise _invalid(
            buffer.place,
            "cannot be cut",
            f"{describe(buffer.tensor)}; {type(error).__name__}: {error}",
            "pass a plain tensor that torch can copy, of a size that memory holds",
        ) from error


def restore(done: Sequence[Sharded], *, everything: bool) -> None:
    """Point each tensor back at what it was, copying nothing.

    Args:
        done: what `shard` has filled; whatever it came to, and once more if that was interrupted.
        everything: also those that were to keep their shard (after an error, when nobody will use it).
    """
    for sharded in done:
        if everything or sharded.buffer.restore:
            _point(sharded.buffer.tensor, sharded.before)


def fingerprint(buffers: Sequence[Buffer]) -> list[tuple[str, str]]:
    """Short descriptions of the buffers, equal only where shape, dtype, dimension and every value are.

    Args:
        buffers: validated buffers.

    Returns:
        (readable part, digest of the values) for each.
    """
    return [(f"{tuple(b.tensor.shape)} {b.tensor.dtype} dim {b.dim}", _digest(b.tensor)) for b in buffers]


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "no values (meta)"
    try:
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()
    except Exception as error:  # said to the other ranks, which wait for it; `shard` will not get far with it either
        return f"cannot be read ({type(error).__name__})"


def differences(all_prints: Sequence[Sequence[tuple[str, str]]]) -> Iterator[tuple[int, dict[int, str]]]:
    """Find the buffers that are not the same on all ranks.

    Args:
        all_prints: the fingerprints of each rank.

    Yields:
        The buffer's place in the list, and for each rank what it holds.
    """
    for index in range(max(map(len, all_prints))):
        held = {
            rank: "{} values {}".format(*prints[index]) if index < len(prints) else "no such buffer"
            for rank, prints in enumerate(all_prints)
        }
        if len(set(held.values())) > 1:
            yield index, held
