"""Bodies that train with other people's trainers: once in one process, once under CP with `patch`, on the same data."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompat import CPWarning, get_cp_context, patch, unpatch
from cpcompat.testing import cpu_parallelism_config, tiny_llama, use_fsdp2_on_cpu

LENGTH, VOCAB = 64, 128


def rows(number: int, seed: int, *, padding: str = "", length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Samples of one length, which can be learned, as a tokenizer would pad them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        start, step = torch.randint(0, 100, (2,), generator=generator)
        ids = 3 + (start + (1 + step % 3) * torch.arange(length)) % (VOCAB - 3)
        mask, labels = torch.ones_like(ids), ids.clone()
        if padding:
            hidden = int(torch.randint(1, length // 2, (), generator=generator))
            part = slice(hidden) if padding == "left" else slice(length - hidden, None)
            ids[part], mask[part], labels[part] = 0, 0, -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def packed(number: int, seed: int) -> list[dict[str, list[int]]]:
    """Samples of half the length, for a collator that puts them into one row."""
    return [{name: row[name][: LENGTH // 2].tolist() for name in ("input_ids", "labels")} for row in rows(number, seed)]


def _fsdp2(kind: type) -> type:
    """A trainer whose accelerator shards with FSDP2 on CPU; in a GPU job TrainingArguments(fsdp=...) does this."""

    class WithFSDP2(kind):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp2_on_cpu(self.accelerator)
            if self.args.bf16:
                self.accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
            self.is_fsdp_enabled = True

    return WithFSDP2


def _exact(kind: type) -> type:
    """A trainer that remembers each step's loss; transformers 4 rounds what it logs to four digits."""

    class Exact(kind):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **keywords: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **keywords)
            steps = self.__dict__.setdefault("exact", {})
            steps[self.state.global_step] = steps.get(self.state.global_step, 0.0) + loss.detach().clone()
            return loss

    return Exact


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().float().flatten()


