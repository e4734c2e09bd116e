"""More than one thing in a process: accelerators, threads, workers of a loader, compiled models."""

from __future__ import annotations

import shutil

import pytest
from installed import RELEASE
from ranks import concurrency_bodies as bodies

from cpcompat.testing import Ranks, run_ranks

ARGUMENT = not RELEASE.has_config


def test_two_accelerators_with_a_model_each(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.two_accelerators, ARGUMENT):
        assert len(found) == 4
        assert max(found.values()) < 1e-5, found


def test_threads_that_enter_at_once(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.two_threads, 200):
        assert found == {"most": 1, "refused": found["refused"], "wrong": [], "sdpa": True, "ended": True}
        assert found["refused"] > 0


def test_attention_in_another_thread_than_the_blocks(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.another_thread):
        assert "[CP301] attention was called in another thread" in found["inside"]
        assert "reward model" in found["inside"]
        assert found["disabled"] is True
        assert found["after"] is True


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_that_start_in_a_block(ranks2: Ranks, method: str) -> None:
    for found in ranks2.run(bodies.loader, method):
        assert found == {"workers": True, "block": True, "restored": True}


@pytest.mark.parametrize("order", ["iioi", "oio"])
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler on CPU"),
            ],
        ),
    ],
)
def test_compiled_models(backend: str, order: str) -> None:
    """What was compiled outside a block is not used inside, nor the other way round."""
    for found in run_ranks(bodies.compiled, 2, backend, order, ARGUMENT, timeout=300):
        assert len(found) == len(order)
        for loss, gradient in found:
            assert loss < 1e-6
            assert gradient < 1e-5
