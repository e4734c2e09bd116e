"""Bodies for the tests of the testing kit."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cpcompat.testing import cpu_parallelism_config, tiny_llama, use_fsdp2_on_cpu


def on_cpu(cp_size=2, **fields):
    from accelerate import Accelerator

    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(cp_size, **fields))
    mesh = acc.torch_device_mesh
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), mesh.device_type


def fsdp2():
    """One step of a prepared model and one of a plain one, from the same weights."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(2))
    use_fsdp2_on_cpu(acc)
    ids = torch.arange(16).remainder(7).reshape(1, 16)
    plain = tiny_llama()
    plain(input_ids=ids, labels=ids).loss.backward()
    model = tiny_llama()
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    acc.backward(model(input_ids=ids, labels=ids).loss)
    worst = max(
        (a.grad.full_tensor() - b.grad).abs().max().item()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return {
        "fsdp2": acc.is_fsdp2,
        "layers": [isinstance(layer, FSDPModule) for layer in model.model.layers],
        "sharded": all(isinstance(p, DTensor) and p.device_mesh.size() == 2 for p in model.parameters()),
        "worst": worst,
    }


def weights():
    return torch.cat([p.detach().flatten() for p in tiny_llama().parameters()]).sum().item(), dist.get_rank()


def ready(repair=False, cp_size=2):
    """What `assert_cp_ready` says of an accelerator, after its first prepare()."""
    from accelerate import Accelerator

    from cpcompat import get_cp_context
    from cpcompat.testing import assert_cp_ready

    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(cp_size) if cp_size > 1 else None)
    acc.prepare_model(tiny_llama())
    if repair:
        get_cp_context(acc)
    else:
        acc.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    try:
        return assert_cp_ready(acc).origin
    except AssertionError as error:
        return f"{error} | {type(error.__cause__).__name__}"


def train(cp_size, fault=None, fsdp2=True):
    """One step of a real loop, right or with a fault; the loss of the whole batch and gradients."""
    from accelerate import Accelerator

    from cpcompat import get_cp_context

    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(cp_size))
    if cp_size > 1 and fsdp2:
        use_fsdp2_on_cpu(acc)
    model = tiny_llama()
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(32).remainder(11).reshape(1, 32)
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(32)[None]

    def step():
        logits = model(input_ids=ids, position_ids=positions).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / 31
        acc.backward(loss * (1 if fault == "scale" else cp_size))
        return loss.detach()

    if cp_size == 1 or fault == "no context":
        loss = step()
    else:
        buffers = [ids, labels, positions]
        with get_cp_context(acc)(buffers=buffers, buffer_seq_dims=[1] * 3):
            loss = step()
        dist.all_reduce(loss)
    values = {"loss": loss, "gradients": {name: p.grad for name, p in model.named_parameters()}}
    if fault == "names" and cp_size > 1:
        values["more"] = 1
    if fault == "nan" and cp_size > 1:
        values["loss"] = float("nan")
    if fault == "shape":
        values["loss"] = [torch.ones(cp_size)]
    return values


def ready_by_patch():
    """No context stands yet, but the loop will get one."""
    from accelerate import Accelerator

    from cpcompat import patch
    from cpcompat.testing import assert_cp_ready

    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(2))
    with patch():
        return assert_cp_ready(acc).origin
