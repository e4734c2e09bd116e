"""`get_cp_context`: find the context of an accelerator, check that it is real, make it where it is missing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import (
    Contradiction,
    CPError,
    CPNotReady,
    CPNotRequested,
    CreationFailed,
    SequenceParallel,
    StaleContext,
    UntestedVersion,
    VersionTooOld,
)
from .layouts import ABSENT, LAYOUTS, RELEASES, Layout, read
from .versions import Installed, installed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .context import CPContext

__all__ = ["get_cp_context", "peek"]

ROTATE_METHODS = ("allgather", "alltoall")
_KEYWORDS = ("buffers", "buffer_seq_dims", "no_restore_buffers")
_USE, _SIZE = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_CP_SIZE"

_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Known:
    """A context that was returned, and what the accelerator looked like then."""

    context: CPContext
    request: _Request
    stamp: tuple[Any, ...]

    def answers(self, cp_size: int | None, mesh: DeviceMesh | None, rotate_method: str | None) -> bool:
        """Whether a later call asks for nothing in particular, or for the same."""
        if cp_size is None and mesh is None and rotate_method is None:
            return True
        return _Request(cp_size, mesh, rotate_method) == self.request

    def holds(self, acc: Any) -> bool:
        """Whether all stands as it stood; by identity, since it may have any notion of equality."""
        (a, b, c, d), (e, f, g, h) = self.stamp, _stamp(acc)
        return a is e and b is f and c is g and d is h and self.context.alive


@dataclass(frozen=True)
class _Request:
    """The three arguments that serve accelerate releases without ParallelismConfig."""

    cp_size: int | None
    mesh: DeviceMesh | None
    rotate_method: str | None


_NOTHING = _Request(None, None, None)


@dataclass
class _Seen:
    """One accelerator, as it was found."""

    acc: Any
    accelerate: Installed | None
    config: Any
    trail: list[str] = field(default_factory=list)

    @property
    def cp_size(self) -> int | None:
        """What the parallelism config says; None without one."""
        return _int(read(self.config, ("cp_size",)))

    @property
    def rotate_method(self) -> str | None:
        method = read(self.config, ("cp_handler", "cp_comm_strategy"))
        return method if method in ROTATE_METHODS else None

    def note(self, place: object, verdict: str) -> None:
        self.trail.append(f"{place}: {verdict}")


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
    try:
        known = _known.get(acc)
    except TypeError:  # not hashable or not weakly referable: somebody's stand-in, never kept
        known = None
    if known is not None and known.answers(cp_size, mesh, rotate_method) and known.holds(acc):
        known.context.attach_hooks()
        return known.context

    request = _Request(cp_size, mesh, rotate_method)
    seen = _look(acc)
    _check_arguments(request, seen)
    context = _existing(seen, request) or _create(seen, request)
    context.attach_hooks()
    with contextlib.suppress(TypeError):
        _known[acc] = _Known(context, request, _stamp(acc))
    return context


def peek(acc: Any) -> tuple[CPContext | None, list[str]]:
    """Look at what `get_cp_context` would find, and make nothing.

    Args:
        acc: an ``accelerate.Accelerator``.

    Returns:
        The context, or None where it would have to be made; and what was looked at.

    Raises:
        CPError: what `get_cp_context` would raise.
    """
    with contextlib.suppress(TypeError):
        known = _known.get(acc)
        if known is not None and known.holds(acc):
            return known.context, list(known.context.trail)
    seen = _look(acc)
    _check_arguments(_NOTHING, seen)
    context = _existing(seen, _NOTHING)
    if context is None and isinstance(place := _plan(seen, _NOTHING), str):
        context = _delegate(seen, "a library unknown to cpcompat", place)
    return context, seen.trail


_STAMPED = (("_cp_context",), ("_context_parallel",), ("state", "device_mesh"), ("state", "parallelism_config"))


def _stamp(acc: Any) -> tuple[Any, ...]:
    """What must stay the same for a returned context to stay right."""
    try:
        state = acc.state
        return acc._cp_context, getattr(acc, "_context_parallel", ABSENT), state.device_mesh, state.parallelism_config
    except Exception:  # one is not there, as in older releases, or its getter fails
        return tuple(read(acc, path) for path in _STAMPED)


# --- what is there -----------------------------------------------------------------------------------------------------


def _look(acc: Any) -> _Seen:
    from . import torch_cp

    torch_cp.require()
    seen = _Seen(acc, installed("accelerate"), read(acc, ("parallelism_config",)))
    state = read(acc, ("state",))
    if type(state).__name__ == "AcceleratorState" and read(state, ("distributed_type",)) is ABSENT:
        raise StaleContext(
            "accelerate's state was reset after this Accelerator was made",
            "acc.state.distributed_type is gone",
            "make a new Accelerator; AcceleratorState._reset_state() leaves the old one without state",
        )
    if _is_mock(seen.config):
        seen.note("acc.parallelism_config", "rejected: a Mock")
        seen.config = ABSENT
    _warn_untested(seen.accelerate)
    return seen


@functools.lru_cache(maxsize=8)
def _warn_untested(found: Installed | None) -> None:
    newest = RELEASES[-1].tried[-1]
    if found is not None and found.newer_than(newest):
        warnings.warn(
            UntestedVersion(
                f"{found} is newer than any accelerate that cpcompat was run against",
                f"newest tried: {newest}",
                "run `python -m cpcompat verify`; it compares the numbers with those without CP",
            ),
            stacklevel=4,
        )


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_mock(value: Any) -> bool:
    return any(base.__module__ == "unittest.mock" for base in type(value).__mro__)


def _check_arguments(request: _Request, seen: _Seen) -> None:
    """Refuse what cannot be meant, and what contradicts the accelerator."""
    sp_size = _int(read(seen.config, ("sp_size",))) or 1
    if sp_size > 1:
        raise SequenceParallel(
            "this accelerator uses sequence parallelism (sp_size), which is not context parallelism and has no context",
            f"parallelism_config: sp_size {sp_size}, cp_size {seen.cp_size}, "
            f"sp_backend {read(seen.config, ('sp_backend',))!r} (accelerate #3817)",
            "for context parallelism set cp_size and leave sp_size at 1; DeepSpeed's Ulysses shards in the data loader",
            sp_size=sp_size,
            cp_size=seen.cp_size,
        )
    asked: dict[str, tuple[Any, Any]] = {}
    if request.cp_size is not None:
        if _int(request.cp_size) is None or request.cp_size < 2:
            raise Contradiction(
                "cp_size is the number of ranks that share a sequence, an int of 2 or more",
                f"got {request.cp_size!r}",
                "without context parallelism do not call get_cp_context",
                argument="cp_size",
            )
        if seen.cp_size is not None and seen.cp_size != request.cp_size:
            asked["cp_size"] = (request.cp_size, seen.cp_size)
    if request.rotate_method is not None:
        if request.rotate_method not in ROTATE_METHODS:
            raise Contradiction(
                "rotate_method is 'allgather' or 'alltoall'",
                f"got {request.rotate_method!r}",
                "name one of the two",
                argument="rotate_method",
            )
        if seen.rotate_method not in (None, request.rotate_method):
            asked["rotate_method"] = (request.rotate_method, seen.rotate_method)
    for argument, (ours, theirs) in asked.items():
        raise Contradiction(
            f"the argument {argument}={ours!r} contradicts the accelerator's parallelism_config",
            f"the accelerator says {theirs!r}",
            f"leave {argument} out, or make the Accelerator with the other value",
            argument=argument,
            given=ours,
            accelerator=theirs,
        )
    if request.mesh is not None:
        mesh = _cp_mesh(request.mesh)
        own = _cp_mesh(read(seen.acc, ("state", "device_mesh")))
        if mesh is None:
            raise Contradiction(
                "mesh is a DeviceMesh of one dimension, or with a dimension named 'cp', of size 2 or more",
                f"got {request.mesh!r}",
                "init_device_mesh(device_type, (n,), mesh_dim_names=('cp',))",
                argument="mesh",
            )
        wanted = request.cp_size or seen.cp_size or mesh.size()
        if mesh.size() != wanted or (own is not None and _ranks(own) != _ranks(mesh)):
            raise Contradiction(
                "the argument mesh contradicts the cp size or the accelerator's own cp mesh",
                f"mesh of ranks {_ranks(mesh)}, cp_size {wanted}, accelerator's mesh "
                f"{_ranks(own) if own is not None else 'none'}",
                "leave mesh out where the accelerator has its own",
                argument="mesh",
            )


def _cp_mesh(mesh: Any) -> DeviceMesh | None:
    """The one-dimensional cp mesh in a value, or None."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        return None
    names = mesh.mesh_dim_names or ()
    if "cp" in names:
        mesh = mesh if mesh.ndim == 1 else mesh["cp"]
    elif mesh.ndim != 1 or names:
        return None
    return mesh if mesh.size() > 1 else None


