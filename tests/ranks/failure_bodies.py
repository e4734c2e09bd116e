"""Bodies for the twelve failure modes: each fault without the library, as a user meets it, and with the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cpcompat import CPContext
from cpcompat import ring as _ring
from cpcompat.hooks import Models
from cpcompat.testing import tiny_llama
from ranks.equality import batch, loss_of, reference, worst

SDPA = F.scaled_dot_product_attention


def context() -> CPContext:
    return CPContext(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))


def caught(call: Callable[[], Any]) -> tuple[str, str, list[str]]:
    """The kind, words and notes of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return "no error", "", []


class BareBlock:
    """What a careful user has without the library: buffers cut rightly, and a ring in the place of SDPA; nothing else.

    torch's own context cannot compute the backward pass on CPU, so its ring is cpcompat's; none of the checks is.
    """

    def __init__(self, cp: CPContext, data: dict[str, Tensor]) -> None:
        self.cp, self.data = cp, data

    def __enter__(self) -> dict[str, Tensor]:
        index = self.cp.positions(next(iter(self.data.values())).shape[1])
        ring = self.cp._own_ring()

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = True, **_: Any
        ) -> Tensor:
            return _ring.attention(ring, query, *_grouped(query, key, value), causal=True, scale=None)

        F.scaled_dot_product_attention = attention
        return {name: tensor[:, index] for name, tensor in self.data.items()}

    def __exit__(self, *exc_info: object) -> None:
        F.scaled_dot_product_attention = SDPA


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """The sum over ranks of the gradients of each rank's part of the loss."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.clone()
        dist.all_reduce(found[name])
    return found


# --- 11: backward or recompute outside the block ------------------------------------------------------------------------


def checkpointed(reentrant: bool) -> nn.Module:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.enable_input_require_grads()
    Models().refresh([model])  # masks are dropped, as accelerate's own hook does it
    return model


def backward_outside(reentrant: bool) -> dict[str, Any]:
    """Backward after the block of a checkpointed Llama, with the bare block and with cpcompat's."""
    data = batch(2, 64)
    total = 2 * 63
    _, right = reference(tiny_llama(), data)
    cp = context()
    found: dict[str, Any] = {}

    def run(block: Any, model: nn.Module, inside: bool) -> dict[str, Tensor]:
        with block as local:
            loss = loss_of(model, local or mine, total)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return averaged(model)

    for inside in (True, False):
        mine = {name: tensor.clone() for name, tensor in data.items()}
        for name, make in (
            ("bare", lambda: BareBlock(cp, data)),
            ("cpcompat", lambda mine=mine: cp(list(mine.values()), [1, 1, 1], set(mine.values()))),
        ):
            key = f"{name}, {'inside' if inside else 'outside'}"
            try:
                found[key] = worst(run(make(), checkpointed(reentrant), inside), right)
            except RuntimeError as error:
                found[key] = (type(error).__name__, str(error))
    return found


def recompute_elsewhere() -> dict[str, Any]:
    """Reentrant checkpointing around attention: nested, in `disabled`, in the next block, without any graph."""
    cp = context()
    query = torch.ones(1, 1, 8, 8, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def once(x: Tensor) -> Tensor:
        return checkpoint(attend, x, use_reentrant=True)

    def twice(x: Tensor) -> Tensor:
        return checkpoint(once, x, use_reentrant=True)

    found: dict[str, Any] = {}
    for name, layer in (("once", once), ("nested", twice)):
        with cp():
            out = layer(query)
        found[name] = caught(lambda out=out: out.sum().backward())[0]
    with cp():
        out = once(query)
        with cp.disabled():
            found["disabled"] = caught(lambda: out.sum().backward())[0]
    with cp():
        out = once(query)
    with cp():
        found["the next block"] = caught(lambda: out.sum().backward())[0]
    with cp(), torch.no_grad():
        once(query)
    with cp():
        with cp.disabled():
            out = once(query)
        attend(query)
    found["in disabled only"] = caught(lambda: out.sum().backward())[0]
    found["outside alone"] = caught(lambda: once(query).sum().backward())[0]
    return found


# --- notes on torch's own exceptions ------------------------------------------------------------------------------------


def notes() -> dict[str, tuple[str, str, list[str]]]:
    """Every exception of torch that gets a note, raised by torch itself inside a block; and some that get none."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cp = context()
    query = torch.ones(1, 1, 8, 8)

    def attend(**keywords: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, **{"is_causal": True, **keywords})

    def mixed() -> None:
        torch.ones(2) @ DTensor.from_local(torch.ones(2, 2), cp.mesh, [Replicate()])

    def no_kernel() -> None:
        with cp.disabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attend(dropout_p=0.1)

    def no_strategy() -> None:
        x = DTensor.from_local(query, cp.mesh, [Replicate()])
        with cp.disabled():
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)

    def not_causal() -> None:
        import torch.distributed.tensor.experimental._attention as module

        module._templated_ring_attention(
            *((cp.group, 2) if "group" in module._templated_ring_attention.__code__.co_varnames else (cp.mesh, 2)),
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            query=query,
            key=query,
            value=query,
            is_causal=False,
        )

    def recompute() -> None:
        x = query.clone().requires_grad_()

        def layer(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

        out = checkpoint(layer, x, use_reentrant=False)
        with cp.disabled():
            out.sum().backward()

    def whole_mask() -> None:
        mask = torch.zeros(1, 1, 8 * cp.size, 8 * cp.size)
        (query @ query.transpose(2, 3) + mask).softmax(-1)

    def eager_model() -> None:
        tiny_llama(attn_implementation="eager")(ids, attention_mask=torch.zeros(1, 1, 8 * cp.size, 8 * cp.size))

    def other_sizes() -> None:
        torch.ones(3) + torch.ones(8)

    def other_error() -> None:
        raise ValueError("mine")

    found = {}
    for case in (
        mixed,
        no_kernel,
        no_strategy,
        not_causal,
        recompute,
        whole_mask,
        eager_model,
        other_sizes,
        other_error,
    ):
        ids = torch.arange(8 * cp.size)[None]

        def block(case: Callable[[], None] = case, ids: Tensor = ids) -> None:
            with cp(buffers=[ids], buffer_seq_dims=[1]):
                case()

        found[case.__name__] = caught(block)
        assert F.scaled_dot_product_attention is SDPA
    return found
