"""`get_cp_context`: find the context of an accelerator, check that it is real, have it made where it is missing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .creating import create, plan
from .errors import StaleContext
from .layouts import ABSENT, LAYOUTS, Layout, is_a, read
from .meshes import cp_mesh, group_problem, ranks_of
from .seen import Request, Seen, check_arguments, is_mock, look

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .context import CPContext

__all__ = ["get_cp_context", "peek"]

_KEYWORDS = ("buffers", "buffer_seq_dims", "no_restore_buffers")
_NOTHING = Request(None, None, None)
_UNKNOWN = "a library unknown to cpcompat"

_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Known:
    """A context that was returned, and what the accelerator looked like then."""

    context: CPContext
    request: Request
    stamp: tuple[Any, ...]
    models: int
    # Two of the stamp by themselves, and where torch keeps the process group: what every call looks at.
    own: Any
    mesh: Any
    groups: Any
    world: Any

    @classmethod
    def now(cls, acc: Any, context: CPContext, request: Request) -> _Known:
        """What is known at this moment."""
        import torch.distributed as dist

        stamp, models = _stamp(acc), read(acc, ("_models",))
        own, mesh = stamp[:2]
        count = len(models) if is_a(models, list) else 0
        return cls(context, request, stamp, count, own, mesh, dist.group, dist.group.WORLD)

    def holds(self, acc: Any) -> bool:
        """Whether all stands as it stood; by identity, since it may have any notion of equality."""
        return all(map(operator.is_, self.stamp, _stamp(acc))) and self.context.alive


def get_cp_context(
    acc: Any, *, cp_size: int | None = None, mesh: DeviceMesh | None = None, rotate_method: str | None = None
) -> CPContext:
    """Return the working context-parallel context of an accelerator, made now where accelerate did not make it.

    Call it on every rank, at any time after the Accelerator exists: before ``prepare()``, after it, after
    ``prepare_model()`` alone. The same object comes back until the accelerator's context, mesh or process group changes.

    Args:
        acc: an ``accelerate.Accelerator``.
        cp_size: the number of ranks that share a sequence, for releases without ParallelismConfig (1.9 and older): the
            world is cut into groups of consecutive ranks.
        mesh: instead of cp_size, a DeviceMesh that is one-dimensional or has a dimension "cp".
        rotate_method: "allgather" or "alltoall"; the accelerator's ``cp_handler`` or else "allgather" by default.

    Returns:
        The context, checked: present, alive, of the size that was asked for.

    Raises:
        CPNotRequested: nobody asked for CP; the message names every gate.
        CPNotReady: the process group or the mesh does not exist yet.
        CreationFailed: making the context failed; the cause is chained.
        StaleContext: the process group was destroyed or accelerate's state was reset.
        Contradiction: an argument says other than the accelerator.
        VersionTooOld: accelerate or torch cannot do it.
        SequenceParallel: sequence parallelism was taken for CP.
    """
    if cp_size is None and mesh is None and rotate_method is None:
        try:  # nearly all calls: what may have changed is read, and nothing called
            known = _known[acc]
            if (
                acc._cp_context is known.own
                and acc.state.device_mesh is known.mesh
                and known.groups.WORLD is known.world
                and len(acc._models) == known.models
            ):
                return known.context
        except Exception:  # not known, a stand-in that cannot be kept, an accelerator of another shape
            pass
    return _find(acc, Request(cp_size, mesh, rotate_method))


def _find(acc: Any, request: Request) -> CPContext:
    """Look closely, and remember what came of it where that can be remembered."""
    known = _remembered(acc)
    if known is not None and (request.like(_NOTHING) or request.like(known.request)) and known.holds(acc):
        context = known.context
    else:
        seen = look(acc)
        check_arguments(request, seen)
        context = _existing(seen, request) or _made(seen, request)
    if is_a(read(acc, ("_models",)), (list, tuple)):
        context.attach_hooks()
    with contextlib.suppress(Exception):  # a stand-in that cannot be kept, as in _remembered
        _known[acc] = _Known.now(acc, context, request)
    return context


def _remembered(acc: Any) -> _Known | None:
    try:
        return _known.get(acc)
    except Exception:  # not weakly referable, not hashable, not comparable: somebody's stand-in, never kept
        return None


def peek(acc: Any) -> tuple[CPContext | None, list[str]]:
    """Look at what `get_cp_context` would find, and make nothing.

    Args:
        acc: an ``accelerate.Accelerator``.

    Returns:
        The context, or None where it would have to be made; and what was looked at.

    Raises:
        CPError: what `get_cp_context` would raise.
    """
    known = _remembered(acc)
    if known is not None and known.holds(acc):
        return known.context, list(known.context.trail)
    seen = look(acc)
    check_arguments(_NOTHING, seen)
    context = _existing(seen, _NOTHING)
    if context is None and isinstance(place := plan(seen, _NOTHING), str):
        context = _delegate(seen, _UNKNOWN, place)
    return context, seen.trail


_STAMPED = (("_cp_context",), ("state", "device_mesh"), ("_context_parallel",), ("state", "parallelism_config"))


def _stamp(acc: Any) -> tuple[Any, ...]:
    """What must stay the same for a returned context to stay right."""
    return tuple(read(acc, path) for path in _STAMPED)


def _existing(seen: Seen, request: Request) -> CPContext | None:
    """Adopt what passes the checks, delegate to a foreign owner; None where nothing is there."""
    owner = _foreign_owner(seen)
    if owner is not None:
        return owner
    dead = False
    for layout in LAYOUTS:
        if layout.kind == "context":
            value = read(seen.acc, layout.path)
            if value is not ABSENT and value is not None:
                verdict = _judge(value, layout, seen, request)
                if not isinstance(verdict, str):
                    return verdict
                seen.note(layout, f"rejected: {verdict}")
                dead = dead or "dead mesh" in verdict
            else:
                seen.note(layout, "absent" if value is ABSENT else "rejected: None")
    if dead:
        raise StaleContext(
            "the accelerator's CP context is stale",
            "; ".join(seen.trail),
            "make a new Accelerator after init_process_group() and call get_cp_context() with it",
        )
    return None


def _foreign_owner(seen: Seen) -> CPContext | None:
    """Libraries that own CP on an accelerator without leaving a context (optimum-habana, SimpleTuner, axolotl forks)."""
    acc = seen.acc
    backend = read(seen.config, ("cp_backend",))
    if is_a(backend, str) and backend != "torch":
        return _delegate(seen, f"the CP backend {backend!r}", "acc.parallelism_config.cp_backend")
    own = read(acc, ("__dict__",))
    replaced = own.get("maybe_context_parallel") if is_a(own, dict) else None
    if replaced is not None and not is_mock(acc):
        return _delegate(seen, _module(replaced), "acc.maybe_context_parallel", replaced)
    mpu = read(acc, ("mpu",))
    if mpu is not ABSENT and mpu is not None and not is_mock(acc):
        return _delegate(seen, _module(mpu), "acc.mpu")
    return None


def _module(value: Any) -> str:
    stated = read(value, ("__name__",) if is_a(value, types.ModuleType) else ("__module__",))
    names = (name for name in (stated, type(value).__module__) if is_a(name, str) and name)
    return str(next(names, _UNKNOWN)).split(".")[0]


def _delegate(seen: Seen, owner: str, place: str, passes_to: Callable[..., Any] | None = None) -> CPContext:
    from .context import CPContext

    seen.note(place, f"delegated: {owner} owns context parallelism here")
    return CPContext(
        None,
        origin="delegated",
        layout=place,
        trail=seen.trail,
        owner=owner,
        passes_to=passes_to,
        size=seen.cp_size,
        accelerator=seen.acc,
    )


def _judge(value: Any, layout: Layout, seen: Seen, request: Request) -> CPContext | str:
    """A context for a value that is real, or the reason why it is not."""
    from . import torch_cp
    from .context import CPContext

    if is_mock(value):
        return "a Mock"
    mark = read(type(value), ("__cpcompat__",))
    made_by_us = is_a(mark, str) and mark == "context"
    function: Any = value
    bound: dict[str, Any] = {}
    positional: tuple[Any, ...] = ()
    while is_a(function, functools.partial):
        bound = {**function.keywords, **bound}
        positional = (*function.args, *positional)
        function = function.func
    if made_by_us:
        if not read(value, ("alive",)):
            return "a context over a dead mesh: its process group was destroyed"
        mesh = read(value, ("mesh",))
    elif callable(function) and torch_cp.is_context_parallel(function):
        mesh = bound.get("mesh", positional[0] if positional else None)
    else:
        return _judge_foreign(function, layout, seen)
    mesh = cp_mesh(mesh)
    if mesh is None:
        return "torch's context_parallel without a one-dimensional cp mesh of size 2 or more"
    problem = group_problem(mesh)
    if problem:
        return f"a context over a dead mesh: {problem}"
    own = cp_mesh(request.mesh) or cp_mesh(read(seen.acc, ("state", "device_mesh")))
    if own is not None and ranks_of(own) != ranks_of(mesh):
        return f"a context over another mesh: ranks {ranks_of(mesh)}, the accelerator's are {ranks_of(own)}"
    if request.cp_size not in (None, mesh.size()):
        return f"a context of cp size {mesh.size()}, not {request.cp_size}"
    if isinstance(value, CPContext):
        seen.note(layout, "taken: made by cpcompat")
        return value
    seen.note(layout, "taken: torch's context_parallel over the accelerator's cp mesh" if not made_by_us else "taken")
    return CPContext(
        mesh,
        rotate_method=str(request.rotate_method or seen.rotate_method or getattr(value, "rotate_method", "allgather")),
        origin="adopted",
        layout=str(layout),
        trail=seen.trail,
        accelerator=seen.acc,
    )


def _judge_foreign(function: Any, layout: Layout, seen: Seen) -> CPContext | str:
    if not callable(function):
        return f"not callable: {type(function).__name__}"
    if read(function, ("__enter__",)) is not ABSENT:
        return "a context manager that was made already, not what makes one"
    try:
        parameters = inspect.signature(function).parameters
    except Exception:
        return f"a callable without a signature: {type(function).__name__}"
    if not all(name in parameters for name in _KEYWORDS):
        return f"a callable of another kind: {read(function, ('__qualname__',)) or type(function).__name__}"
    owner = _module(function)
    return _delegate(seen, owner, str(layout), function)


def _made(seen: Seen, request: Request) -> CPContext:
    """Make a context; delegate where somebody else's cp mesh stands, without accelerate's config."""
    mesh = plan(seen, request)
    return _delegate(seen, _UNKNOWN, mesh) if isinstance(mesh, str) else create(mesh, seen, request)
