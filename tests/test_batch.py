"""From a batch to a loss: whole batches are prepared rightly, and a loop under CP gives the numbers of one without."""

from __future__ import annotations

import re
from collections import UserDict
from pathlib import Path

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from ranks import batch_bodies as bodies

from cpcompat import buffers
from cpcompat.batch import Whole, prepare, trim
from cpcompat.errors import BatchInvalid, BatchUnsupported

IGNORE = -100
GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
HAS_CONFIG = Version(accelerate.__version__) >= Version("1.10")
MODELS = ("llama", "gpt2", "qwen3", "mixtral")
SETUPS = {"cp 2": (2, 1), "cp 4": (4, 1), "dp 2 x cp 2": (2, 2)}
# accelerate 1.9 and older have no ParallelismConfig, without which their FSDP2 knows no cp dimension.
WRAPPERS = ("DDP", "FSDP2") if HAS_CONFIG else ("DDP",)


# --- loops on real ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("model", MODELS)
def test_a_loop_equals_the_same_loop_without_cp(request, model, setup, wrapper):
    cp_size, dp_size = SETUPS[setup]
    ranks = request.getfixturevalue(f"ranks{cp_size * dp_size}")
    results = ranks.run(bodies.loop, model, cp_size, dp_size, fsdp2=wrapper == "FSDP2")
    for result in results:
        assert result["loss"] < 1e-6
        assert result["gradient"] < 1e-5
        assert result["logits"] < 1e-5
        assert result["values"] == results[0]["values"]
        assert result["wrapper"].startswith("FSDP" if wrapper == "FSDP2" else "DistributedDataParallel")
    # The step was what it claims to be: one shard without any label, and batches of unequal counts.
    labelled = [result["labelled"] for result in results]
    assert labelled[-1][0]
    assert not labelled[cp_size - 1][1]
    assert len({sum(counts) for counts in zip(*labelled, strict=True)}) == 2


def test_the_guide_runs(ranks2):
    text = GUIDE.read_text(encoding="utf-8")
    blocks = [(text[: m.start(1)].count("\n"), m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)]
    assert len(blocks) == text.count("```python") > 8
    assert ranks2.run(bodies.guide, blocks, str(GUIDE)) == [len(blocks)] * 2


def test_embeddings_keep_their_graph(ranks2):
    for result in ranks2.run(bodies.embeddings):
        assert result["gradient"] < 1e-5


def test_the_callers_batch_stays_as_it_is(ranks2):
    for result in ranks2.run(bodies.untouched):
        assert result.pop("inside")
        assert result.pop("after")
        assert result.pop("after an error")
        assert result.pop("rest")
        assert result.pop("keys") == ["extra", "input_ids", "name", "position_ids", "rows", "shift_labels"]
        rows = [[*range(13), 0, 0, 0], [*range(20, 33), 0, 0, 0]]
        assert result["joined"] == {
            "input_ids": rows,
            "shift_labels": [[*row[1:13], *[IGNORE] * 4] for row in rows],
            "extra": [[*range(1, 14), 0, 0, 0], [*range(21, 34), 0, 0, 0]],
            "position_ids": [[*range(16)]] * 2,
        }


def test_a_batch_that_one_rank_refuses_is_refused_by_all(ranks2):
    other, refuser = ranks2.run(bodies.refused_on_one_rank)
    assert refuser.startswith("BatchUnsupported: [CP206] attention_mask says that rows are padded on the left")
    assert other.startswith("RanksDiffer: [CP204] cp rank 1 cannot enter the block")
    assert "padded on the left" in other


@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"])
def test_reduce_loss_is_the_global_mean(request, ranks):
    for result in request.getfixturevalue(ranks).run(bodies.losses):
        for name, (got, expected) in result["numbers"].items():
            assert got == pytest.approx(expected, rel=1e-6), name
        assert result["two elements"].startswith("BatchInvalid: [CP205] loss_sum is the sum over this rank's tokens")


def test_accumulation_weighs_tokens_not_batches(ranks2):
    for result in ranks2.run(bodies.accumulated):
        assert len(result) == 4
        for name, (got, expected) in result.items():
            assert got == pytest.approx(expected, rel=1e-6), name


