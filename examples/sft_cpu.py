"""Fine-tune a tiny Llama on texts with TRL's SFTTrainer and CP=2 on CPU, beside the same run without CP.

    torchrun --nproc-per-node 2 examples/sft_cpu.py

Needs accelerate 1.10 or newer (1.12 for transformers 5), transformers, trl, and no GPU. Lines about context parallelism are
marked.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch.distributed as dist
from accelerate.state import AcceleratorState
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

import cpcompat
from cpcompat.testing import cpu_parallelism_config, tiny_llama

STEPS, BATCH = 5, 4
TEXTS = [
    "a mesh of ranks shares one long sequence",
    "each rank holds the head chunk and the tail chunk",
    "attention goes round the ring once and every key is seen",
    "what was sharded in place is whole again at the end",
] * STEPS


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, trained on the spot: nothing is downloaded."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<pad>", "<bos>", "<eos>", "<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def train(cp_size: int) -> list[float]:
    """All ranks share a sequence with CP, and each takes its part of the batch without."""
    # On GPUs: SFTConfig(parallelism_config=ParallelismConfig(cp_size=2), fsdp=..., bf16=True)
    config = {"parallelism_config": cpu_parallelism_config(cp_size)} if cp_size > 1 else {}
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH if cp_size > 1 else BATCH // 2,
        pad_to_multiple_of=4,  # CP: 2 x cp_size, so that each batch can be cut
        packing=False,  # CP: packed documents would attend to each other
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        ddp_find_unused_parameters=False,
        **config,
    )
    data = Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = SFTTrainer(model=tiny_llama(), args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    AcceleratorState._reset_state(True)  # only because this script trains twice
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    disable_progress_bars()
    cpcompat.patch()  # CP: before the trainer is made
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
