"""Checks of one live context on all its ranks, and the report that they make.

Each check is a function of a context that compares what happens on real ranks with what happens without context
parallelism, and returns a row. All ranks of the cp group must call it. The context is left as it was: checks run on a twin
over the same mesh.
"""

from __future__ import annotations

import math
import re
import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import torch_cp
from .codes import CODES
from .errors import AttentionWarning, LengthInvalid
from .versions import installed

if TYPE_CHECKING:
    from .context import CPContext

__all__ = ["Row", "VerifyReport", "attention", "exceptions", "live", "sharding", "switch", "tokens", "versions"]

Status = Literal["ok", "FAILED", "not run"]

WIDTH = 96
_COLOURS = {"ok": "32", "FAILED": "1;31", "not run": "33"}


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        name: what was checked.
        status: ``"ok"``, ``"FAILED"`` or ``"not run"``.
        numbers: the largest differences over all ranks, by what differs.
        limits: what each number may be.
        detail: the finding in words; for what was not run, why.
        ranks: by rank, what differs between them by nature.
        trace: the traceback, where an exception ended the check.
    """

    name: str
    status: Status
    numbers: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    ranks: tuple[str, ...] = ()
    trace: str = ""

    @classmethod
    def measured(cls, name: str, detail: str = "", **differences: tuple[float, float]) -> Row:
        """A row that is ok where each difference is within its limit; (difference, limit) by keyword."""
        numbers = {what: number for what, (number, _) in differences.items()}
        limits = {what: limit for what, (_, limit) in differences.items()}
        good = all(number <= limits[what] for what, number in numbers.items())  # NaN is not
        return cls(name, "ok" if good else "FAILED", numbers, limits, detail)

    @classmethod
    def found(cls, name: str, problems: Sequence[str], detail: str, ranks: tuple[str, ...] = ()) -> Row:
        """A row that is ok where there is no problem."""
        return cls(name, "FAILED" if problems else "ok", detail="; ".join(problems) or detail, ranks=ranks)

    @classmethod
    def raised(cls, name: str, error: BaseException) -> Row:
        """A row for a check that an exception ended."""
        trace = "".join(traceback.format_exception(error))
        return cls(name, "FAILED", detail=_first_line(error), trace=trace)

    @classmethod
    def merged(cls, rows: Sequence[Row]) -> Row:
        """One row for all ranks: the worst status, the largest numbers, each rank's own words where they differ."""
        order = ("FAILED", "not run", "ok")
        worst = min(rows, key=lambda row: order.index(row.status))
        numbers = {what: _largest([row.numbers.get(what, math.nan) for row in rows]) for what in worst.numbers}
        words = [row.detail for row in rows if row.status == worst.status]
        if len(set(words)) > 1:
            words = [f"rank {rank}: {row.detail}" for rank, row in enumerate(rows) if row.status == worst.status]
            words = ["; ".join(words)]
        held = tuple(text for row in rows for text in row.ranks)
        return cls(worst.name, worst.status, numbers, worst.limits, words[0], held, worst.trace)

    @property
    def code(self) -> str:
        """The code of a check that failed: that of the error which ended it, or CP502."""
        named = re.findall(r"\[(CP\d{3})\]", self.detail) or ["CP502"]
        return named[-1] if self.status == "FAILED" else ""

    def lines(self) -> list[str]:
        """The finding as texts: the numbers and their limits, what was found, what each rank holds, what it is called."""
        parts = []
        if self.numbers:
            compared = (
                (n, "<" if n <= self.limits[what] else ">", self.limits[what], what) for what, n in self.numbers.items()
            )
            parts.append("    ".join(f"{what} {n:.1e} {sign} {limit:.0e}" for n, sign, limit, what in compared))
        parts += [self.detail] if self.detail else []
        parts += [f"rank {rank}: {text}" for rank, text in enumerate(self.ranks)]
        return parts + ([f"{self.code}: {CODES[self.code].title}"] if self.code else [])

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; a difference that is no finite number is None."""
        numbers = {what: n if math.isfinite(n) else None for what, n in self.numbers.items()}
        return {**asdict(self), "numbers": numbers, "ranks": [*self.ranks], "code": self.code}


def _largest(numbers: Sequence[float]) -> float:
    return math.nan if any(math.isnan(number) for number in numbers) else max(numbers)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")


@dataclass(frozen=True)
class VerifyReport:
    """What was verified, and how it went; as text it is a table.

    Attributes:
        rows: the checks, in the order in which they ran.
        versions: what is installed, by import name.
        where: how many ranks, on what.
        alone: what accelerate makes by itself, by moment; empty where that was not looked at.
    """

    rows: tuple[Row, ...]
    versions: dict[str, str]
    where: str
    alone: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether something ran, and all that ran passed."""
        found = {row.status for row in self.rows}
        return "ok" in found and "FAILED" not in found

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, lists, texts and numbers, for JSON."""
        return {"ok": self.ok, **asdict(self), "rows": [row.to_dict() for row in self.rows]}

    def table(self, *, colour: bool = False) -> str:
        """The table.

        Args:
            colour: mark each status with a colour, for a terminal.
        """
        head = {
            "installed": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "ranks": self.where,
            "accelerate alone": ", ".join(f"{moment} {what}" for moment, what in self.alone.items()),
        }
        out = [line for label, text in head.items() if text for line in _hang(f"  {label}", [text], 20)]
        out.append("-" * WIDTH)
        indent = max(len(row.name) for row in self.rows) + 12
        for row in self.rows:
            lines = _hang(f"  {row.status:<8}{row.name}", row.lines(), indent)
            if colour:
                lines[0] = f"  \033[{_COLOURS[row.status]}m{row.status:<8}\033[0m" + lines[0][10:]
            out += lines
        count = Counter(row.status for row in self.rows)
        out += [
            "-" * WIDTH,
            f"  {count['ok']} ok, {count['FAILED']} failed, {count['not run']} not run. {self._verdict()}",
        ]
        traces = {row.trace: row.name for row in reversed(self.rows) if row.trace}
        for trace, name in reversed(traces.items()):
            out += ["", f"{name}:", textwrap.indent(trace.rstrip(), "  ")]
        return "\n".join(out)

    def _verdict(self) -> str:
        if self.ok:
            return "The numbers under CP are those without it."
        failed = any(row.status == "FAILED" for row in self.rows)
        return "Do not train with context parallelism here." if failed else "Nothing was compared."

    def __str__(self) -> str:
        return self.table()


def _hang(label: str, texts: Sequence[str], indent: int) -> list[str]:
    """A label and beside it the texts, each from a line of its own."""
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH - indent, break_on_hyphens=False)] or [""]
    return [f"{label:<{indent}}{lines[0]}", *(" " * indent + line for line in lines[1:])]


def versions() -> dict[str, str]:
    """What is installed, by import name, with the distribution where it is a fork."""
    import platform

    found = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "transformers"):
        package = installed(name)
        found[name] = str(package).removeprefix(f"{name} ") if package else "none"
    return found


# --- the checks ---------------------------------------------------------------------------------------------------------


def tokens(cp: CPContext) -> Row:
    """Which tokens each rank holds, and that together they are all."""
    mine = cp.positions(_length(cp))
    (whole,) = cp.unshard([mine], [0])
    good = torch.equal(whole.cpu(), torch.arange(_length(cp)))
    problems = [] if good else ["the ranks' tokens, joined, are not the whole sequence"]
    return Row.found("tokens, head-tail", problems, f"{_length(cp)} in all, each once", (_spans(mine.tolist()),))


def sharding(cp: CPContext) -> Row:
    """Tensors of several kinds are cut, restored and joined bit for bit; one that asked to keeps its shard."""
    generator = torch.Generator().manual_seed(1)
    length, device = _length(cp), _device(cp)
    base = torch.randn(length + 1, 6, generator=generator).to(device)
    cases: dict[str, tuple[Tensor, int]] = {
        "int64": (torch.randint(1000, (2, length), generator=generator).to(device), 1),
        "bfloat16": (torch.randn(2, length, 4, generator=generator).bfloat16().to(device), 1),
        "bool": ((torch.rand(3, length, generator=generator) > 0.5).to(device), -1),
        "transposed view": (base.t()[:, :-1], 1),
        "overlapping view": (base[1:], 0),
        "expanded": (torch.arange(length, device=device).expand(4, -1), 1),
        "kept": (torch.arange(length, device=device), 0),
    }
    here = cp.positions(length, device)
    before = {name: tensor.clone() for name, (tensor, _) in cases.items()}
    shards = {name: before[name].index_select(dim, here) for name, (_, dim) in cases.items()}
    places = {name: _place(tensor) for name, (tensor, _) in cases.items()}
    tensors, dims = [tensor for tensor, _ in cases.values()], [dim for _, dim in cases.values()]
    problems = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)  # this block is about tensors only
        with _twin(cp)(buffers=tensors, buffer_seq_dims=dims, no_restore_buffers={cases["kept"][0]}):
            cut = [tensor.clone() for tensor in tensors]
    for name, shard, joined in zip(cases, cut, cp.unshard(cut, dims), strict=True):
        tensor = cases[name][0]
        if not torch.equal(shard, shards[name]):
            problems.append(f"{name}: the shard differs from these tokens of the whole")
        if not torch.equal(joined, before[name]):
            problems.append(f"{name}: the shards of all ranks, joined, differ from the whole")
        if name == "kept":
            if not torch.equal(tensor, shards[name]):
                problems.append("a tensor in no_restore_buffers did not keep its shard")
        elif _place(tensor) != places[name] or not torch.equal(tensor, before[name]):
            problems.append(f"{name}: not restored")
    return Row.found("buffers", problems, "cut, restored and joined bit for bit: " + ", ".join([*cases][:-1]))


def attention(cp: CPContext, method: str = "", grouped: bool = False) -> Row:
    """Attention and its gradients against plain attention over the whole sequence.

    Args:
        cp: the context.
        method: the rotate method; the context's own by default.
        grouped: half as many key heads as query heads.
    """
    method = method or cp.rotate_method
    generator = torch.Generator().manual_seed(2)
    device, exact = _device(cp), _device(cp) == "cpu"
    dtype, limit = (torch.float32, 1e-5) if exact else (torch.bfloat16, 2e-2)
    heads = (4, 2, 2, 4) if grouped else (4, 4, 4, 4)
    query, key, value, grad = (torch.randn(2, h, _length(cp), 16, generator=generator).to(device, dtype) for h in heads)
    here = cp.positions(_length(cp), device)

    whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    q, k, v = (tensor.repeat_interleave(4 // tensor.shape[1], dim=1) for tensor in whole)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.backward(expected, grad)

    mine = [tensor.index_select(2, here).requires_grad_() for tensor in (query, key, value)]
    with _twin(cp, method)():
        q, k, v = mine
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        torch.autograd.backward(out, grad.index_select(2, here))

    def difference(ours: Tensor, theirs: Tensor | None) -> float:
        assert theirs is not None
        theirs = theirs.detach()
        return float((ours - theirs.index_select(2, here)).abs().max() / theirs.abs().max())

    backward = [difference(m.grad, w.grad) for m, w in zip(mine, whole, strict=True) if m.grad is not None]
    name = f"attention, {method}" + (", GQA" if grouped else "")
    return Row.measured(
        name,
        forward=(difference(out.detach(), expected), limit),
        backward=(_largest(backward) if len(backward) == 3 else math.nan, limit),
    )


class _Raised(Exception):
    """What the check of exceptions raises."""


def exceptions(cp: CPContext) -> Row:
    """An exception in the block, or on the way in, leaves SDPA and every buffer as they were."""
    original = F.scaled_dot_product_attention
    length, device = _length(cp), _device(cp)
    ids = torch.arange(2 * length, device=device).view(2, length)
    kept = torch.arange(length, device=device)
    odd = torch.arange(length - 1, device=device)
    before = [(tensor, _place(tensor), tensor.clone()) for tensor in (ids, kept, odd)]
    problems = []

    def look(when: str) -> None:
        if F.scaled_dot_product_attention is not original:
            problems.append(f"{when}, SDPA is not the original")
            F.scaled_dot_product_attention = original
        if any(_place(tensor) != place or not torch.equal(tensor, values) for tensor, place, values in before):
            problems.append(f"{when}, a buffer is not as before")

    raised = _Raised("raised by the check")
    try:
        with _twin(cp)(buffers=[ids, kept], buffer_seq_dims=[1, 0], no_restore_buffers={kept}):
            raise raised
    except _Raised as error:
        if error is not raised:
            problems.append("another exception came out than was raised")
    else:
        problems.append("the exception was swallowed")
    look("after an exception in the block")
    try:
        with _twin(cp)(buffers=[odd], buffer_seq_dims=[0]):
            problems.append(f"a length of {length - 1} was accepted")
    except LengthInvalid:
        look("after a refused length")
    return Row.found("exceptions", problems, "SDPA is the original object and every buffer as before")


def switch(cp: CPContext) -> Row:
    """Torch's own CP attention goes on and off, also when the body raises."""
    original = F.scaled_dot_product_attention
    problems = []
    assert cp.mesh is not None
    try:
        with torch_cp.attention(cp.mesh, cp.rotate_method):
            if not torch_cp.is_patched(F.scaled_dot_product_attention):
                problems.append("it did not go on")
            raise _Raised
    except _Raised:
        pass
    if F.scaled_dot_product_attention is not original:
        problems.append("SDPA is not the original afterwards")
        F.scaled_dot_product_attention = original
    used = "it attends here" if cp.mesh.device_type != "cpu" else "on CPU cpcompat's ring attends"
    return Row.found("torch's own switch", problems, f"goes on and off cleanly; {used}")


