"""Errors keep their facts, cross process boundaries whole, and have codes of their own."""

from __future__ import annotations

import pickle

import pytest

from cpcompat import errors

KINDS = [getattr(errors, name) for name in errors.__all__]
ERRORS = [kind for kind in KINDS if issubclass(kind, errors.CPError)]
WARNINGS = [kind for kind in KINDS if issubclass(kind, errors.CPWarning)]


def test_codes_are_unique() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS) == len(ERRORS) + len(WARNINGS)


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_crosses_a_process_boundary_whole(kind: type[errors.CPError]) -> None:
    error = kind("what", "evidence", "next step", length=7, ranks=[1, 2])
    assert isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.what, copy.evidence, copy.next_step) == ("what", "evidence", "next step")
    assert (copy.length, copy.ranks) == (7, [1, 2])
    assert str(copy) == str(error) == f"[{kind.code}] what\n  seen: evidence\n  do:   next step"


@pytest.mark.parametrize("kind", WARNINGS)
def test_a_warning_crosses_a_process_boundary_whole(kind: type[errors.CPWarning]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what", "evidence", "next step")))
    assert type(copy) is kind
    assert str(copy) == f"[{kind.code}] what\n  seen: evidence\n  do:   next step"


def test_parts_that_are_not_there_take_no_line() -> None:
    assert str(errors.CPError("what")) == "[CP100] what"
