"""Real trainers: run by ``nox -s clients`` or ``pytest -m clients``; the losses are shown side by side at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpcompat.testing import Ranks

FOLDER = Path(__file__).parent
LINES = pytest.StashKey[list[str]]()
OFFLINE = {"HF_HUB_OFFLINE": "1"}

Both = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def ranks1() -> Iterator[Ranks]:
    """One process, for the run without CP."""
    with Ranks(1, timeout=120) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def known() -> dict[str, dict[str, Any]]:
    """The results without CP, by what was asked."""
    return {}


@pytest.fixture
def both(ranks1: Ranks, ranks2: Ranks, ranks4: Ranks, known: dict[str, dict[str, Any]]) -> Both:
    """Run a body without CP in one process, and with it on ranks."""

    def run(body: Any, cp_size: int, dp_size: int = 1, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        plain = {name: value for name, value in fields.items() if name not in ("fsdp2", "hook")}
        asked = f"{body.__name__} {sorted(plain.items())}"
        if asked not in known:
            (known[asked],) = ranks1.run(body, 1, env=OFFLINE, **plain)
        ranks = ranks4 if cp_size * dp_size == 4 else ranks2
        return known[asked], ranks.run(body, cp_size, dp_size, env=OFFLINE, **fields)

    return run


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep a pair of rows for the table at the end."""

    def keep(without: list[float], with_cp: list[float]) -> None:
        lines = request.config.stash.setdefault(LINES, [])
        name = request.node.name.removeprefix("test_")
        lines += [f"{name:<60} without CP  " + " ".join(f"{loss:.6f}" for loss in without)]
        lines += [f"{'':<60} with CP     " + " ".join(f"{loss:.6f}" for loss in with_cp)]

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("losses")
        for line in lines:
            terminalreporter.write_line(line)
