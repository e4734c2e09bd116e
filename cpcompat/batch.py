"""From a collator's batch to tensors that can be cut, as functions of whole tensors; and the same batch for every rank.

A batch, as a collator gives it, is brought into the form in which it can be cut: labels shifted, positions made, length
padded, masks that say nothing gone, and everything that context parallelism cannot express refused. No tensor of the
caller is changed; what is cut later are padded copies, or other tensor objects over the same storage.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import buffers as _buffers
from .buffers import describe
from .errors import BatchInvalid, BatchUnsupported, CPError, RanksDiffer

if TYPE_CHECKING:
    from .ring import Ring

__all__ = ["Whole", "broadcast", "prepare", "refuse", "trim"]

# (batch, length, ...), whatever their sizes are.
_PER_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels")
_FEATURES = ("pixel", "image", "video", "audio", "input_features", "input_values", "feature_", "spectrogram")
_PACKING = ("cu_seq", "max_length_", "max_seqlen", "seq_idx", "segment_ids", "sequence_ids")
_CROSS = ("encoder_", "decoder_", "cross_attention")


@dataclass(frozen=True)
class Whole:
    """A batch that is ready to be cut.

    Attributes:
        tensors: the tensors with a sequence dimension, all of one length; none of them an object of the caller's.
        dims: the sequence dimension of each.
        rest: what is passed on untouched.
        length: tokens in the caller's batch.
        padded: tokens after padding.
        hides: whether there are padded tokens, which only causal attention keeps from the real ones.
        ignore_index: the label that counts for nothing.
    """

    tensors: dict[str, Tensor]
    dims: dict[str, int]
    rest: dict[str, Any]
    length: int
    padded: int
    hides: bool
    ignore_index: int

    def buffers(self) -> dict[str, Tensor]:
        """New tensor objects over the same values, without graph, for the engine to shard in place and compare."""
        # Not detach(): that would share the version counter, and sharding raises it.
        return {n: t.clone() if t.is_inference() else t.data for n, t in self.tensors.items()}

    def local(self, buffers: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Any]:
        """What the model is to be called with.

        Args:
            buffers: what `buffers` returned, sharded by now.
            rank: cp rank.
            size: cp size.

        Returns:
            The shards, and the rest. A tensor with a graph is cut differentiably.
        """
        cut = {
            name: _buffers.head_tail(self.tensors[name], self.dims[name], rank, size)
            if self.tensors[name].requires_grad
            else shard
            for name, shard in buffers.items()
        }
        return {**cut, **self.rest}


def prepare(batch: Mapping[str, Any], size: int, pad_token_id: int | None, ignore_index: int) -> Whole:
    """Bring a batch into the form in which it can be cut; nothing of the caller's is changed.

    Args:
        batch: a collator's mapping, with ``input_ids`` (batch, length) or ``inputs_embeds`` (batch, length, width).
        size: cp size.
        pad_token_id: fills ``input_ids``; None for 0.
        ignore_index: fills the labels.

    Returns:
        The whole batch.

    Raises:
        BatchInvalid: no mapping, no tokens, tensors whose lengths do not go together.
        BatchUnsupported: left padding, packed rows, another mask, pixels or audio, an encoder's part.
    """
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
        raise BatchInvalid(
            "a batch is a mapping of tensors by name, such as a collator returns",
            f"got {type(batch).__name__}",
            'pass a dict with "input_ids" (batch, length)',
        )
    _refuse_by_name(batch)
    rows, length, device = _tokens(batch)
    extra = -length % (2 * size)

    tensors: dict[str, Tensor] = {}
    dims: dict[str, int] = {}
    rest: dict[str, Any] = {}
    for name, value in batch.items():
        dim = _sequence_dim(name, value, rows, length) if isinstance(value, Tensor) else None
        if name == "attention_mask" or (name == "labels" and value is None):
            continue
        if name in _PER_TOKEN and value is not None and not isinstance(value, Tensor):
            raise BatchInvalid(
                f"{name} is not a tensor", type(value).__name__, 'let the collator return tensors ("pt")'
            )
        if dim is None:
            rest[name] = value
        elif name == "labels":
            if batch.get("shift_labels") is None:
                tensors["shift_labels"], dims["shift_labels"] = _shift(value, ignore_index), 1
        else:
            tensors[name], dims[name] = value, dim
    if rest.get("position_ids", ...) is None:
        del rest["position_ids"]
    if "shift_labels" in tensors:
        rest.pop("shift_labels", None)

    real = _real_tokens(batch.get("attention_mask"), length)
    if "position_ids" in tensors:
        _check_positions(tensors["position_ids"], real)
    else:
        tensors["position_ids"], dims["position_ids"] = torch.arange(length, device=device).expand(rows, -1), 1
    if real is not None and "shift_labels" in tensors:
        _check_labels(tensors["shift_labels"], real, ignore_index)

    fills = {"input_ids": pad_token_id or 0, "shift_labels": ignore_index}
    if extra:
        tensors = {name: _pad(name, tensor, dims[name], extra, fills.get(name, 0)) for name, tensor in tensors.items()}
    hides = bool(extra) or (real is not None and not bool(real.all()))
    return Whole(tensors, dims, rest, length, length + extra, hides, ignore_index)


def refuse(batch: Mapping[str, Any]) -> None:
    """Refuse what context parallelism cannot express, for a batch that somebody else brings into form.

    Args:
        batch: a collator's mapping, with ``input_ids`` or ``inputs_embeds``.

    Raises:
        BatchInvalid: no tokens, or a mask that does not go with them.
        BatchUnsupported: left padding, packed rows, another mask, pixels or audio, an encoder's part.
    """
    _refuse_by_name(batch)
    _, length, _ = _tokens(batch)
    real = _real_tokens(batch.get("attention_mask"), length)
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor):
        _check_positions(positions, real)


def _refuse_by_name(batch: Mapping[str, Any]) -> None:
    for name, value in batch.items():
        if value is None:
            continue
        if name.startswith(_PACKING):
            _unsupported(
                name,
                "says that several samples are packed into one row",
                describe(value),
                "give each sample a row of its own: context parallelism has one causal mask, and samples of one row "
                "would attend to each other",
            )
        if name.startswith(_FEATURES):
            _unsupported(
                name,
                "holds pixels or audio, which the model would put in the place of tokens that this rank may not hold",
                describe(value),
                "compute inputs_embeds from the whole batch, inside cp.disabled() or before the block, and pass those",
            )
        if name.startswith(_CROSS):
            _unsupported(
                name,
                "belongs to a model with an encoder, whose cross-attention context parallelism does not know",
                describe(value),
                "train decoder-only models with CP; run an encoder of your own inside cp.disabled()",
            )
        if name == "past_key_values":
            _unsupported(
                name,
                "is a cache of keys and values, which is not cut",
                describe(value),
                "generate outside the block, without CP",
            )


def _unsupported(name: str, problem: str, evidence: str, next_step: str, **facts: Any) -> NoReturn:
    raise BatchUnsupported(f"{name} {problem}", evidence, next_step, name=name, **facts)


def _tokens(batch: Mapping[str, Any]) -> tuple[int, int, torch.device]:
    """Rows, length and device of the batch, from the ids or embeddings."""
    for name, ndim, form in (("input_ids", 2, "(batch, length)"), ("inputs_embeds", 3, "(batch, length, width)")):
        value = batch.get(name)
        if not isinstance(value, Tensor):
            continue
        if value.dim() != ndim or not value.shape[1]:
            raise BatchInvalid(
                f"{name} is {form} with at least one token",
                describe(value),
                "add the batch dimension: ids[None]" if value.dim() == ndim - 1 else f"pass {name} as {form}",
                name=name,
            )
        return value.shape[0], value.shape[1], value.device
    raise BatchInvalid(
        "the batch has neither input_ids nor inputs_embeds as a tensor",
        ", ".join(f"{name}: {describe(value)}" for name, value in batch.items()) or "an empty mapping",
        'pass a mapping with "input_ids" (batch, length)',
    )


def _is_position(name: str) -> bool:
    return name.endswith("position_ids") or name == "cache_position"


def _sequence_dim(name: str, tensor: Tensor, rows: int, length: int) -> int | None:
    """The dimension to cut, by name where it is known and by size elsewhere; None where there is none."""
    shape = tuple(tensor.shape)
    dim: int | None = None
    if name in _PER_TOKEN:
        dim = 1
    elif _is_position(name):
        dim = len(shape) - 1  # (batch, length), and (3, batch, length) of multimodal rotary models
    elif name == "attention_mask":
        return None
    if dim is not None:
        if not 0 <= dim < len(shape) or shape[dim] != length:
            raise BatchInvalid(
                f"{name} does not go with the {length} tokens of this batch",
                describe(tensor),
                "give each token one value; a label for a whole row cannot be learned from a shard"
                if name == "labels"
                else f"pass {name} of length {length} in dimension {dim}",
                name=name,
                length=length,
            )
        return dim
    if len(shape) >= 2 and shape[0] in (rows, 1) and shape[1] == length:
        if length in shape[2:] and ("mask" in name or "bias" in name):
            _unsupported(
                name,
                "says something about pairs of tokens",
                describe(tensor),
                "leave it out: context parallelism has one causal mask and no bias",
            )
        return 1
    if len(shape) >= 3 and shape[-2] in (rows, 1) and shape[-1] == length:
        return len(shape) - 1
    if length in (shape[1:] if shape[:1] == (rows,) else shape):
        raise BatchInvalid(
            f"{name} has a dimension as long as the sequence, but not where a value for each token has it",
            f"{describe(tensor)}, {rows} rows of {length} tokens",
            "pass it as (batch, length, ...) or (any, batch, length), or leave it out of the batch",
            name=name,
            length=length,
        )
    return None


def _shift(labels: Tensor, ignore_index: int) -> Tensor:
    """The label of the next token for each token: shifted before the cut, no shard loses one (transformers #36607)."""
    return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)), dim=1)


