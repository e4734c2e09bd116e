"""Measure cpcompat against torch's own context and against one process, side by side, by turns, medians.

python bench/bench.py             measure (about nine minutes of a quiet machine) and write the page
python bench/bench.py train       measure some parts again (the page says so), for instance after a disturbance
python bench/bench.py --page      write the page from the results of before

Writes results/bench.json, docs/benchmark.md and its figures. Only ratios are judged.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench.json"
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import bodies  # noqa: E402
import page  # noqa: E402

from cpcompat import RankFailed  # noqa: E402
from cpcompat.testing import run_ranks  # noqa: E402

LIMIT = 2 << 30
"""Private memory of a process in the search for the longest sequence."""
STEP = 16
"""The search is exact to this many tokens for each rank."""
GUESS = 3776
"""Where the search starts without CP; any number will do, a near one ends sooner."""


def ranks(body: Callable[..., Any], nproc: int, *arguments: Any) -> Any:
    return run_ranks(body, nproc, *arguments, timeout=300)


def start_up() -> dict[str, float]:
    """Seconds of a fresh interpreter that does nothing, imports the package, prints the help."""
    starts = {"pass": ["-c", "pass"], "import": ["-c", "import cpcompat"], "help": ["-m", "cpcompat", "--help"]}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def start(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)

    return {
        name: median(t)
        for name, t in bodies.alternate({n: lambda a=a: start(a) for n, a in starts.items()}, 41).items()
    }


def enter_and_leave() -> list[dict[str, Any]]:
    rows = []
    for length, rounds, burst in zip(bodies.LENGTHS, (200, 200, 100, 21), (10, 10, 5, 2), strict=True):
        for keep in (False, True):
            results = ranks(bodies.enter_and_leave, 2, length, keep, rounds, burst)
            slower = {name: max(one[name] for one in results) for name in results[0]}
            rows.append({"length": length, "restored": not keep, **slower})
    return rows


def enter_memory() -> list[dict[str, Any]]:
    rows = []
    for keep in (False, True):
        row = {which: max(ranks(bodies.enter_memory, 2, which, keep)) for which in ("ours", "torch")}
        rows.append({"length": bodies.LENGTHS[-1], "restored": not keep, **row})
    return rows


def attention(length: int, rounds: int) -> dict[str, Any]:
    times = ranks(bodies.attention_times, 2, length, rounds)[0]
    memory = {"one": ranks(bodies.attention_memory, 1, length, "")[0]}
    for method in bodies.METHODS:
        memory[method] = max(ranks(bodies.attention_memory, 2, length, method))
    return {"length": length, "times": {name: median(values) for name, values in times.items()}, "memory": memory}


def longest() -> list[dict[str, Any]]:
    """The longest sequence that trains within the limit, and the memory of a step of one length, by CP size."""
    rows: list[dict[str, Any]] = []
    for size in (1, 2, 4):
        unit = STEP * size

        def fits(units: int, size: int = size, unit: int = unit) -> bool:
            try:
                ranks(bodies.train_within, size, units * unit, size, LIMIT)
            except RankFailed:
                return False
            return True

        guess = (rows[0]["longest"] if rows else GUESS) // STEP  # each rank's share stays about the same
        low, high = int(guess * 0.92), int(guess * 1.04)
        while not fits(low):
            low, high = int(low * 0.9), low
        while fits(high):
            low, high = high, int(high * 1.1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        rows.append({"size": size, "longest": low * unit, "peak": max(ranks(bodies.train_memory, size, 2048, size))})
    return rows


def measure(parts: list[str]) -> None:
    import accelerate
    import torch
    import transformers

    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__.split("+")[0],
            "accelerate": accelerate.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "limit": LIMIT,
        "seconds": {},
        "again": parts,
    }
    if parts:
        before = json.loads(RESULTS.read_text())
        found = {**before, **found, "seconds": before["seconds"], "again": sorted({*parts, *before.get("again", [])})}
    measures: dict[str, Callable[[], Any]] = {
        "start": start_up,
        "lookup": lambda: ranks(bodies.lookup, 2)[0],
        "enter": enter_and_leave,
        "enter_memory": enter_memory,
        "over_time": lambda: ranks(bodies.over_time, 2, 10_000)[0],
        "attention": lambda: [attention(1 << 12, 9), attention(1 << 14, 2)],
        "train": lambda: {n: median(t) for n, t in ranks(bodies.train_times, 2, 1 << 12, 7)[0].items()},
        "longest": longest,
    }
    for name in parts or measures:
        start = time.perf_counter()
        found[name] = measures[name]()
        found["seconds"][name] = round(time.perf_counter() - start, 1)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found['seconds'][name]} s", found[name], flush=True)


def main() -> int:
    if "--page" not in sys.argv:
        RESULTS.parent.mkdir(exist_ok=True)
        measure(sys.argv[1:])
    page.write(json.loads(RESULTS.read_text()), ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
