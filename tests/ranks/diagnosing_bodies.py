"""Bodies that diagnose live accelerators, healthy ones and each that is not."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

import cpcompat
from cpcompat import Report, diagnose, get_cp_context
from cpcompat.testing import tiny_llama
from ranks.equality import batch, loss_of, make_accelerator


def healthy(fsdp2: bool, argument: bool) -> dict[str, Any]:
    """A step of a tiny Llama as it should be: diagnosed before, between and after; every warning is kept."""
    from accelerate.utils import set_seed

    set_seed(7)
    acc = make_accelerator(2, fsdp2=fsdp2)
    reports: dict[str, Report] = {}
    if not argument:
        reports["before prepare"] = diagnose(acc)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = tiny_llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        loaders = () if argument else (DataLoader(torch.arange(8), batch_size=2, shuffle=True),)
        model, *_ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)
        cp = get_cp_context(acc, cp_size=2) if argument else get_cp_context(acc)
        reports["before the block"] = diagnose(acc)
        data = batch(2, 64)
        with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
            reports["in the block"] = diagnose(acc)
            acc.backward(loss_of(model, data, 126) * 2)
        reports["after the block"] = diagnose(acc)
    ours = [str(warning.message) for warning in said if isinstance(warning.message, cpcompat.CPWarning)]
    return {"reports": reports, "warnings": ours}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from torch.arange(8)


def _acc(*prepared: Any, ready: bool = True) -> Any:
    acc = make_accelerator(2, fsdp2=False)
    for item in prepared:
        if isinstance(item, torch.nn.Module):
            acc.prepare_model(item)
        else:
            acc.prepare(item)
    if ready:
        get_cp_context(acc)
    return acc


def _shuffled() -> DataLoader[Any]:
    torch.seed()
    return DataLoader(torch.arange(8), batch_size=2, shuffle=True)


def _captured() -> Any:
    """A model whose module bound the name before the block."""
    module = types.ModuleType("somebodys_model")
    module.attention = F.scaled_dot_product_attention  # type: ignore[attr-defined]
    sys.modules["somebodys_model"] = module
    layer = type("Layer", (torch.nn.Linear,), {"__module__": "somebodys_model"})
    return _acc(torch.nn.Sequential(layer(2, 2)))


def _replaced() -> Any:
    acc, original = _acc(tiny_llama()), F.scaled_dot_product_attention

    def theirs(*args: Any, **keywords: Any) -> Any:
        return original(*args, **keywords)

    F.scaled_dot_product_attention = theirs
    return acc


def _owned() -> Any:
    acc = _acc(ready=False)
    acc.state.parallelism_config = types.SimpleNamespace(cp_backend="simpletuner", cp_size=2)
    return acc


def _set(path: str, value: Any) -> Callable[[], Any]:
    def make() -> Any:
        acc = _acc(ready=False)
        holder: Any = acc
        *names, last = path.split(".")
        for name in names:
            holder = getattr(holder, name)
        setattr(holder, last, value)
        return acc

    return make


def _flash() -> Any:
    """Asked for on a machine that has it; here the model is only looked at."""
    acc = _acc(tiny_llama())
    for module in acc._models[0].modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "flash_attention_2"
    return acc


def _forced() -> Any:
    """A user's bidirectional attention under the name that accelerate goes by."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = torch.nn.ModuleDict({"self_attn": Unhooked(), "more": torch.nn.Linear(2, 2)})
    model["self_attn"].is_causal = False
    _attach_context_parallel_hooks(model)
    return _acc(model)


def _no_mesh() -> Any:
    acc = _acc(ready=False)
    acc.state.device_mesh = acc.parallelism_config.device_mesh = None
    return acc


def _dropping() -> Any:
    model = tiny_llama(attention_dropout=0.1)
    model.train()
    return _acc(model)


def _reentrant() -> Any:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return _acc(model)


def _reset() -> Any:
    from accelerate.state import AcceleratorState

    acc = _acc(ready=False)
    AcceleratorState._reset_state()
    return acc


def _plain() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


class Unhooked(torch.nn.Module):
    """A user's own; its name says attention, and nothing says whether it is causal."""

    def forward(self, x: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return x


Unhooked.__name__ = "PlainAttention"


CASES: dict[str, Callable[[], Any]] = {
    "no cp": _plain,
    "sequence parallel": _set("state.parallelism_config.sp_size", 2),
    "no mesh": _no_mesh,
    "state reset": _reset,
    "owned": _owned,
    "not made yet": lambda: _acc(torch.nn.Linear(2, 2), ready=False),
    "sizes": _set("state.parallelism_config.dp_shard_size", 4),
    "eager": lambda: _acc(tiny_llama(attn_implementation="eager")),
    "flash": _flash,
    "chunks": lambda: _acc(tiny_llama(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=16)),
    "linear attention": lambda: _acc(tiny_llama(layer_types=["linear_attention", "full_attention"]), ready=False),
    "no hook": lambda: _acc(torch.nn.Sequential(torch.nn.Linear(2, 2), Unhooked())),
    "not causal": _forced,
    "dropout": _dropping,
    "reentrant": _reentrant,
    "shuffled": lambda: _acc(_shuffled()),
    "iterable": lambda: _acc(DataLoader(Stream(), batch_size=2)),
    "captured": _captured,
    "replaced": _replaced,
}


def sick(case: str) -> list[tuple[str, str, str]]:
    """The findings that are not fine, as code, severity and evidence."""
    sdpa = F.scaled_dot_product_attention
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cpcompat.CPWarning)
            acc = CASES[case]()
            report = diagnose(acc)
        text = str(report)
        assert max(map(len, text.splitlines())) <= 80, text
        return [(f.code, f.severity, f.evidence) for f in report.found("note", "warning", "error")]
    finally:
        F.scaled_dot_product_attention = sdpa
        sys.modules.pop("somebodys_model", None)


def nothing_is_changed() -> dict[str, bool]:
    """Diagnosing neither makes a context nor attaches a hook nor moves a seed."""
    acc = _acc(tiny_llama(), _shuffled(), ready=False)
    own = acc.__dict__.get("_cp_context")
    hooks = [len(module._forward_pre_hooks) for model in acc._models for module in model.modules()]
    state = torch.get_rng_state()
    diagnose(acc)
    return {
        "context": acc.__dict__.get("_cp_context") is own,
        "hooks": hooks == [len(module._forward_pre_hooks) for model in acc._models for module in model.modules()],
        "seed": torch.equal(state, torch.get_rng_state()),
    }
