"""What a test suite needs to try context parallelism on CPU: real ranks, real accelerate, a small real model.

Nothing here is faked. `cpu_parallelism_config` is accelerate's own configuration class, which otherwise refuses CPUs;
`use_fsdp2_on_cpu` lets `Accelerator.prepare` shard with FSDP2, as it would on GPUs; `run_ranks` and `Ranks` start
processes over gloo. `assert_cp_ready` and `assert_equals_without_cp` are the two questions of a guard in CI: does the
context exist where CP is on, and are the numbers right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import CPError
from .launch import Ranks, run_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import LlamaForCausalLM

    from .context import CPContext

__all__ = [
    "Ranks",
    "assert_cp_ready",
    "assert_equals_without_cp",
    "cpu_parallelism_config",
    "run_ranks",
    "tiny_llama",
    "use_fsdp2_on_cpu",
]


def cpu_parallelism_config(cp_size: int, **fields: Any) -> ParallelismConfig:
    """Make a ``ParallelismConfig`` that an `Accelerator` accepts on CPU, too.

    Args:
        cp_size: how many ranks share a sequence.
        fields: the other fields of ``ParallelismConfig``, such as ``dp_shard_size`` or ``cp_handler``.

    Every check of accelerate stays in force but the one of the device. Needs accelerate 1.10 or later.
    """
    config: ParallelismConfig = _cpu_config_class()(cp_size=cp_size, **fields)
    return config


def use_fsdp2_on_cpu(acc: Accelerator) -> None:
    """Let ``acc.prepare(model, optimizer)`` shard the model with FSDP2, one unit a transformer layer.

    Call it right after the `Accelerator` was made, which must have a device mesh. As with FSDP2 on GPUs, the model and
    its optimizer must be prepared in one call.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    acc.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    acc.state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP


