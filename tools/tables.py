"""Make docs/compatibility.md, the README's table and the guarantees' numbers of the result files: what was run, no more.

python tools/tables.py            write them
python tools/tables.py --check    exit 1 where they are not those of the results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cpcompat.layouts import RELEASES, TORCH_RELEASES, TORCHES  # noqa: E402

RESULTS, PAGE, README = ROOT / "results", ROOT / "docs" / "compatibility.md", ROOT / "README.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- compatibility: made by `nox -s tables` of the files in results/ -->\n", "<!-- /compatibility -->"
NUMBERS, NUMBERS_END = "<!-- numbers: made by `nox -s tables` of results/nightly.json -->\n", "<!-- /numbers -->"
FAULTS = [
    "torch",
    "after an exception",
    "a length of n, not 2n",
    "no buffers",
    "expanded rows",
    "two views of one tensor",
]
OWN = {"never": "never", "prepare": "at the first `prepare()`"}


def result(name: str) -> dict[str, Any] | None:
    """A result file, or None where there is none, or none of its tests ran on ranks."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found if found and sum(found["passed_on_ranks"].values()) else None


def outcome(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    skipped = sum(found["skipped"].values())
    failed = f", **{found['failed']} failed**" if found["failed"] else ""
    return f"{found['passed']} passed{failed}" + (f", {skipped} skipped" if skipped else "")


def on_ranks(found: dict[str, Any] | None) -> str:
    return ", ".join(f"{count} on {n}" for n, count in found["passed_on_ranks"].items()) if found else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def accelerate_rows() -> list[list[str]]:
    rows = []
    for row in RELEASES:
        for version in row.tried:
            found = result(f"accelerate-{version}")
            does = "made" if row.own_context == "never" else "adopted after `prepare()`, made before it"
            asked = "" if row.has_config else " with `cp_size=`"
            rows.append([version, OWN[row.own_context], row.lost, does + asked, outcome(found), on_ranks(found)])
    return rows


def other_rows(prefix: str, names: list[str]) -> list[list[str]]:
    rows = []
    for path in sorted(RESULTS.glob(f"{prefix}-*.json")):
        found = result(path.stem)
        versions = json.loads(path.read_text())["versions"]
        rows.append([*(versions.get(name, "") for name in names), outcome(found), on_ranks(found)])
    return rows


def python_rows() -> list[list[str]]:
    rows = []
    for python in ("3.10", "3.12", "3.13", "3.14"):
        found = result(f"python-{python}")
        versions = found["versions"] if found else {"python": python}
        rows.append(
            [*(versions.get(n, "") for n in ("python", "torch", "accelerate")), outcome(found), on_ranks(found)]
        )
    return rows


def torch_rows() -> list[list[str]]:
    rows = []
    for torch in TORCHES:
        for release in ("1.10.1", "1.12.0", "1.15.0"):
            found = result(f"torch-{torch}-accelerate-{release}")
            python = found["versions"]["python"] if found else ""
            rows.append([torch, release, python, outcome(found), on_ranks(found)])
    return rows


def fault_rows() -> list[list[str]]:
    """What torch's own context does; shown for the releases in which a test has seen it."""
    rows = []
    for row in TORCH_RELEASES:
        seen = [
            v for v in row.tried if any(result(f"torch-{v}-accelerate-{a}") for a in ("1.10.1", "1.12.0", "1.15.0"))
        ]
        if not seen:
            rows.append([", ".join(row.tried), "not run", "", "", "", ""])
            continue
        after = "restored" if row.restores else "SDPA stays patched, buffers stay short"
        expands = "right" if row.expands else "**wrong order**"
        views = "right" if row.views else "**corrupted**"
        rows.append([", ".join(seen), after, row.short, row.empty, expands, views])
    return rows


def reasons() -> str:
    """Every reason for a skip, with the number of tests, over all result files."""
    found: dict[str, int] = {}
    for path in sorted(RESULTS.glob("*.json")):
        for reason, count in json.loads(path.read_text()).get("skipped", {}).items():
            found[reason] = found.get(reason, 0) + count
    return table(["reason for a skip", "tests"], [[reason, str(count)] for reason, count in sorted(found.items())])


def measured() -> str:
    """What the nightly tests counted."""
    path = RESULTS / "nightly.json"
    if not path.exists():
        return "The nightly session was not run.\n"
    found = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    rows = [
        [f"`{test.removeprefix('tests/')}`", ", ".join(f"{what} {count}" for what, count in counts.items())]
        for test, counts in sorted(found["measured"].items())
    ]
    return f"""## How often it was tried

The last recorded `nox -s nightly` ({outcome(found)}; {versions}), on each rank:

{table(["measured by", "counts"], rows)}"""


def spans() -> str:
    """Since when and until when what is told holds."""
    lines = []
    for row in RELEASES:
        first, last = row.tried[0], row.tried[-1]
        lines.append(f"* {first}{f' to {last}' if last != first else ''}: {row.lost} ({row.source})")
    return "\n".join(lines)


def excerpt() -> str:
    head = ["accelerate", "makes its context by itself", "what cpcompat does", "tests"]
    return table(head, [[version, own, does, outcome] for version, own, _, does, outcome, _ in accelerate_rows()])


def page() -> str:
    whole = next(iter(sorted(RESULTS.glob("accelerate-*-whole.json"))), None)
    newest = result(f"accelerate-{RELEASES[-1].tried[-1]}")
    versions = newest["versions"] if newest else {}
    with_python = versions.get("python", "none yet")
    with_what = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name != "accelerate")
    head = ["accelerate", "makes its context by itself", "what a user loses", "what cpcompat does", "tests", "ranks"]
    return f"""# Compatibility

Made by `nox -s tables` of the files in `results/`, each written by the test run that it tells of. A release counts as run
only where tests passed on two real ranks or more with exactly these versions.

## accelerate

With {with_what or "nothing yet"}. The tests of each row are `MATRIX` in the noxfile; among them are a
tiny Llama's loss (to 1e-6) and every gradient (to 1e-5) against the same model without CP, under
DDP and FSDP2 (DDP alone up to 1.9), CP 2 and 4, both rotate methods, and two data-parallel groups of CP 2.

{table(head, accelerate_rows())}
Since when, until when, and where it is told:

{spans()}

The whole suite, on the newest: {outcome(json.loads(whole.read_text())) if whole else "not run"}.

## The Trainer's users

{table(["accelerate", "transformers", "trl", "tests", "ranks"], other_rows("clients", ["accelerate", "transformers", "trl"]))}
## torch

The tests of each row are `ENGINE` in the noxfile. `nox -s "torch_matrix(2.9.1)" -- 1.12.0` runs one cell, `nox -s torch_matrix`
all of them, one environment of 5 GB at a time. `nox -s newest` tries what the registry has now, pre-releases included; it exits
with 3 where upstream moved and with 4 where cpcompat broke.

{table(["torch", "accelerate", "python", "tests", "ranks"], torch_rows())}
What torch's own `context_parallel` does, each seen by `tests/test_upstream.py` in that very release. cpcompat's block restores,
refuses a length that does not fit, takes an empty list, and cuts expanded rows and views rightly on all of them.

{table(FAULTS, fault_rows())}
## Python

The newest accelerate and torch that each has, by `nox -s pythons`; those above ran on {with_python}.

{table(["python", "torch", "accelerate", "tests", "ranks"], python_rows())}
## Skips

{reasons()}"""


def main() -> int:
    text = README.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    wanted = {README: text[:begin] + "\n" + excerpt() + "\n" + text[end:], PAGE: page()}
    text = GUARANTEES.read_text(encoding="utf-8")
    begin, end = text.index(NUMBERS) + len(NUMBERS), text.index(NUMBERS_END)
    wanted[GUARANTEES] = text[:begin] + "\n" + measured() + "\n" + text[end:]
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text("utf-8") != content]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not that of the results: run `nox -s tables`")
        return bool(stale)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
