"""Train a tiny Llama for some steps with CP=2 on CPU, beside the same model without CP.

    torchrun --nproc-per-node 2 examples/train_cpu.py

Needs accelerate 1.10 or newer, transformers, and no GPU. Every line that is about context parallelism is marked.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator

from cpcompat import get_cp_context  # CP
from cpcompat.testing import cpu_parallelism_config, tiny_llama

STEPS, LENGTH = 5, 256


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(3, 128, (2, LENGTH), generator=generator)
        labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)  # shifted before anything is sharded
        found.append({"input_ids": ids, "shift_labels": labels, "position_ids": torch.arange(LENGTH).expand(2, -1)})
    return found


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The summed loss of what this rank holds, over the number of tokens of the whole batch."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    return loss / (2 * (LENGTH - 1))


def without_cp() -> list[float]:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches():
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def with_cp() -> list[float]:
    acc = Accelerator(cpu=True, parallelism_config=cpu_parallelism_config(cp_size=2))  # CP; on GPUs: ParallelismConfig
    model = tiny_llama()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    cp = get_cp_context(acc)  # CP
    losses = []
    for batch in batches():
        with cp(buffers=list(batch.values()), buffer_seq_dims=[1, 1, 1]):  # CP
            loss = loss_of(model, batch)
            acc.backward(loss * cp.size)  # CP: the wrapper averages over ranks, the shards' losses add up
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def main() -> None:
    ours = with_cp()
    if dist.get_rank() == 0:
        print("step   CP=2       without    difference")
        for step, (mine, right) in enumerate(zip(ours, without_cp(), strict=True), 1):
            print(f"{step:<4} {mine:10.7f} {right:10.7f}   {abs(mine - right):.1e}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that ends in the ordinary way


if __name__ == "__main__":
    main()