@contextlib.contextmanager
def _heard(messages: list[str]) -> Iterator[None]:
    """Collect what cpcompat warns of, as often as it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CPWarning)
        yield
    messages += [str(warning.message) for warning in caught if isinstance(warning.message, CPWarning)]


def results(trainer: Any) -> dict[str, Any]:
    """What is compared: losses as logged and exact, and the weights."""
    exact = []
    for _, loss in sorted(trainer.__dict__.get("exact", {}).items()):
        total = torch.as_tensor(loss).float().clone()
        dist.all_reduce(total)
        exact.append(float(total) / dist.get_world_size())
    return {
        "logged": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "exact": exact,
        "weights": torch.cat([_whole(parameter) for parameter in trainer.model.parameters()]),
    }


def arguments(kind: type, cp_size: int, dp_size: int, folder: str | None, batch: int, **fields: Any) -> Any:
    """Training arguments for CPU, a step a log line; `batch` is the global batch."""
    if cp_size > 1:
        sizes = {"dp_shard_size": dp_size} if dp_size > 1 else {}
        fields["parallelism_config"] = cpu_parallelism_config(cp_size, **sizes)
    defaults: dict[str, Any] = {
        "output_dir": folder or tempfile.mkdtemp(prefix="cpcompat-"),
        "use_cpu": True,
        "max_steps": 5,
        "per_device_train_batch_size": batch // dp_size,
        "per_device_eval_batch_size": batch // dp_size,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "optim": "sgd",
        "learning_rate": 0.5,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 1,
    }
    return kind(**{**defaults, **fields})


def train(
    cp_size: int,
    dp_size: int = 1,
    *,
    do: Sequence[str] = ("train",),
    fsdp2: bool = False,
    padding: str = "",
    length: int = LENGTH,
    collator: str = "",
    evaluated: int = 6,
    hook: bool = False,
    patched: bool = True,
    folder: str | None = None,
    resume: str | None = None,
    batch: int = 4,
    **fields: Any,
) -> dict[str, Any]:
    """Run transformers' Trainer.

    Args:
        do: what is called, in this order: "train", "evaluate", "predict".
        padding: the side on which the rows are padded.
        length: tokens of a row.
        collator: "packed" for transformers' own collator that flattens a batch into one row.
        evaluated: rows of the evaluation set.
        hook: make predictions whole by the Trainer's hook and `unshard`.
        patched: False for what a user sees without us.
        folder: where checkpoints go.
        resume: the checkpoint to go on from.
    """
    import transformers
    from transformers import Trainer, TrainingArguments

    kind = _exact(_fsdp2(Trainer) if fsdp2 else Trainer)
    heard: list[str] = []
    found: dict[str, Any] = {"heard": heard}
    with _heard(heard), patch() if patched else contextlib.nullcontext():
        trainer = kind(
            model=tiny_llama(),
            args=arguments(TrainingArguments, cp_size, dp_size, folder, batch, **fields),
            train_dataset=packed(40, 5) if collator else rows(40, 5, padding=padding, length=length),
            eval_dataset=rows(evaluated, 9, padding=padding),
            data_collator=transformers.DataCollatorWithFlattening() if collator else None,
        )
        if hook:
            trainer.preprocess_logits_for_metrics = lambda logits, labels: get_cp_context(trainer.accelerator).unshard(
                [logits], [1]
            )[0]
        for what in do:
            if what == "train":
                trainer.train(resume_from_checkpoint=resume)
            elif what == "evaluate":
                found.setdefault("eval_loss", []).append(trainer.evaluate()["eval_loss"])
            else:
                told = trainer.predict(rows(evaluated, 9))
                found["predictions"], found["label_ids"] = told.predictions, told.label_ids
    return {**found, **results(trainer)}


TEXTS = (
    "a mesh of ranks shares one long sequence",
    "each rank holds the head chunk and the tail chunk",
    "attention goes round the ring once and every key is seen",
    "a label that is shifted after the cut is lost at every border",
    "the loss of the shards adds up to the loss of the whole",
    "what was sharded in place is whole again at the end",
)


def tokenizer() -> Any:
    """A tokenizer of whole words, trained here on the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<pad>", "<bos>", "<eos>", "<unk>"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def sft(
    cp_size: int,
    dp_size: int = 1,
    *,
    do: Sequence[str] = ("train",),
    fsdp2: bool = False,
    batch: int = 4,
    **fields: Any,
) -> dict[str, Any]:
    """Run TRL's SFTTrainer on texts of different lengths."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    kind = _exact(_fsdp2(SFTTrainer) if fsdp2 else SFTTrainer)
    heard: list[str] = []
    found: dict[str, Any] = {"heard": heard}
    texts = [{"text": " ".join(TEXTS[(i + j) % len(TEXTS)] for j in range(1 + i % 3))} for i in range(24)]
    # Each row of a batch is padded on the right, to a length that can be cut into 2 x cp size.
    fields = {"dataset_text_field": "text", "max_length": 64, "pad_to_multiple_of": 8, **fields}
    with _heard(heard), patch():
        trainer = kind(
            model=tiny_llama(),
            args=arguments(SFTConfig, cp_size, dp_size, None, batch, **fields),
            train_dataset=Dataset.from_list(texts),
            eval_dataset=Dataset.from_list(texts[:6]),
            processing_class=tokenizer(),
        )
        for what in do:
            if what == "train":
                trainer.train()
            else:
                found.setdefault("eval_loss", []).append(trainer.evaluate()["eval_loss"])
    return {**found, **results(trainer)}


def page(blocks: Sequence[str]) -> dict[str, Any]:
    """Run the code of a page, one block after the other, with the names that it takes for given."""
    from transformers import Trainer, TrainingArguments

    given: dict[str, Any] = {
        "Trainer": Trainer,
        "model": tiny_llama(),
        "dataset": rows(6, 5),
        "args": arguments(TrainingArguments, 2, 1, None, 4),
    }
    try:
        for block in blocks:
            exec(block, given)
    finally:
        unpatch()
    losses = [entry["loss"] for entry in given["trainer"].state.log_history if "loss" in entry]
    return {"losses": losses, "logits": given.get("logits"), "labels": given.get("labels")}
