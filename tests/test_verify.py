"""verify: passes where all is right, fails where one line is wrong, and says which."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from copies import copy
from installed import ACCELERATE, RELEASE
from ranks import verify_bodies as bodies

import cpcompat
from cpcompat import VerifyReport
from cpcompat.checks import Row
from cpcompat.testing import Ranks

LLAMAS = {"tiny Llama, DDP", "tiny Llama, FSDP2"}
ATTENTION = {f"attention, {method}{grouped}" for method in ("allgather", "alltoall") for grouped in ("", ", GQA")}
OTHERS = {
    "context before prepare()",
    "context after prepare()",
    "tokens, head-tail",
    "buffers",
    "exceptions",
    "torch's own switch",
}


@pytest.fixture(scope="module")
def report() -> VerifyReport:
    return cpcompat.verify(2)


def row(report: VerifyReport, name: str) -> Row:
    (found,) = [row for row in report.rows if row.name == name]
    return found


def test_everything_that_can_run_here_passes(report: VerifyReport) -> None:
    by_name = {row.name: row.status for row in report.rows}
    assert set(by_name) == LLAMAS | ATTENTION | OTHERS
    missing = set() if RELEASE.has_config else {"tiny Llama, FSDP2"}
    assert {name for name, status in by_name.items() if status != "ok"} == missing
    assert report.ok
    for name in missing:
        assert by_name[name] == "not run"
        assert "has no ParallelismConfig (1.10 brought it)" in row(report, name).detail


def test_differences_are_numbers_of_a_real_comparison(report: VerifyReport) -> None:
    for name in ATTENTION | LLAMAS:
        found = row(report, name)
        if found.status == "ok":
            assert set(found.numbers) in ({"forward", "backward"}, {"loss", "gradients"})
            # Another order of summation leaves a trace in float32; only the loss may be equal by chance.
            assert all(number > 0 for what, number in found.numbers.items() if what != "loss")
            assert all(number <= found.limits[what] for what, number in found.numbers.items())


def test_it_says_what_accelerate_makes_alone_and_what_cpcompat_did(report: VerifyReport) -> None:
    own = "acc._cp_context" if RELEASE.own_context == "prepare" else "none"
    assert report.alone == {"before prepare()": "none", "after prepare()": own}
    after = "adopted" if RELEASE.own_context == "prepare" else "created"
    assert row(report, "context before prepare()").detail.startswith("created, cp size 2, allgather")
    assert row(report, "context after prepare()").detail.startswith(f"{after}, cp size 2, allgather")
    assert ("cp_size=" in row(report, "context after prepare()").detail) is not RELEASE.has_config


def test_each_rank_holds_head_and_tail(report: VerifyReport) -> None:
    assert row(report, "tokens, head-tail").ranks == ("0-15 and 48-63", "16-47")


def test_the_table(report: VerifyReport) -> None:
    text = str(report)
    assert ACCELERATE is not None
    assert f"torch {torch.__version__}, accelerate {ACCELERATE.version}, transformers" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\033" not in text
    coloured = report.table(colour=True)
    assert coloured.count("\033[32m") == sum(row.status == "ok" for row in report.rows)
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == text


def test_the_dictionary_is_json(report: VerifyReport) -> None:
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["ok"] is True
    assert set(read) == {"ok", "rows", "versions", "where", "alone"}
    assert {"name", "status", "numbers", "detail", "ranks"} <= set(read["rows"][0])


def test_one_rank_is_too_few() -> None:
    with pytest.raises(ValueError, match="2 ranks or more, not 1"):
        cpcompat.verify(1)


def test_a_number_that_is_none_fails() -> None:
    rows = [Row.measured("a", loss=(value, 1.0)) for value in (0.5, math.nan)]
    assert [row.status for row in rows] == ["ok", "FAILED"]
    merged = Row.merged(rows)
    assert merged.status == "FAILED"
    assert math.isnan(merged.numbers["loss"])
    assert merged.to_dict()["numbers"] == {"loss": None}


def test_the_worst_rank_decides() -> None:
    held = [Row.found("a", [], "fine", ("left",)), Row.found("a", ["odd"], "fine", ("right",))]
    assert Row.merged(held) == Row("a", "FAILED", detail="odd", ranks=("left", "right"))
    numbers = [Row.measured("a", loss=(value, 1.0)) for value in (0.5, 0.25)]
    assert Row.merged(numbers).numbers == {"loss": 0.5}


def test_a_report_in_which_nothing_ran_is_not_ok() -> None:
    assert not VerifyReport((Row("a", "not run"),), {}, "").ok
    assert VerifyReport((Row("a", "not run"), Row("b", "ok")), {}, "").ok
    assert not VerifyReport((Row("a", "FAILED"), Row("b", "ok")), {}, "").ok


def test_the_function_stays_a_function() -> None:
    """No module of the package has its name, so importing one cannot put itself in its place."""
    assert callable(cpcompat.verify)
    assert not (Path(cpcompat.__file__).parent / "verify.py").exists()


# --- on a live context --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepare", [False, True], ids=["created", "after prepare"])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_a_live_context(ranks2: Ranks, method: str, prepare: bool) -> None:
    one, other = ranks2.run(bodies.live, "cpcompat", method, prepare=prepare)
    assert one == other
    assert one["ok"], one["text"]
    assert one["origin"] == ("adopted" if prepare and RELEASE.own_context == "prepare" else "created")
    assert {row["status"] for row in one["rows"]} == {"ok"}
    assert {row["name"] for row in one["rows"]} >= {f"attention, {method}", "buffers", "exceptions"}
    assert one["first_entry_is_left"]


def test_four_ranks(ranks4: Ranks) -> None:
    """On two cp groups of two, each group has its own report."""
    reports = ranks4.run(bodies.live_groups)
    assert [report["ok"] for report in reports] == [True] * 4
    assert reports[0]["where"] == "2 of one cp group, on cpu"


def test_inside_a_block_it_is_refused(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.inside_a_block) == ["NestedContext"] * 2


def test_a_foreign_owner_is_named_and_nothing_claimed(ranks2: Ranks) -> None:
    for report in ranks2.run(bodies.delegated):
        (only,) = report["rows"]
        assert only["status"] == "not run"
        assert "ranks owns context parallelism here" in only["detail"]
        assert not report["ok"]


# One wrong line: the file, what it says, what it shall say, and the checks that must fail.
METHOD = "alltoall"
WRONG = {
    "the results of two blocks are merged the wrong way": (
        "ring.py",
        "torch.sigmoid(block_lse - old)",
        "torch.sigmoid(old - block_lse)",
        {f"attention, {METHOD}", f"attention, {METHOD}, GQA"},
    ),
    "the gradient of the queries is overwritten": (
        "ring.py",
        "grad_query[:, :, rows] += block_query",
        "grad_query[:, :, rows] = block_query.to(grad_query.dtype)",
        {f"attention, {METHOD}", f"attention, {METHOD}, GQA"},
    ),
    "the gradients of grouped heads are not added up": (
        "ring.py",
        "grad_part.shape[-2:]).sum(dim=3)",
        "grad_part.shape[-2:])[:, :, :, 0]",
        {f"attention, {METHOD}, GQA"},
    ),
    "the tail is another chunk": (
        "buffers.py",
        "stride.insert(dim, step * (2 * size - 1 - 2 * rank))",
        "stride.insert(dim, step * size)",
        {"buffers"},
    ),
    "positions are another chunk's": (
        "buffers.py",
        "tail = (2 * size - 1 - rank) * chunk",
        "tail = (size + rank) * chunk",
        {"tokens, head-tail", "buffers", f"attention, {METHOD}", f"attention, {METHOD}, GQA"},
    ),
    "nothing is restored": ("buffers.py", "if everything or sharded.buffer.restore:", "if everything:", {"buffers"}),
    "a kept buffer keeps its shard after an error": (
        "buffers.py",
        "if everything or sharded.buffer.restore:",
        "if sharded.buffer.restore:",
        {"exceptions"},
    ),
    "SDPA stays replaced": (
        "block.py",
        "F.scaled_dot_product_attention = self._original",
        "pass",
        {f"attention, {METHOD}", f"attention, {METHOD}, GQA", "exceptions"},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_wrong_line_fails_the_checks_of_it(
    ranks2: Ranks, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, right, wrong, failing = WRONG[case]
    name = f"copy_{list(WRONG).index(case)}"
    copy(tmp_path / name, file, right, wrong)
    monkeypatch.syspath_prepend(tmp_path)
    for report in ranks2.run(bodies.live, name, METHOD):
        assert {row["name"] for row in report["rows"] if row["status"] == "FAILED"} == failing, report["text"]
        assert not report["ok"]
        assert "Do not train with context parallelism here." in report["text"]
