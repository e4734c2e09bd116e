"""Fixtures of the whole suite: two sets of real gloo ranks, started once."""

from __future__ import annotations

import json
import platform
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from cpcompat.testing import Ranks
from cpcompat.versions import installed

collect_ignore = ["downstream"]  # a project of its own, see nox -s downstream

PACKAGES = ("accelerate", "torch", "transformers", "trl", "pytest")


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


def pytest_configure() -> None:
    """A shell that starts a job in the background makes it ignore Ctrl-C, and so its children, which tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", default=None, help="write versions and counts of this run to a JSON file")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was run with which versions; docs/compatibility.md is made of these files."""
    target = session.config.getoption("--record")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not target or reporter is None:
        return
    versions = {name: str(found.version) for name in PACKAGES if (found := installed(name))}
    reports = reporter.stats.get("passed", ())
    passed = {report.nodeid for report in reports}
    on_ranks = {"ranks2": 2, "ranks4": 4}
    record = {
        "versions": {"python": platform.python_version(), **versions},
        "passed": len(passed),
        "failed": len(reporter.stats.get("failed", ())) + len(reporter.stats.get("error", ())),
        "skipped": Counter(
            report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", ())
        ),
        "passed_on_ranks": {
            str(n): sum(item.nodeid in passed and _uses(item, fixture) for item in session.items)
            for fixture, n in on_ranks.items()
        },
        "measured": {report.nodeid: dict(report.user_properties) for report in reports if report.user_properties},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def _uses(item: pytest.Item, fixture: str) -> bool:
    number = fixture.removeprefix("ranks")
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return fixture in getattr(item, "fixturenames", ()) or str(parameters.get("ranks")) == number
