"""The cp mesh: found in a value, looked at for life, made where no release of accelerate makes one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .errors import Contradiction, StaleContext
from .layouts import is_a

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["cp_mesh", "group_problem", "live", "new_mesh", "ranks_of"]


def cp_mesh(mesh: Any) -> DeviceMesh | None:
    """The one-dimensional cp mesh in a value, or None."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if not is_a(mesh, DeviceMesh):
        return None
    try:
        names, dims = mesh.mesh_dim_names or (), mesh.ndim
    except AttributeError:  # the object without its __init__
        return None
    if "cp" in names:
        mesh = mesh if dims == 1 else mesh["cp"]
    elif dims != 1 or names:
        return None
    return mesh if mesh.size() > 1 else None


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, in its order."""
    return list(mesh.mesh.flatten().tolist())


def group_problem(mesh: DeviceMesh) -> str | None:
    """Why the mesh's process group cannot be used; size() and even sharding still work on a dead one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return "its process group was destroyed"
    try:
        dist.get_rank(mesh.get_group())
        return None if dist.get_world_size(mesh.get_group()) == mesh.size() else "its process group has another size"
    except Exception as error:
        return f"its process group is gone ({type(error).__name__}: {error})"


def live(mesh: DeviceMesh, place: str) -> DeviceMesh:
    """The mesh itself, or an error where its process group is gone."""
    problem = group_problem(mesh)
    if problem:
        raise StaleContext(
            f"the cp mesh cannot be used: {problem}",
            place,
            "make the Accelerator (or the mesh) anew after init_process_group()",
        )
    return mesh


def new_mesh(cp_size: int, device_type: str) -> DeviceMesh:
    """Cut the world into cp groups of consecutive ranks; every rank must call it."""
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
    return init_device_mesh(device_type, (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))["cp"]
