"""The twelve ways in which context parallelism goes wrong for people, each without the library and with it.

What is here shows the fault as a user has it (for the silent ones the wrong number) and then the same with cpcompat: fixed, or
explained by a code. "Without" is accelerate or torch itself where they run on CPU, and elsewhere a bare block: buffers cut
rightly and a ring in the place of attention, with none of the checks. What another file shows already is not repeated:

 1  the rotate method, the hooks, every order of events      test_resolve.py
 2  windows as long as the sequence, modules without a hook  test_hooks.py; in batches test_batch.py
 3  eval_loss and predict of the Trainer, on each release    clients/test_trainer.py; rows of metrics: test_patch.py
 4  FSDP1, no FSDP, launch flags, the config file            test_diagnosing.py; cp_size against cp_size: test_resolve.py
 5  which buffer, which rank, how often                      test_context.py
 7  names bound before the block, in the doctor              test_diagnosing.py; outputs and gradients: test_verify.py
 8  positions and labels of padded, rotary and odd batches   test_batch.py
 9  accumulation, and counts that cannot be                  test_batch.py
11  buffers restored before backward                         test_context.py
12  each kind of error, each kind of tensor                  test_context.py
"""

from __future__ import annotations

import math
import sys

import pytest
from installed import RELEASE
from ranks import failure_bodies as bodies

from cpcompat.codes import CODES
from cpcompat.explaining import explain
from cpcompat.testing import Ranks, run_ranks
from cpcompat.versions import installed

HAS_CONFIG = pytest.mark.skipif(not RELEASE.has_config, reason="this accelerate has no ParallelismConfig")
ARGUMENT = not RELEASE.has_config
TORCH = installed("torch")
assert TORCH is not None
EXACT = 5e-6

# --- 1: the context is missing ------------------------------------------------------------------------------------------


@HAS_CONFIG
@pytest.mark.parametrize("prepare", ["prepare", "prepare_model"])
def test_01_the_context_is_missing(ranks2: Ranks, prepare: str) -> None:
    """On 1.12.0 after prepare(); on every release after prepare_model() alone, as evaluating before training does it."""
    lost = prepare == "prepare_model" or RELEASE.own_context == "never"
    for found in ranks2.run(bodies.missing, prepare):
        if lost:
            kind, text, _ = found["without"]
            assert kind == "AttributeError"
            assert "no attribute '_cp_context'" in text
            assert found["logits"] < EXACT
        assert found["origin"] == ("created" if lost else "adopted")


# --- 2: the mask is thrown away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bodies.LAYERS)
def test_02_layers_that_see_less_than_the_sequence(ranks2: Ranks, name: str) -> None:
    for found in ranks2.run(bodies.layers, name, ARGUMENT):
        assert found["wrong"] > 0.01, "the logits that a user would have had, silently"
        assert found["refused"] == ("ModelUnsupported", "CP302")


def test_02_packed_rows_and_padding_on_the_left(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.masks):
        assert found["packed, wrong"] > 0.1
        assert found["left, wrong"] > 0.1
        assert found["packed"] == found["left"] == ("BatchUnsupported", "CP206")
        assert found["right"] < EXACT, "padding on the right is harmless"


@pytest.mark.parametrize(("kind", "hooked"), [("gpt2", 2), ("gpt_neox", 2), ("bert", 0)])
def test_02_attention_of_another_name_gets_no_hook(ranks2: Ranks, kind: str, hooked: int) -> None:
    """From accelerate, that is; the library hooks it, or (a model that is not causal) refuses the mask that comes."""
    for found in ranks2.run(bodies.other_names, kind, ARGUMENT):
        assert found["accelerate"] == 0
        assert found["cpcompat"] == hooked
        assert found["masked"] == (("no error", "") if hooked else ("AttentionUnsupported", "CP301"))


# --- 3: evaluation ------------------------------------------------------------------------------------------------------


