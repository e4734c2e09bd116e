"""Bodies about models: those that CP cannot express, and attention modules of other names."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cpcompat import AttentionWarning, CPError, get_cp_context
from cpcompat.hooks import attention_modules, has_mask_hook
from ranks.equality import batch, gradients, loss_of, make_accelerator, reference, worst

SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    },
}
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}


def config(kind: str, **fields: Any) -> PreTrainedConfig:
    sizes = SIZES.get(kind, COMMON)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return CONFIGS[kind](**{"vocab_size": 128, "use_cache": False, **NO_DROPOUT, **ids, **sizes, **fields})


def model(kind: str, **fields: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(kind, **fields), attn_implementation="sdpa").float()


def accelerator_and_arguments(argument: bool) -> tuple[Any, dict[str, Any]]:
    return make_accelerator(2, fsdp2=False), {"cp_size": 2} if argument else {}


def refused(kind: str, fields: dict[str, Any], length: int, argument: bool) -> dict[str, Any]:
    """Evaluate-only, the path on which no accelerate refuses anything: get the context, enter, run."""
    acc, arguments = accelerator_and_arguments(argument)
    net = acc.prepare_model(model(kind, **fields), evaluation_mode=True)
    data = batch(1, length)
    try:
        cp = get_cp_context(acc, **arguments)
        with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]), torch.no_grad():
            loss = float(loss_of(net, data, length)) if kind != "qwen3_next" else 0.0
    except CPError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "layer_type": error.layer_type,
            "window": error.window,
            "length": data["input_ids"].shape[1],
        }
    return {"error": None, "loss": loss}


def other_names(kind: str, argument: bool) -> dict[str, Any]:
    """GPT-2 and GPT-NeoX: attention modules that are not called self_attn get the hook, and the numbers are right."""
    data = batch(2, 64)
    loss, grads = reference(model(kind), data)
    acc, arguments = accelerator_and_arguments(argument)
    net = model(kind)
    net, _ = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    cp = get_cp_context(acc, **arguments)
    names = [name for name, module in attention_modules(net) if has_mask_hook(module)]
    total = 2 * 63
    with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
        local = loss_of(net, data, total)
        acc.backward(local * 2)
    whole = local.detach().clone()
    torch.distributed.all_reduce(whole)
    return {
        "hooked": names,
        "loss": abs(float(whole) - loss) / loss,
        "gradient": worst(gradients(net), grads),
    }


class PlainAttention(torch.nn.Module):
    """Attention of a user's own model, with a mask argument and no word on whether it is causal."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return x


def unknown_modules(argument: bool) -> list[str]:
    acc, arguments = accelerator_and_arguments(argument)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), PlainAttention())
    acc.prepare_model(net, evaluation_mode=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        get_cp_context(acc, **arguments)
        get_cp_context(acc, **arguments)
    return [str(w.message) for w in seen if issubclass(w.category, AttentionWarning)]


def masks_outside_a_block(argument: bool) -> float:
    """A left-padded row through a hooked model, outside any block: the mask counts, as without cpcompat."""
    ids = batch(1, 16)["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    plain = model("llama").eval()
    acc, arguments = accelerator_and_arguments(argument)
    net = acc.prepare_model(model("llama"), evaluation_mode=True).eval()
    get_cp_context(acc, **arguments)
    assert all(has_mask_hook(module) for _, module in attention_modules(net))
    with torch.no_grad():
        right, mine = plain(input_ids=ids, attention_mask=mask).logits, net(input_ids=ids, attention_mask=mask).logits
        dropped = plain(input_ids=ids).logits
    assert float((right - dropped)[:, 5:].abs().max()) > 1e-3, "the mask makes a difference"
    return float((right - mine)[:, 5:].abs().max())
