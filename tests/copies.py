"""Copies of the package under other names, whole or with one line made wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import cpcompat


def copy(to: Path, file: str = "", right: str = "", wrong: str = "") -> None:
    """Copy the package to a folder; in `file` replace the one place that says `right`."""
    shutil.copytree(Path(cpcompat.__file__).parent, to, ignore=shutil.ignore_patterns("__pycache__"))
    if file:
        text = (to / file).read_text()
        assert text.count(right) == 1, f"{file} says {right!r} {text.count(right)} times"
        (to / file).write_text(text.replace(right, wrong))
