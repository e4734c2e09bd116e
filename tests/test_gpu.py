"""The accelerators' path: torch's own CP attention under the engine. Runs where two GPUs are found."""

from __future__ import annotations

import pytest
import torch
from ranks import gpu_bodies as bodies

from cpcompat.testing import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, and there are fewer here"),
]


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_numbers_on_gpus(method: str) -> None:
    with Ranks(2, backend="nccl", timeout=120) as ranks:
        for found in ranks.run(bodies.attention, method):
            assert found["forward"] < 1e-5
            assert found["backward"] < 1e-4
