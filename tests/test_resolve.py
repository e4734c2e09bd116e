"""get_cp_context on the installed accelerate, on real ranks, in every order of events."""

from __future__ import annotations

import types
from unittest import mock

import pytest
from installed import RELEASE
from ranks import resolve_bodies as bodies

from cpcompat import CPError, get_cp_context
from cpcompat.testing import Ranks, run_ranks

HAS_CONFIG = pytest.mark.skipif(not RELEASE.has_config, reason="this accelerate has no ParallelismConfig")
NO_CONFIG = pytest.mark.skipif(RELEASE.has_config, reason="this accelerate has ParallelismConfig")
ENVIRONMENT = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}


@HAS_CONFIG
@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("order", ["nothing", "prepare", "prepare_model"])
def test_context_is_there_whatever_came_before(ranks2: Ranks, order: str, by_environment: bool) -> None:
    env = ENVIRONMENT | {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"} if by_environment else {}
    reports = ranks2.run(bodies.entry, order, by_environment=by_environment, env=env)
    own = order == "prepare" and RELEASE.own_context == "prepare"
    for rank, report in enumerate(reports):
        assert report["before"] is False, "accelerate makes its context late"
        assert report["own"] is own
        assert report["origin"] == ("adopted" if own else "created")
        assert report["layout"] == "acc._cp_context"
        assert (report["size"], report["rank"], report["group_size"]) == (2, rank, 2)
        assert report["mesh_names"] == ("cp",)
        assert report["alive"]
        assert report["same"], "a second call returns the same object"
        assert report["rotate_method"] == report["torch_rotate_method"]
        assert report["hooks"] in (None, {1}), "one mask hook a module"
        if report["origin"] == "created":
            assert (report["inside"], report["outside"]) == (16, 32), "maybe_context_parallel works"
        if order == "prepare_model":
            assert report["later_hooks"] == {1}
            assert report["later_origin"] == ("adopted" if RELEASE.own_context == "prepare" else "created")
            assert report["later_new"] is (RELEASE.own_context == "prepare")
    if not by_environment:
        assert reports[0]["rotate_method"] == "alltoall", "the rotate method of cp_handler"


@NO_CONFIG
@pytest.mark.parametrize("order", ["nothing", "prepare", "prepare_model"])
def test_cp_size_serves_releases_without_a_config(ranks2: Ranks, order: str) -> None:
    for report in ranks2.run(bodies.entry, order, arguments={"cp_size": 2, "rotate_method": "alltoall"}):
        assert report["origin"] == "created"
        assert report["size"] == 2
        assert report["same"]
        assert report["rotate_method"] == report["torch_rotate_method"] == "alltoall"
        assert report["hooks"] in (None, {1})


@HAS_CONFIG
def test_models_prepared_later_get_their_hooks(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.hooks_of_later_models)[0] == {"called": {1}, "entered": {1}, "first": {1}}


@HAS_CONFIG
def test_one_hook_a_module_whoever_came_first(ranks2: Ranks) -> None:
    counts = ranks2.run(bodies.whoever_came_first)[0]
    assert counts == {"accelerate first": {1}, "cpcompat first": {1}, "cpcompat twice": {1}}


@HAS_CONFIG
def test_a_new_object_where_context_or_mesh_changed(ranks2: Ranks) -> None:
    report = ranks2.run(bodies.changed_context)[0]
    assert report == {"origins": ["created", "adopted", "created"], "distinct": 3, "mesh": True}


@HAS_CONFIG
def test_only_a_real_context_is_adopted(ranks2: Ranks) -> None:
    found = ranks2.run(bodies.candidates)[0]
    adopted = {name for name, (origin, _) in found.items() if origin == "adopted"}
    delegated = {name for name, (origin, _) in found.items() if origin == "delegated"}
    assert adopted == {"torch's", "torch's, wrapped twice"}
    assert delegated == {"a foreign function", "a foreign partial"}
    words = {
        "None": "None",
        "a Mock": "a Mock",
        "an entered context manager": "made already",
        "an attention handler": "another kind",
        "a module": "not callable",
        "a partial without mesh": "without a one-dimensional cp mesh",
        "a mesh of size 1": "size 2 or more",
        "a foreign function": "ranks owns context parallelism",
    }
    for name, word in words.items():
        assert word in found[name][1], (name, found[name])


@HAS_CONFIG
def test_a_context_over_another_mesh_is_not_adopted(ranks4: Ranks) -> None:
    for rank, (origin, note, members) in enumerate(ranks4.run(bodies.another_mesh)):
        assert origin == "created"
        assert f"a context over another mesh: ranks [{rank % 2}, {rank % 2 + 2}]" in note
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]


@HAS_CONFIG
def test_every_layout_of_the_table_is_looked_up(ranks2: Ranks) -> None:
    found = ranks2.run(bodies.layouts)[0]
    assert len(found) == 11
    for place, (origin, layout) in found.items():
        assert (origin, layout) == ("adopted", place)


