"""Every difference between torch releases: where its CP functions are, and how to switch its CP attention on and off.

Functions are found by looking where this torch keeps them, never by version number (they moved in 2.6 and in 2.10).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import CreationFailed, VersionTooOld
from .layouts import MIN_TORCH
from .versions import installed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TorchCP", "attention", "find", "is_context_parallel", "require"]

# Public place first. Importing through `torch.distributed._tensor` makes a second copy with options of its own: never.
_PLACES = (
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.experimental._context_parallel",
    "torch.distributed.tensor.experimental._context_parallel._attention",
)
_NAMES = ("context_parallel", "set_rotate_method")


@dataclass(frozen=True)
class TorchCP:
    """Torch's own context parallelism, as this torch keeps it.

    Attributes:
        context_parallel: the context manager function.
        set_rotate_method: sets the process-wide rotate method.
        contexts: every object that goes by the name ``context_parallel`` in the known places.
    """

    context_parallel: Callable[..., Any]
    set_rotate_method: Callable[[str], None]
    contexts: tuple[Callable[..., Any], ...]


def require() -> None:
    """Check that this torch can do CP at all.

    Raises:
        VersionTooOld: torch is older than 2.6 or was built without torch.distributed.
    """
    found = installed("torch")
    text = found.version if found else "none"
    if found is not None and found.older_than(MIN_TORCH):
        raise VersionTooOld(
            f"context parallelism needs torch {MIN_TORCH} or newer",
            f"torch {text} is installed",
            f"pip install 'torch>={MIN_TORCH}'",
            package="torch",
            needed=MIN_TORCH,
            installed=text,
        )
    if not torch.distributed.is_available():
        raise VersionTooOld(
            "context parallelism needs a torch that was built with torch.distributed",
            f"torch {text}: torch.distributed.is_available() is False",
            "install a torch build with distributed support (the official wheels have it)",
            package="torch",
            needed="torch.distributed",
            installed=text,
        )


@functools.lru_cache(maxsize=1)
def find() -> TorchCP:
    """Find torch's CP functions.

    Returns:
        The functions.

    Raises:
        VersionTooOld: see `require`.
        CreationFailed: this torch has moved them; the message lists every place that was looked at.
    """
    require()
    seen: dict[str, list[Any]] = {name: [] for name in _NAMES}
    for place in _PLACES:
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue
        for name in _NAMES:
            value = getattr(module, name, None)
            if callable(value) and value not in seen[name]:
                seen[name].append(value)
    missing = [name for name, values in seen.items() if not values]
    if missing:
        raise CreationFailed(
            f"torch's {' and '.join(missing)} cannot be found in this torch",
            f"torch {torch.__version__}; looked in {', '.join(_PLACES)}",
            "use the newest cpcompat, or a torch that its compatibility table lists",
            missing=missing,
            looked_in=_PLACES,
        )
    return TorchCP(seen["context_parallel"][0], seen["set_rotate_method"][0], tuple(seen["context_parallel"]))


def is_context_parallel(function: object) -> bool:
    """Whether an object is torch's own ``context_parallel``, from whichever place it was imported.

    Args:
        function: any object.

    Returns:
        True only for the function itself, not for what wraps it.
    """
    return any(function is context for context in find().contexts)


def is_patched(function: object) -> bool:
    """Whether a function is what torch's ``context_parallel`` puts in the place of SDPA.

    Args:
        function: what stands in ``torch.nn.functional.scaled_dot_product_attention``.

    Returns:
        True for torch's own wrapper.
    """
    return getattr(function, "__module__", "") in _PLACES


@contextmanager
def attention(mesh: DeviceMesh, rotate_method: str) -> Iterator[None]:
    """Switch torch's own CP attention on, by its public context over a buffer of 2 x cp size elements.

    The context is closed normally even when the body raised: that undoes the SDPA patch on every torch, while up to 2.12
    an exception thrown into it would leave SDPA patched for good.

    Args:
        mesh: the cp mesh.
        rotate_method: ``"allgather"`` or ``"alltoall"``; process-wide in torch, so set at each entry.

    Raises:
        CreationFailed: SDPA was replaced by a function that torch does not recognise, so CP would silently stay off.
    """
    import torch.nn.functional as F

    cp = find()
    cp.set_rotate_method(rotate_method)
    before = F.scaled_dot_product_attention
    token = torch.zeros(1, 2 * mesh.size(), device=mesh.device_type)
    manager = cp.context_parallel(mesh, buffers=[token], buffer_seq_dims=[1], no_restore_buffers={token})
    manager.__enter__()
    try:
        if F.scaled_dot_product_attention is before:
            raise CreationFailed(
                "torch did not switch its CP attention on",
                f"torch.nn.functional.scaled_dot_product_attention had been replaced by {before!r}, "
                "and torch goes by the function's name",
                "put torch's own function back before the block, or name the replacement scaled_dot_product_attention",
            )
        yield
    finally:
        manager.__exit__(None, None, None)
        F.scaled_dot_product_attention = before
