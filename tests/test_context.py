"""The engine on real ranks: shard, attend, restore, refuse."""

from __future__ import annotations

import pytest
from ranks import context_bodies as bodies

from cpcompat.testing import Ranks


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(f"ranks{request.param}")


def test_shards_are_torchs_bit_for_bit(ranks: Ranks) -> None:
    assert min(ranks.run(bodies.shards_are_torchs, 60)) >= 60


def test_tensors_that_share_storage(ranks: Ranks) -> None:
    ranks.run(bodies.aliases)
    assert all(ranks.run(bodies.torch_corrupts_aliases)), "torch has been mended; say so in the table"


@pytest.mark.parametrize("body", [bodies.restoring, bodies.exceptions, bodies.no_buffers, bodies.global_order])
def test_contract(ranks: Ranks, body) -> None:
    """Each body asserts on its rank."""
    assert ranks.run(body) == [None] * ranks.nproc


BAD = {
    "length": ("BufferInvalid", "another sequence length than buffer 0"),
    "multiple": ("LengthInvalid", "pad the sequence to 20, the next multiple of 4"),
    "zero": ("LengthInvalid", "pad the sequence to 4"),
    "dims": ("BufferInvalid", "2 buffers, 1 dims"),
    "dim": ("BufferInvalid", "no dimension 2"),
    "dim kind": ("BufferInvalid", "no dimension '1'"),
    "scalar": ("BufferInvalid", "no dimension 0"),
    "grad": ("BufferInvalid", "buffer 1 requires grad"),
    "grad view": ("BufferInvalid", "buffer 1 requires grad"),
    "device": ("BufferInvalid", "meta and cpu"),
    "inference": ("BufferInvalid", "inference tensor"),
    "no tensor": ("BufferInvalid", "buffer 1 is not a tensor"),
    "sparse": ("BufferInvalid", "not a dense tensor"),
    "wrapper": ("BufferInvalid", "full_tensor()"),
    "subset": ("BufferInvalid", "not among the buffers"),
    "twice": ("BufferInvalid", "same tensor as buffer 0"),
}


def test_bad_buffers_are_refused_by_name_and_untouched(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.bad_buffers):
        assert found.keys() == BAD.keys()
        for name, (kind, words) in BAD.items():
            assert found[name][0] == kind, (name, found[name])
            assert words in found[name][1], found[name][1]
            assert "do:" in found[name][1]


def test_a_nested_block_is_refused(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.nested) == [("NestedContext",) * 3] * 2


def test_different_batches_are_an_error_on_every_rank(ranks2: Ranks) -> None:
    always = ranks2.run(bodies.different_buffers, "always")
    by_variable = ranks2.run(bodies.different_buffers, "", False, env={"CPCOMPAT_FINGERPRINT": "always"})
    for outcome in always + by_variable:
        assert outcome["errors"] == [None, "RanksDiffer", "RanksDiffer"]
        assert outcome["buffer"] == 1
        assert "buffer 1" in outcome["text"]
        assert "rank 0: (1, 16)" in outcome["text"]
        assert "set_seed" in outcome["text"]


def test_the_fingerprint_is_taken_when_asked_for(ranks2: Ranks) -> None:
    for when in ("first", "never"):
        for outcome in ranks2.run(bodies.different_buffers, when):
            assert outcome["errors"] == [None, None, None], "only the first entry was equal, and only it is compared"
    assert ranks2.run(bodies.first_entry_differs) == [("RanksDiffer", "LengthInvalid"), ("RanksDiffer", "RanksDiffer")]


def test_attention_that_was_not_seen_is_warned_of(ranks2: Ranks) -> None:
    for seen in ranks2.run(bodies.unseen_attention):
        assert seen["kinds"] == ["AttentionWarning"]
        assert seen["file"] == "context_bodies.py"
        assert 'attn_implementation="sdpa"' in seen["text"]
        assert seen["quiet"] == 0


ATTENTION = {
    "mask": "cannot apply one",
    "dropout": "attention_dropout to 0",
    "cross": "cross-attention",
    "cached step": "use_cache=False",
    "other sequence": "attention over 6 tokens",
    "heads": "2 query heads do not go with 1",
    "uneven heads": "3 query heads do not go with 2",
    "batches": "does not broadcast",
    "odd": "odd number",
}


def test_attention_calls_that_cp_cannot_compute(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.attention_refusals):
        assert found.keys() == ATTENTION.keys()
        for name, words in ATTENTION.items():
            assert found[name][0] == "AttentionUnsupported"
            assert words in found[name][1], found[name][1]


def test_torchs_own_attention_is_switched_on_and_off(ranks2: Ranks) -> None:
    """What of the accelerators' path needs none; the numbers of it are in test_gpu.py."""
    for report in ranks2.run(bodies.torchs_attention):
        assert report["patched"]
        assert report["restored"]
        assert report["restored after an exception"]
        assert report["a stranger in SDPA's place"] == "CreationFailed"
        assert report["inside"] == 8
        assert report["torch says"], "torch has no CP attention for the CPU kernel"
        assert report["after"] == (16, True)
        assert "causal only" in report["not causal"]


def test_backward_after_the_block_fails_loudly(ranks2: Ranks) -> None:
    for text in ranks2.run(bodies.backward_after_the_block):
        assert "modified by an inplace operation" in text