@HAS_CONFIG
def test_foreign_owners_are_delegated_to(ranks2: Ranks) -> None:
    found = ranks2.run(bodies.foreign_owners)[0]
    assert {row["origin"] for row in found.values()} == {"delegated"}
    assert found["own_manager"]["inside"] == "theirs"
    assert found["own_manager"]["length"] == found["axolotl"]["length"] == 8, "nothing sharded by us"
    for silent in ("simpletuner", "habana", "unsloth"):
        assert found[silent]["error"] == "ForeignOwner", "never a fake success"
    assert "simpletuner" in found["simpletuner"]["owner"]
    assert found["habana"]["owner"] == "optimum"


REFUSALS = {
    "no config": ("CPNotRequested", ["parallelism_config: None", "ParallelismConfig(cp_size=2)"]),
    "cp_size 1": ("CPNotRequested", ["cp_size 1"]),
    "sequence parallel": ("SequenceParallel", ["sp_size 2", "Ulysses"]),
    "no mesh": ("CPNotReady", ["no device mesh", "init_process_group() first"]),
    "state reset": ("StaleContext", ["state was reset", "make a new Accelerator"]),
    "a Mock": ("CPNotRequested", ["not asked for"]),
    "no accelerator": ("CPNotRequested", ["not asked for"]),
    "creation": ("CreationFailed", ["could not be made", "verify"]),
    "cp_size differs": ("Contradiction", ["cp_size=4", "says 2"]),
    "cp_size 0": ("Contradiction", ["2 or more"]),
    "rotate_method differs": ("Contradiction", ["'alltoall'", "'allgather'"]),
    "rotate_method unknown": ("Contradiction", ["carousel"]),
    "mesh is none": ("Contradiction", ["DeviceMesh"]),
    "mesh differs": ("Contradiction", ["mesh"]),
}


@HAS_CONFIG
@pytest.mark.parametrize("situation", REFUSALS)
def test_a_refusal_says_what_was_seen_and_what_to_do(ranks2: Ranks, situation: str) -> None:
    kind, words = REFUSALS[situation]
    for report in ranks2.run(bodies.refusal, situation):
        assert report["kind"] == kind
        for word in (*words, "seen:", "do:"):
            assert word in report["text"], report["text"]
        if situation == "creation":
            assert report["cause"] == "AttributeError", "the cause is chained"


class Raising:
    """Every attribute is a getter that fails."""

    def __getattribute__(self, name: str) -> object:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise OSError(f"no {name}")


@pytest.mark.parametrize(
    "stand_in",
    [None, 1, "acc", object(), types.SimpleNamespace(), Raising(), mock.Mock(), mock.MagicMock(spec=dict), int],
)
@pytest.mark.parametrize("arguments", [{}, {"cp_size": 2}])
def test_anything_that_is_no_accelerator_is_a_typed_error(stand_in: object, arguments: dict[str, int]) -> None:
    with pytest.raises(CPError) as seen:
        get_cp_context(stand_in, **arguments)
    assert type(seen.value).__name__ == ("CPNotReady" if arguments else "CPNotRequested")
    assert seen.value.next_step


@HAS_CONFIG
def test_a_size_without_its_switch_is_named(ranks2: Ranks) -> None:
    """accelerate launch --parallelism_config_cp_size 2 alone runs without CP and says nothing."""
    report = ranks2.run(bodies.refusal, "no config", env={"PARALLELISM_CONFIG_CP_SIZE": "2"})[0]
    assert report["kind"] == "CPNotRequested"
    assert "ACCELERATE_USE_PARALLELISM_CONFIG=true beside PARALLELISM_CONFIG_CP_SIZE" in report["text"]


@NO_CONFIG
def test_old_accelerates_say_what_they_need(ranks2: Ranks) -> None:
    asked = ranks2.run(bodies.refusal, "old", env=ENVIRONMENT)[0]
    assert asked["kind"] == "VersionTooOld"
    assert "accelerate>=1.10" in asked["text"]
    silent = ranks2.run(bodies.refusal, "old")[0]
    assert silent["kind"] == "CPNotRequested"
    assert "cp_size=..." in silent["text"]
    uneven = ranks2.run(bodies.refusal, "old: cp_size 3")[0]
    assert uneven["kind"] == "Contradiction"
    assert "2 processes cannot be cut" in uneven["text"]


@HAS_CONFIG
def test_a_destroyed_process_group_is_named() -> None:
    found = run_ranks(bodies.stale, 2, timeout=60)[0]
    assert found.pop("a new accelerator").endswith(" 8")
    assert set(found.values()) == {"StaleContext"}, found


@HAS_CONFIG
def test_no_process_group_yet() -> None:
    text = run_ranks(bodies.without_process_group, 1, timeout=60)[0]
    assert text.startswith("CPNotReady")
    assert "get_cp_context(acc)" in text
