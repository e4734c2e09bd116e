"""What upstream does in the very versions installed here, and one tripwire for each private name in use.

A failure here means that upstream moved: its message says which row to write.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
import torch
from installed import RELEASE
from ranks import upstream_bodies as bodies

from cpcompat import CreationFailed, torch_cp
from cpcompat.layouts import TORCH_RELEASES
from cpcompat.testing import Ranks, run_ranks
from cpcompat.versions import base_version, installed

TORCH = installed("torch")
assert TORCH is not None


def test_torchs_own_context_has_the_faults_of_its_row() -> None:
    """On ranks of their own: torch leaves itself broken here, which is the point."""
    rows = [row for row in TORCH_RELEASES if not TORCH.older_than(row.tried[0])]
    expected = dataclasses.asdict(rows[-1])
    expected.pop("tried")
    for found in run_ranks(bodies.behaviour, 2, timeout=60):
        assert found == expected, f"torch {TORCH.version} differs from its row in layouts.TORCH_RELEASES: write another"


def test_the_table_names_every_torch_once_and_in_order() -> None:
    tried = [base_version(version) for row in TORCH_RELEASES for version in row.tried]
    assert tried == sorted(set(tried))


@pytest.mark.parametrize("name", ["context_parallel", "set_rotate_method"])
def test_torchs_functions_are_found(name: str) -> None:
    assert callable(getattr(torch_cp.find(), name)), f"write the new place of {name} into torch_cp._PLACES"


def test_the_signature_of_torchs_context() -> None:
    parameters = list(inspect.signature(torch_cp.find().context_parallel).parameters)
    assert parameters == ["mesh", "buffers", "buffer_seq_dims", "no_restore_buffers"], "adapt torch_cp.attention"


def test_the_kernels_of_the_ring() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._schema
    assert [a.name for a in flash.arguments] == [
        *("query", "key", "value", "dropout_p", "is_causal"),
        *("attn_mask", "scale"),
    ], "adapt ring._flash"
    assert [a.name for a in backward.arguments] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"),
        *("attn_mask", "scale"),
    ], "adapt ring._flash_backward"


def test_version_counters_can_be_raised() -> None:
    tensor = torch.zeros(1)
    before = tensor._version
    torch.autograd.graph.increment_version(tensor)
    assert tensor._version == before + 1, "adapt buffers._point"


def test_hooks_of_a_module_can_be_read() -> None:
    module = torch.nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    assert len(module._forward_pre_hooks) == 1, "adapt hooks._hooks"


def test_accelerates_list_of_models() -> None:
    source = inspect.getsource(importlib.import_module("accelerate.accelerator"))
    assert "self._models" in source, "adapt CPContext.attach_hooks"
    if RELEASE.has_config:
        assert "self._cp_context(" in source, "write the new layout into layouts.LAYOUTS"
        hooks = inspect.getsource(importlib.import_module("accelerate.big_modeling"))
        assert "def _self_attn_pre_forward_hook" in hooks, "adapt hooks._ACCELERATE_HOOK"


def test_a_torch_that_moved_its_functions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cp, "_PLACES", ("torch.no_such_place", "torch.distributed.tensor"))
    torch_cp.find.cache_clear()
    try:
        with pytest.raises(CreationFailed, match=r"looked in torch\.no_such_place, torch\.distributed\.tensor") as seen:
            torch_cp.find()
        assert seen.value.missing == ["context_parallel", "set_rotate_method"]
    finally:
        torch_cp.find.cache_clear()


def test_cpcompat_has_none_of_these_faults(ranks2: Ranks) -> None:
    """The same situations through cpcompat's block, on whatever torch this is."""
    from ranks import context_bodies

    for body in (context_bodies.exceptions, context_bodies.no_buffers, context_bodies.aliases):
        assert ranks2.run(body) == [None, None]