def _ranks(mesh: DeviceMesh) -> list[int]:
    return list(mesh.mesh.flatten().tolist())


def _group_problem(mesh: DeviceMesh) -> str | None:
    """Why the mesh's process group cannot be used; size() and even sharding still work on a dead one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return "its process group was destroyed"
    try:
        dist.get_rank(mesh.get_group())
        return None if dist.get_world_size(mesh.get_group()) == mesh.size() else "its process group has another size"
    except Exception as error:
        return f"its process group is gone ({type(error).__name__}: {error})"


# --- what may be used ---------------------------------------------------------------------------------------------------


def _existing(seen: _Seen, request: _Request) -> CPContext | None:
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


def _foreign_owner(seen: _Seen) -> CPContext | None:
    """Libraries that own CP on an accelerator without leaving a context (optimum-habana, SimpleTuner, axolotl forks)."""
    acc = seen.acc
    backend = read(seen.config, ("cp_backend",))
    if isinstance(backend, str) and backend != "torch":
        return _delegate(seen, f"the CP backend {backend!r}", "acc.parallelism_config.cp_backend")
    replaced = getattr(acc, "__dict__", {}).get("maybe_context_parallel")
    if replaced is not None and not _is_mock(acc):
        return _delegate(seen, _module(replaced), "acc.maybe_context_parallel", replaced)
    if not isinstance(read(acc, ("mpu",)), (type(ABSENT), type(None))) and not _is_mock(acc):
        return _delegate(seen, _module(acc.mpu), "acc.mpu")
    return None


def _module(value: Any) -> str:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") or type(value).__module__
    return str(name).split(".")[0]


def _delegate(seen: _Seen, owner: str, place: str, passes_to: Callable[..., Any] | None = None) -> CPContext:
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


def _judge(value: Any, layout: Layout, seen: _Seen, request: _Request) -> CPContext | str:
    """A context for a value that is real, or the reason why it is not."""
    from . import torch_cp
    from .context import CPContext

    if _is_mock(value):
        return "a Mock"
    made_by_us = getattr(type(value), "__cpcompat__", "") == "context"
    function: Any = value
    bound: dict[str, Any] = {}
    positional: tuple[Any, ...] = ()
    while isinstance(function, functools.partial):
        bound = {**function.keywords, **bound}
        positional = (*function.args, *positional)
        function = function.func
    if made_by_us:
        if not value.alive:
            return "a context over a dead mesh: its process group was destroyed"
        mesh = value.mesh
    elif callable(function) and torch_cp.is_context_parallel(function):
        mesh = bound.get("mesh", positional[0] if positional else None)
    else:
        return _judge_foreign(function, layout, seen)
    mesh = _cp_mesh(mesh)
    if mesh is None:
        return "torch's context_parallel without a one-dimensional cp mesh of size 2 or more"
    problem = _group_problem(mesh)
    if problem:
        return f"a context over a dead mesh: {problem}"
    own = _cp_mesh(request.mesh) or _cp_mesh(read(seen.acc, ("state", "device_mesh")))
    if own is not None and _ranks(own) != _ranks(mesh):
        return f"a context over another mesh: ranks {_ranks(mesh)}, the accelerator's are {_ranks(own)}"
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


def _judge_foreign(function: Any, layout: Layout, seen: _Seen) -> CPContext | str:
    if not callable(function):
        return f"not callable: {type(function).__name__}"
    if hasattr(function, "__enter__"):
        return "a context manager that was made already, not what makes one"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return f"a callable without a signature: {type(function).__name__}"
    if not all(name in parameters for name in _KEYWORDS):
        return f"a callable of another kind: {getattr(function, '__qualname__', type(function).__name__)}"
    owner = _module(function)
    return _delegate(seen, owner, str(layout), function)


# --- what must be made --------------------------------------------------------------------------------------------------


def _create(seen: _Seen, request: _Request) -> CPContext:
    """Do what accelerate's ``_prepare_cp`` would have done, and check it right after."""
    from . import torch_cp
    from .context import CPContext

    mesh = _plan(seen, request)
    if isinstance(mesh, str):  # a foreign owner's mesh
        return _delegate(seen, "a library unknown to cpcompat", mesh)
    method = request.rotate_method or seen.rotate_method or "allgather"
    stored = (seen.cp_size or 1) > 1 and hasattr(seen.acc, "maybe_context_parallel")
    layout = "acc._cp_context" if stored else "kept by cpcompat (this accelerator reads none)"
    seen.note(layout, "created")
    try:
        torch_cp.find().set_rotate_method(method)
        context = CPContext(
            mesh, rotate_method=method, origin="created", layout=layout, trail=seen.trail, accelerator=seen.acc
        )
        if stored:
            seen.acc._cp_context = context
    except CPError:
        raise
    except Exception as error:
        raise CreationFailed(
            "the context-parallel context could not be made",
            f"{type(error).__name__}: {error}; " + "; ".join(seen.trail),
            "see the cause above; `python -m cpcompat verify` shows whether CP works here at all",
        ) from error
    problem = _group_problem(mesh)
    wanted = request.cp_size or seen.cp_size or mesh.size()
    if stored and read(seen.acc, ("_cp_context",)) is not context:
        problem = "the accelerator does not keep it: acc._cp_context is something else"
    elif context.size != wanted:
        problem = f"its size is {context.size}, and {wanted} was asked for"
    if problem:
        raise CreationFailed(
            f"the context-parallel context did not pass the check right after it was made: {problem}",
            "; ".join(seen.trail),
            "make the Accelerator anew after init_process_group()",
        )
    return context


