"""transformers' Trainer under `patch`: every number is the one without context parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import ACCELERATE, RELEASE
from ranks import client_bodies as bodies

from cpcompat import RankFailed
from cpcompat.layouts import TRAINER_EVALUATES_SINCE
from cpcompat.testing import Ranks, run_ranks
from cpcompat.versions import installed

TRANSFORMERS = installed("transformers")
assert TRANSFORMERS is not None and TRANSFORMERS.base is not None
assert ACCELERATE is not None and ACCELERATE.base is not None
# transformers #48167: before, the Trainer evaluates without CP, and multiplies eval_loss by cp_size.
EVALUATES = not TRANSFORMERS.older_than(TRAINER_EVALUATES_SINCE)
# From 1.14 on, accelerate takes a model that it has prepared for evaluation for prepared, and leaves DDP out.
FORGETS_DDP = not ACCELERATE.older_than("1.14.0")

SIZES = {"cp2": (2, 1), "cp4": (4, 1), "cp2-dp2": (2, 2)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "right padding": {"padding": "right"},
    "adamw": {"optim": "adamw_torch", "learning_rate": 3e-4},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "fsdp2": {"fsdp2": True},
    "fsdp2 accumulation": {"fsdp2": True, "gradient_accumulation_steps": 2},
    "fsdp2 checkpointing": {
        "fsdp2": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "fsdp2 evaluated at the start": {"fsdp2": True, "eval_on_start": True},
}


def compare(plain: dict[str, Any], found: list[dict[str, Any]], losses: float = 1e-5, weights: float = 1e-5) -> None:
    """Losses, as logged and exact, and weights, on every rank."""
    assert len(plain["exact"]) == len(plain["logged"]) == 5
    rounded = all(loss == round(loss, 4) for loss in plain["logged"])
    for result in found:
        assert result["exact"] == pytest.approx(plain["exact"], abs=losses)
        assert result["logged"] == pytest.approx(plain["logged"], abs=losses + (1e-4 if rounded else 0))
        assert float((result["weights"] - plain["weights"]).abs().max()) < weights


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights(both: Any, show: Callable[..., None], case: str, sizes: str) -> None:
    plain, found = both(bodies.train, *SIZES[sizes], **CASES[case])
    show(plain["exact"], found[0]["exact"])
    compare(plain, found)


@pytest.mark.parametrize("fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_bf16(both: Any, show: Callable[..., None], fsdp2: bool) -> None:
    exact, _ = both(bodies.train, 2)
    plain, found = both(bodies.train, 2, bf16=True, fsdp2=fsdp2)
    show(plain["exact"], found[0]["exact"])
    assert plain["exact"] != exact["exact"], "bf16 was on"
    # FSDP2 computes the logits, and so the loss, in bfloat16, whose step is 1/32 here; autocast only the products.
    compare(plain, found, losses=1 / 32 if fsdp2 else 2e-3, weights=2e-3)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("evaluated", [4, 6], ids=["full batches", "a short last batch"])
def test_evaluate_alone(both: Any, show: Callable[..., None], sizes: str, evaluated: int) -> None:
    cp_size, dp_size = SIZES[sizes]
    plain, found = both(bodies.train, cp_size, dp_size, do=("evaluate",), evaluated=evaluated)
    show(plain["eval_loss"], found[0]["eval_loss"])
    for result in found:
        factor = 1 if EVALUATES else cp_size
        assert result["eval_loss"] == pytest.approx([factor * loss for loss in plain["eval_loss"]], abs=1e-5 * factor)


def test_evaluate_before_and_after(both: Any, show: Callable[..., None]) -> None:
    plain, found = both(bodies.train, 2, do=("evaluate", "train", "evaluate"))
    show(plain["eval_loss"], found[0]["eval_loss"])
    factor = 1 if EVALUATES else 2
    for result in found:
        assert result["eval_loss"][0] == pytest.approx(factor * plain["eval_loss"][0], abs=2e-5)
    if FORGETS_DDP:
        # Without CP as well: each rank trains by itself. When this fails, accelerate has mended it.
        assert not found[0]["weights"].equal(found[1]["weights"])
        return
    compare(plain, found)
    for result in found:
        assert result["eval_loss"][1] == pytest.approx(factor * plain["eval_loss"][1], abs=2e-5)


@pytest.mark.parametrize("fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_evaluate_after(both: Any, show: Callable[..., None], fsdp2: bool) -> None:
    plain, found = both(bodies.train, 2, do=("train", "evaluate"), fsdp2=fsdp2)
    show(plain["eval_loss"], found[0]["eval_loss"])
    compare(plain, found)
    factor = 1 if EVALUATES else 2
    for result in found:
        assert result["eval_loss"] == pytest.approx([factor * loss for loss in plain["eval_loss"]], abs=2e-5)


def test_evaluate_first_with_fsdp2_is_refused_by_accelerate(ranks2: Ranks) -> None:
    with pytest.raises(RankFailed, match="model and optimizer must be passed together"):
        ranks2.run(bodies.train, 2, do=("evaluate",), fsdp2=True)


def test_predictions_are_shards(both: Any) -> None:
    plain, found = both(bodies.train, 2, do=("predict",))
    rows, length, width = plain["predictions"].shape
    for result in found:
        assert result["predictions"].shape == (2 * rows, length // 2 if EVALUATES else length, width)
        assert result["label_ids"].shape == (2 * rows, length)


@pytest.mark.parametrize("sizes", SIZES)
def test_predictions_made_whole_by_the_hook(both: Any, sizes: str) -> None:
    """The recipe of the warning: `unshard` in preprocess_logits_for_metrics, one row a batch, every cp_size-th row."""
    cp_size, dp_size = SIZES[sizes]
    one = {"do": ("predict",), "evaluated": 5, "per_device_eval_batch_size": 1}
    plain, found = both(bodies.train, cp_size, dp_size, hook=EVALUATES, **one)
    for result in found:
        np.testing.assert_allclose(result["predictions"][::cp_size], plain["predictions"], atol=1e-5)
        np.testing.assert_array_equal(result["label_ids"][::cp_size], plain["label_ids"])


def test_what_is_warned_of_is_warned_of_once() -> None:
    """In processes that have not warned yet."""
    for result in run_ranks(bodies.train, 2, 2, do=("evaluate", "predict", "evaluate", "predict"), timeout=120):
        (heard,) = result["heard"]
        assert ("#48842" if EVALUATES else "#48167") in heard
        assert "unshard" in heard if EVALUATES else "divide eval_loss by cp_size" in heard


@pytest.mark.parametrize("fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_a_resumed_run(both: Any, ranks2: Ranks, show: Callable[..., None], tmp_path: Path, fsdp2: bool) -> None:
    plain, _ = both(bodies.train, 2)
    saves: dict[str, Any] = {"fsdp2": fsdp2, "folder": str(tmp_path), "save_strategy": "steps", "save_steps": 3}
    compare(plain, ranks2.run(bodies.train, 2, **saves))
    resumed = ranks2.run(bodies.train, 2, resume=str(tmp_path / "checkpoint-3"), **saves)
    show(plain["exact"], resumed[0]["logged"])
    for result in resumed:
        assert len(result["exact"]) == 2, "only the last two steps were run"
        assert result["exact"] == pytest.approx(plain["exact"][3:], abs=1e-5)
        assert float((result["weights"] - plain["weights"]).abs().max()) < 1e-5


def test_packed_rows_are_refused(ranks2: Ranks) -> None:
    with pytest.raises(RankFailed, match="several samples are packed"):
        ranks2.run(bodies.train, 2, collator="packed")


def test_left_padding_is_refused(ranks2: Ranks) -> None:
    with pytest.raises(RankFailed, match="rows are padded on the left"):
        ranks2.run(bodies.train, 2, padding="left")


def test_without_patch(ranks2: Ranks) -> None:
    """What brought the user here: accelerate 1.12.0 has no context; elsewhere torch's own cannot run on CPU."""
    missing = "no attribute '_cp_context'"
    with pytest.raises(RankFailed, match=missing if RELEASE.own_context == "never" else "NotImplementedError"):
        ranks2.run(bodies.train, 2, patched=False)


def test_lengths_that_cannot_be_cut_are_named(ranks2: Ranks) -> None:
    with pytest.raises(RankFailed, match=re.escape("2 x cp size = 4")):
        ranks2.run(bodies.train, 2, length=62)
