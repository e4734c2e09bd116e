"""Make docs/benchmark.md and its figures of a result file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

NOTES = Path(__file__).parent / "notes.md"
"""What the numbers do not say by themselves, written by hand; the end of the page."""


class Row(NamedTuple):
    """One ratio (or difference), with what it is judged by."""

    what: str
    value: str
    target: str
    met: bool | None


def most(what: str, value: float, limit: float | None, unit: str = "") -> Row:
    number = str(value) if isinstance(value, int) else f"{value:.3f}" if not unit and value < 1 else f"{value:.1f}"
    text = f"{number} {unit}".rstrip()
    bound = "" if limit is None else f"at most {limit:g}" + (f" {unit}" if unit else "")
    return Row(what, text, bound, None if limit is None else value <= limit)


def least(what: str, value: float, limit: float) -> Row:
    return Row(what, f"{value:.2f}", f"at least {limit:g}", value >= limit)


def tokens(length: int) -> str:
    return f"{length >> 20} Mi" if length >= 1 << 20 else f"{length >> 10} Ki"


def restored(row: dict[str, Any]) -> str:
    return "restored" if row["restored"] else "not restored"


def rows(found: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    start, lookup = found["start"], found["lookup"]
    yield (
        "1. Start: more than a fresh interpreter that does nothing",
        [
            most("`import cpcompat`", 1e3 * (start["import"] - start["pass"]), 3, "ms"),
            most("`python -m cpcompat --help`", 1e3 * (start["help"] - start["pass"]), 60, "ms"),
        ],
    )
    yield (
        f"2. `get_cp_context(acc)` when it is there: {1e9 * lookup['call']:.0f} ns, relative to",
        [
            most(
                f"`acc._cp_context` ({1e9 * lookup['instance attribute']:.0f} ns)",
                lookup["call"] / lookup["instance attribute"],
                20,
            ),
            most(
                f'`getattr(acc, "_cp_context")` ({1e9 * lookup["getattr"]:.0f} ns)',
                lookup["call"] / lookup["getattr"],
                None,
            ),
            most(
                f"`acc.device`, a property ({1e9 * lookup['property']:.0f} ns)",
                lookup["call"] / lookup["property"],
                None,
            ),
            most(
                f"a call of an empty function ({1e9 * lookup['empty call']:.0f} ns)",
                lookup["call"] / lookup["empty call"],
                None,
            ),
        ],
    )
    yield (
        "3. Enter and leave, 4 int64 buffers of 1 x S, relative to torch's `context_parallel`: time",
        [
            most(
                f"S = {tokens(r['length'])}, {restored(r)}",
                r["ours"] / r["torch"],
                0.2 if r["length"] == 1 << 10 else 0.12,
            )
            for r in found["enter"]
        ],
    )
    yield (
        "3. The same with torch's attention switched on, as on accelerators",
        [
            most(
                f"S = {tokens(r['length'])}, {restored(r)}",
                r["with torch's attention"] / r["torch"],
                {1 << 13: 0.5, 1 << 16: 0.25}.get(r["length"]),
            )
            for r in found["enter"]
        ],
    )
    yield (
        "3. Extra peak memory, relative to torch's",
        [
            most(
                f"S = {tokens(r['length'])}, {restored(r)}: {r['ours'] >> 20} and {r['torch'] >> 20} MiB",
                r["ours"] / r["torch"],
                0.6,
            )
            for r in found["enter_memory"]
        ],
    )
    for r in found["attention"]:
        times, memory = r["times"], r["memory"]
        yield (
            f"4. Ring attention on CPU, forward and backward, S = {tokens(r['length'])}, two ranks with one thread each",
            [
                least(
                    "alltoall, times as fast as one process with one thread",
                    times["one thread"] / times["alltoall"],
                    1.7,
                ),
                least(
                    "allgather, times as fast as one process with one thread",
                    times["one thread"] / times["allgather"],
                    1.6,
                ),
                least(
                    "alltoall, times as fast as one process with two threads",
                    times["two threads"] / times["alltoall"],
                    0.85,
                ),
                least(
                    "allgather, times as fast as one process with two threads",
                    times["two threads"] / times["allgather"],
                    0.85,
                ),
                Row(
                    "alltoall without messages, relative to one thread",
                    f"{times['one thread'] / times['silent']:.2f}",
                    "",
                    None,
                ),
                most(
                    f"peak memory of a rank, alltoall ({memory['one'] >> 20} MiB alone)",
                    memory["alltoall"] / memory["one"],
                    0.6,
                ),
                most("peak memory of a rank, allgather", memory["allgather"] / memory["one"], 0.6),
            ],
        )
    if "longest" in found:
        one, two, four = found["longest"]
        yield (
            f"5. The longest sequence that trains within {found['limit'] >> 20} MiB a process, against {one['longest']} tokens",
            [
                least(f"CP 2: {two['longest']} tokens", two["longest"] / one["longest"], 1.9),
                least(f"CP 4: {four['longest']} tokens", four["longest"] / one["longest"], 3.6),
            ],
        )
    yield (
        "6. A train step of a tiny Llama, S = 4 Ki, with two ranks",
        [
            least(
                "tokens a second, relative to one process with one thread",
                found["train"]["one"] / found["train"]["two"],
                1.8,
            )
        ],
    )
    yield (
        "7. The cost of the checks, relative to torch's `context_parallel` (restored)",
        [
            row
            for r in found["enter"]
            if r["restored"]
            for row in (
                most(f"S = {tokens(r['length'])}, first entry, with fingerprint", r["fingerprint"] / r["torch"], None),
                most(f"S = {tokens(r['length'])}, later entries", r["ours"] / r["torch"], None),
            )
        ],
    )
    grown = found["over_time"]
    yield (
        "8. Growth over 10,000 enters and leaves",
        [
            most("live tensors", grown["tensors"], 0),
            most("resident size", grown["resident"] / 1024, 1024, "KiB"),
        ],
    )


def write(found: dict[str, Any], docs: Path) -> None:
    """Write the page and both figures."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Benchmark",
        "",
        "Made by `nox -s bench`, which measures everything below in one run: side by side, by turns, medians; on ranks the",
        "slowest counts. Only ratios are judged.",
        f"Run with {versions}; {found['machine']}; {sum(found['seconds'].values()) / 60:.0f} minutes.",
        *([f"Measured again after that run: {', '.join(found['again'])}."] if found.get("again") else []),
        "",
        "![Time to enter and leave](benchmark-enter.svg)",
        "",
        *(
            ["![Memory and longest sequence](benchmark-memory.svg)"]
            if "longest" in found
            else ["Number 5 is not measured yet."]
        ),
        "",
    ]
    for title, some in rows(found):
        lines += [f"## {title}", "", "| what | measured | target | |", "| --- | --- | --- | --- |"]
        marks = {True: "met", False: "**missed**", None: ""}
        lines += [f"| {row.what} | {row.value} | {row.target} | {marks[row.met]} |" for row in some]
        lines.append("")
    notes = NOTES.read_text() if NOTES.exists() else ""
    (docs / "benchmark.md").write_text("\n".join(lines) + notes)
    figures(found, docs)


