"""From each rank's summed loss to the mean over the tokens of all ranks, with the gradient that averaging makes right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import describe
from .errors import BatchInvalid

__all__ = ["Reduced", "reduce_loss"]


@dataclass(frozen=True)
class Reduced:
    """A loss over all ranks.

    Attributes:
        loss: to call backward on.
        fewest: the smallest number of tokens that was given for a batch, over all ranks.
        labelled: the tokens of this batch that have a label, over all ranks; infinite where that is not known.
    """

    loss: Tensor
    fewest: Tensor
    labelled: Tensor


def reduce_loss(
    loss_sum: Tensor, num_tokens: float | Tensor | Sequence[float | Tensor], steps: int, labelled: Tensor | None
) -> Reduced:
    """See `CPContext.reduce_loss`.

    Args:
        loss_sum: this rank's sum.
        num_tokens: this rank's tokens, of this batch or of each batch of an optimizer step.
        steps: what accelerate divides by in ``backward``.
        labelled: this rank's tokens with a label, where known.

    Returns:
        The loss, and what a check of num_tokens needs.

    Raises:
        BatchInvalid: loss_sum is not a tensor of one element.
    """
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        raise BatchInvalid(
            "loss_sum is the sum over this rank's tokens, one number in a tensor",
            describe(loss_sum),
            'cross_entropy(..., reduction="sum")',
        )
    loss_sum = loss_sum.reshape(())
    at: dict[str, Any] = {"device": loss_sum.device, "dtype": torch.promote_types(loss_sum.dtype, torch.float32)}
    if isinstance(num_tokens, Tensor):
        window, counts = num_tokens.dim() > 0, num_tokens.detach().to(**at).reshape(-1)
    elif isinstance(num_tokens, Sequence):
        window, counts = True, torch.stack([torch.as_tensor(count, **at) for count in num_tokens or [0]])
    else:
        window, counts = False, torch.as_tensor(num_tokens, **at).reshape(1)
    known = torch.full((), torch.inf, **at) if labelled is None else labelled.to(**at)
    total = torch.stack((loss_sum.detach().to(**at), counts.sum(), counts.min(), known))
    dist.all_reduce(total)
    summed, tokens, fewest, known = total.unbind()
    weight = torch.where(tokens > 0, (steps if window else 1) / tokens, 0.0)
    loss: Tensor = _Mean.apply(loss_sum, summed * weight, dist.get_world_size() * weight)  # type: ignore[no-untyped-call]
    return Reduced(loss, fewest, known)


class _Mean(torch.autograd.Function):
    """One value forward, another factor backward."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.factor, ctx.dtype = factor, loss_sum.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad * ctx.factor).to(ctx.dtype), None, None