def _plan(seen: _Seen, request: _Request) -> Any:
    """The mesh to make a context over, see `_mesh`; an error where it was not asked for, or not yet possible."""
    import torch.distributed as dist

    _check_requested(seen, request)
    if not dist.is_available() or not dist.is_initialized():
        raise CPNotReady(
            "the process group does not exist yet, so there is no cp mesh",
            "torch.distributed.is_initialized() is False",
            "start under torchrun or accelerate launch, make the Accelerator (it calls init_process_group), then call "
            "get_cp_context(acc)",
        )
    return _mesh(seen, request)


def _check_requested(seen: _Seen, request: _Request) -> None:
    """Refuse to make a context that nobody asked for, naming each gate."""
    if request.cp_size is not None or request.mesh is not None or (seen.cp_size or 1) > 1:
        return
    for layout in LAYOUTS:
        if layout.kind == "mesh" and _cp_mesh(read(seen.acc, layout.path)) is not None:
            return
    used, size = os.environ.get(_USE), os.environ.get(_SIZE)
    by_environment = size is not None and size.isdigit() and int(size) > 1
    has_config = seen.config is not ABSENT
    evidence = "; ".join(
        (
            f"{seen.accelerate or 'accelerate is not installed'}",
            f"acc.parallelism_config: {_describe_config(seen)}",
            f"{_USE}={used}, {_SIZE}={size}",
            "cp_size and mesh were not given",
        )
    )
    facts = {"cp_size": seen.cp_size, "environment": {_USE: used, _SIZE: size}, "trail": seen.trail}
    if not has_config and by_environment:
        raise VersionTooOld(
            "context parallelism was asked for by the environment, and this accelerate does not read it",
            evidence,
            "pip install 'accelerate>=1.10', or call get_cp_context(acc, cp_size=...)",
            package="accelerate",
            needed="1.10",
            installed=seen.accelerate.version if seen.accelerate else None,
            **facts,
        )
    if not has_config:
        next_step = "this accelerate has no ParallelismConfig (1.10 brought it): call get_cp_context(acc, cp_size=...)"
    elif by_environment and (used or "").lower() not in ("true", "1", "yes", "on", "t", "y"):
        next_step = (
            f"set {_USE}=true beside {_SIZE} (accelerate launch --use_parallelism_config); alone it does nothing"
        )
    else:
        next_step = "Accelerator(parallelism_config=ParallelismConfig(cp_size=2)), or cp_size= here"
    raise CPNotRequested("context parallelism was not asked for", evidence, next_step, **facts)


