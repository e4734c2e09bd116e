"""One rank of a training over two nodes: ``node.py FOLDER``, started by a launcher on each node.

Compares a tiny Llama under CP with the same model without it, for every case and rotate method, and writes what it
found, and where it ran, to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from installed import RELEASE
from ranks.equality import batch, gradients, loss_of, make_accelerator, reference, worst
from torch.distributed.device_mesh import init_device_mesh

from cpcompat import CPContext, get_cp_context
from cpcompat.testing import tiny_llama

METHODS = ("allgather", "alltoall")


def ready(cp_size: int, method: str) -> tuple[Any, Any, CPContext]:
    """Accelerator, model and context where the cp groups are consecutive ranks, as accelerate cuts the world."""
    sizes = {"dp_shard_size": 4 // cp_size} if cp_size < 4 else {}
    acc = make_accelerator(cp_size, fsdp2=False, rotate_method=method, **sizes)
    model = prepared(acc)
    if RELEASE.has_config:
        return acc, model, get_cp_context(acc)
    return acc, model, get_cp_context(acc, cp_size=cp_size, rotate_method=method)


def ready_across(method: str) -> tuple[Any, Any, CPContext]:
    """The same where each cp group has one rank of each node, over a mesh that accelerate knows nothing of."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    acc = Accelerator(cpu=True)
    return acc, prepared(acc), get_cp_context(acc, mesh=mesh, rotate_method=method)


def prepared(acc: Any) -> Any:
    model = tiny_llama()
    return acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def compare(acc: Any, model: Any, cp: CPContext, replica: int) -> dict[str, Any]:
    """Loss and gradients under CP against those of the whole batch in one process; each replica takes its own rows."""
    replicas = dist.get_world_size() // cp.size
    data = batch(rows=2 * replicas, length=64)
    loss, grads = reference(tiny_llama(), data)

    mine = {name: tensor[2 * replica : 2 * replica + 2] for name, tensor in data.items()}
    total = int((data["labels"] != -100).sum())
    with cp(buffers=list(mine.values()), buffer_seq_dims=[1, 1, 1]):
        local = loss_of(model, mine, total)
        acc.backward(local * dist.get_world_size())  # DDP averages over all ranks; the shards' losses add up
    whole = local.detach().clone()
    dist.all_reduce(whole)
    return {
        "origin": cp.origin,
        "method": cp.rotate_method,
        "group": dist.get_process_group_ranks(cp.group),
        "wrapper": type(model).__name__,
        "loss": abs(float(whole) - loss) / loss,
        "gradient": worst(gradients(model), grads),
    }


def main() -> None:
    # Launchers start their ranks in sessions of their own: whoever kills a launcher does not reach them.
    faulthandler.dump_traceback_later(90, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    cases = {
        "within nodes": (rank // 2, lambda method: ready(2, method)),
        "across nodes": (rank % 2, ready_across),
        "over all ranks": (0, lambda method: ready(4, method)),
    }
    found: dict[str, dict[str, Any]] = {}
    for case, (replica, make) in cases.items():
        for method in METHODS:
            found.setdefault(case, {})[method] = compare(*make(method), replica)
            AcceleratorState._reset_state(True)  # the next one is another Accelerator, on the same process group
            GradientState._reset_state()

    space = Path("/proc/self/ns/net")
    place = {
        "rank": rank,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node": int(os.environ["GROUP_RANK"]),
        "pid": os.getpid(),
        "launcher": os.getppid(),
        "namespace": os.readlink(space) if space.is_symlink() else "",
    }
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps({**place, "cases": found}))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destroy_process_group may abort a correct run


if __name__ == "__main__":
    main()