def test_03_evaluation(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.evaluation, ARGUMENT):
        assert found["joined in rank order"] > 0.1, "logits in head-tail order"
        assert found["gathered by accelerate"] == (4, 16, 128), "two rows became four halves"
        assert found["added up"] == pytest.approx(2, abs=1e-4), "cp_size times the loss"
        assert found["logits"] < EXACT
        assert found["shape"] == (2, 32, 128)
        assert found["loss"] == pytest.approx(1, abs=1e-5)


# --- 4: context parallelism is not on -----------------------------------------------------------------------------------


def test_04_a_size_without_its_switch(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.not_on, ARGUMENT, env={"PARALLELISM_CONFIG_CP_SIZE": "2"}):
        if not ARGUMENT:
            assert found["tokens on each rank"] == 32, "all of them, silently"
            assert found["refused"] == ("CPNotRequested", "CP101")
        else:
            assert found["refused"] == ("VersionTooOld", "CP106")


@HAS_CONFIG
def test_04_sizes_that_are_not_the_processes() -> None:
    """On ranks of their own: torch 2.9 makes some of the groups before it refuses, and the next group never comes."""
    for found in run_ranks(bodies.sizes_differ, 4, timeout=60):
        assert found["kind"] != "no error"
        assert found["code"] == "CP109"
        assert "cp 2 = 2, and 4 processes" in found["evidence"]


# --- 5: the ranks hold different batches --------------------------------------------------------------------------------


def test_05_different_batches_train_wrongly(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.different_batches):
        assert found["wrong"] > 0.5, "of the gradients of either batch"
        assert found["refused"] == ("RanksDiffer", "CP204")


@pytest.mark.parametrize("kind", ["own", "iterable", "shuffled", *(["plain"] if ARGUMENT else [])])
def test_05_loaders_that_give_each_rank_its_own(ranks2: Ranks, kind: str) -> None:
    """Unseeded shuffle, IterableDataset, own loaders; and on accelerate 1.9 and older any."""
    for found in ranks2.run(bodies.loaders, kind, ARGUMENT):
        assert found == {"different": True, "refused": ("RanksDiffer", "CP204"), "cured": ("no error", "")}


