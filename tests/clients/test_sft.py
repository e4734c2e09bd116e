"""TRL's SFTTrainer under `patch`, on texts of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import client_bodies as bodies

from cpcompat import RankFailed
from cpcompat.testing import Ranks

SIZES = {"cp2": (2, 1), "cp4": (4, 1), "cp2-dp2": (2, 2)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "fsdp2": {"fsdp2": True},
    "without gradient checkpointing": {"gradient_checkpointing": False},
}


def compare(plain: dict[str, Any], found: list[dict[str, Any]]) -> None:
    assert len(plain["exact"]) == 5
    assert plain["exact"][4] < plain["exact"][0] - 0.3, "it learns"
    for result in found:
        assert result["exact"] == pytest.approx(plain["exact"], abs=1e-5)
        assert float((result["weights"] - plain["weights"]).abs().max()) < 1e-5


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights(both: Any, show: Callable[..., None], case: str, sizes: str) -> None:
    plain, found = both(bodies.sft, *SIZES[sizes], **CASES[case])
    show(plain["exact"], found[0]["exact"])
    compare(plain, found)


def test_evaluate(both: Any, show: Callable[..., None]) -> None:
    """SFTTrainer computes its loss itself, and so is right also where the Trainer's eval_loss is not."""
    plain, found = both(bodies.sft, 2, do=("train", "evaluate"))
    show(plain["eval_loss"], found[0]["eval_loss"])
    compare(plain, found)
    for result in found:
        assert result["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-5)


def test_packing_is_refused(ranks2: Ranks) -> None:
    """By TRL itself, from some release on."""
    with pytest.raises(RankFailed, match="Packing is not compatible with context parallelism"):
        ranks2.run(bodies.sft, 2, packing=True)


def test_rows_without_padding_are_refused(ranks2: Ranks) -> None:
    """By us: TRL lets them pass, although they are packed rows, too."""
    with pytest.raises(RankFailed, match="several samples are packed"):
        ranks2.run(bodies.sft, 2, padding_free=True, max_length=None)
