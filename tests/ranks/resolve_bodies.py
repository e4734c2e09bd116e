"""Bodies that resolve a context on real accelerators, in every order of events."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import cpcompat
from cpcompat import CPError, get_cp_context
from cpcompat.hooks import attention_modules
from cpcompat.testing import cpu_parallelism_config, tiny_llama
from ranks.equality import batch, loss_of, make_accelerator


def hook_counts(model: torch.nn.Module) -> set[int]:
    """How many mask hooks, of accelerate or cpcompat, each attention module has."""
    return {
        sum(
            getattr(hook, "__name__", "") == "_self_attn_pre_forward_hook"
            or getattr(hook, "__cpcompat__", "") == "mask-hook"
            for hook in module._forward_pre_hooks.values()
        )
        for _, module in attention_modules(model)
    }


def torch_rotate_method() -> str:
    import torch.distributed.tensor.experimental._attention as attention

    return attention._cp_options.rotate_method.name.replace("_", "").lower()


def accelerator_by_environment() -> Any:
    """Accelerator() alone, which reads the environment; its config class is the one that allows CPUs."""
    import accelerate.accelerator as module

    with mock.patch.object(module, "ParallelismConfig", cpcompat.testing.CPUParallelismConfig):
        return module.Accelerator(cpu=True)


def entry(order: str, *, by_environment: bool = False, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """Resolve after `order`: "nothing", "prepare" or "prepare_model"; report what came of it."""

    arguments = arguments or {}
    acc = accelerator_by_environment() if by_environment else make_accelerator(2, fsdp2=False, rotate_method="alltoall")
    before = hasattr(acc, "_cp_context")
    model = tiny_llama()
    if order == "prepare":
        model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    elif order == "prepare_model":
        model = acc.prepare_model(model, evaluation_mode=True)
    own = hasattr(acc, "_cp_context")
    cp = get_cp_context(acc, **arguments)
    again = get_cp_context(acc, **arguments)
    bare = get_cp_context(acc)
    report = {
        "before": before,
        "own": own,
        "origin": cp.origin,
        "layout": cp.layout,
        "size": cp.size,
        "rank": cp.rank,
        "group_size": torch.distributed.get_world_size(cp.group),
        "mesh_names": cp.mesh.mesh_dim_names,
        "rotate_method": cp.rotate_method,
        "torch_rotate_method": torch_rotate_method(),
        "same": cp is again is bare,
        "hooks": hook_counts(model) if order != "nothing" else None,
        "alive": cp.alive,
        "trail": cp.trail,
    }
    if hasattr(acc, "maybe_context_parallel") and cp.origin == "created":
        data = batch(2, 32)
        data["position_ids"] = data["position_ids"].contiguous()
        with acc.maybe_context_parallel(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
            report["inside"] = data["input_ids"].shape[1]
            if order != "nothing":
                report["loss"] = float(loss_of(model, data, 62).detach())
        report["outside"] = data["input_ids"].shape[1]
        # A second prepare() of the same accelerator may replace the attribute; hooks stay one a module.
        if order == "prepare_model":
            wrapped, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            later = get_cp_context(acc)
            report["later_origin"], report["later_hooks"] = later.origin, hook_counts(wrapped)
            report["later_new"] = later is not cp
    return report


def hooks_of_later_models() -> dict[str, Any]:
    """Models prepared after the context was returned get their hooks at the next call, and at the next entry."""
    acc = make_accelerator(2, fsdp2=False)
    cp = get_cp_context(acc)
    first = acc.prepare_model(tiny_llama(), evaluation_mode=True)
    get_cp_context(acc)
    called = hook_counts(first)
    second = acc.prepare_model(tiny_llama(seed=1), evaluation_mode=True)
    data = batch(1, 32)
    with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
        # A mask that is not dropped would be refused by the attention call.
        second(input_ids=data["input_ids"], attention_mask=torch.ones(1, 16, dtype=torch.long), use_cache=False)
    return {"called": called, "entered": hook_counts(second), "first": hook_counts(first)}


def whoever_came_first() -> dict[str, set[int]]:
    """One hook a module with accelerate's own before or after cpcompat's, and with two copies of cpcompat."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    from cpcompat.hooks import Models

    counts = {}
    model = tiny_llama()
    _attach_context_parallel_hooks(model)
    Models().refresh([model])
    counts["accelerate first"] = hook_counts(model)
    model = tiny_llama()
    Models().refresh([model])
    _attach_context_parallel_hooks(model)
    Models().refresh([model])
    counts["cpcompat first"] = hook_counts(model)
    model = tiny_llama()
    Models().refresh([model])
    Models().refresh([model])
    counts["cpcompat twice"] = hook_counts(model)
    return counts