# --- figures -----------------------------------------------------------------------------------------------------------

OURS, TORCH, GREY = "#1f5fa8", "#d1762b", "#8a8a8a"


def figures(found: dict[str, Any], docs: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.hashsalt": "cpcompat",
            "svg.fonttype": "path",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "axes.axisbelow": True,
            "legend.frameon": False,
        }
    )

    def save(figure: Any, name: str) -> None:
        figure.savefig(docs / name, metadata={"Date": None}, facecolor="white")
        plt.close(figure)

    kept = [r for r in found["enter"] if r["restored"]]
    lengths = [r["length"] for r in kept]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines = {
        "torch": (TORCH, "-", "torch's context_parallel"),
        "with torch's attention": (OURS, "--", "cpcompat with torch's attention switched on"),
        "ours": (OURS, "-", "cpcompat"),
    }
    for name, (colour, style, label) in lines.items():
        axes.plot(lengths, [1e3 * r[name] for r in kept], style, color=colour, marker="o", markersize=4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="sequence length in tokens", ylabel="milliseconds")
    axes.set_xticks(lengths, [tokens(length) for length in lengths])
    axes.minorticks_off()
    axes.set_title("Enter and leave a block: 4 int64 buffers, two ranks on CPU")
    axes.legend()
    save(figure, "benchmark-enter.svg")

    if "longest" not in found:
        return
    sizes = [r["size"] for r in found["longest"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    places = range(len(sizes))
    for axes, values, ideal, label in (
        (left, [r["peak"] / 2**20 for r in found["longest"]], lambda first, n: first / n, "MiB a rank"),
        (right, [r["longest"] / 1024 for r in found["longest"]], lambda first, n: first * n, "Ki tokens"),
    ):
        bars = axes.bar(places, values, width=0.55, color=OURS)
        axes.bar_label(bars, fmt="%.0f" if max(values) > 50 else "%.1f", label_type="center", color="white")
        axes.plot(
            places,
            [ideal(values[0], n) for n in sizes],
            "_",
            color=TORCH,
            markersize=38,
            markeredgewidth=1.6,
        )
        axes.set_xticks(places, [f"CP {n}" if n > 1 else "no CP" for n in sizes])
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
        axes.plot([], [], color=TORCH, linewidth=1.6, label="ideal")
        axes.legend(loc="upper right" if axes is left else "upper left", handlelength=1.2)
    left.set_title("Peak of a train step of 2 Ki tokens")
    right.set_title(f"Longest sequence within {found['limit'] >> 20} MiB")
    save(figure, "benchmark-memory.svg")
