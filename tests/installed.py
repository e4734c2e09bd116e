"""What the installed accelerate is expected to do, from the project's own table."""

from __future__ import annotations

from cpcompat.layouts import RELEASES, Release
from cpcompat.versions import base_version, installed

ACCELERATE = installed("accelerate")
assert ACCELERATE is not None


def release() -> Release:
    """The row of the installed accelerate."""
    assert ACCELERATE is not None
    base = ACCELERATE.base
    assert base is not None
    rows = [row for row in RELEASES if (since := base_version(row.since)) is not None and since <= base]
    return rows[-1]


RELEASE = release()
