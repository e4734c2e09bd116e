"""The loop on real ranks, by the test kit and the pytest plugin of the copy that the library carries."""

import importlib.util
import os

import longtail
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from longtail._vendor import cp_shim
from longtail._vendor.cp_shim.testing import assert_cp_ready, assert_equals_without_cp, cpu_parallelism_config


def make(cp_size):
    os.environ["ACCELERATE_ALLOW_CP_STANDALONE"] = "true"  # accelerate wants FSDP2 beside CP; a small model needs none
    torch.manual_seed(0)
    config = cpu_parallelism_config(cp_size) if cp_size > 1 else None
    return Accelerator(cpu=True, parallelism_config=config), longtail.Model()


def batches():
    generator = torch.Generator().manual_seed(1)
    for length in (48, 61):  # the second is no multiple of anything
        ids = torch.randint(64, (2, length), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


def run(cp_size):
    acc, model = make(cp_size)
    losses = longtail.train(acc, model, batches())
    if cp_size > 1:
        assert_cp_ready(acc)
    return {"losses": losses, "weights": dict(model.named_parameters())}


def check_where_we_are():
    """In an environment without cpcompat."""
    assert importlib.util.find_spec("cpcompat") is None
    assert "site-packages" in cp_shim.__file__


def check_equal_without_cp():
    assert_equals_without_cp(run, cp_size=2)


@pytest.mark.cp(nproc=2)
def check_every_rank_reports_the_loss_of_the_whole_batch():
    losses = torch.tensor(run(2)["losses"])
    both = [torch.empty_like(losses) for _ in range(2)]
    dist.all_gather(both, losses)
    assert torch.equal(*both)


@pytest.mark.cp(nproc=2)
def check_errors_are_the_copys_own():
    acc, _ = make(2)
    cp = cp_shim.get_cp_context(acc)
    with pytest.raises(cp_shim.LengthInvalid, match="CP202"):
        with cp(buffers=[torch.zeros(1, 7)], buffer_seq_dims=[1]):
            pass
