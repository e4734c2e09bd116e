"""Train a tiny Llama with transformers' Trainer and CP=2 on CPU, beside the same run without CP.

    torchrun --nproc-per-node 2 examples/trainer_cpu.py

Needs accelerate 1.10 or newer (1.12 for transformers 5), transformers, and no GPU. The one line that a trainer needs is
marked; ``python -m cpcompat run`` does without it.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from transformers import PrinterCallback, Trainer, TrainingArguments

import cpcompat
from cpcompat.testing import cpu_parallelism_config, tiny_llama

STEPS, LENGTH, BATCH = 5, 256, 4


def dataset() -> list[dict[str, torch.Tensor]]:
    """Rows that count: there is something to learn."""
    rows = [3 + (7 * row + torch.arange(LENGTH)) % 100 for row in range(STEPS * BATCH)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(cp_size: int) -> list[float]:
    """All ranks share a sequence with CP, and each takes its part of the batch without."""
    # On GPUs: TrainingArguments(parallelism_config=ParallelismConfig(cp_size=2), fsdp=..., bf16=True)
    config = {"parallelism_config": cpu_parallelism_config(cp_size)} if cp_size > 1 else {}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH if cp_size > 1 else BATCH // 2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        ddp_find_unused_parameters=False,
        **config,
    )
    trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=dataset())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    AcceleratorState._reset_state(True)  # only because this script trains twice
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    cpcompat.patch()  # CP: before the Trainer is made
    ours, right = train(cp_size=2), train(cp_size=1)
    if dist.get_rank() == 0:
        print("step   CP=2       without    difference")
        for step, (mine, other) in enumerate(zip(ours, right, strict=True), 1):
            print(f"{step:<4} {mine:10.7f} {other:10.7f}   {abs(mine - other):.1e}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts a process at the end of a correct run


if __name__ == "__main__":
    main()
