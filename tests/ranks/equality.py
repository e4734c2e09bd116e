"""Bodies that compare a model under CP with the same model without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, IGNORE = 128, -100


def batch(rows: int, length: int, seed: int = 3) -> dict[str, Tensor]:
    """Ids, shifted labels and positions of a global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = torch.cat((ids[:, 1:], torch.full((rows, 1), IGNORE)), dim=1)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(length).expand(rows, -1),
    }


def loss_of(model: nn.Module, data: dict[str, Tensor], total: int) -> Tensor:
    """The summed token loss over `total`, so that shards add up to the global mean."""
    logits = model(input_ids=data["input_ids"], position_ids=data["position_ids"], use_cache=False).logits
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), data["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return loss / total


def reference(model: nn.Module, data: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole batch in one process."""
    total = int((data["labels"] != IGNORE).sum())
    loss = loss_of(model, data, total)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients under their plain names; whole ones where FSDP2 shards them."""
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[plain_name(name)] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to that gradient's largest value."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in theirs)


def make_accelerator(cp_size: int, *, fsdp2: bool, rotate_method: str = "allgather", **sizes: int) -> Any:
    """A real Accelerator on CPU; without a parallelism config where accelerate has none."""
    from accelerate import Accelerator

    try:
        from accelerate.utils import TorchContextParallelConfig
    except ImportError:
        return Accelerator(cpu=True)
    from cpcompat.testing import cpu_parallelism_config, use_fsdp2_on_cpu

    handler = TorchContextParallelConfig(cp_comm_strategy=rotate_method)
    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(cp_size, cp_handler=handler, **sizes))
    if fsdp2:
        use_fsdp2_on_cpu(acc)
    return acc


def llama_equality(
    cp_size: int, *, fsdp2: bool, rotate_method: str, argument: bool = False, dp_size: int = 1, checkpoint: str = ""
) -> dict[str, Any]:
    """Loss and gradients of a tiny Llama under CP against those of the whole batch in one process.

    Args:
        argument: ask by ``cp_size=``, as accelerate 1.9 and older need it.
        checkpoint: "reentrant" or "non-reentrant" activation checkpointing under CP.
    """
    from cpcompat import get_cp_context
    from cpcompat.testing import tiny_llama

    data = batch(rows=2 * dp_size, length=64)
    loss, grads = reference(tiny_llama(), data)
    # Up to torch 2.8 FSDP2 sums over gloo where it should average, with CP or without: taken out of the comparison.
    factor = fsdp2_factor() if fsdp2 else 1.0
    assert factor in (1.0, torch.distributed.get_world_size())

    sizes = {"dp_shard_size": dp_size} if dp_size > 1 else {}
    acc = make_accelerator(cp_size, fsdp2=fsdp2, rotate_method=rotate_method, **sizes)
    model = tiny_llama()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        model.train()
        model.enable_input_require_grads()
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cp = get_cp_context(acc, cp_size=cp_size, rotate_method=rotate_method) if argument else get_cp_context(acc)

    # Each data-parallel group takes its rows; all ranks of one cp group take the same.
    dp_rank = torch.distributed.get_rank() // cp_size
    rows = slice(2 * dp_rank, 2 * dp_rank + 2)
    mine = {name: tensor[rows] for name, tensor in data.items()}
    total = int((data["labels"] != IGNORE).sum())
    with cp(buffers=list(mine.values()), buffer_seq_dims=[1, 1, 1]):
        local = loss_of(model, mine, total)
        # DDP and FSDP average over all ranks; the shards' losses add up.
        acc.backward(local * cp_size * dp_size)
    whole = local.detach().clone()
    torch.distributed.all_reduce(whole)
    return {
        "origin": cp.origin,
        "loss": abs(float(whole) - loss) / loss,
        "gradient": worst({name: grad / factor for name, grad in gradients(model).items()}, grads),
    }


def fsdp2_factor() -> float:
    """What FSDP2 makes of equal gradients on all ranks, without accelerate and without CP: 1 where it averages them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    model(torch.ones(1, 4)).sum().backward()
    return float(gradients(model)["weight"].mean())