def test_a_count_that_cannot_be_is_named(ranks2):
    for right, whole, one_too_many in ranks2.run(bodies.miscounted):
        assert right == []
        for said, tokens in ((whole, 28), (one_too_many, 16)):
            (text,) = said
            assert text.startswith("LossWarning batch_bodies.py [CP207] reduce_loss was given more tokens")
            assert f"adds up to {tokens} over all ranks, and 14 tokens" in text


def test_gather_gives_each_sample_once_in_order_without_padding(ranks2):
    for result in ranks2.run(bodies.gathers):
        assert result.pop("stranger") == (
            "BatchInvalid: [CP205] the tensor has 8 tokens over all ranks, and the latest batch has 12"
        )
        assert result == dict.fromkeys(("values", "dim -2", "gradient", "bool", "plain"), True)


def test_disabled_is_ordinary_attention_for_a_while(ranks2):
    for result in ranks2.run(bodies.switched_off):
        for name in ("another block", "another context"):
            assert result.pop(name) == "NestedContext"
        assert result.pop("a block in it") == "NestedContext"
        assert set(result.values()) == {True}, result


def test_broadcast_batch_sends_everything(ranks2):
    first, other = ranks2.run(bodies.sent)
    reasons = {
        "no mapping": "a batch is a mapping of tensors, or None where the loader has ended",
        "no pickle": "f cannot be sent to the other ranks",
        "sparse": "s is not a plain dense tensor",
    }
    for name, reason in reasons.items():
        assert first.pop(name) == f"BatchInvalid: [CP205] {reason}"
        assert other.pop(name) == "RanksDiffer: [CP204] cp rank 0 could not send its batch"
    for result in (first, other):
        assert result.pop("names") == ["a", "b"]
        assert result.pop("none") is None
        assert result.pop("end") is None
        assert set(result.values()) == {True}, result


def test_padding_is_not_shown_to_attention_that_is_not_causal(ranks2):
    for full, padded in ranks2.run(bodies.padding_and_no_causality):
        assert full == ""
        assert padded == (
            "AttentionUnsupported: [CP301] attention that is not causal sees the padded tokens of this batch"
        )


# --- whole batches ------------------------------------------------------------------------------------------------------


def joined(whole: Whole, size: int) -> dict[str, torch.Tensor]:
    """Cut for every rank, as the engine does, and joined again."""
    shards = []
    for rank in range(size):
        cut = {n: buffers.head_tail(t, whole.dims[n], rank, size) for n, t in whole.buffers().items()}
        shards.append(whole.local(cut, rank, size))
    return {n: buffers.in_global_order([s[n] for s in shards], whole.dims[n]) for n in whole.tensors}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(2, 5), st.data())
def test_every_token_and_label_is_on_one_rank(rows, length, size, data):
    ids = torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(length))
    labels = ids.clone()
    real = torch.tensor(data.draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows)))
    mask = torch.arange(length) < real[:, None]
    labels[~mask] = IGNORE
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask.long(), "temperature": torch.tensor(1.0)}
    before = {name: value.clone() for name, value in batch.items()}
    whole = prepare(batch, size, 7, IGNORE)
    got = joined(whole, size)

    assert whole.padded % (2 * size) == 0
    assert 0 <= whole.padded - length < 2 * size
    assert torch.equal(trim(got["input_ids"], 1, length, whole.padded), ids)
    assert (got["input_ids"][:, length:] == 7).all()
    assert torch.equal(got["position_ids"], torch.arange(whole.padded).expand(rows, -1))
    assert torch.equal(got["shift_labels"][:, : length - 1], labels[:, 1:])
    assert (got["shift_labels"][:, length - 1 :] == IGNORE).all()
    assert whole.hides == bool((~mask).any() or whole.padded != length)
    assert whole.rest == {"temperature": batch["temperature"]}
    assert all(torch.equal(batch[name], value) for name, value in before.items())
    assert set(whole.tensors) == {"input_ids", "shift_labels", "position_ids"}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_a_mask_is_dropped_only_where_it_says_padding_on_the_right(rows):
    mask = torch.tensor(rows)
    right = all(row == sorted(row, reverse=True) for row in rows)
    pairs = torch.ones(5, 5, dtype=torch.bool).tril() & mask[:, None, None]
    forms = (mask, mask.long(), mask.float(), pairs, pairs[:, 0], torch.zeros(pairs.shape).masked_fill(~pairs, -1e9))
    for form in forms:
        batch = {"input_ids": torch.zeros(mask.shape, dtype=torch.long), "attention_mask": form}
        if right:
            whole = prepare(batch, 2, None, IGNORE)
            assert set(whole.tensors) == {"input_ids", "position_ids"}
        else:
            with pytest.raises(BatchUnsupported, match=r"attention_mask (says that rows are padded on the left|hides)"):
                prepare(batch, 2, None, IGNORE)


