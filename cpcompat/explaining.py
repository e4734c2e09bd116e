"""Words for what torch says, or does silently, in a block: notes on its exceptions, and an error for a recomputation outside.

An exception comes through as the same object; the note gives the code under which docs/troubleshooting.md explains it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from .codes import CODES
from .errors import BackwardOutside, CPError

__all__ = ["annotate", "explain", "guard_recomputation"]

# torch's words, which have not changed since 2.5.
_KNOWN = (
    ("CP308", re.compile(r"got mixed torch\.Tensor and DTensor")),
    ("CP309", re.compile(r"No available kernel|No viable backend for scaled_dot_product_attention")),
    ("CP310", re.compile(r"does not have a sharding strategy registered")),
    ("CP311", re.compile(r"Load balancing requires `?is_causal=True")),
    ("CP208", re.compile(r"torch\.utils\.checkpoint: .*(saved|[Rr]ecomput)", re.S)),
    ("CP503", re.compile(r"Connection (closed|reset) by peer|Broken pipe")),
    ("CP504", re.compile(r"Timed out waiting \d+ *ms|Application timeout caused pair closure")),
)
_SIZES = re.compile(
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
    r"|expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)"
)
_REENTRANT = CheckpointFunction.forward.__code__


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an exception, which stays the same object; on Python 3.10, which has no notes, its message grows.

    Args:
        error: the exception.
        note: what to add.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)


def explain(error: BaseException, local_length: int | None, size: int) -> None:
    """Add a note to an exception that torch raises in a block for a reason which is known; nothing to any other.

    Args:
        error: the exception.
        local_length: how many tokens each rank of the block holds, where that is known.
        size: cp size.
    """
    if not isinstance(error, Exception) or isinstance(error, CPError):
        return
    text = str(error)
    code = next((code for code, words in _KNOWN if words.search(text)), None)
    if code is None and local_length is not None:
        sizes = _SIZES.search(text)
        met = {int(number) for number in sizes.groups() if number} if sizes else set()
        code = "CP312" if met == {local_length, local_length * size} else None
    if code is None:
        return
    row = CODES[code]
    annotate(error, f"[{code}] {row.title}\n  why:  {row.reason}\n  do:   {row.remedy}")


def guard_recomputation(is_active: Callable[[], bool]) -> None:
    """See to it that a reentrantly checkpointed layer around this attention call is computed again in a block, or not at all.

    Such a layer runs without a graph now and once more in the backward pass. Outside a block that is ordinary attention over
    a shard: gradients off by 20 %, and no word. Each autograd node of torch's CheckpointFunction around the call gets a
    hook, which runs before that happens.

    Args:
        is_active: whether a block is open; asked in the backward pass.
    """

    def refuse(grads: Any) -> None:
        if not is_active():
            raise BackwardOutside(
                "a checkpointed layer that ran inside a context-parallel block is about to be computed again outside of it, "
                "where its attention sees this rank's shard only: the gradients would be wrong",
                "reentrant activation checkpointing; no block is open in this backward pass",
                "call acc.backward(loss) inside the block, and not inside cp.disabled()",
            )

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            frame.f_locals["ctx"].register_prehook(refuse)
        frame = frame.f_back
