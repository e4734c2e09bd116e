"""One block of a context: validate, agree with the other ranks, shard, attend, restore."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import batch as _batch
from . import buffers as _buffers
from . import ring as _ring
from . import torch_cp
from .errors import AttentionUnsupported, AttentionWarning, Contradiction, NestedContext, RanksDiffer
from .explaining import explain, guard_recomputation
from .sdpa import Call, problem

if TYPE_CHECKING:
    from .context import CPContext

__all__ = ["FINGERPRINT_VARIABLE", "BatchBlock", "Block", "Fingerprint", "is_active"]

Fingerprint = Literal["first", "always", "never"]

FINGERPRINT_VARIABLE = "CPCOMPAT_FINGERPRINT"

_CALLS = 1 << 13  # numbers kept for the attention calls of one block
_open: dict[str, Block] = {}  # the one block of this process that is open or being entered, by the word "block"


class Block(AbstractContextManager[Any]):
    """One use of a context: validate, shard, attend, restore."""

    def __init__(
        self,
        cp: CPContext,
        buffers: Sequence[Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: Collection[Tensor] | None,
        fingerprint: Fingerprint | None,
    ) -> None:
        self._cp = cp
        self._arguments = (buffers, dims, no_restore)
        self._fingerprint = fingerprint
        self._original: Any = None
        self._undo: list[_buffers.Sharded] = []
        self._local_length: int | None = None
        self._calls = 0
        self._number = 0
        self._thread = 0
        self._torch: AbstractContextManager[None] | None = None

    def __enter__(self) -> Any:
        cp = self._cp
        ring = cp._live_ring()
        # Counted on every rank, whether it comes in or not: messages of one block never meet those of another.
        cp._entries += 1
        self._thread = threading.get_ident()
        # What is_active() sees may be another copy's block, or torch's own.
        if _open or is_active():
            raise self._nested()
        try:
            if _open.setdefault("block", self) is not self:  # one step also between threads
                raise self._nested()
            plan = self._agree(ring)
            self._number = cp._entries * _CALLS
            self._original = F.scaled_dot_product_attention
            if cp._device_type != "cpu" and cp.mesh is not None:
                manager = torch_cp.attention(cp.mesh, cp.rotate_method)
                manager.__enter__()
                self._torch, self._torch_attention = manager, F.scaled_dot_product_attention
            _buffers.shard(plan, ring.rank, ring.size, self._undo)
            F.scaled_dot_product_attention = self._attention
            cp._block, cp._lengths = self, None
        except BaseException as error:
            self._put_back(failed=True)
            explain(error, None, cp.size)
            raise

    @staticmethod
    def _nested() -> NestedContext:
        return NestedContext(
            "a context-parallel block is active in this process already",
            f"torch.nn.functional.scaled_dot_product_attention is {F.scaled_dot_product_attention!r}",
            "leave the first block before entering another, in whatever thread; one block takes buffers of one length",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cp = self._cp
        try:
            self._put_back(failed=kind is not None)
        except BaseException:  # Ctrl-C in the middle of it: once more, each of its steps can be repeated
            self._put_back(failed=True)
            raise
        if error is not None:
            explain(error, self._local_length, cp.size)
        if kind is None and not cp._attended:
            cp._attended = True
            if not self._calls:
                warnings.warn(
                    AttentionWarning(
                        "no attention call went through context parallelism in this block: each rank attended to its own "
                        "shard only, if it attended at all",
                        "torch.nn.functional.scaled_dot_product_attention was not called once",
                        'set attn_implementation="sdpa"; call it as F.scaled_dot_product_attention, not by a name '
                        "imported before the block; run the model inside the block",
                    ),
                    stacklevel=2,
                )

    def _put_back(self, failed: bool) -> None:
        if _open.get("block") is not self:  # it did not come in
            return
        try:
            if self._torch is not None:
                # torch puts SDPA back only where its own wrapper stands.
                F.scaled_dot_product_attention = self._torch_attention
                self._torch.__exit__(None, None, None)
                self._torch = None
        finally:
            if self._original is not None:
                F.scaled_dot_product_attention = self._original
            _buffers.restore(self._undo, everything=failed)
            self._arguments = (None, None, None)
            self._undo = []
            self._cp._block = None
            _open.pop("block", None)

    def _validate(self) -> list[_buffers.Buffer]:
        cp = self._cp
        plan = _buffers.validate(*self._arguments, cp.size)
        length = plan[0].tensor.shape[plan[0].dim] if plan else None
        cp.attach_hooks()
        cp._models.check(length)
        self._local_length = length // cp.size if length is not None else None
        return plan

    def _agree(self, ring: _ring.Ring) -> list[_buffers.Buffer]:
        """Validate; where a fingerprint is due, see that all ranks of the group can enter with equal buffers."""
        cp = self._cp
        when = self._fingerprint or os.environ.get(FINGERPRINT_VARIABLE) or "first"
        if when not in ("first", "always", "never"):
            raise Contradiction(
                "the fingerprint is compared 'first', 'always' or 'never'",
                f"got {when!r}",
                f"check the argument fingerprint and the variable {FINGERPRINT_VARIABLE}",
            )
        if when == "never" or (when == "first" and cp._agreed):
            return self._validate()
        plan: list[_buffers.Buffer] = []
        prints: list[tuple[str, str]] = []
        mine: Exception | None = None
        try:
            plan = self._validate()
            prints = _buffers.fingerprint(plan)
        except Exception as error:  # whatever it is: the other ranks wait for this one's word
            mine = error
        held: list[Any] = [None] * ring.size
        report = (str(mine) if mine else None, prints)
        dist.all_gather_object(held, report, group=ring.group)
        if mine is not None:
            raise mine
        self._compare(held)
        cp._agreed = True
        return plan

    @staticmethod
    def _compare(held: Sequence[tuple[str | None, list[tuple[str, str]]]]) -> None:
        errors = {rank: error for rank, (error, _) in enumerate(held) if error}
        if errors:
            raise RanksDiffer(
                f"cp rank {', '.join(map(str, errors))} cannot enter the block",
                "; ".join(f"rank {rank}: {error}" for rank, error in errors.items()),
                "mend the error on that rank; no rank entered",
                errors=errors,
            )
        for index, by_rank in _buffers.differences([prints for _, prints in held]):
            raise RanksDiffer(
                f"the ranks of one cp group hold different values in buffer {index}; they must hold the same batch",
                "; ".join(f"rank {rank}: {text}" for rank, text in by_rank.items()),
                "seed the sampler equally on all ranks of a cp group (accelerate's set_seed), or broadcast the batch from "
                "cp rank 0; loaders that give each rank its own samples are an IterableDataset, or any on accelerate 1.9 "
                "and older",
                buffer=index,
                held=by_rank,
            )

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Stands in for ``F.scaled_dot_product_attention`` inside the block."""
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        found = self._problem(call)
        if found is not None:
            raise AttentionUnsupported(found[0], str(call), found[1])
        if threading.get_ident() != self._thread and not _of_autograd():
            raise AttentionUnsupported(
                "attention was called in another thread than the one that opened the context-parallel block",
                f"{threading.current_thread().name}; {call}",
                "attend in that thread only while no block is open, or run the model in the thread of the block",
            )
        self._calls += 1
        if not torch.is_grad_enabled():
            guard_recomputation(is_active)
        if self._torch is not None:
            return self._torch_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if query.dim() == 3:
            return self._ring_attention(query[None], key[None], value[None], is_causal, scale)[0]
        return self._ring_attention(query, key, value, is_causal, scale)

    def _ring_attention(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
    ) -> Tensor:
        number = self._number + self._calls
        return _ring.attention(self._cp._live_ring(), query, key, value, causal=is_causal, scale=scale, number=number)

    _attention.__cpcompat__ = "attention"  # type: ignore[attr-defined]

    def _problem(self, call: Call) -> tuple[str, str] | None:
        """What CP cannot compute in this call, and what to do."""
        return problem(call, on_cpu=self._torch is None, local_length=self._local_length)


