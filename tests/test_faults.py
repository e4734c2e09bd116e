"""Faults on real ranks: survivors get an error that names the cause in time, nothing is left broken, training goes on.

What another file shows already is not repeated: exceptions of every kind inside the block, refused buffers and the first
entry's agreement (test_context.py), backward after the block (test_context.py, test_failure_modes.py number 11), a
destroyed group without an open block (test_resolve.py), ranks that fail under the launcher (test_launch.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import RELEASE
from ranks import fault_bodies as bodies

from cpcompat.codes import CODES
from cpcompat.errors import RankFailed
from cpcompat.testing import Ranks, run_ranks

TIMEOUT = 2.0
METHODS = ("allgather", "alltoall")


@pytest.mark.parametrize(
    ("kind", "first", "method"),
    [
        ("raises", "ValueError: mine", "allgather"),
        ("refused", "LengthInvalid: [CP202]", "alltoall"),
        ("a buffer that cannot be cut", "MemoryError: no memory for the second buffer", "allgather"),
        ("hangs", "", "alltoall"),
    ],
)
def test_a_fault_on_one_rank(kind: str, first: str, method: str) -> None:
    reports = run_ranks(bodies.on_one_rank, 2, kind, method, timeout=60, env={"CP_TIMEOUT": str(TIMEOUT)})
    waiting, faulty = reports
    assert f"[CP504] {CODES['CP504'].title}" in waiting["said"], waiting["said"]
    assert "cp rank 0 was waiting for cp rank 1 (global rank 1)" in waiting["said"]
    assert TIMEOUT * 0.9 < waiting["seconds"] < TIMEOUT + 5
    assert faulty["said"].startswith(first), faulty["said"]
    for report in reports:
        assert report["buffers"]
        assert report["sdpa"]
        assert report["goes on"], "over a new group"


def test_a_killed_rank_is_an_error_of_the_others_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(bodies.killed, 2, str(tmp_path), timeout=60)
    report = json.loads((tmp_path / "survivor.json").read_text())
    assert f"[CP503] {CODES['CP503'].title}" in report["said"], report["said"]
    assert "waiting for cp rank 1" in report["said"]
    assert report["seconds"] < 10, "and not after the group's 30 s"
    assert report["buffers"]
    assert report["sdpa"]


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_skips_a_batch_alone_gives_no_wrong_numbers(method: str) -> None:
    """Rank 1 catches its out-of-memory error and goes on; its next keys must not be taken for those of this batch."""
    silent, _ = run_ranks(bodies.gave_up_and_went_on, 2, False, method, timeout=60)
    assert silent["said"] == "no error"
    assert silent["wrong"] > 0.1, "what unnumbered messages give, without a word"
    for report in run_ranks(bodies.gave_up_and_went_on, 2, True, method, timeout=60):
        assert "Timed out" in report["said"] or "closed" in report["said"], report["said"]
        assert "was waiting for cp rank" in report["said"]


def test_out_of_memory(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.out_of_memory):
        for where in ("inside", "entering"):
            assert "can't allocate memory" in found[where]["said"] or "not enough memory" in found[where]["said"]
            assert found[where]["buffers"]
            assert found[where]["sdpa"]
            assert found[where]["goes on"]


@pytest.mark.parametrize("when", ["made again inside", "made again after"])
def test_a_group_that_is_destroyed_inside_a_block(when: str) -> None:
    for found in run_ranks(bodies.group_destroyed, 2, when, timeout=60):
        assert "StaleContext: [CP104]" in found["attention"], found["attention"]
        assert found["buffers"]
        assert found["sdpa"]
        assert found["old context"] == "StaleContext"
        assert found["goes on"]


def test_blocks_that_are_never_closed(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.dropped):
        assert found["inside"] == 8
        assert found["after"] == (16, True)
        assert "NestedContext: [CP203]" in found["forgotten"]
        assert found["goes on"]


def test_an_interrupted_prepare(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.interrupted_prepare, not RELEASE.has_config):
        assert found["interrupted"]
        assert found["gradient"] < 1e-5


@pytest.mark.parametrize("phase", ["entering", "leaving"])
def test_an_interruption_anywhere(ranks2: Ranks, phase: str, record_property: Callable[[str, object], None]) -> None:
    """Ctrl-C at each place at which the interpreter may act on it, one after the other."""
    for found in ranks2.run(bodies.interrupted, phase):
        record_property("interruptions", found["tried"])
        assert found["broken"] == []
        assert found["tried"] > 10
        assert found["goes on"]


@pytest.mark.parametrize("steps", [100, pytest.param(2000, marks=pytest.mark.nightly)])
def test_training_survives(ranks2: Ranks, steps: int, record_property: Callable[[str, object], None]) -> None:
    """Weights after exceptions, thrown in on all ranks at once, are those of a run without these steps, bit for bit."""
    for found in ranks2.run(bodies.survive, steps, 0.2, timeout=120 + steps):
        assert found["places"] == sorted(bodies.PLACES)
        assert found["thrown"] == found["caught"] > steps / 10
        record_property("steps", steps)
        record_property("exceptions thrown in", found["thrown"])
        assert found["moved"]
        assert found["equal"]