def ids(rows=2, length=8):
    return torch.ones(rows, length, dtype=torch.long)


def causal(length=8):
    return torch.ones(length, length, dtype=torch.bool).tril()


TWO_HEADS = torch.stack((causal(), causal() & (torch.arange(8) < 5)))[None]

REFUSED = {
    "packed positions": ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}, "start again within a row"),
    "samples of one token": ({"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0]])}, "start again within a row"),
    "jumping positions": ({"position_ids": torch.tensor([[0, 1, 2, 3, 9, 10, 11, 12]])}, "jump within a row"),
    "packed rotary positions": (
        {"position_ids": torch.tensor([0, 1, 1, 1, 0, 1, 2, 3]).expand(3, 2, 8)},
        "start again",
    ),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 3, 8])}, "several samples are packed"),
    "cu_seq_lens_q": ({"cu_seq_lens_q": torch.tensor([0, 3, 8])}, "several samples are packed"),
    "seq_idx": ({"seq_idx": ids()}, "several samples are packed"),
    "numbered samples": ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 0, 0]] * 2)}, "other values than 0 and 1"),
    "window": ({"attention_mask": (causal() & causal().T.roll(-2, 0))[None, None]}, "says more than causal"),
    "bidirectional": ({"attention_mask": torch.ones(2, 1, 8, 8)}, "says more than causal"),
    "soft mask": ({"attention_mask": torch.where(causal(), 0.0, -3.0)[None, None]}, "says more than causal"),
    "mask of heads": ({"attention_mask": TWO_HEADS}, "says more than causal"),
    "mask object": ({"attention_mask": {"full_attention": causal()}}, "is not a tensor"),
    "bias": ({"position_bias": torch.zeros(2, 8, 8)}, "pairs of tokens"),
    "pixels": ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "holds pixels or audio"),
    "audio": ({"input_features": torch.zeros(1, 80, 30)}, "holds pixels or audio"),
    "encoder": ({"encoder_hidden_states": torch.zeros(2, 8, 4)}, "encoder"),
    "decoder": ({"decoder_input_ids": ids()}, "encoder"),
    "cache": ({"past_key_values": object()}, "cache of keys"),
}

