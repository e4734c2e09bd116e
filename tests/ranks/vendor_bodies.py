"""Bodies with two copies of the package, of two versions, in one process."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

import cpcompat
from cpcompat.testing import tiny_llama
from ranks import equality
from ranks.resolve_bodies import hook_counts

SDPA = F.scaled_dot_product_attention


def _refused(entering: Any, kind: type[BaseException]) -> tuple[bool, bool, str]:
    """What entering raises: of its own family, a RuntimeError for everybody, and with a code."""
    try:
        with entering:
            return False, False, "no error"
    except RuntimeError as error:
        return type(error) is kind, isinstance(error, cpcompat.CPError), getattr(error, "code", "none")


def beside(name: str, first: str) -> dict[str, Any]:
    """Both copies ask for the context of one accelerator, `first` before the other, and both run a block over it."""
    other = importlib.import_module(name)
    one, two = (cpcompat, other) if first == "cpcompat" else (other, cpcompat)
    data = equality.batch(rows=2, length=64)
    loss, grads = equality.reference(tiny_llama(), data)
    total = int((data["labels"] != equality.IGNORE).sum())
    acc = equality.make_accelerator(2, fsdp2=False)
    model = acc.prepare_model(tiny_llama())
    contexts = one.get_cp_context(acc), two.get_cp_context(acc)
    found: dict[str, Any] = {
        "versions": (one.__version__, two.__version__),
        "types": [type(context) is package.CPContext for context, package in zip(contexts, (one, two), strict=True)],
        "origins": [context.origin for context in contexts],
        "stands": acc._cp_context is contexts[0],
        "hooks": hook_counts(model),
        "losses": [],
        "gradients": [],
        "lengths": [],
        "nested": [],
    }
    for context, inner, package in ((contexts[0], contexts[1], two), (contexts[1], contexts[0], one)):
        model.zero_grad()
        with context(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
            standing = F.scaled_dot_product_attention
            nested = _refused(inner(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]), package.NestedContext)
            found["nested"].append(nested)
            found["lengths"].append({tensor.shape[1] for tensor in data.values()})
            assert F.scaled_dot_product_attention == standing, "the refusal must not touch attention"
            local = equality.loss_of(model, data, total)
            acc.backward(local * 2)
        assert F.scaled_dot_product_attention is SDPA
        whole = local.detach().clone()
        torch.distributed.all_reduce(whole)
        found["losses"].append(abs(float(whole) - loss) / loss)
        found["gradients"].append(equality.worst(equality.gradients(model), grads))
    return found


def patched_twice(name: str) -> dict[str, Any]:
    """Both copies patch; a trainer's call shards once, and the originals come back with the last."""
    from accelerate import Accelerator

    other = importlib.import_module(name)
    acc = equality.make_accelerator(2, fsdp2=False)
    acc.prepare_model(tiny_llama())
    ids = torch.arange(8)[None]
    original = Accelerator.maybe_context_parallel
    lengths = []
    with other.patch(), cpcompat.patch():
        replaced = Accelerator.maybe_context_parallel
        once = replaced.__wrapped__ is original
        with acc.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1], no_restore_buffers=set()):
            lengths.append(ids.shape[1])
            F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 8), is_causal=True)
    return {"once": once, "lengths": [*lengths, ids.shape[1]], "back": Accelerator.maybe_context_parallel is original}
