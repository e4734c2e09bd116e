"""Where accelerators keep their context, who else owns it, and what each accelerate release does: data only.

The noxfile reads these tables too, so nothing here imports anything but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "ABSENT",
    "LAYOUTS",
    "MIN_TORCH",
    "RELEASES",
    "TORCHES",
    "TORCH_RELEASES",
    "TRAINER_EVALUATES_SINCE",
    "Layout",
    "Release",
    "TorchRelease",
    "is_a",
    "read",
    "register_layout",
]

Kind = Literal["context", "mesh"]


@dataclass(frozen=True)
class Layout:
    """One place where an accelerator may keep a context or a mesh.

    Attributes:
        path: attribute names, starting at the accelerator.
        kind: ``"context"`` for a callable with accelerate's contract, ``"mesh"`` for a DeviceMesh with a "cp" dim.
        registered: True where `register_layout` added it. A registered mesh is a request for CP; a built-in one without
            a matching parallelism config is somebody else's.
    """

    path: tuple[str, ...]
    kind: Kind
    registered: bool = False

    def __str__(self) -> str:
        return ".".join(("acc", *self.path))


# accelerate's released spelling first; `_context_parallel` and the children are asked for by downstream forks.
_NAMES = ("_cp_context", "_context_parallel")
_HOLDERS: tuple[tuple[str, ...], ...] = (
    (),
    ("state",),
    ("parallelism_config",),
    ("parallelism_config", "cp_handler"),
    ("state", "fsdp_plugin"),
)
_MESHES: tuple[tuple[str, ...], ...] = (
    ("torch_device_mesh",),
    ("state", "device_mesh"),
    ("device_mesh",),
    ("parallelism_config", "device_mesh"),
)

LAYOUTS: list[Layout] = [
    *(Layout((*holder, name), "context") for holder in _HOLDERS for name in _NAMES),
    *(Layout(path, "mesh") for path in _MESHES),
]


def register_layout(*path: str, kind: Kind = "context") -> Layout:
    """Add a place to look, before the built-in ones; adding the same place again changes nothing.

    Args:
        path: attribute names, starting at the accelerator: ``register_layout("engine", "cp_ctx")``.
        kind: ``"context"`` or ``"mesh"``.

    Returns:
        The layout, as it will appear in ``CPContext.layout``.

    Raises:
        ValueError: for an empty path, an empty name or another kind.
    """
    if not path or not all(isinstance(name, str) and name for name in path):
        raise ValueError(f"a layout is one or more attribute names, got {path!r}")
    if kind not in ("context", "mesh"):
        raise ValueError(f"kind is 'context' or 'mesh', got {kind!r}")
    layout = Layout(path, kind, registered=True)
    if layout not in LAYOUTS:
        LAYOUTS.insert(0, layout)
    return layout


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent", "__bool__": lambda self: False})()


def read(obj: Any, path: tuple[str, ...]) -> Any:
    """Follow a path of attributes.

    Args:
        obj: where to start.
        path: attribute names.

    Returns:
        The value, or `ABSENT` where a name is missing or its getter raises: a property that fails (after
        ``AcceleratorState._reset_state()``, say) is not there, and no reason to die.
    """
    for name in path:
        try:
            obj = getattr(obj, name)
        except Exception:
            return ABSENT
    return obj


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a value's type is one or comes from it, whatever its ``__class__`` says or does.

    Args:
        value: somebody's object, which may be a Mock with a spec.
        kind: the type, or several.
    """
    return issubclass(type(value), kind)


@dataclass(frozen=True)
class Release:
    """What a span of accelerate releases does with ``cp_size=2``; each version in `tried` is run by the test matrix.

    Attributes:
        since: the first release of the span.
        tried: the releases that the test matrix installs.
        has_config: whether ``Accelerator(parallelism_config=...)`` exists.
        own_context: when accelerate makes ``_cp_context`` by itself: ``"never"`` or ``"prepare"``.
        refuses_windows: whether accelerate itself refuses sliding-window models in ``prepare()``.
        lost: what a user goes without.
        source: issues and pull requests.
    """

    since: str
    tried: tuple[str, ...]
    has_config: bool
    own_context: Literal["never", "prepare"]
    refuses_windows: bool
    lost: str
    source: str


RELEASES: tuple[Release, ...] = (
    Release(
        since="0.34.2",
        tried=("0.34.2", "1.0.1", "1.6.0", "1.9.0"),
        has_config=False,
        own_context="never",
        refuses_windows=False,
        lost="no context parallelism; each rank another batch",
        source="accelerate #3626",
    ),
    Release(
        since="1.10.0",
        tried=("1.10.0", "1.10.1", "1.11.0"),
        has_config=True,
        own_context="prepare",
        refuses_windows=False,
        lost="no context before prepare() or after prepare_model() alone",
        source="accelerate #4177",
    ),
    Release(
        since="1.12.0",
        tried=("1.12.0",),
        has_config=True,
        own_context="never",
        refuses_windows=False,
        lost="context, rotate method and mask hooks: AttributeError",
        source="accelerate #3817, #3856, #3867",
    ),
    Release(
        since="1.13.0",
        tried=("1.13.0", "1.14.0"),
        has_config=True,
        own_context="prepare",
        refuses_windows=False,
        lost="no context before prepare() or after prepare_model() alone",
        source="accelerate #3858, #4177",
    ),
    Release(
        since="1.15.0",
        tried=("1.15.0",),
        has_config=True,
        own_context="prepare",
        refuses_windows=True,
        lost="no context before prepare() or after prepare_model() alone",
        source="accelerate #4177",
    ),
)

# accelerate's own floor for CP, and the first torch with a public context_parallel.
MIN_TORCH = "2.6"


@dataclass(frozen=True)
class TorchRelease:
    """What torch's own ``context_parallel`` does, in a span of releases; each in `tried` is run by the torch matrix.

    cpcompat's block does the same on all of them. What is found by looking (places, signatures) is in `torch_cp`.

    Attributes:
        tried: the releases that the torch matrix installs.
        restores: whether SDPA and buffers are restored after an exception in the block.
        short: what becomes of a length that is a multiple of n and not of 2n.
        empty: what becomes of an empty list of buffers (pytorch #159634).
        expands: whether rows made by ``expand`` are cut in the right order (pytorch #170200).
        views: whether two views of one tensor are cut and restored rightly.
    """

    tried: tuple[str, ...]
    restores: bool
    short: Literal["AssertionError", "contiguous shards"]
    empty: Literal["accepted", "IndexError"]
    expands: bool
    views: bool = False


TORCH_RELEASES: tuple[TorchRelease, ...] = (
    TorchRelease(("2.6.0", "2.7.1", "2.8.0"), restores=False, short="AssertionError", empty="accepted", expands=True),
    TorchRelease(("2.9.1",), restores=False, short="AssertionError", empty="IndexError", expands=True),
    TorchRelease(("2.10.0",), restores=False, short="AssertionError", empty="IndexError", expands=False),
    TorchRelease(("2.11.0", "2.12.1"), restores=False, short="AssertionError", empty="IndexError", expands=True),
    TorchRelease(
        ("2.13.0", "2.14.1", "2.15.0"), restores=True, short="contiguous shards", empty="IndexError", expands=True
    ),
)
TORCHES = tuple(version for row in TORCH_RELEASES for version in row.tried)

# From this release on the Trainer evaluates under CP; before, it multiplies eval_loss by cp_size (transformers #48167).
TRAINER_EVALUATES_SINCE = "5.16.0"