def changed_context() -> dict[str, Any]:
    """A new object where the accelerator's context or mesh changed."""
    acc = make_accelerator(2, fsdp2=False)
    first = get_cp_context(acc)
    acc._cp_context = functools.partial(context_parallel, mesh=acc.state.device_mesh["cp"])
    adopted = get_cp_context(acc)
    acc.state.device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    del acc._cp_context
    remade = get_cp_context(acc)
    return {
        "origins": [first.origin, adopted.origin, remade.origin],
        "distinct": len({id(first), id(adopted), id(remade)}),
        "mesh": remade.mesh is not first.mesh,
    }


def _noop(buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None) -> Any:
    return nullcontext()


def _handler(query: Any, key: Any, value: Any) -> Any:
    return query


@contextmanager
def _entered() -> Any:
    yield


class _Raising:
    @property
    def _cp_context(self) -> Any:
        raise RuntimeError("a getter that fails")


def candidates() -> dict[str, tuple[str, str]]:
    """What becomes of each thing that may stand in ``acc._cp_context``: origin and the note on it."""
    mesh2 = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    values: dict[str, Callable[[Any], Any]] = {
        "None": lambda acc: None,
        "a Mock": lambda acc: mock.MagicMock(),
        "an entered context manager": lambda acc: _entered(),
        "an attention handler": lambda acc: _handler,
        "a module": lambda acc: types,
        "a partial without mesh": lambda acc: context_parallel,
        "a mesh of size 1": lambda acc: functools.partial(context_parallel, mesh=other),
        "torch's": lambda acc: functools.partial(context_parallel, mesh=mesh2),
        "torch's, wrapped twice": lambda acc: functools.partial(functools.partial(context_parallel, mesh2)),
        "a foreign function": lambda acc: _noop,
        "a foreign partial": lambda acc: functools.partial(_noop, buffers=None),
    }
    found = {}
    for name, make in values.items():
        acc = make_accelerator(2, fsdp2=False)
        acc._cp_context = make(acc)
        cp = get_cp_context(acc)
        found[name] = (cp.origin, cp.trail[0])
    return found


def another_mesh() -> tuple[str, str, list[int]]:
    """On four ranks: a context over other ranks than the accelerator's cp mesh."""
    acc = make_accelerator(2, fsdp2=False, dp_shard_size=2)
    strided = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))["cp"]
    acc._cp_context = functools.partial(context_parallel, mesh=strided)
    cp = get_cp_context(acc)
    return cp.origin, cp.trail[0], torch.distributed.get_process_group_ranks(cp.group)


def layouts() -> dict[str, tuple[str, str]]:
    """A real context in every place of the table, and in one that was registered."""
    from cpcompat.layouts import LAYOUTS, read

    found = {}
    registered = cpcompat.register_layout("engine", "cp")
    for layout in [entry for entry in LAYOUTS if entry.kind == "context"]:
        acc = make_accelerator(2, fsdp2=False)
        acc.engine = types.SimpleNamespace()
        acc.state.fsdp_plugin = types.SimpleNamespace()
        holder = read(acc, layout.path[:-1])
        context = functools.partial(context_parallel, mesh=acc.state.device_mesh["cp"])
        # accelerate's states share one dictionary and refuse unknown names in their setattr on some releases.
        object.__setattr__(holder, layout.path[-1], context)
        try:
            cp = get_cp_context(acc)
            found[str(layout)] = (cp.origin, cp.layout)
        finally:
            object.__delattr__(holder, layout.path[-1])
    LAYOUTS.remove(registered)  # the ranks live on
    return found


def foreign_owners() -> dict[str, dict[str, Any]]:
    """Other libraries' ways to own CP: delegated, calls passed on or refused by name, nothing sharded twice."""

    def own_manager(acc: Any) -> None:
        acc.maybe_context_parallel = lambda buffers=None, buffer_seq_dims=None, no_restore_buffers=None: nullcontext(
            "theirs"
        )

    def simpletuner(acc: Any) -> None:
        acc.state.parallelism_config = types.SimpleNamespace(cp_backend="simpletuner", cp_size=2)

    def habana(acc: Any) -> None:
        acc.mpu = types.ModuleType("optimum.habana.distributed.mpu")

    def unsloth(acc: Any) -> None:
        acc.state.parallelism_config = None
        acc.state.device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def axolotl(acc: Any) -> None:
        acc._cp_context = _noop

    found: dict[str, dict[str, Any]] = {}
    from accelerate.state import AcceleratorState

    for claim in (own_manager, simpletuner, habana, unsloth, axolotl):
        AcceleratorState._reset_state()
        acc = make_accelerator(2, fsdp2=False)
        claim(acc)
        cp = get_cp_context(acc)
        ids = torch.arange(8)[None]
        row: dict[str, Any] = {"origin": cp.origin, "owner": cp.owner, "same": get_cp_context(acc) is cp}
        try:
            with cp(buffers=[ids], buffer_seq_dims=[1]) as inside:
                row["inside"] = inside
                row["length"] = ids.shape[1]
        except CPError as error:
            row["error"] = type(error).__name__
        found[claim.__name__] = row
    return found


