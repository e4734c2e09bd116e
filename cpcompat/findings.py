"""What `diagnose` returns: findings, each with the code under which docs/troubleshooting.md explains it, and their report."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .codes import CODES, link
from .errors import CPError

__all__ = ["Finding", "Report", "Severity"]

Severity = Literal["ok", "note", "warning", "error"]

WIDTH = 80
_ORDER: tuple[Severity, ...] = ("error", "warning", "note", "ok")
_COLOURS = {"error": "1;31", "warning": "33", "note": "36", "ok": "32"}
_INDENT = 17


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        code: its row in the table of codes.
        severity: ``"ok"`` (looked at, and fine), ``"note"`` (worth knowing), ``"warning"`` (numbers or runs may be wrong) or
            ``"error"`` (they are, or the run will end).
        title: one line.
        evidence: what was seen where, with values.
        why: why it matters.
        remedy: what to do.
        reports: the public reports, such as ``"accelerate #3856"``.
    """

    code: str
    severity: Severity
    title: str
    evidence: str = ""
    why: str = ""
    remedy: str = ""
    reports: tuple[str, ...] = ()

    @classmethod
    def of(cls, code: str, severity: Severity, evidence: str = "", *, title: str = "", remedy: str = "") -> Finding:
        """A finding whose words are those of the table, where none are given.

        Args:
            code: its row.
            severity: how bad it is.
            evidence: what was seen.
            title: instead of the row's.
            remedy: instead of the row's.
        """
        row = CODES[code]
        return cls(code, severity, title or row.title, evidence, row.reason, remedy or row.remedy, row.reports)

    @classmethod
    def raised(cls, error: CPError) -> Finding:
        """What an error says that `get_cp_context` would raise."""
        return cls.of(error.code, "error", error.evidence, title=error.what, remedy=error.next_step)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, with the addresses of the reports."""
        return {**asdict(self), "reports": [link(report) for report in self.reports]}

    def lines(self) -> list[str]:
        """The finding as text, in 80 columns; what is fine takes no more than it needs."""
        out = _hang(f"  {self.severity:<8} {self.code} ", [self.title])
        parts = [("seen", self.evidence)]
        if self.severity in ("warning", "error"):
            parts.append(("why", self.why))
        if self.severity != "ok":
            parts += [("do", self.remedy), *(("see", link(report)) for report in self.reports)]
        for label, text in parts:
            if text:
                out += _hang(f"{'':{_INDENT}}{label:<5}", [text])
        return out


@dataclass(frozen=True)
class Report:
    """What was found; as text it is a list in 80 columns, the worst first.

    Attributes:
        findings: the findings.
        installed: the versions, by import name, with the distribution where it is a fork.
    """

    findings: tuple[Finding, ...]
    installed: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not self.found("error")

    def found(self, *severities: Severity) -> tuple[Finding, ...]:
        """The findings of the given severities."""
        return tuple(finding for finding in self.findings if finding.severity in severities)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, lists and texts, for JSON."""
        return {"ok": self.ok, "installed": self.installed, "findings": [one.to_dict() for one in self._sorted()]}

    def table(self, *, colour: bool = False) -> str:
        """The text.

        Args:
            colour: mark each severity with a colour, for a terminal.
        """
        versions = ", ".join(f"{name} {version}" for name, version in self.installed.items())
        out = [*_hang(f"  {'installed':<{_INDENT - 2}}", [versions]), "-" * WIDTH] if versions else []
        for finding in self._sorted():
            lines = finding.lines()
            if colour:
                word = finding.severity
                lines[0] = f"  \033[{_COLOURS[word]}m{word:<8}\033[0m" + lines[0][10:]
            out += lines
        count = Counter(finding.severity for finding in self.findings)
        out += ["-" * WIDTH, "  " + ", ".join(f"{count[word]} {_plural(word, count[word])}" for word in _ORDER)]
        return "\n".join(out)

    def _sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: _ORDER.index(finding.severity))

    def __str__(self) -> str:
        return self.table()


def _plural(word: str, count: int) -> str:
    return word if word == "ok" or count == 1 else f"{word}s"


def _hang(label: str, texts: Sequence[str]) -> list[str]:
    """A label and beside it the texts, each from a line of its own."""
    width = WIDTH - len(label)
    lines = [line for text in texts for line in textwrap.wrap(text, width, break_on_hyphens=False)] or [""]
    return [f"{label}{lines[0]}", *(" " * len(label) + line for line in lines[1:])]
