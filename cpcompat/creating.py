"""Make a context where accelerate made none, once it was asked for and can work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .errors import Contradiction, CPError, CPNotReady, CPNotRequested, CreationFailed, VersionTooOld, shown
from .layouts import ABSENT, LAYOUTS, read
from .meshes import cp_mesh, group_problem, live, new_mesh
from .seen import Request, Seen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .context import CPContext

__all__ = ["create", "plan"]

_USE, _SIZE = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_CP_SIZE"


def plan(seen: Seen, request: Request) -> DeviceMesh | str:
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


def _check_requested(seen: Seen, request: Request) -> None:
    """Refuse to make a context that nobody asked for, naming each gate."""
    if request.cp_size is not None or request.mesh is not None or (seen.cp_size or 1) > 1:
        return
    for layout in LAYOUTS:
        if layout.kind == "mesh" and cp_mesh(read(seen.acc, layout.path)) is not None:
            return
    used, size = os.environ.get(_USE), os.environ.get(_SIZE)
    by_environment = size is not None and size.isdecimal() and len(size) < 10 and int(size) > 1
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


def _describe_config(seen: Seen) -> str:
    if seen.config is ABSENT:
        return "absent"
    return "None" if seen.config is None else f"cp_size {seen.cp_size}"


def _mesh(seen: Seen, request: Request) -> DeviceMesh | str:
    """The cp mesh to make a context over; the place of a foreign one as text where another library put it there."""
    given = cp_mesh(request.mesh)
    if given is not None:
        return live(given, "the argument mesh")
    wanted = request.cp_size or seen.cp_size
    for layout in LAYOUTS:
        mesh = cp_mesh(read(seen.acc, layout.path)) if layout.kind == "mesh" else None
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
        return live(mesh, str(layout))
    if (seen.cp_size or 1) > 1:
        raise CPNotReady(
            "the accelerator has no device mesh although cp_size is set",
            "; ".join(seen.trail) + f"; acc.state.device_mesh is {shown(read(seen.acc, ('state', 'device_mesh')))}",
            "init_process_group() first, then Accelerator(parallelism_config=...), then get_cp_context(acc)",
        )
    device = read(seen.acc, ("device", "type"))
    return new_mesh(wanted or 1, device if isinstance(device, str) else "cpu")


def create(mesh: DeviceMesh, seen: Seen, request: Request) -> CPContext:
    """Do what accelerate's ``_prepare_cp`` would have done, and check it right after."""
    from . import torch_cp
    from .context import CPContext

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
    problem = group_problem(mesh)
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