def _real_tokens(mask: Any, length: int) -> Tensor | None:
    """Which tokens are real, (batch, length), where the mask says that the others are padding on the right.

    Raises:
        BatchUnsupported: the mask says anything else.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        _unsupported("attention_mask", "is not a tensor", describe(mask), "leave it out where it says plain causal")
    if mask.dim() in (3, 4) and tuple(mask.shape[-2:]) == (length, length):
        # A bool says who is seen; a float is added to the scores.
        sees = mask if mask.dtype is torch.bool else mask == 0 if mask.is_floating_point() else mask != 0
        sees = sees if mask.dim() == 4 else sees[:, None]
        tokens = sees.diagonal(dim1=-2, dim2=-1)[:, :1]
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        plain = bool((sees == (causal & tokens[:, :, None])).all())
        if mask.is_floating_point():
            plain = plain and bool(((mask == 0) | (mask <= -1e4)).all())
        if not plain:
            _unsupported(
                "attention_mask",
                "says more than causal attention with padding on the right",
                describe(mask),
                "leave it out where plain causal attention is meant; another one context parallelism cannot compute",
            )
        tokens = tokens.reshape(-1, length)
    elif mask.dim() == 2 and mask.shape[1] == length:
        if bool(((mask != 0) & (mask != 1)).any()):
            _unsupported(
                "attention_mask",
                "has other values than 0 and 1: it numbers packed samples, or is added to scores",
                f"{describe(mask)}, values from {mask.min().item()} to {mask.max().item()}",
                "give each sample a row of its own, and a mask of 0 and 1",
            )
        tokens = mask != 0
    else:
        raise BatchInvalid(
            f"attention_mask does not go with the {length} tokens of this batch",
            describe(mask),
            f"pass it as (batch, {length})",
            name="attention_mask",
            length=length,
        )
    if bool((tokens[:, 1:] & ~tokens[:, :-1]).any()):
        left = bool((~tokens[:, 0] & tokens.any(dim=1)).any())
        _unsupported(
            "attention_mask",
            "says that rows are padded on the left" if left else "hides tokens amid a row",
            f"row {int((tokens[:, 1:] & ~tokens[:, :-1]).any(dim=1).int().argmax())} has a real token after a hidden one",
            'pad on the right: tokenizer.padding_side = "right"; the mask is not applied under context parallelism, and '
            "only causal attention hides what comes later",
        )
    return tokens


def _check_positions(positions: Tensor, real: Tensor | None) -> None:
    """Refuse positions that mean packed rows; transformers reads a step other than one as the start of a sample."""
    rotary = positions.dim() > 2  # of several axes the first is time, which stands still within an image
    steps = (positions[0] if rotary else positions).diff(dim=-1)
    broken = steps < 0 if rotary else steps != 1
    if real is not None:
        broken = broken & real[:, 1:]
    if bool(broken.any()):
        first = int(broken.reshape(-1, broken.shape[-1]).any(dim=0).int().argmax())
        restart = bool((steps[broken] < 1).any())
        _unsupported(
            "position_ids",
            "start again within a row: several samples are packed into it" if restart else "jump within a row",
            f"a first step other than one after token {first}",
            "give each sample a row of its own: samples of one row would attend to each other"
            if restart
            else "pass positions that go up by one, or none",
            token=first,
        )


def _check_labels(labels: Tensor, real: Tensor, ignore_index: int) -> None:
    counted = (labels != ignore_index) & ~real.reshape(real.shape + (1,) * (labels.dim() - 2))
    if bool(counted.any()):
        raise BatchInvalid(
            "padded tokens have labels, and what a padded token sees is another thing without its mask",
            f"{int(counted.sum())} labels other than {ignore_index} behind tokens that attention_mask hides",
            f"labels[attention_mask == 0] = {ignore_index}",
            name="labels",
        )


def _pad(name: str, tensor: Tensor, dim: int, extra: int, fill: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = extra
    if _is_position(name):
        steps = torch.arange(1, extra + 1, device=tensor.device, dtype=tensor.dtype)
        tail = tensor.narrow(dim, -1, 1) + steps  # positions have their tokens last
    else:
        tail = tensor.new_full(shape, fill)
    return torch.cat((tensor, tail), dim)


def trim(whole: Tensor, dim: int, length: int, padded: int) -> Tensor:
    """Remove the padding that `prepare` added.

    Args:
        whole: a tensor in global order.
        dim: its sequence dimension.
        length: tokens in the caller's batch.
        padded: tokens after padding.

    Returns:
        A view of the first `length` tokens.

    Raises:
        BatchInvalid: the tensor has not the padded length.
    """
    if whole.shape[dim] != padded:
        raise BatchInvalid(
            f"the tensor has {whole.shape[dim]} tokens over all ranks, and the latest batch has {padded}",
            f"{describe(whole)}, dimension {dim}",
            "gather what the model returned for this batch, before the next one; or use unshard, which knows no padding",
            length=length,
            padded=padded,
        )
    return whole.narrow(dim, 0, length)


def broadcast(batch: Mapping[str, Any] | None, ring: Ring, device: str) -> dict[str, Any] | None:
    """See `CPContext.broadcast_batch`.

    Args:
        batch: cp rank 0's batch; on the other ranks it is not looked at.
        ring: the ranks.
        device: the kind of device over which the cp group communicates.

    Returns:
        The batch of cp rank 0; None where that is None.

    Raises:
        BatchInvalid: on cp rank 0, what cannot be sent.
        RanksDiffer: on the others, when cp rank 0 had nothing to send.
    """
    sent: list[Any] = [None]
    if ring.rank == 0:
        try:
            sent = [_outline(batch)]
        except CPError as error:
            sent = [error]
    dist.broadcast_object_list(sent, src=ring.peers[0], group=ring.group)
    outline = sent[0]
    if isinstance(outline, CPError):
        if ring.rank == 0:
            raise outline
        raise RanksDiffer("cp rank 0 could not send its batch", str(outline), "mend the error on that rank")
    if outline is None:
        return None
    received: dict[str, Any] = {}
    for name, entry in outline.items():
        if isinstance(entry, bytes):
            received[name] = batch[name] if batch is not None and ring.rank == 0 else pickle.loads(entry)
            continue
        shape, dtype, home = entry
        if batch is not None and ring.rank == 0:
            tensor = batch[name]
            # As bytes: gloo knows neither bool nor, in every release, bfloat16.
            flat = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            flat = tensor.reshape(-1).view(torch.uint8)
        dist.broadcast(flat, src=ring.peers[0], group=ring.group)
        received[name] = tensor.to(home) if ring.rank else tensor
    return received


def _outline(batch: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the others must know before the tensors come: shape, dtype and device of each, everything else pickled."""
    if batch is None:
        return None
    if not isinstance(batch, Mapping):
        raise BatchInvalid(
            "a batch is a mapping of tensors, or None where the loader has ended", f"got {type(batch).__name__}"
        )
    outline: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or (
                type(value) is not Tensor and hasattr(value, "__tensor_flatten__")
            ):
                raise BatchInvalid(f"{name} is not a plain dense tensor", describe(value), "send plain tensors only")
            outline[name] = tuple(value.shape), value.dtype, value.device.type
            continue
        try:
            outline[name] = pickle.dumps(value)
        except Exception as error:
            raise BatchInvalid(
                f"{name} cannot be sent to the other ranks", f"{describe(value)}: {error}", "leave it out of the batch"
            ) from error
    return outline
