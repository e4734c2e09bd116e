"""The twelve ways in which context parallelism goes wrong for people, each without the library and with it."""

from __future__ import annotations

import sys

from ranks import failure_bodies as bodies

from cpcompat.codes import CODES
from cpcompat.testing import Ranks

# --- 11: backward or recompute outside the block ------------------------------------------------------------------------


def test_11_reentrant_checkpointing_outside_is_silent_without_us(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.backward_outside, True):
        assert found["bare, inside"] < 1e-5
        assert found["bare, outside"] > 0.2, "what a user would have had, without a word"
        assert found["cpcompat, inside"] < 1e-5
        kind, text = found["cpcompat, outside"]
        assert kind == "BackwardOutside"
        assert "[CP208]" in text
        assert "backward(loss) inside the block" in text


def test_11_other_checkpointing_outside_is_torchs_own_error(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.backward_outside, False):
        assert found["cpcompat, inside"] < 1e-5
        for name in ("bare, outside", "cpcompat, outside"):
            assert found[name][0] == "CheckpointError"
            assert found[name][1].startswith("torch.utils.checkpoint: ")


def test_11_only_what_is_computed_again_elsewhere_is_refused(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.recompute_elsewhere):
        refused = {name for name, kind in found.items() if kind == "BackwardOutside"}
        assert refused == {"once", "nested", "disabled"}
        assert {kind for name, kind in found.items() if name not in refused} == {"no error"}


# --- notes on what torch raises (6, 7, 10, 11) --------------------------------------------------------------------------

NOTES = {
    "mixed": ("RuntimeError", "CP308"),
    "no_kernel": ("RuntimeError", "CP309"),
    "no_strategy": ("NotImplementedError", "CP310"),
    "not_causal": ("RuntimeError", "CP311"),
    "recompute": ("CheckpointError", "CP208"),
    "whole_mask": ("RuntimeError", "CP312"),
    "eager_model": ("RuntimeError", "CP312"),
}


def test_torchs_exceptions_come_through_with_a_note(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.notes):
        assert found.pop("other_sizes")[2] == []
        assert found.pop("other_error") == ("ValueError", "mine", [])
        assert found.keys() == NOTES.keys()
        for name, (kind, text, notes) in found.items():
            expected, code = NOTES[name]
            assert kind == expected, (name, text)
            (note,) = notes if sys.version_info >= (3, 11) else [text]
            for words in (f"[{code}] {CODES[code].title}", CODES[code].reason, CODES[code].remedy):
                assert words in note