def _length(cp: CPContext) -> int:
    return 32 * cp.size


def _device(cp: CPContext) -> str:
    return cp.mesh.device_type if cp.mesh is not None else "cpu"


def _twin(cp: CPContext, method: str = "") -> CPContext:
    """Another context over the same mesh: the first entry of the one checked stays its own."""
    return type(cp)(cp.mesh, rotate_method=method or cp.rotate_method)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _spans(indices: Sequence[int]) -> str:
    """``0-15 and 48-63``."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return " and ".join(f"{first}-{last}" for first, last in spans)


# --- all of them, on a live context -------------------------------------------------------------------------------------


def live(cp: CPContext) -> VerifyReport:
    """Run every check that a live context allows; all ranks of its group must call it, and all get the same report.

    Args:
        cp: the context.
    """
    said = f"{cp.origin}, cp size {cp.size}, {cp.rotate_method}, {cp.layout or 'no layout'}"
    if cp.origin == "delegated":
        said = f"{cp.owner} owns context parallelism here; cpcompat only passes calls on and checks nothing of it"
        return VerifyReport((Row("context", "not run", detail=said),), versions(), "not known")
    rows = [Row("context", "ok", detail=said)]
    checks: dict[str, Callable[[CPContext], Row]] = {
        "tokens, head-tail": tokens,
        "buffers": sharding,
        f"attention, {cp.rotate_method}": attention,
        f"attention, {cp.rotate_method}, GQA": partial(attention, grouped=True),
        "exceptions": exceptions,
    }
    for name, check in checks.items():
        try:
            row = check(cp)
        except Exception as error:
            row = Row.raised(name, error)
        held: list[Any] = [None] * cp.size
        dist.all_gather_object(held, row, group=cp.group)
        rows.append(Row.merged(held))
    return VerifyReport(tuple(rows), versions(), f"{cp.size} of one cp group, on {_device(cp)}")
