"""Models: those that CP cannot express are refused on every accelerate; every attention module drops its mask."""

from __future__ import annotations

import pytest
from installed import RELEASE
from ranks import hook_bodies as bodies

from cpcompat.testing import Ranks

ARGUMENT = not RELEASE.has_config

REFUSED = {
    "sliding window": ("mistral", {"sliding_window": 16}, "sliding_attention", 16),
    "a window in some layers": (
        "gemma3_text",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "sliding_attention",
        8,
    ),
    "chunks": (
        "llama",
        {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16},
        "chunked_attention",
        16,
    ),
    "linear attention": ("llama", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cp_cannot_express(ranks2: Ranks, name: str) -> None:
    kind, fields, layer_type, window = REFUSED[name]
    for found in ranks2.run(bodies.refused, kind, fields, 64, ARGUMENT):
        assert found["error"] == "ModelUnsupported", found
        assert (found["layer_type"], found["window"]) == (layer_type, window)
        assert layer_type in found["text"]
        assert found["length"] == 64, "nothing was touched"


def test_a_window_as_long_as_the_sequence_is_harmless(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.refused, "mistral", {"sliding_window": 64}, 64, ARGUMENT):
        assert found["error"] is None
        assert found["loss"] > 0


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_attention_modules_of_another_name_get_the_hook(ranks2: Ranks, kind: str) -> None:
    for found in ranks2.run(bodies.other_names, kind, ARGUMENT):
        assert len(found["hooked"]) == 2
        assert not any(name.endswith("self_attn") for name in found["hooked"])
        assert found["loss"] < 1e-6
        assert found["gradient"] < 1e-5


def test_modules_that_cannot_be_hooked_are_named(ranks2: Ranks) -> None:
    for texts in ranks2.run(bodies.unknown_modules, ARGUMENT):
        assert len(texts) == 1
        assert "seen: 1" in texts[0]
        assert "pass no attention mask" in texts[0]


def test_outside_a_block_a_mask_counts(ranks2: Ranks) -> None:
    assert max(ranks2.run(bodies.masks_outside_a_block, ARGUMENT)) == 0