MALFORMED = {
    "row labels": ({"labels": torch.ones(2, dtype=torch.long)}, "labels does not go with the 8 tokens"),
    "short labels": ({"labels": ids(length=7)}, "labels does not go with the 8 tokens"),
    "labels of a list": ({"labels": [[1] * 8] * 2}, "labels is not a tensor"),
    "short positions": ({"position_ids": torch.arange(7)[None]}, "position_ids does not go with the 8 tokens"),
    "short mask": ({"attention_mask": ids(length=7)}, "attention_mask does not go with the 8 tokens"),
    "unclear dimension": ({"mixture": torch.zeros(3, 8)}, "but not where a value for each token has it"),
    "one row without batch": ({"weights": torch.zeros(8)}, "but not where a value for each token has it"),
    "flat ids": ({"input_ids": torch.ones(8, dtype=torch.long)}, r"input_ids is \(batch, length\)"),
    "no tokens": ({"input_ids": ids(length=0)}, "at least one token"),
    "no ids": ({"input_ids": None}, "neither input_ids nor inputs_embeds"),
    "labelled padding": (
        {"labels": ids(), "attention_mask": torch.tensor([[1] * 6 + [0] * 2, [1] * 8])},
        "padded tokens have labels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cp_cannot_express_is_refused(case):
    extra, reason = REFUSED[case]
    with pytest.raises(BatchUnsupported, match=reason) as caught:
        prepare({"input_ids": ids(), **extra}, 2, None, IGNORE)
    assert caught.value.name in extra
    assert caught.value.next_step


@pytest.mark.parametrize("case", MALFORMED)
def test_what_does_not_go_together_is_named(case):
    extra, reason = MALFORMED[case]
    with pytest.raises(BatchInvalid, match=reason) as caught:
        prepare({"input_ids": ids(), **extra}, 2, None, IGNORE)
    assert not isinstance(caught.value, BatchUnsupported)


@pytest.mark.parametrize("batch", [[1], None, ids(), {0: ids()}])
def test_a_batch_is_a_mapping(batch):
    with pytest.raises(BatchInvalid, match="a batch is a mapping of tensors by name"):
        prepare(batch, 2, None, IGNORE)


def test_any_mapping_will_do():
    from transformers import BatchEncoding

    for kind in (dict, UserDict, BatchEncoding):
        assert set(prepare(kind({"input_ids": ids()}), 2, None, IGNORE).tensors) == {"input_ids", "position_ids"}


def test_a_causal_mask_without_padding_hides_nothing():
    for mask in (
        causal()[None, None],
        torch.where(causal(), 0.0, float("-inf"))[None],
        causal().long().expand(2, 3, 8, 8),
    ):
        assert not prepare({"input_ids": ids(), "attention_mask": mask}, 2, None, IGNORE).hides


def test_the_sequence_is_found_by_name_and_by_size():
    rotary = torch.arange(6).expand(3, 2, 6)
    batch = {
        "input_ids": ids(length=6),
        "position_ids": rotary,
        "cache_position": torch.arange(6),
        "features": torch.ones(2, 6, 6),
        "shared": torch.ones(1, 6),
        "axes": torch.ones(4, 2, 6),
        "rows": torch.ones(2, 3),
        "flag": True,
        "nothing": None,
    }
    whole = prepare(batch, 2, None, IGNORE)
    assert whole.dims == {
        "input_ids": 1, "position_ids": 2, "cache_position": 0, "features": 1, "shared": 1, "axes": 2
    }  # fmt: skip
    assert set(whole.rest) == {"rows", "flag", "nothing"}
    assert torch.equal(whole.tensors["position_ids"], torch.arange(8).expand(3, 2, 8))
    assert torch.equal(whole.tensors["cache_position"], torch.arange(8))
    assert not whole.tensors["axes"][..., 6:].any()
    assert whole.tensors["features"].shape == (2, 8, 6)


def test_as_many_rows_as_tokens_is_no_riddle():
    batch = {"input_ids": ids(4, 4), "weights": torch.ones(4), "scores": torch.ones(4, 3)}
    whole = prepare(batch, 2, None, IGNORE)
    assert set(whole.tensors) == {"input_ids", "position_ids"}
    assert set(whole.rest) == {"weights", "scores"}


def test_labels_that_are_shifted_already_are_taken_as_they_are():
    aligned = torch.arange(16).reshape(2, 8)
    for labels in ({}, {"labels": ids()}):
        whole = prepare({"input_ids": ids(), "shift_labels": aligned, **labels}, 2, None, IGNORE)
        assert torch.equal(whole.tensors["shift_labels"], aligned)
        assert "labels" not in {**whole.tensors, **whole.rest}


def test_missing_values_are_made_or_left_out():
    batch = {"input_ids": ids(), "labels": None, "attention_mask": None, "position_ids": None, "inputs_embeds": None}
    whole = prepare(batch, 2, None, IGNORE)
    assert set(whole.tensors) == {"input_ids", "position_ids"}
    assert whole.rest == {"inputs_embeds": None}


def test_positions_of_padded_tokens_may_be_anything():
    positions = torch.tensor([[0, 1, 2, 3, 4, 1, 1, 1]])
    mask = (torch.arange(8) < 5)[None].expand(2, 8)
    assert prepare({"input_ids": ids(), "position_ids": positions, "attention_mask": mask}, 2, None, IGNORE).hides


def test_tensors_of_inference_mode_are_copied():
    with torch.inference_mode():
        tensor = ids()
    (copy, _) = prepare({"input_ids": tensor}, 2, None, IGNORE).buffers().values()
    assert not copy.is_inference()


def test_embeddings_without_padding_share_storage_and_with_a_graph_keep_it():
    plain, graph = torch.ones(2, 8, 3), torch.ones(2, 7, 3, requires_grad=True)
    assert prepare({"inputs_embeds": plain}, 2, None, IGNORE).buffers()["inputs_embeds"].data_ptr() == plain.data_ptr()
    whole = prepare({"inputs_embeds": graph}, 2, None, IGNORE)
    assert not whole.buffers()["inputs_embeds"].requires_grad
    joined(whole, 2)["inputs_embeds"].sum().backward()
    assert torch.equal(graph.grad, torch.ones(2, 7, 3))
