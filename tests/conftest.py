"""Fixtures of the whole suite: two sets of real gloo ranks, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpcompat.testing import Ranks


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    """Two ranks, reused by every test."""
    with Ranks(2, timeout=120) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four ranks, reused by every test."""
    with Ranks(4, timeout=180) as ranks:
        yield ranks
