"""The table of codes: whole, stable, and the same as the page made of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import cpcompat
from cpcompat import errors
from cpcompat.checks import Row
from cpcompat.codes import CODES, Code, link, troubleshooting

ROOT = Path(cpcompat.__file__).parent
KINDS = [getattr(errors, name) for name in errors.__all__]


def test_the_page_is_the_table() -> None:
    page = ROOT.parent / "docs" / "troubleshooting.md"
    assert page.read_text(encoding="utf-8") == troubleshooting(), (
        "python -m cpcompat.codes > docs/troubleshooting.md makes the page anew"
    )
    assert re.findall(r"^## (CP\d{3}):", troubleshooting(), re.M) == sorted(CODES)


def test_every_error_and_warning_has_its_row() -> None:
    for kind in KINDS:
        assert kind.code in CODES
        if kind not in (errors.CPError, errors.CPWarning):
            assert f"`{kind.__name__}`" in CODES[kind.code].symptom, "the row names the class that a user meets"


def test_every_code_in_the_package_has_its_row() -> None:
    """And no row is left that nothing prints."""
    said: set[str] = set()
    for path in ROOT.glob("*.py"):
        if path.stem != "codes":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    said.update(re.findall(r"\bCP\d{3}\b", node.value))
    assert said == set(CODES)


@pytest.mark.parametrize("row", CODES.values(), ids=CODES)
def test_a_row_says_everything(row: Code) -> None:
    assert not row.title.endswith(".")
    for text in (row.symptom, row.reason, row.remedy):
        assert text[-1] in ".!`)", text
        assert not re.search(r"\w[.!?]$", row.title)
    for report in row.reports:
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/issues/\d+", link(report))


def test_codes_keep_their_meaning() -> None:
    """The codes of the errors, which programs and searches go by."""
    assert {kind.__name__: kind.code for kind in KINDS} == {
        "AttentionUnsupported": "CP301",
        "AttentionWarning": "CP303",
        "BackwardOutside": "CP208",
        "BatchInvalid": "CP205",
        "BatchUnsupported": "CP206",
        "BufferInvalid": "CP201",
        "CPError": "CP100",
        "CPNotReady": "CP102",
        "CPNotRequested": "CP101",
        "CPWarning": "CP400",
        "Contradiction": "CP105",
        "CreationFailed": "CP103",
        "EvaluationWarning": "CP402",
        "ForeignOwner": "CP108",
        "LengthInvalid": "CP202",
        "LossWarning": "CP207",
        "ModelUnsupported": "CP302",
        "NestedContext": "CP203",
        "RankFailed": "CP501",
        "RanksDiffer": "CP204",
        "SequenceParallel": "CP107",
        "StaleContext": "CP104",
        "UntestedVersion": "CP401",
        "VendorRefused": "CP601",
        "VersionTooOld": "CP106",
    }


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (Row("a", "ok", detail="[CP201] said somewhere"), ""),
        (Row("a", "not run", detail="no transformers"), ""),
        (Row.measured("a", loss=(1.0, 0.5)), "CP502"),
        (Row.found("a", ["not restored"], "fine"), "CP502"),
        (Row.raised("a", errors.BufferInvalid("what")), "CP201"),
        (Row.raised("a", ValueError("mine")), "CP502"),
        (Row("a", "FAILED", detail="[CP501] rank 1 of 2 raised CreationFailed: [CP103] what"), "CP103"),
        (Row("a", "FAILED", detail="[CP501] rank 1 of 2 did not return within 8 s"), "CP501"),
    ],
)
def test_a_failed_check_of_verify_has_a_code(row: Row, code: str) -> None:
    assert row.code == row.to_dict()["code"] == code
    assert (f"{code}: {CODES[code].title}" in row.lines()) if code else not any(":" in line for line in row.lines()[1:])