def _describe_config(seen: _Seen) -> str:
    if seen.config is ABSENT:
        return "absent"
    return "None" if seen.config is None else f"cp_size {seen.cp_size}"


def _mesh(seen: _Seen, request: _Request) -> Any:
    """The cp mesh to make a context over; the place of a foreign one as text where another library put it there."""
    if request.mesh is not None:
        return _live(_cp_mesh(request.mesh), "the argument mesh")
    wanted = request.cp_size or seen.cp_size
    for layout in LAYOUTS:
        mesh = _cp_mesh(read(seen.acc, layout.path)) if layout.kind == "mesh" else None
        if mesh is None:
            continue
        if (seen.cp_size or 1) < 2 and not layout.registered:
            # accelerate makes a cp mesh only where its config has cp_size (unsloth puts one there for its own CP).
            seen.note(layout, "a cp mesh that accelerate did not make")
            return str(layout)
        if wanted not in (None, mesh.size()):
            raise Contradiction(
                "the accelerator's cp mesh has another size than was asked for",
                f"{layout}: {mesh.size()} ranks, asked for {wanted}",
                "make the Accelerator with that cp_size",
                argument="cp_size",
            )
        return _live(mesh, str(layout))
    if (seen.cp_size or 1) > 1:
        raise CPNotReady(
            "the accelerator has no device mesh although cp_size is set",
            "; ".join(seen.trail) + f"; acc.state.device_mesh is {read(seen.acc, ('state', 'device_mesh'))!r}",
            "init_process_group() first, then Accelerator(parallelism_config=...), then get_cp_context(acc)",
        )
    assert wanted is not None
    return _new_mesh(wanted, seen)


def _live(mesh: Any, place: str) -> Any:
    problem = _group_problem(mesh)
    if problem:
        raise StaleContext(
            f"the cp mesh cannot be used: {problem}",
            place,
            "make the Accelerator (or the mesh) anew after init_process_group()",
        )
    return mesh


def _new_mesh(cp_size: int, seen: _Seen) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if world % cp_size:
        raise Contradiction(
            f"{world} processes cannot be cut into cp groups of {cp_size}",
            f"world size {world}, cp_size {cp_size}",
            "start a multiple of cp_size processes",
            argument="cp_size",
            world_size=world,
            given=cp_size,
        )
    device = read(seen.acc, ("device", "type"))
    device_type = device if isinstance(device, str) else "cpu"
    return init_device_mesh(device_type, (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))["cp"]
