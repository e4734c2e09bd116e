"""The number that counts: loss and every gradient of a tiny Llama under CP equal those without CP."""

from __future__ import annotations

import pytest
from installed import FSDP2_PROBLEM, RELEASE
from ranks.equality import llama_equality

from cpcompat.testing import Ranks

METHODS = ("allgather", "alltoall")
WRAPPERS = ("DDP", pytest.param("FSDP2", marks=pytest.mark.skipif(bool(FSDP2_PROBLEM), reason=FSDP2_PROBLEM)))


def check(results: list[dict]) -> None:
    origin = "adopted" if RELEASE.own_context == "prepare" else "created"
    for result in results:
        assert result["origin"] == origin
        assert result["loss"] < 1e-6
        assert result["gradient"] < 1e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_cp_2(ranks2: Ranks, wrapper: str, method: str) -> None:
    argument = not RELEASE.has_config
    check(ranks2.run(llama_equality, 2, fsdp2=wrapper == "FSDP2", rotate_method=method, argument=argument))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_cp_4(ranks4: Ranks, wrapper: str, method: str) -> None:
    argument = not RELEASE.has_config
    check(ranks4.run(llama_equality, 4, fsdp2=wrapper == "FSDP2", rotate_method=method, argument=argument))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_data_parallel_groups_of_cp_2(ranks4: Ranks, wrapper: str) -> None:
    argument = not RELEASE.has_config
    check(
        ranks4.run(llama_equality, 2, fsdp2=wrapper == "FSDP2", rotate_method="alltoall", argument=argument, dp_size=2)
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_activation_checkpointing(ranks2: Ranks, kind: str, method: str) -> None:
    argument = not RELEASE.has_config
    check(ranks2.run(llama_equality, 2, fsdp2=False, rotate_method=method, argument=argument, checkpoint=kind))
