"""A training script that knows nothing of patch: ``loop.py FOLDER [fail|leave]``, started on two processes by a test."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from cpcompat.testing import cpu_parallelism_config, tiny_llama


def main() -> None:
    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(2))
    model = tiny_llama()
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(64).remainder(7)[None] + 3
    labels = torch.cat((ids[:, 1:], torch.tensor([[-100]])), dim=1)
    positions = torch.arange(64)[None]
    with acc.maybe_context_parallel(buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
        logits = model(input_ids=ids, position_ids=positions).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 63
        acc.backward(loss * 2)
    dist.all_reduce(loss := loss.detach())
    found = {"name": __name__, "argv": sys.argv[1:], "loss": float(loss), "size": dist.get_world_size()}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group may abort a correct run


if __name__ == "__main__":
    main()
