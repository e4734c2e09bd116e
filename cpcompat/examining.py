"""What `diagnose` looks at on a live accelerator: context, topology, models, loaders, and attention itself.

Only looking: nothing is attached, made or sent, so that one rank may ask alone.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import CPError
from .findings import Finding, Severity
from .layouts import ABSENT, read
from .settings import Settings, topology

if TYPE_CHECKING:
    from torch import nn

__all__ = ["examine"]

_KINDS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
# What never calls scaled_dot_product_attention.
_OTHERS = ("eager", "flash", "flex", "paged", "kernels")
# set_seed takes no larger one, and a generator that nobody seeded almost never has a smaller.
_SEEDS = 2**32


def examine(acc: Any) -> Iterator[Finding]:
    """Look at an accelerator.

    Args:
        acc: an ``accelerate.Accelerator``.

    Yields:
        Findings, also of what is fine.
    """
    finding, size = _context(acc)
    yield finding
    if size is None:
        return
    yield from topology(_settings(acc, size))
    models = list(read(acc, ("_models",)) or ())
    for model in models:
        yield from _model(model, hooked=finding.severity == "ok")
    if not models:
        title = "No model is prepared yet, and none was looked at"
        yield Finding.of("CP304", "note", title=title, remedy="call diagnose(acc) again after prepare()")
    yield from _loaders(acc)
    yield from _captured(models)


def _context(acc: Any) -> tuple[Finding, int | None]:
    """The context, without making one; and the cp size, or None where there is nothing more to look at."""
    from . import resolve

    try:
        context, trail = resolve.peek(acc)
    except CPError as error:
        return Finding.raised(error), None
    absent = [note.partition(":")[0] for note in trail if note.endswith(": absent")]
    tried = "; ".join(note for note in trail if not note.endswith(": absent"))
    tried += ("; " if tried and absent else "") + (f"absent: {', '.join(absent)}" if absent else "")
    if context is None:
        late = "maybe_context_parallel is patched" if _patched(acc) else "no context stands on the accelerator"
        severity: Severity = "note" if _patched(acc) or not read(acc, ("_models",)) else "warning"
        size = read(acc, ("parallelism_config", "cp_size"))
        return Finding.of("CP403", severity, f"{late}; {tried}", title="The context is not made yet"), size
    if context.origin == "delegated":
        return Finding.of("CP108", "note", tried, title=f"{context.owner} owns context parallelism here"), None
    said = f"{context.origin}, cp size {context.size}, rank {context.rank}, {context.rotate_method}, {context.layout}"
    return Finding.of("CP101", "ok", f"{said}; {tried}", title="Context parallelism is on"), context.size


def _patched(acc: Any) -> bool:
    return hasattr(getattr(acc, "maybe_context_parallel", None), "__cpcompat__")


def _settings(acc: Any, size: int) -> Settings:
    config = read(acc, ("parallelism_config",))
    sizes = {kind: value for kind in _KINDS if isinstance(value := read(config, (f"{kind}_size",)), int)}
    sharding = None
    if read(acc, ("device", "type")) != "cpu":
        version = 2 if read(acc, ("state", "fsdp_plugin", "fsdp_version")) == 2 else 1
        kind = str(read(acc, ("distributed_type",))).rpartition(".")[2].upper()
        sharding = {"FSDP": f"FSDP{version}", "DEEPSPEED": "DeepSpeed"}.get(kind, "none")
    processes = read(acc, ("num_processes",)) if sizes else None  # by cp_size= the world is cut evenly
    return Settings("the accelerator", True, sizes or {"cp": size}, processes, sharding)


# --- models -------------------------------------------------------------------------------------------------------------


def _some(names: Iterable[str]) -> str:
    """The first few of many names."""
    held = list(names)
    return ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")


def _model(model: nn.Module, *, hooked: bool) -> Iterator[Finding]:
    """Attention implementation, layer types, hooks, dropout and checkpointing of one model."""
    from .hooks import attention_modules, has_mask_hook, layer_limits

    kind = type(model).__name__
    attention = dict(attention_modules(model))
    if not attention:
        yield Finding.of("CP303", "note", kind, title="No attention module was found in this model")
        return
    # An encoder's attention, which is not causal, has a sequence of its own and no part in this.
    causal = {name: module for name, module in attention.items() if getattr(module, "is_causal", None) is not False}
    ways = {name: read(module, ("config", "_attn_implementation")) for name, module in causal.items()}
    others = [f"{name}: {way}" for name, way in ways.items() if str(way).startswith(_OTHERS)]
    unknown = [f"{name}: {way}" for name, way in ways.items() if isinstance(way, str) and way != "sdpa"]
    if others:
        yield Finding.of("CP304", "error", f"{kind}: {_some(others)}")
    elif unknown:
        yield Finding.of(
            "CP304", "note", f"{kind}: {_some(unknown)}", title="An attention implementation that is not known"
        )
    elif "sdpa" in ways.values():
        yield Finding.of("CP304", "ok", f"{kind}: {len(ways)} attention modules", title="Attention is sdpa")

    limits = layer_limits(model)
    for layer, longest in limits.items():
        seen = f"{kind}: {layer}" + (f", sees {longest} tokens back" if longest else "")
        title = f"Sequences of more than {longest} tokens will be refused" if longest else ""
        yield Finding.of("CP302", "note" if longest else "error", seen, title=title)
    if not limits:
        yield Finding.of("CP302", "ok", kind, title="Every layer is full attention")

    bare = [name for name, module in causal.items() if not has_mask_hook(module)]
    odd = [name for name in bare if getattr(causal[name], "is_causal", None) is None and not name.endswith("self_attn")]
    forced = [name for name in attention.keys() - causal.keys() if has_mask_hook(attention[name])]
    if forced:
        title = "Attention that is not causal, and accelerate's hook makes it so"
        yield Finding.of("CP303", "warning", f"{kind}: {_some(sorted(forced))}", title=title)
    if odd:
        yield Finding.of("CP303", "warning", f"{kind}: {_some(odd)}", title="Attention modules that get no mask hook")
    elif bare and hooked:
        yield Finding.of(
            "CP303", "note", f"{kind}: {_some(bare)}", title="Mask hooks will be attached at the next get_cp_context"
        )
    elif causal and not bare:
        yield Finding.of("CP303", "ok", f"{kind}: {len(causal)}", title="Every attention module drops its mask")

    dropping = [f"{name}: {rate}" for name, module in causal.items() if (rate := _dropout(module))]
    if dropping:
        yield Finding.of("CP306", "error" if model.training else "note", f"{kind}: {_some(dropping)}")
    yield from _checkpointing(model)


def _dropout(module: nn.Module) -> float:
    for name in ("attention_dropout", "attn_dropout"):
        value = getattr(module, name, None)
        value = getattr(value, "p", value)
        if isinstance(value, float | int) and value > 0:
            return float(value)
    return 0.0


def _checkpointing(model: nn.Module) -> Iterator[Finding]:
    kinds: Counter[Any] = Counter()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
            kinds[keywords.get("use_reentrant", "not known")] += 1
    if kinds[True]:
        yield Finding.of("CP307", "note", f"{type(model).__name__}: {kinds[True]} modules")
    elif kinds:
        yield Finding.of("CP307", "ok", f"use_reentrant: {next(iter(kinds))}", title="Activation checkpointing")


# --- loaders ------------------------------------------------------------------------------------------------------------


def _loaders(acc: Any) -> Iterator[Finding]:
    loaders = list(read(acc, ("_dataloaders",)) or ())
    for number, loader in enumerate(loaders):
        problem = _loader(loader)
        if problem is None and read(acc, ("parallelism_config",)) is ABSENT:
            problem = "this accelerate gives every rank other samples"
        place = f"loader {number}, {type(loader).__name__}"
        if problem:
            yield Finding.of("CP209", "warning", f"{place}: {problem}")
        else:
            yield Finding.of("CP209", "ok", place, title="Nothing that gives cp ranks different batches")


def _loader(loader: Any) -> str | None:
    """Why the ranks of a cp group may get different batches, or None."""
    import torch
    from torch.utils.data import IterableDataset, RandomSampler

    if isinstance(getattr(loader, "dataset", None), IterableDataset) and "Dispatcher" in type(loader).__name__:
        return "an IterableDataset, which the dispatcher deals out to all ranks"
    sampler = loader
    for _ in range(8):  # wrappers of wrappers
        if isinstance(sampler, RandomSampler):
            break
        inner = [read(sampler, (name,)) for name in ("batch_sampler", "sampler")]
        sampler = next((one for one in inner if one is not None and one is not ABSENT), None)
    if not isinstance(sampler, RandomSampler):
        return None
    if read(loader, ("synchronized_generator",)) and "generator" in (read(loader, ("rng_types",)) or ()):
        return None
    generator = getattr(sampler, "generator", None)
    seed = getattr(sampler, "initial_seed", None)
    if not isinstance(seed, int):
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    return f"shuffled with a seed that nobody set ({seed})" if seed >= _SEEDS else None


# --- attention itself ---------------------------------------------------------------------------------------------------


def _captured(models: Iterable[nn.Module]) -> Iterator[Finding]:
    """Names that were bound to scaled_dot_product_attention, and whoever stands in its place."""
    import torch.nn.functional as F

    from .block import is_active

    sdpa = F.scaled_dot_product_attention
    if is_active():
        return
    if not inspect.isbuiltin(sdpa):
        place = f"{getattr(sdpa, '__module__', '')}.{getattr(sdpa, '__qualname__', type(sdpa).__name__)}"
        yield Finding.of("CP305", "note", place, title="Somebody replaced scaled_dot_product_attention")
        return
    own = {type(module).__module__ for model in models for module in model.modules()}
    used: list[str] = []
    unused: list[str] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" or name.startswith(f"{__package__}."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is sdpa:
                (used if name in own else unused).append(f"{name}.{attribute}")
    if used:
        yield Finding.of("CP305", "warning", _some(used))
    elif unused:
        yield Finding.of(
            "CP305", "note", _some(unused), title="Other modules have captured scaled_dot_product_attention"
        )
    else:
        yield Finding.of("CP305", "ok", title="No name was bound to scaled_dot_product_attention")
