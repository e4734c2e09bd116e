"""CPU ring attention, forward and backward, against plain attention over the whole sequence."""

from __future__ import annotations

import pytest
from ranks import ring_bodies as bodies

from cpcompat.testing import Ranks

LIMITS = {"float32": 3e-6, "float64": 1e-13}


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(f"ranks{request.param}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_numbers(ranks: Ranks, method: str, dtype: str, causal: bool) -> None:
    for found in ranks.run(bodies.compare, method, dtype, causal):
        if dtype == "bfloat16":
            # Each rank's part of a gradient is rounded to bfloat16 once, where plain attention rounds only the sum.
            assert found["worst"] < 2.5 * found["plain"]
        else:
            assert found["worst"] < LIMITS[dtype]


@pytest.mark.parametrize("body", [bodies.three_dimensions, bodies.backward_after_the_block, bodies.only_some_gradients])
def test_special_calls(ranks: Ranks, body) -> None:
    assert max(ranks.run(body)) < 2e-6
