"""What a test suite needs to try context parallelism on CPU: real ranks, real accelerate, a small real model.

Nothing here is faked. `cpu_parallelism_config` is accelerate's own configuration class, which otherwise refuses CPUs;
`use_fsdp2_on_cpu` lets `Accelerator.prepare` shard with FSDP2, as it would on GPUs; `run_ranks` and `Ranks` start
processes over gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .launch import Ranks, run_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import LlamaForCausalLM

__all__ = ["Ranks", "cpu_parallelism_config", "run_ranks", "tiny_llama", "use_fsdp2_on_cpu"]


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
