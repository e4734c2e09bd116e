"""The testing kit: accelerate on CPU with nothing faked."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import accelerate
import pytest
import torch
from packaging.version import Version
from ranks import testing_bodies as bodies

from cpcompat.errors import RankFailed
from cpcompat.testing import (
    Ranks,
    assert_equals_without_cp,
    cpu_parallelism_config,
    run_ranks,
    tiny_llama,
)

needs_config = pytest.mark.skipif(
    Version(accelerate.__version__) < Version("1.10"), reason="this accelerate has no ParallelismConfig"
)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


@needs_config
def test_the_config_is_accelerates_own_and_travels():
    from accelerate import ParallelismConfig

    config = cpu_parallelism_config(2, dp_shard_size=3)
    assert isinstance(config, ParallelismConfig)
    assert (config.cp_size, config.dp_shard_size) == (2, 3)
    assert config.cp_handler is not None
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


@needs_config
def test_the_config_is_read_by_a_process_that_has_not_made_one():
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).cp_size)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(cpu_parallelism_config(2)), env=env, capture_output=True
    )
    assert done.stdout.strip() == b"2", done.stderr


@needs_config
def test_accelerate_takes_the_config_on_cpu(ranks):
    assert ranks.run(bodies.on_cpu) == [({"cp": 2}, "cpu")] * 2


@needs_config
def test_accelerates_other_checks_stay():
    with pytest.raises(RankFailed, match=r"total_size \(2\) does not match num_processes \(4\)"):
        run_ranks(bodies.on_cpu, 4)


@needs_config
def test_fsdp2_on_cpu(ranks):
    for result in ranks.run(bodies.fsdp2):
        assert result.pop("worst") < 1e-6
        assert result == {"fsdp2": True, "layers": [True, True], "sharded": True}


def test_tiny_llama_is_the_same_everywhere_and_draws_nothing(ranks):
    state = torch.get_rng_state()
    model = tiny_llama()
    assert torch.equal(torch.get_rng_state(), state)
    total = torch.cat([p.detach().flatten() for p in model.parameters()]).sum().item()
    assert [result[0] for result in ranks.run(bodies.weights)] == pytest.approx([total] * 2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (4, 2, 2)


def test_tiny_llama_takes_other_fields():
    model = tiny_llama(num_hidden_layers=1, attn_implementation="eager", seed=1)
    assert len(model.model.layers) == 1
    assert model.config._attn_implementation == "eager"
    assert not torch.equal(model.lm_head.weight, tiny_llama(num_hidden_layers=1).lm_head.weight)


@needs_config
def test_ready_where_a_context_was_made(ranks):
    assert set(ranks.run(bodies.ready, repair=True)) == {"created"}


@needs_config
def test_ready_where_patch_will_make_one(ranks):
    assert ranks.run(bodies.ready_by_patch) == ["created"] * 2


@needs_config
def test_ready_says_what_accelerate_left_out(ranks):
    """1.12.0 makes no context; the other releases do."""
    makes_none = Version(accelerate.__version__).release[:2] == (1, 12)
    for verdict in ranks.run(bodies.ready):
        if makes_none:
            assert "cp size 2" in verdict
            assert "no context stood on the accelerator" in verdict
        else:
            assert verdict == "adopted"


@needs_config
def test_ready_where_nobody_asked_for_cp(ranks):
    for verdict in ranks.run(bodies.ready, cp_size=1):
        assert verdict.endswith("| CPNotRequested")
        assert "CP101" in verdict


@needs_config
def test_equality_of_a_right_loop():
    assert_equals_without_cp(bodies.train)


@needs_config
@pytest.mark.parametrize(
    "fault, words",
    [
        ("no context", "no module ran inside a context-parallel block on rank 0, 1: CP is off"),
        ("scale", r"gradients\.model\..* on rank 0 differs by .* \(0\.5 of its size\); \d+ of \d+ values"),
        ("nan", r"loss on rank 0 differs by nan .*: nan, without CP \d"),
        ("names", "rank 0 returned other values than without: more"),
        ("shape", r"loss\[0\] on rank 0 has the shape \(2,\), without CP \(1,\)"),
    ],
)
def test_equality_finds_faults(fault, words):
    with pytest.raises(AssertionError, match=words):
        assert_equals_without_cp(bodies.train, fault)