# --- 6: the sequence length ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [30, 31])
def test_06_a_length_that_cannot_be_cut(ranks2: Ranks, length: int) -> None:
    reports = ranks2.run(bodies.lengths, length)
    for found in reports:
        if TORCH.older_than("2.13.0"):
            assert found["torch"] == ("AssertionError", ""), "no word on what was asserted"
        assert found["refused"] == ("LengthInvalid", "CP202")
        assert found["facts"] == (length, 4, 32)
        assert found["batch"] == 32, "a batch is padded"
    if not TORCH.older_than("2.13.0"):
        half = -(-length // 2)
        shards = [list(range(half)), list(range(half, length))]
        assert [found["shard"] for found in reports] == shards, "another layout, and for odd lengths uneven shards"


# --- 7: attention never goes through context parallelism ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_07_attention_that_is_not_seen(ranks2: Ranks, how: str) -> None:
    """eager stands for whatever is not sdpa; the doctor names each implementation, flash too."""
    for found in ranks2.run(bodies.unseen, how):
        assert found["wrong"] > 0.1, "the logits of ranks that attend to their own shard"
        assert found["warned"] == ["CP303"]


def test_07_two_layers_that_both_shard(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.sharded_twice):
        assert found["tokens"] == 8, "a shard of a shard, silently"
        assert found["refused"] == ("NestedContext", "CP203")


# --- 8: labels and positions --------------------------------------------------------------------------------------------


def test_08_labels_shifted_after_the_cut_and_positions_missing(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.labels_and_positions):
        assert found["targets"] == (60, 62), "each row loses one at each border"
        assert found["loss, wrong"] > 1e-5
        assert found["logits, wrong"] > 1e-3, "without positions each shard starts at 0"
        assert found["loss"] < EXACT
        assert found["logits"] < EXACT


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_08_expanded_positions(ranks2: Ranks, rows: int) -> None:
    broken = rows in (2, 3) and TORCH.older_than("2.11.0") and not TORCH.older_than("2.10.0")
    for found in ranks2.run(bodies.expanded, rows):
        assert found == {"torch": not broken, "cpcompat": True}


# --- 9: the loss's scale ------------------------------------------------------------------------------------------------


def test_09_the_scale_of_the_loss(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.loss_scale):
        assert abs(found["unequal"]["mean of means"]) > 0.01
        assert found["unequal"]["sum of means"] == pytest.approx(2, abs=0.1), "about cp_size times the loss"
        assert math.isnan(found["one shard empty"]["mean of means"])
        for case in found.values():
            assert abs(case["ours"]) < EXACT


# --- 10: no usable kernel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_10_attention_on_cpu(ranks2: Ranks, causal: bool) -> None:
    """torch has no CP attention for the CPU kernel; its words for other kernels get notes, see below."""
    for found in ranks2.run(bodies.on_cpu, causal):
        kind, text = found["torch"]
        assert kind == "NotImplementedError"
        assert "does not have a sharding strategy registered" in text
        assert found["forward"] < EXACT
        assert found["backward"] < EXACT


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


class Old(RuntimeError):
    """An exception as Python 3.10 has them, without notes."""

    @property
    def add_note(self) -> None:
        raise AttributeError


@pytest.mark.parametrize("kind", [RuntimeError, Old])
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("No available kernel.  Aborting execution.", "CP309"),
        ("No viable backend for scaled_dot_product_attention was found. This is likely due to", "CP309"),
        ("torch.utils.checkpoint: A different number of tensors was saved during the original forward and", "CP208"),
        (
            "The expanded size of the tensor (16) must match the existing size (8) at non-singleton dimension 3.",
            "CP312",
        ),
        ("The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 3", "CP312"),
        ("The size of tensor a (8) must match the size of tensor b (32) at non-singleton dimension 3", ""),
        ("one of the variables needed for gradient computation has been modified by an inplace operation", ""),
        ("CUDA out of memory", ""),
    ],
)
def test_a_note_is_added_where_the_reason_is_known(kind: type[RuntimeError], text: str, code: str) -> None:
    error = kind(text)
    explain(error, 8, 2)
    noted = getattr(error, "__notes__", [])
    if not code:
        assert noted == []
        assert error.args == (text,)
    elif hasattr(error, "add_note"):
        assert noted[0].startswith(f"[{code}] ")
        assert error.args == (text,)
    else:
        assert str(error).startswith(f"{text}\n[{code}] ")


# --- 12: unsafe mechanics -----------------------------------------------------------------------------------------------


def test_12_unsafe_mechanics(ranks2: Ranks) -> None:
    left = (False, 16) if TORCH.older_than("2.13.0") else (True, 32)
    for found in ranks2.run(bodies.mechanics):
        assert found["exception, torch"] == found["exception, cpcompat"] == "KeyError"
        assert found["left, torch"] == left, "attention patched for good, and the buffer short"
        assert found["left, cpcompat"] == (True, 32)

        assert found["empty, torch"] == ("no error" if TORCH.older_than("2.9.0") else "IndexError")
        assert found["empty, cpcompat"] == "no error"

        assert "cannot resize" in found["grad, torch"]
        assert found["grad, cpcompat"] == ("BufferInvalid", "CP201")

        kind, kept = found["views, torch"]
        assert kind != "no error" or not kept, "two views of one tensor are corrupted"
        assert found["views, cpcompat"] == ("no error", True)
        assert found["base, torch"] is False, "what a view looks at is overwritten"
        assert found["base, cpcompat"] is True

        assert found["nested, torch"] is False, "leaving the inner block takes attention from the outer one"
        assert found["nested, cpcompat"] == (("NestedContext", "CP203"), True)
