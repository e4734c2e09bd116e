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
