"""`CPContext`: one context-parallel block after the other, the same whoever made the context."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import batch as _batch
from . import buffers as _buffers
from . import loss as _loss
from . import ring as _ring
from .block import BatchBlock, Block, Fingerprint, is_active
from .errors import (
    BufferInvalid,
    ForeignOwner,
    LossWarning,
    NestedContext,
    StaleContext,
)
from .hooks import Models

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .checks import VerifyReport

__all__ = ["CPContext", "Origin"]

Origin = Literal["adopted", "created", "delegated"]


class CPContext:
    """A working CP context: call it for a block in which the buffers are sharded and attention spans all cp ranks.

    It has the call contract of accelerate's ``_cp_context`` and can stand in its place. Obtain it by `get_cp_context`.

    Attributes:
        mesh: the cp mesh, one-dimensional; None only where another library owns CP and shows none.
        size: cp size.
        rotate_method: ``"allgather"`` or ``"alltoall"``.
        origin: ``"adopted"`` (accelerate's own passed the checks), ``"created"`` (made by cpcompat) or ``"delegated"``
            (another library owns CP here; calls are only passed on).
        layout: where on the accelerator it was found or stored.
        trail: what was looked at, and why each was taken or not.
    """

    __cpcompat__ = "context"

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        rotate_method: str = "allgather",
        origin: Origin = "created",
        layout: str = "",
        trail: Sequence[str] = (),
        accelerator: object = None,
        owner: str = "",
        passes_to: Callable[..., AbstractContextManager[Any]] | None = None,
        size: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.rotate_method = rotate_method
        self.origin: Origin = origin
        self.layout = layout
        self.trail = tuple(trail)
        self.owner = owner
        self.size: int = mesh.size() if mesh is not None else (size or 1)
        self._passes_to = passes_to
        self._world = dist.group.WORLD if dist.is_available() else None
        self._accelerator: Callable[[], object] = lambda: accelerator
        with contextlib.suppress(TypeError):  # somebody's stand-in may not be weakly referable
            self._accelerator = weakref.ref(accelerator)
        self._models = Models()
        self._entries = 0
        self._agreed = False
        self._attended = False
        self._counted = False
        self._block: Block | None = None
        self._lengths: tuple[int, int] | None = None
        self._ring: _ring.Ring | None = None
        if mesh is not None:
            group = mesh.get_group()
            peers = tuple(dist.get_process_group_ranks(group))
            self._ring = _ring.Ring(group, peers, dist.get_rank(group), rotate_method)

    def __repr__(self) -> str:
        return (
            f"<CPContext {self.origin}, size {self.size}, {self.rotate_method}, layout {self.layout or 'none'}"
            + (f", owner {self.owner}" if self.owner else "")
            + ">"
        )

    @property
    def rank(self) -> int:
        """The cp rank of this process.

        Raises:
            ForeignOwner: another library owns CP and shows no mesh.
        """
        return self._own_ring().rank

    @property
    def group(self) -> dist.ProcessGroup:
        """The cp process group.

        Raises:
            StaleContext: it was destroyed.
            ForeignOwner: another library owns CP and shows no mesh.
        """
        return self._live_ring().group

    @property
    def _device_type(self) -> str:
        return self.mesh.device_type if self.mesh is not None else "cpu"

    @property
    def alive(self) -> bool:
        """Whether the process group that the context was made over is still the current one."""
        return self._world is not None and dist.group.WORLD is self._world

    def _own_ring(self) -> _ring.Ring:
        if self._ring is None:
            raise ForeignOwner(
                f"{self.owner} owns context parallelism here and shows no mesh",
                "; ".join(self.trail),
                f"use the interface of {self.owner}",
                owner=self.owner,
            )
        return self._ring

    def _live_ring(self) -> _ring.Ring:
        ring = self._own_ring()
        if not self.alive:
            state = "another process group exists now" if dist.is_initialized() else "no process group exists now"
            raise StaleContext(
                "the process group of this CP context was destroyed",
                state,
                "make a new Accelerator after init_process_group() and call get_cp_context() with it",
            )
        return ring

    def __call__(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
        *,
        fingerprint: Fingerprint | None = None,
    ) -> AbstractContextManager[Any]:
        """Make a block. Run forward and backward inside it; every rank of the cp group must enter.

        Args:
            buffers: tensors with a sequence dimension, all of one length, a multiple of 2 x cp size; sharded in place.
                None or an empty list only switches attention on, for people who shard their input themselves.
            buffer_seq_dims: the sequence dimension of each.
            no_restore_buffers: those that keep the shard after the block.
            fingerprint: when to compare the buffers over the cp group: ``"first"`` (the first entry only), ``"always"`` or
                ``"never"``; None for what CPCOMPAT_FINGERPRINT says, or else ``"first"``.

        Returns:
            A context manager for one use. Entering raises `BufferInvalid`, `LengthInvalid`, `RanksDiffer`,
            `NestedContext`, `ModelUnsupported` or `StaleContext`, with every buffer as it was.
        """
        if self.origin == "delegated":
            if self._passes_to is None:
                raise ForeignOwner(
                    f"{self.owner} owns context parallelism on this accelerator and left nothing to pass the call on to",
                    "; ".join(self.trail),
                    f"use the interface of {self.owner}, or remove it from this accelerator",
                    owner=self.owner,
                )
            return self._passes_to(
                buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
            )
        return Block(self, buffers, buffer_seq_dims, no_restore_buffers, fingerprint)

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """The global indices that this rank holds inside a block.

        Args:
            seq_len: global sequence length in tokens.
            device: where to put the result; the mesh's device type by default.

        Returns:
            int64 of shape (seq_len / size,).

        Raises:
            LengthInvalid: seq_len is no multiple of 2 x size.
        """
        ring = self._live_ring()
        return _buffers.positions(seq_len, ring.rank, ring.size, device or self._device_type)

    def unshard(self, tensors: Sequence[Tensor], seq_dims: Sequence[int]) -> list[Tensor]:
        """Join the ranks' shards in global order; every rank of the cp group must call it.

        Differentiable: the gradient of a shard is the sum over what all ranks made of the whole, so that the average
        over ranks that DDP and FSDP take is the true gradient of a loss that each rank computes from the whole.

        Args:
            tensors: shards, each of even length along its dimension and of one shape on all ranks.
            seq_dims: the sequence dimension of each.

        Returns:
            New tensors, `size` times as long.

        Raises:
            BufferInvalid: lists that do not match, a missing dimension, an odd length.
            StaleContext: the process group was destroyed.
        """
        ring = self._live_ring()
        if len(tensors) != len(seq_dims):
            raise BufferInvalid(
                "tensors and seq_dims have different lengths",
                f"{len(tensors)} tensors, {len(seq_dims)} dims",
                "give one sequence dimension for each tensor",
            )
        whole = []
        for index, (tensor, dim) in enumerate(zip(tensors, seq_dims, strict=True)):
            if not isinstance(tensor, Tensor) or not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % 2:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise BufferInvalid(
                    f"tensor {index} is no shard: it has no dimension {dim} of even length",
                    f"shape {shape}",
                    "pass what the model returned inside the block, and its sequence dimension",
                    index=index,
                )
            whole.append(_ring.unshard(ring, tensor, dim % tensor.dim()))
        return whole

    def batch(
        self, batch: Mapping[str, Any], *, pad_token_id: int | None = None, ignore_index: int = -100
    ) -> AbstractContextManager[dict[str, Any]]:
        """Make a block for a whole batch: ``with cp.batch(batch) as local: logits = model(**local).logits``.

        Labels are shifted before the cut and come as ``shift_labels``: label i belongs to logits i, and is not to be
        shifted again. (Labels that are aligned already go in as ``shift_labels``.) ``position_ids`` are made where
        missing, the sequence is padded on the right to a multiple of 2 x size, and every tensor with the sequence
        dimension is cut, one with a graph differentiably. An attention mask that says only right padding, or plain
        causal, is dropped: causal attention does not look at what comes later. What has no sequence dimension is passed on.

        Args:
            batch: what a collator returns, the same on all ranks of the cp group: a mapping with ``input_ids``
                (batch, length) or ``inputs_embeds`` (batch, length, width).
            pad_token_id: fills ``input_ids``. None for 0: any id will do, as no real token attends to it.
            ignore_index: the label that counts for nothing.

        Returns:
            A context manager for one use, which yields a new dict; its shards stay what they are after the block. The
            caller's mapping and tensors are never changed, so they can be used inside the block, too. Entering raises
            `BatchInvalid`, `BatchUnsupported`, and what a plain block raises.
        """
        return BatchBlock(self, functools.partial(_batch.prepare, batch, self.size, pad_token_id, ignore_index))

    def reduce_loss(self, loss_sum: Tensor, num_tokens: float | Tensor | Sequence[float | Tensor]) -> Tensor:
        """Turn each rank's summed loss into the mean over all tokens of the global batch; every rank must call it.

        With S_r the sum and n_r the tokens of rank r, of W ranks (data times cp), the mean is M = sum S_r / sum n_r. DDP
        and FSDP average gradients over the W ranks, so what rank r must differentiate is W S_r / sum n_r: then the
        average is the gradient of M. The result has the value M on every rank and that gradient. A rank with no labels
        takes part with S_r = 0 and n_r = 0; where no rank has any, value and gradient are 0. Ranks that repeat the work
        of others (tensor parallelism) cancel out.

        With gradient accumulation, batch k of G has sums S_rk and counts n_rk, and the mean over the optimizer step is
        sum S_rk / N with N = sum n_rk over all r and k: a batch with more tokens weighs more. N must be known before the
        first backward, so give the counts of all batches of the step as a sequence, the same at each of its calls. Then
        rank r differentiates W G S_rk / N, because `Accelerator.backward` divides by G =
        ``gradient_accumulation_steps``; also the last step of an epoch, with fewer batches than G, comes out right. The
        values are G sum_r S_rk / N: their sum over G is the mean. With a single number each batch gets the weight 1 / G,
        which is the mean over tokens only where all batches have equally many.

        Args:
            loss_sum: sum of the losses of this rank's tokens, as from ``cross_entropy(..., reduction="sum")``.
            num_tokens: how many tokens that is; or, for exact accumulation, a sequence with the tokens of each batch of
                the step. Only sums over ranks matter, so that a whole batch's count divided by `size` does as well.

        Returns:
            The loss for ``acc.backward``, a float32 (or wider) scalar. Differentiable where loss_sum is.

        Raises:
            BatchInvalid: loss_sum is not one number.
            StaleContext: the process group was destroyed.
        """
        self._live_ring()
        block = self._block
        labelled = block.labelled() if isinstance(block, BatchBlock) else None
        reduced = _loss.reduce_loss(
            loss_sum, num_tokens, getattr(self._accelerator(), "gradient_accumulation_steps", 1), labelled
        )
        if not self._counted:
            self._counted = True
            fewest, known = reduced.fewest.item(), reduced.labelled.item()
            if fewest > known * (1 + 1e-5):
                warnings.warn(
                    LossWarning(
                        "reduce_loss was given more tokens than this batch has labels, so that loss and gradients "
                        "become too small",
                        f"num_tokens adds up to {fewest:g} over all ranks, and {known:g} tokens have a label",
                        "count this rank's shift_labels, or divide a whole batch's count of labels[:, 1:] by cp.size",
                    ),
                    stacklevel=2,
                )
        return reduced.loss

    def gather(self, tensor: Tensor, seq_dim: int) -> Tensor:
        """Join the ranks' shards of logits or other values of the latest batch; every rank of the cp group must call it.

        Args:
            tensor: a shard, as the model returned it in the block of `batch`.
            seq_dim: its sequence dimension.

        Returns:
            The whole tensor, the same on all ranks of the cp group: each sample once, in global order, without the
            padding that `batch` added. Differentiable, see `unshard`.

        Raises:
            BatchInvalid: the tensor is not of the latest batch.
            BufferInvalid, StaleContext: see `unshard`.
        """
        (whole,) = self.unshard([tensor], [seq_dim])
        return whole if self._lengths is None else _batch.trim(whole, seq_dim, *self._lengths)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Use ordinary attention for a while, inside a block: for a frozen encoder, a reward model, cross-attention.

        What runs in it sees whole sequences of its own, with any mask; outside a block nothing changes. It can be nested
        and left by an exception. Backward may run outside it, but activation checkpointing has to be inside: what
        is computed again must be computed the same way.

        Raises:
            NestedContext: attention belongs to another context's block.
            ForeignOwner: another library owns CP here.
        """
        self._own_ring()
        block = self._block
        if block is None and is_active():
            raise NestedContext(
                "the context-parallel block that is active is not one of this context",
                f"torch.nn.functional.scaled_dot_product_attention is {F.scaled_dot_product_attention!r}",
                "call disabled() of the context whose block this is",
            )
        standing = F.scaled_dot_product_attention
        if block is not None:
            F.scaled_dot_product_attention = block._original
        try:
            yield
        finally:
            if block is not None and self._block is block:
                F.scaled_dot_product_attention = standing

    def broadcast_batch(self, batch: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Give every rank of the cp group the batch of cp rank 0; every rank of it must call.

        For loaders that give each rank its own samples: an IterableDataset, or any on accelerate 1.9 and older.

        Args:
            batch: cp rank 0's batch, or None where its loader has ended; on the other ranks it is not looked at.

        Returns:
            A new dict, on cp rank 0 with the same tensors, on the others with copies without graph, on the same kind of
            device; other values travel by pickle. None on all ranks where cp rank 0 passed None.

        Raises:
            BatchInvalid: on cp rank 0, for what cannot be sent.
            RanksDiffer: on the others, when cp rank 0 could not send.
            StaleContext: the process group was destroyed.
        """
        return _batch.broadcast(batch, self._live_ring(), self._device_type)

    def verify(self) -> VerifyReport:
        """Check on the live ranks that what this context does is right; every rank of the cp group must call it.

        Sharding and restoring, attention forward and backward against plain attention over a whole (short) sequence, and
        what an exception leaves behind, on this mesh and device. Takes well under a second on CPU.

        Returns:
            The report, the same on all ranks; as text it is a table. Where another library owns CP, nothing is compared.

        Raises:
            StaleContext: the process group was destroyed.
            NestedContext: called inside a block.
        """
        from .checks import live

        if self.origin != "delegated":
            self._live_ring()
            if is_active():
                raise NestedContext(
                    "a context-parallel block is active; a context is verified outside of it",
                    f"torch.nn.functional.scaled_dot_product_attention is {F.scaled_dot_product_attention!r}",
                    "call verify() before or after the block",
                )
        return live(self)

    def attach_hooks(self) -> None:
        """Give every model that the accelerator holds now its mask hooks; done at each entry too.

        Raises:
            ModelUnsupported: see `Models.refresh`.
        """
        models = getattr(self._accelerator(), "_models", None)
        if models:
            self._models.refresh(models)