def refusal(situation: str) -> dict[str, Any]:
    """The error of a situation, as a user meets it."""
    arguments: dict[str, Any] = {}
    if situation.startswith("old"):
        from accelerate import Accelerator

        acc: Any = Accelerator(cpu=True)
        arguments = {"old: cp_size 3": {"cp_size": 3}}.get(situation, {})
    elif situation == "no config":
        from accelerate import Accelerator

        acc = Accelerator(cpu=True)
    elif situation == "cp_size 1":
        from accelerate import Accelerator
        from accelerate.parallelism_config import ParallelismConfig

        acc = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    elif situation == "sequence parallel":
        acc = make_accelerator(2, fsdp2=False)
        acc.state.parallelism_config.sp_size = 2
    elif situation == "no mesh":
        acc = make_accelerator(2, fsdp2=False)
        acc.state.device_mesh = acc.parallelism_config.device_mesh = None
    elif situation == "state reset":
        from accelerate.state import AcceleratorState

        acc = make_accelerator(2, fsdp2=False)
        AcceleratorState._reset_state()
    elif situation == "a Mock":
        acc = mock.MagicMock()
    elif situation == "no accelerator":
        acc = None
    elif situation == "creation":
        acc = make_accelerator(2, fsdp2=False)
        # accelerate itself would fail here too: the attribute cannot be written
        kind = type(acc)
        acc.__class__ = type("ReadOnly", (kind,), {"_cp_context": property(lambda self: None)})
    else:
        acc = make_accelerator(2, fsdp2=False)
        arguments = {
            "cp_size differs": {"cp_size": 4},
            "cp_size 0": {"cp_size": 0},
            "rotate_method differs": {"rotate_method": "alltoall"},
            "rotate_method unknown": {"rotate_method": "carousel"},
            "mesh is none": {"mesh": "cp"},
            "mesh differs": {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))},
        }[situation]
    try:
        get_cp_context(acc, **arguments)
    except CPError as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "facts": sorted(error.facts),
            "cause": type(error.__cause__).__name__,
        }
    return {"kind": None}


def stale() -> dict[str, str]:
    """Contexts whose process group was destroyed, and made again."""
    import torch.distributed as dist

    acc = make_accelerator(2, fsdp2=False)
    cp = get_cp_context(acc)
    rank, store = dist.get_rank(), dist.TCPStore("127.0.0.1", 0, is_master=True) if dist.get_rank() == 0 else None
    ports = [store.port if store else None]
    dist.broadcast_object_list(ports, src=0)
    found = {}
    dist.destroy_process_group()
    for when in ("destroyed", "made again"):
        if when == "made again":
            mine = store or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
            dist.init_process_group("gloo", store=mine, rank=rank, world_size=2)
        for name, call in {
            "call": lambda: cp().__enter__(),
            "get": lambda: get_cp_context(acc),
            "group": lambda: cp.group,
            "unshard": lambda: cp.unshard([torch.ones(1, 2)], [1]),
            "positions": lambda: cp.positions(8),
        }.items():
            try:
                call()
                found[f"{name}, {when}"] = "no error"
            except CPError as error:
                found[f"{name}, {when}"] = type(error).__name__
    found["a new accelerator"] = fresh_after_reset()
    dist.barrier()
    return found


def fresh_after_reset() -> str:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    acc = make_accelerator(2, fsdp2=False)
    cp = get_cp_context(acc)
    ids = torch.arange(8)[None]
    with cp(buffers=[ids], buffer_seq_dims=[1]):
        q = torch.randn(1, 2, 4, 8)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return f"{cp.origin} {ids.shape[1]}"


def without_process_group() -> str:
    """A process that is no rank at all asks; run on one rank whose group was destroyed."""
    import torch.distributed as dist

    dist.destroy_process_group()
    config = cpu_parallelism_config(2)
    acc = types.SimpleNamespace(
        parallelism_config=config, state=types.SimpleNamespace(device_mesh=None), maybe_context_parallel=None
    )
    try:
        get_cp_context(acc)
    except CPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


assert sys.modules["torch"] is torch
