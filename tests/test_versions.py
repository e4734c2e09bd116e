"""Versions as packages state them, and the tables that hold what each release does."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpcompat import UntestedVersion, VersionTooOld, register_layout
from cpcompat.layouts import ABSENT, LAYOUTS, RELEASES, TORCHES, read
from cpcompat.versions import Installed, base_version, installed


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("2.9.0+cu128", "2.9.0"),
        ("1.16.0.dev0", "1.16.0"),
        ("2.10.0a0+git1234", "2.10.0"),
        ("1.12.0rc1.post2", "1.12.0"),
        ("not a version", None),
        ("", None),
    ],
)
def test_base_version(text: str, base: str | None) -> None:
    assert str(base_version(text)) == str(base)


@given(st.text())
def test_no_text_is_fatal(text: str) -> None:
    base = base_version(text)
    assert base is None or str(base)


def test_what_runs_counts_before_what_the_metadata_say(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("accelerate")
    module.__version__ = "9.9.9.dev0"
    monkeypatch.setitem(sys.modules, "accelerate", module)
    found = installed("accelerate")
    assert found is not None
    assert (found.version, str(found.base)) == ("9.9.9.dev0", "9.9.9")


def test_a_fork_is_found_by_its_import_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate-kt is another distribution whose import name is accelerate."""
    meta = tmp_path / "some_fork-1.14.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: some-fork\nVersion: 1.14.0\n")
    (meta / "top_level.txt").write_text("forked_module\n")
    (tmp_path / "forked_module").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installed("forked_module")
    assert found == Installed("forked_module", "some-fork", "1.14.0")
    assert str(found) == "forked_module 1.14.0 (from some-fork)"
    assert installed("no_such_module_at_all") is None


def test_newer_than_the_table_is_one_warning() -> None:
    from cpcompat.seen import _warn_untested

    newer = Installed("accelerate", "accelerate", "99.0.0")
    with pytest.warns(UntestedVersion, match="accelerate 99.0.0 is newer") as seen:
        _warn_untested(newer, RELEASES[-1].tried[-1])
        _warn_untested(newer, RELEASES[-1].tried[-1])
    assert len(seen) == 1
    with pytest.warns(UntestedVersion, match=r"torch 99\.1\.0\+cu999 is newer than any torch"):
        _warn_untested(Installed("torch", "torch", "99.1.0+cu999"), TORCHES[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for release in RELEASES:
            _warn_untested(Installed("accelerate", "accelerate", release.tried[-1]), RELEASES[-1].tried[-1])


def test_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpcompat import torch_cp

    monkeypatch.setattr(torch_cp, "installed", lambda name: Installed(name, name, "2.5.1+cu121"))
    with pytest.raises(VersionTooOld, match=r"torch 2\.5\.1\+cu121 is installed") as seen:
        torch_cp.require()
    assert (seen.value.package, seen.value.needed) == ("torch", "2.6")


def test_rows_are_in_order_and_name_what_is_tried() -> None:
    since = [base_version(row.since) for row in RELEASES]
    assert since == sorted(since)
    tried = [base_version(version) for row in RELEASES for version in row.tried]
    assert tried == sorted(tried)
    assert len(tried) == 11


def test_register_layout() -> None:
    before = list(LAYOUTS)
    try:
        layout = register_layout("engine", "ctx")
        assert register_layout("engine", "ctx") == layout
        assert [layout, *before] == LAYOUTS
        assert str(layout) == "acc.engine.ctx"
        for path in ((), ("",), (1,)):
            with pytest.raises(ValueError, match="attribute names"):
                register_layout(*path)
        with pytest.raises(ValueError, match="kind"):
            register_layout("x", kind="group")
    finally:
        LAYOUTS[:] = before


def test_a_getter_that_raises_is_absent() -> None:
    class Broken:
        @property
        def state(self) -> object:
            raise RuntimeError("no state")

    assert read(Broken(), ("state", "device_mesh")) is ABSENT
    assert read(Broken(), ("missing",)) is ABSENT
    assert not ABSENT