def tiny_llama(*, seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """Make a Llama of two layers with random float32 weights, the same on every rank, in milliseconds.

    Args:
        seed: of the weights; the caller's random state stays as it is.
        fields: fields of ``LlamaConfig`` over those used here. By default: hidden size 64, four heads with two for
            keys and values, vocabulary 128, SDPA attention.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**{**config, **fields})).float()
    return model


def assert_cp_ready(acc: Accelerator) -> CPContext:
    """Assert that a working CP context stands on an accelerator, and return it. Call it on every rank.

    The context must be there already: made by accelerate, by an earlier `get_cp_context`, or by `patch`. Then attention
    over it is compared with plain attention, unless another library owns context parallelism here.

    Raises:
        AssertionError: with the reason, and the `CPError` that says more as its cause.
    """
    import torch
    import torch.nn.functional as F

    from .context import CPContext
    from .layouts import LAYOUTS, read
    from .resolve import get_cp_context

    patched = hasattr(getattr(acc, "maybe_context_parallel", None), "__cpcompat__")
    stood = [str(place) for place in LAYOUTS if place.kind == "context" and callable(read(acc, place.path))]
    try:
        cp = get_cp_context(acc)
        if cp.origin == "delegated":
            return cp
        if not stood and not patched:
            raise AssertionError(
                f"context parallelism is on (cp size {cp.size}), but no context stood on the accelerator: "
                "accelerate made none. Call cpcompat.get_cp_context(acc) in the loop, or cpcompat.patch() before it."
            )
        generator = torch.Generator().manual_seed(0)
        query, key, value = torch.randn(3, 1, 2, 8 * cp.size, 16, generator=generator).to(acc.device)
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        query, key, value = shards = [query.clone(), key.clone(), value.clone()]
        # One of its own over the same mesh: this is no first entry, whose checks are for the loop.
        with CPContext(cp.mesh, rotate_method=cp.rotate_method)(shards, [2, 2, 2], fingerprint="never"):
            shard = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        (found,) = cp.unshard([shard], [2])
    except CPError as error:
        raise AssertionError(str(error)) from error
    torch.testing.assert_close(
        found, expected, rtol=1e-3, atol=1e-3, msg=lambda text: f"CP attention differs from plain attention: {text}"
    )
    return cp


def assert_equals_without_cp(
    fn: Callable[..., Any],
    *args: Any,
    cp_size: int = 2,
    nproc: int | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> None:
    """Assert that a piece of training gives the same numbers with context parallelism as without it.

    Calls ``fn(cp_size, *args, **kwargs)`` on real ranks and ``fn(1, *args, **kwargs)`` on one, and compares what they
    return; call it in the test process, not on ranks. That the model really ran inside a CP block is checked, too:
    without it, the numbers would be equal for the wrong reason.

    Args:
        fn: stands at the top of a module and returns a number, a tensor, or a dict, list or tuple of such, the same on
            every rank: a loss over the whole batch, gradients, weights. Sharded tensors (DTensor) are made whole, and
            a "module." before a name, which DDP adds, is left out.
        args: passed on to ``fn``.
        cp_size: how many ranks share a sequence.
        nproc: how many ranks to start, if more than ``cp_size``.
        rtol: allowed difference of a value, relative to the largest magnitude in its tensor.
        atol: allowed difference beside that.
        timeout: seconds for each of the two runs.
        env: environment variables for both.
        kwargs: passed on to ``fn``.

    Raises:
        AssertionError: naming the value that differs most, or saying that CP was not used.
        RankFailed: a rank failed.
    """
    (plain,) = run_ranks(_observed, 1, fn, 1, args, kwargs, timeout=timeout, env=env)
    with_cp = run_ranks(_observed, nproc or cp_size, fn, cp_size, args, kwargs, timeout=timeout, env=env)
    unused = [rank for rank, (_, used) in enumerate(with_cp) if not used]
    if unused:
        raise AssertionError(
            f"no module ran inside a context-parallel block on rank {', '.join(map(str, unused))}: CP is off, or the "
            "model is called outside the block"
        )
    expected = dict(_leaves("", plain[0]))
    for rank, (result, _) in enumerate(with_cp):
        found = dict(_leaves("", result))
        if found.keys() != expected.keys():
            odd = ", ".join(sorted(found.keys() ^ expected.keys()))
            raise AssertionError(f"with CP, rank {rank} returned other values than without: {odd}")
        differences = []
        for name, value in expected.items():
            if found[name].shape != value.shape:
                shapes = f"{tuple(found[name].shape)}, without CP {tuple(value.shape)}"
                raise AssertionError(f"{name or 'the value'} on rank {rank} has the shape {shapes}")
            error = (found[name] - value).abs().max().item() if value.numel() else 0.0
            size = value.abs().max().item() if value.numel() else 0.0
            if not error <= atol + rtol * size:  # NaN is never equal
                differences.append((error / (size or 1.0), name, error, found[name], value))
        if differences:
            relative, name, error, ours, theirs = max(differences, key=lambda one: (one[0] != one[0], one[0]))
            values = f": {ours.item():.8g}, without CP {theirs.item():.8g}" if ours.numel() == 1 else ""
            raise AssertionError(
                f"{name or 'the value'} on rank {rank} differs by {error:.3g} ({relative:.3g} of its size){values}; "
                f"{len(differences)} of {len(expected)} values differ by more than rtol={rtol:g}, atol={atol:g} allow"
            )


def _observed(fn: Callable[..., Any], cp_size: int, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """On a rank: what ``fn`` returned, made plain, and whether a module ran inside a CP block."""
    __tracebackhide__ = True
    from torch.nn.modules.module import register_module_forward_pre_hook

    from .block import is_active

    used = False

    def look(module: object, inputs: object) -> None:
        nonlocal used
        used = used or is_active()

    handle = register_module_forward_pre_hook(look)
    try:
        result = fn(cp_size, *args, **kwargs)
    finally:
        handle.remove()
    return _plain(result), used


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key).removeprefix("module."): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().cpu() if hasattr(value, "detach") else value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors in a nested value, with their paths, as float64 tensors."""
    import torch

    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), one)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _leaves(f"{name}[{index}]", one)
    else:
        yield name, torch.as_tensor(value).to(torch.float64)


class _WithDevices:
    """An accelerator as it looks where it has several devices."""

    multi_device = True

    def __init__(self, acc: Accelerator) -> None:
        self._acc = acc

    def __getattr__(self, name: str) -> Any:
        return getattr(self._acc, name)


def _cpu_config_class() -> Any:
    """Make the class once, under a name by which pickle finds it in a process that has not made it yet."""
    made = globals().get("CPUParallelismConfig")
    if made is not None:
        return made
    from accelerate.parallelism_config import ParallelismConfig

    def validate(self: Any, acc: Accelerator) -> None:
        ParallelismConfig._validate_accelerator(self, _WithDevices(acc))

    body = {
        "__doc__": "accelerate's ``ParallelismConfig``, allowed on CPU.",
        "__module__": __name__,
        "_validate_accelerator": validate,
    }
    globals()["CPUParallelismConfig"] = made = type("CPUParallelismConfig", (ParallelismConfig,), body)
    return made


def __getattr__(name: str) -> Any:
    if name == "CPUParallelismConfig":
        return _cpu_config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