class BatchBlock(Block):
    """A block over a batch, which is prepared where a block validates: an error on one rank is one on all."""

    def __init__(self, cp: CPContext, prepare: Callable[[], _batch.Whole]) -> None:
        super().__init__(cp, None, None, None, None)
        self._prepare = prepare
        self._shards: dict[str, Tensor] = {}

    def __enter__(self) -> dict[str, Any]:
        super().__enter__()
        cp, whole = self._cp, self._whole
        cp._lengths = whole.length, whole.padded
        try:
            return whole.local(self._shards, cp.rank, cp.size)
        except BaseException:
            self._put_back(failed=True)
            raise

    def labelled(self) -> Tensor | None:
        """How many of this rank's tokens have a label; None where the batch has no labels."""
        labels = self._shards.get("shift_labels")
        return None if labels is None else (labels != self._whole.ignore_index).sum()

    def _validate(self) -> list[_buffers.Buffer]:
        self._whole = self._prepare()
        self._shards = self._whole.buffers()
        buffers = list(self._shards.values())
        self._arguments = (buffers, list(self._whole.dims.values()), buffers)
        return super()._validate()

    def _problem(self, call: Call) -> tuple[str, str] | None:
        found = super()._problem(call)
        if found is None and not call.is_causal and self._whole.hides:
            return (
                "attention that is not causal sees the padded tokens of this batch",
                f"use a causal model, or batches without padding, of a multiple of {2 * self._cp.size} tokens",
            )
        return found


def is_active() -> bool:
    """Whether a CP block, of this or another copy of cpcompat or of torch itself, is open in this process."""
    current = F.scaled_dot_product_attention
    return getattr(current, "__cpcompat__", "") == "attention" or torch_cp.is_patched(current)


def _of_autograd() -> bool:
    """Whether this is one of autograd's own threads, which compute checkpointed layers again on accelerators."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _alone() -> None:
    """In a forked child, a data loader's worker for instance: it is no rank of any group, so its attention is its own."""
    block = _open.pop("block", None)
    if block is not None and block._original is not None:
        F.scaled_dot_product_attention = block._original


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)
