"""One accelerator as it was found, and what a caller asks of it."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import Contradiction, SequenceParallel, StaleContext, UntestedVersion, shown
from .layouts import ABSENT, RELEASES, TORCHES, is_a, read
from .meshes import cp_mesh, ranks_of
from .versions import Installed, installed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ROTATE_METHODS", "Request", "Seen", "check_arguments", "is_mock", "look"]

ROTATE_METHODS = ("allgather", "alltoall")


@dataclass(frozen=True)
class Request:
    """The three arguments that serve accelerate releases without ParallelismConfig."""

    cp_size: int | None
    mesh: DeviceMesh | None
    rotate_method: str | None

    def like(self, other: Request) -> bool:
        """Whether it asks for the same; what cannot be meant is compared with nothing, since it may have any equality."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(type(mine) is type(theirs) and mine == theirs for mine, theirs in pairs)


@dataclass
class Seen:
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
        """What the cp handler says; None without one."""
        method = read(self.config, ("cp_handler", "cp_comm_strategy"))
        return method if is_a(method, str) and method in ROTATE_METHODS else None

    def note(self, place: object, verdict: str) -> None:
        """Keep what was looked at, and what came of it."""
        self.trail.append(f"{place}: {verdict}")


def look(acc: Any) -> Seen:
    """Look at an accelerator; an error where torch is too old or accelerate's state is gone."""
    from . import torch_cp

    torch_cp.require()
    seen = Seen(acc, installed("accelerate"), read(acc, ("parallelism_config",)))
    state = read(acc, ("state",))
    if type(state).__name__ == "AcceleratorState" and read(state, ("distributed_type",)) is ABSENT:
        raise StaleContext(
            "accelerate's state was reset after this Accelerator was made",
            "acc.state.distributed_type is gone",
            "make a new Accelerator; AcceleratorState._reset_state() leaves the old one without state",
        )
    if is_mock(seen.config):
        seen.note("acc.parallelism_config", "rejected: a Mock")
        seen.config = ABSENT
    _warn_untested(seen.accelerate, RELEASES[-1].tried[-1])
    _warn_untested(installed("torch"), TORCHES[-1])
    return seen


@functools.lru_cache(maxsize=8)
def _warn_untested(found: Installed | None, newest: str) -> None:
    if found is not None and found.newer_than(newest):
        warnings.warn(
            UntestedVersion(
                f"{found} is newer than any {found.name} that cpcompat was run against",
                f"newest tried: {newest}",
                "run `python -m cpcompat verify`; it compares the numbers with those without CP",
            ),
            stacklevel=4,
        )


def _int(value: Any) -> int | None:
    """A number of processes; None for anything else, also for what no int64 holds."""
    return value if is_a(value, int) and type(value) is not bool and -(2**63) <= value < 2**63 else None


def is_mock(value: Any) -> bool:
    """Whether a value is a stand-in of unittest.mock, which has every attribute."""
    return any(base.__module__ == "unittest.mock" for base in type(value).__mro__)


def check_arguments(request: Request, seen: Seen) -> None:
    """Refuse what cannot be meant, and what contradicts the accelerator."""
    sp_size = _int(read(seen.config, ("sp_size",))) or 1
    if sp_size > 1:
        raise SequenceParallel(
            "this accelerator uses sequence parallelism (sp_size), which is not context parallelism and has no context",
            f"parallelism_config: sp_size {sp_size}, cp_size {seen.cp_size}, "
            f"sp_backend {shown(read(seen.config, ('sp_backend',)))} (accelerate #3817)",
            "for context parallelism set cp_size and leave sp_size at 1; DeepSpeed's Ulysses shards in the data loader",
            sp_size=sp_size,
            cp_size=seen.cp_size,
        )
    asked: dict[str, tuple[Any, Any]] = {}
    if request.cp_size is not None:
        if _int(request.cp_size) is None or request.cp_size < 2:
            raise Contradiction(
                "cp_size is the number of ranks that share a sequence, an int of 2 or more",
                f"got {shown(request.cp_size)}",
                "without context parallelism do not call get_cp_context",
                argument="cp_size",
            )
        if seen.cp_size is not None and seen.cp_size != request.cp_size:
            asked["cp_size"] = (request.cp_size, seen.cp_size)
    if request.rotate_method is not None:
        if not is_a(request.rotate_method, str) or request.rotate_method not in ROTATE_METHODS:
            raise Contradiction(
                "rotate_method is 'allgather' or 'alltoall'",
                f"got {shown(request.rotate_method)}",
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
        mesh = cp_mesh(request.mesh)
        own = cp_mesh(read(seen.acc, ("state", "device_mesh")))
        if mesh is None:
            raise Contradiction(
                "mesh is a DeviceMesh of one dimension, or with a dimension named 'cp', of size 2 or more",
                f"got {shown(request.mesh)}",
                "init_device_mesh(device_type, (n,), mesh_dim_names=('cp',))",
                argument="mesh",
            )
        wanted = request.cp_size or seen.cp_size or mesh.size()
        if mesh.size() != wanted or (own is not None and ranks_of(own) != ranks_of(mesh)):
            raise Contradiction(
                "the argument mesh contradicts the cp size or the accelerator's own cp mesh",
                f"mesh of ranks {ranks_of(mesh)}, cp_size {wanted}, accelerator's mesh "
                f"{ranks_of(own) if own is not None else 'none'}",
                "leave mesh out where the accelerator has its own",
                argument="mesh",
            )
