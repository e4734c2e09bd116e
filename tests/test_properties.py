"""Bad input of every kind, drawn by hypothesis: right results or a typed error, and nothing touched.

300 examples of each by default, 5,000 by -m nightly.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from ranks import property_bodies as bodies
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from cpcompat import CPContext, CPError, ForeignOwner, diagnose, get_cp_context
from cpcompat.resolve import peek
from cpcompat.settings import ConfigUnreadable
from cpcompat.testing import Ranks
from cpcompat.versions import Installed, installed

EXAMPLES = pytest.mark.parametrize("examples", [300, pytest.param(5000, marks=pytest.mark.nightly)])
Record = Callable[[str, object], None]


def tried(examples: int) -> settings:
    """The same examples in every run; counts are asserted by each test."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# --- buffers ----------------------------------------------------------------------------------------------------------------


@EXAMPLES
def test_buffers(ranks2: Ranks, examples: int, record_property: Record) -> None:
    found = ranks2.run(bodies.any_buffers, examples, timeout=600)
    assert found[0] == found[1], "the ranks tried other examples, or fared differently"
    good, spoilt, wild = (found[0]["outcomes"][mode] for mode in bodies.MODES)
    compared = sum(counts.pop("compared with torch") for counts in (good, spoilt, wild))
    whole = good + spoilt + wild
    assert whole.total() >= examples
    assert good.keys() == {"sharded"}
    assert "sharded" not in spoilt
    assert min(good.total(), spoilt.total(), wild["sharded"], wild.total() - wild["sharded"]) > examples / 20
    assert compared > examples / 20
    record_property("lists", whole.total())
    for outcome, count in sorted(whole.items()):
        record_property(outcome, count)
    record_property("compared with torch", compared)


def test_buffers_of_four_ranks(ranks4: Ranks) -> None:
    found = ranks4.run(bodies.any_buffers, 40)
    assert len({one["story"] for one in found}) == 1
    outcomes = found[0]["outcomes"]
    assert outcomes["good"]["sharded"] > 4
    assert sum(sum(counts.values()) - counts["compared with torch"] for counts in outcomes.values()) >= 40


def test_every_fault_of_buffers(ranks2: Ranks) -> None:
    """Each by itself, so that none depends on luck, also where the ranks compare what they hold."""
    found = ranks2.run(bodies.every_fault)
    assert found[0] == found[1]
    for fault, outcome in found[0].items():
        assert outcome in ("BufferInvalid", "LengthInvalid") or fault.startswith("perhaps "), (fault, outcome)


# --- what is passed as an accelerator ---------------------------------------------------------------------------------------


def keywords(buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None) -> None:
    """What somebody's context looks like."""


def fails(*_: object, **__: object) -> Any:
    raise OSError("not this one")


LEAVES: dict[str, Callable[[], Any]] = {
    **{
        repr(value): functools.partial(lambda value: value, value) for value in (None, True, False, 0, 1, 2, 3, -2, 2.0)
    },
    **{
        repr(text): functools.partial(str, text)
        for text in ("", "2", "torch", "ulysses", "allgather", "alltoall", "cpu")
    },
    "2**70": lambda: 2**70,
    "10**5000": lambda: 10**5000,
    "nan": lambda: float("nan"),
    "bytes": lambda: b"cp",
    "a list": lambda: [1],
    "a dict": lambda: {"cp_size": 2},
    "an array": lambda: np.ones(2),
    "a tensor": lambda: torch.ones(2),
    "a class": lambda: CPContext,
    "a module": lambda: types.ModuleType("mpu"),
    "models": lambda: [torch.nn.Linear(1, 1)],
    "a Mock": mock.Mock,
    "a MagicMock": mock.MagicMock,
    "a Mock of a mesh": lambda: mock.Mock(spec=DeviceMesh),
    "a Mock of a context": lambda: mock.Mock(spec=CPContext),
    "a mesh that was not made": lambda: DeviceMesh.__new__(DeviceMesh),
    "a lambda": lambda: lambda *_: None,
    "a function": lambda: fails,
    "a context function": lambda: keywords,
    "a method": lambda: [].append,
    "a type's method": lambda: dict.get,
    "a partial": lambda: functools.partial(keywords, 1),
    "a partial of another kind": lambda: functools.partial(print, mesh=3),
    "torch's": lambda: context_parallel,
    "torch's, bound": lambda: functools.partial(context_parallel, mock.Mock(spec=DeviceMesh)),
    "torch's, bound by name": lambda: functools.partial(context_parallel, mesh=7),
    "a context": lambda: CPContext(None, origin="delegated", owner="somebody"),
    "an error": lambda: ValueError("cp"),
}
# What the resolver reads, by where it reads it.
_PLACES = ("_cp_context", "_context_parallel", "device_mesh", "maybe_context_parallel")
ATTRIBUTES = {
    "acc": ("state", "parallelism_config", "torch_device_mesh", "mpu", "_models", "device", *_PLACES),
    "state": ("parallelism_config", "fsdp_plugin", "distributed_type", *_PLACES),
    "parallelism_config": ("cp_size", "sp_size", "cp_handler", "sp_backend", "cp_backend", *_PLACES),
    "cp_handler": ("cp_comm_strategy", *_PLACES),
    "fsdp_plugin": _PLACES,
    "device": ("type",),
    "": ("mesh", "alive", "rotate_method", "func", "args", "keywords", "ndim", "mesh_dim_names", "__wrapped__"),
}
OFTEN = {"acc": ("parallelism_config", "state"), "parallelism_config": ("cp_size", "sp_size", "cp_handler")}
KINDS = ("class", "class", "class", "namespace", "mock")
LIES = {"a mesh": DeviceMesh, "an int": int, "a str": str, "a partial": functools.partial, "a module": types.ModuleType}
TRAITS = {
    "properties": {},
    "slots": {},
    "named AcceleratorState": {},
    "getters fail": {},
    "other attributes are itself": {"__getattr__": lambda self, name: self},
    "other attributes fail": {"__getattr__": fails},
    "other attributes are callable": {"__getattr__": lambda self, name: keywords},
    "eq fails": {"__eq__": fails, "__hash__": object.__hash__},
    "equals all": {"__eq__": lambda self, other: True, "__hash__": lambda self: 1},
    "eq is no bool": {"__eq__": lambda self, other: np.ones(2), "__hash__": lambda self: 1},
    "hash fails": {"__hash__": fails},
    "not hashable": {"__hash__": None},
    "bool fails": {"__bool__": fails},
    "len fails": {"__len__": fails},
    "repr fails": {"__repr__": fails},
    "str fails": {"__str__": fails},
    "iter fails": {"__iter__": fails},
    "says it is a context": {"__cpcompat__": "context"},
    "says it is something": {"__cpcompat__": "hook"},
    "callable": {"__call__": fails},
    "a context function": {"__call__": lambda self, buffers, buffer_seq_dims, no_restore_buffers: None},
    "signature fails": {"__call__": fails, "__signature__": property(fails)},
    "a context manager": {"__enter__": fails, "__exit__": fails},
    "no module": {"__module__": property(fails)},
    "module is a number": {"__module__": 3},
    "no dict": {"__dict__": property(fails)},
    "dict is a number": {"__dict__": 3},
    "class fails": {"__class__": property(fails)},
    **{f"says it is {name}": {"__class__": kind} for name, kind in LIES.items()},
}


class Thing(NamedTuple):
    """One stand-in: a leaf by its name, or something with attributes."""

    kind: str
    traits: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()


LEAF = st.sampled_from(sorted(LEAVES)).map(Thing)
# What is often there, so that much is looked at behind it.
LIKELY = {
    "cp_size": ("1", "2", "2", "3"),
    "sp_size": ("1", "1", "2"),
    "cp_backend": ("'torch'", "'torch'", "'ulysses'"),
    "cp_comm_strategy": ("'alltoall'", "'allgather'"),
    "rotate_method": ("'alltoall'", "'allgather'"),
    "mpu": ("None", "a module"),
    "_models": ("models", "a list"),
    **dict.fromkeys(
        ("_cp_context", "_context_parallel"), ("a context function", "a partial", "torch's, bound", "a context")
    ),
}


def leaf(name: str) -> st.SearchStrategy[Thing]:
    return LEAF | st.sampled_from(LIKELY.get(name, sorted(LEAVES))).map(Thing)


@st.composite
def things(draw: st.DrawFn, place: str = "acc", depth: int = 3) -> Thing:
    names = draw(st.lists(st.sampled_from(ATTRIBUTES.get(place, ATTRIBUTES[""])), unique=True, max_size=5))
    attributes = []
    if draw(st.booleans()):
        names = list(dict.fromkeys([*OFTEN.get(place, ()), *names]))
    for name in names:
        deeper = depth and (name in ATTRIBUTES or draw(st.integers(0, 3)) == 0)
        attributes.append((name, draw(things(name, depth - 1) if deeper and draw(st.integers(0, 5)) else leaf(name))))
    traits = draw(st.just(()) | st.lists(st.sampled_from(sorted(TRAITS)), unique=True, max_size=3).map(tuple))
    return Thing(draw(st.sampled_from(KINDS)), traits, tuple(attributes))


class Made:
    """The objects of one example, and everything that was set on them since."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.touched: list[str] = []

    def make(self, thing: Thing) -> Any:
        if thing.kind in LEAVES:
            return LEAVES[thing.kind]()
        values = {name: self.make(value) for name, value in thing.attributes}
        if thing.kind == "class":
            made = self.instance(thing.traits, values)
        elif thing.kind == "namespace":
            made = types.SimpleNamespace(**values)
        else:
            made = mock.Mock()
            made.__dict__.update(values)  # past what a Mock itself does with its values
        self.things.append(made)
        return made

    def instance(self, traits: tuple[str, ...], values: dict[str, Any]) -> Any:
        body: dict[str, Any] = {}
        for trait in traits:
            body.update(TRAITS[trait])
        if "getters fail" in traits:
            body.update(dict.fromkeys(values, property(fails)))
            values = {}
        elif "properties" in traits:
            body.update({name: property(lambda self, value=value: value) for name, value in values.items()})
            values = {}
        elif "slots" in traits:
            body = {"__slots__": tuple(set(values) - set(body)), **body}
        touched = self.touched
        body["__setattr__"] = lambda self, name, value: touched.append(name)
        body["__delattr__"] = lambda self, name: touched.append(name)
        made = object.__new__(type("AcceleratorState" if "named AcceleratorState" in traits else "Acc", (), body))
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def picture(self) -> list[Any]:
        """Names and identities of what every thing holds; a Mock's own children come by being looked at."""
        held: list[Any] = list(self.touched)
        for thing in self.things:
            try:
                values = dict(object.__getattribute__(thing, "__dict__"))
            except Exception:
                continue
            held.append(
                {name: id(value) for name, value in values.items() if not name.startswith(("_mock", "method_"))}
            )
        return held


NAMES = ("cp_size", "rotate_method", "mesh")
MEANT = st.fixed_dictionaries(
    {"cp_size": st.sampled_from(["2", "3"]).map(Thing)}, optional={"rotate_method": leaf("rotate_method")}
)
ARGUMENTS = MEANT | st.fixed_dictionaries({}, optional={name: leaf(name) | things("", 1) for name in NAMES})
SIZES = ("2", "1", "0", "-2", "²", "٢", "two", "", " 2", "9" * 5000)
ENVIRONMENT = st.fixed_dictionaries(
    {},
    optional={
        "ACCELERATE_USE_PARALLELISM_CONFIG": st.sampled_from(["true", "1", "", "no"]),
        "PARALLELISM_CONFIG_CP_SIZE": st.sampled_from(SIZES),
    },
)


@EXAMPLES
def test_accelerators(examples: int, record_property: Record) -> None:
    assert not torch.distributed.is_initialized(), "this test is about a process without a group"
    outcomes: Counter[str] = Counter()

    def outcome(made: Made, deed: Callable[..., Any], acc: Any, **arguments: Any) -> str:
        before = made.picture()
        try:
            found = deed(acc, **arguments)
        except CPError as error:
            assert error.evidence, error
            assert error.next_step, error
            found, name = None, type(error).__name__
        assert made.picture() == before
        if found is None:
            return name
        context, trail = found if deed is peek else (found, found.trail)
        assert isinstance(context, CPContext)
        assert all(isinstance(line, str) for line in trail)
        assert (context.origin, context.mesh) == ("delegated", None), "without a process group nothing else works"
        assert context.owner in repr(context)
        if context._passes_to is None:
            with pytest.raises(ForeignOwner):
                context()
        return "delegated"

    @tried(examples)
    @given(st.one_of(LEAF, things(), things(), things(), things()), ARGUMENTS, ENVIRONMENT)
    def holds(thing: Thing, arguments: dict[str, Thing], environment: dict[str, str]) -> None:
        made = Made()
        acc, more = made.make(thing), {name: made.make(value) for name, value in arguments.items()}
        with mock.patch.dict(os.environ, environment):
            first = outcome(made, get_cp_context, acc)
            assert outcome(made, peek, acc) == first
            assert outcome(made, get_cp_context, acc) == first
            before = made.picture()
            assert str(diagnose(acc))
            assert made.picture() == before
            if more:
                outcomes["with arguments: " + outcome(made, get_cp_context, acc, **more)] += 1
        outcomes[first] += 1

    holds()
    first = {kind: count for kind, count in outcomes.items() if not kind.startswith("with ")}
    assert sum(first.values()) >= examples
    assert first["delegated"] > examples / 10
    assert sum(first.values()) - first["delegated"] > examples / 4
    assert len(first) >= 4, "kinds"
    assert outcomes["with arguments: Contradiction"] > examples / 10
    assert outcomes["with arguments: CPNotReady"], "arguments that can be meant"
    record_property("stand-ins", sum(first.values()))
    for kind, count in sorted(outcomes.items()):
        record_property(kind, count)


# --- version strings --------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 30).map(str) | st.sampled_from(["007", "2024", "99999999999999999999", "9" * 4299])


@st.composite
def versions(draw: st.DrawFn) -> str:
    """What PEP 440 allows, in all its spellings."""

    def some(*parts: st.SearchStrategy[str]) -> str:
        return "".join(draw(part) for part in parts) if draw(st.booleans()) else ""

    words = st.sampled_from
    between = words(["", ".", "-", "_"])
    text = some(words(["v", "V"])) + some(NUMBERS, st.just("!"))
    text += ".".join(draw(st.lists(NUMBERS, min_size=1, max_size=5)))
    text += some(
        between, words(["a", "b", "rc", "alpha", "BETA", "c", "pre", "preview"]), between, NUMBERS | st.just("")
    )
    text += some(between, words(["post", "rev", "r", "POST"]), between, NUMBERS | st.just(""))
    text += some(between, words(["dev", "DEV"]), between, NUMBERS | st.just(""))
    text += some(st.just("+"), words(["cu128", "cpu", "git1a2b3c", "7", "local.2", "Ubuntu-1_x"]))
    return some(words([" ", "\n"])) + text + some(words([" ", "\t"]))


@st.composite
def nearly_versions(draw: st.DrawFn) -> str:
    text, place = draw(versions()), draw(st.integers(0, 40))
    return text[:place] + draw(st.text(max_size=2)) + text[place + draw(st.integers(0, 1)) :]


VERSIONS = st.one_of(versions(), versions(), nearly_versions(), st.text(), st.sampled_from(["", "unknown", "9" * 5000]))


def rank_of(text: str) -> tuple[int, tuple[int, ...]] | None:
    """Epoch and release as packaging reads them, without the zeros at the end; None where it reads nothing."""
    try:
        version = Version(text)
    except ValueError:
        return None
    release = list(version.release)
    while release and not release[-1]:
        release.pop()
    return version.epoch, tuple(release)


@EXAMPLES
def test_versions(examples: int, record_property: Record) -> None:
    pairs: Counter[str] = Counter()

    @tried(examples)
    @given(VERSIONS, VERSIONS)
    def holds(one: str, other: str) -> None:
        found = Installed("torch", "torch", one)
        mine, theirs = rank_of(one), rank_of(other)
        readable = mine is not None and theirs is not None
        assert found.older_than(other) is (readable and mine < theirs)  # type: ignore[operator]
        assert found.newer_than(other) is (readable and mine > theirs)  # type: ignore[operator]
        assert (found.base is None) == (mine is None)
        assert found.base is None or rank_of(str(found.base)) == mine
        assert one in str(found)
        pairs["equal" if readable and mine == theirs else "compared" if readable else "one is none"] += 1

    holds()
    assert pairs.total() >= examples
    assert min(pairs["compared"], pairs["one is none"]) > examples / 10
    record_property("pairs", pairs.total())
    for kind, count in sorted(pairs.items()):
        record_property(kind, count)


@EXAMPLES
def test_versions_that_a_module_states(examples: int, record_property: Record) -> None:
    """Whatever stands in ``__version__``."""
    kinds: Counter[str] = Counter()

    @tried(examples)
    @given(leaf("") | things("", 0) | VERSIONS.map(lambda text: Thing("text", (text,))))
    def holds(thing: Thing) -> None:
        value = thing.traits[0] if thing.kind == "text" else Made().make(thing)
        stand_in = types.SimpleNamespace(__version__=value)
        with mock.patch.dict(sys.modules, {"iniconfig": stand_in}):
            found = installed("iniconfig")
        assert found is not None
        assert isinstance(found.version, str)
        assert isinstance(found.older_than("2.6"), bool)
        kinds[thing.kind if thing.kind in (*KINDS, "text") else "a value"] += 1

    holds()
    assert kinds.total() >= examples
    record_property("modules", kinds.total())


# --- config files -----------------------------------------------------------------------------------------------------------

SECRET = "hunter2secret"  # a plain word: only its place says that it is nobody's business
LONG_SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"  # shown nowhere, not even where a size should be
# Fragments of YAML that some loader trips over, or that would run something.
FRAGMENTS = (
    *("1", "2", "2", "4", "0", "-2", "2.0", "2.", "1e3", "0x2", "0b_", "0x_", "0o7", "1_000", "1:30", "+2", "٢", "²"),
    *("true", "no", "~", "", ".inf", "-.inf", ".nan", "=", "<<", "2001-99-99", "2001-01-01", "2001-01-01T99:00:00Z"),
    *(
        "FSDP",
        "MULTI_GPU",
        "DEEPSPEED",
        "MULTI_CPU",
        "'NO'",
        "allgather",
        "alltoall",
        "carousel",
        "two",
        "'2'",
        '" 2 "',
    ),
    *("[]", "{}", "[2]", "{a: 2}", "{fsdp_version: 2}", "{version: 1}", "{? [1, 2] : 3}", "{? {a: b} : 3}", "&a [*a]"),
    *(
        "*nobody",
        "&a {b: *a}",
        "[[[",
        "]",
        "{",
        "'",
        '"',
        "\t",
        "@x",
        "`x",
        "%x",
        "? x",
        "- x",
        "a: b: c",
        "|",
        ">-",
        "#",
    ),
    *('"\\ud800"', '"\\x00"', '"\\uFEFF"', "\x07", "\x85", "\u2028", "é", "\U0001f600", "!!binary x", "!!binary aGk="),
    *(
        "!!int x",
        "!!int ''",
        "!!float x",
        "!!bool x",
        "!!null x",
        "!!timestamp x",
        "!!set {a}",
        "!!omap [a]",
        "!!pairs [a]",
    ),
    *(
        "!!str 2",
        "!!map 2",
        "!!seq 2",
        "!!int 2",
        "!",
        "!x",
        "!<x>",
        "!!python/tuple [1]",
        "!!python/none",
        "!!python/int 2",
    ),
    *("!!python/name:os.system", "!!python/module:antigravity", "!!python/object:os.stat_result {}"),
    "!!python/object/apply:os.system ['touch ran']",
    "!!python/object/apply:os.mkdir ['ran']",
    "!!python/object/apply:builtins.open ['ran', 'w']",
    "!!python/object/apply:subprocess.run [['touch', 'ran']]",
    "!!python/object/new:subprocess.Popen [['touch', 'ran']]",
    "!!python/object/apply:eval [\"open('ran', 'w')\"]",
    "{<<: 3}",
    "{<<: [{cp_size: 2}, 3]}",
    "9" * 5000,
    "0x" + "f" * 5000,
    "9" * 4000,
    "[" * 500,
    "[" * 400 + "]" * 400,
    "- " * 400 + "x",
    "{a: " * 300 + "x" + "}" * 300,
    LONG_SECRET,
)
# A value of nine names, each of which holds the one before nine times: printed, it would fill any memory.
LAUGHS = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'x'] * 9)}]\n" for n in range(7))
SIZE_NAMES = [f"{kind}_size" for kind in ("dp_replicate", "dp_shard", "cp", "sp", "tp")]
TOP = (
    "parallelism_config",
    "fsdp_config",
    "num_processes",
    "distributed_type",
    "use_cpu",
    "compute_environment",
    *SIZE_NAMES,
)
INNER = (*(f"parallelism_config_{name}" for name in SIZE_NAMES), "parallelism_config_cp_comm_strategy", *SIZE_NAMES)
SECRETS = (
    "hub_token",
    "main_process_ip",
    "wandb_api_key",
    "env",
    "parallelism_config_token",
    "fsdp_secret",
    "2",
    "a b",
)

raw = st.sampled_from(FRAGMENTS)
likely_size = st.sampled_from(["1", "2", "2", "4", "8"])


@st.composite
def config_lines(draw: st.DrawFn) -> str:
    """Keys that are read, with all kinds of values, line by line; secrets in others."""
    lines = [LAUGHS] if draw(st.integers(0, 9)) == 9 else []
    values = raw | likely_size | likely_size | (st.just("*l6") if lines else raw)
    for name in draw(st.lists(st.sampled_from(TOP[1:]), unique=True, max_size=4)):
        lines.append(f"{name}: {draw(values)}\n")
    if draw(st.integers(0, 4)):
        lines.append("parallelism_config:\n")
        for name in draw(st.lists(st.sampled_from(INNER), unique=True, max_size=5)):
            lines.append(f"  {name}: {draw(values)}\n")
        lines.append(f"  note: {SECRET}\n")
    elif draw(st.booleans()):
        lines.append(f"parallelism_config: {draw(values)}\n")
    for name in draw(st.lists(st.sampled_from(SECRETS), unique=True, max_size=3)):
        lines.append(f"{name}: {draw(st.sampled_from([SECRET, LONG_SECRET, f'[{SECRET}]', f'{{a: {SECRET}}}']))}\n")
    return "".join(lines)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary(max_size=4)
)
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "parallelism_config": nested | st.dictionaries(st.sampled_from(INNER), st.integers(-1, 8) | nested, max_size=5),
        "fsdp_config": nested
        | st.dictionaries(st.sampled_from(["fsdp_version", "version"]), st.integers(0, 3) | nested),
        **{name: st.integers(0, 8) | nested for name in TOP[2:]},
        **{name: st.just(SECRET) | st.just({"of": [SECRET]}) for name in SECRETS},
    },
)
CONFIGS = st.one_of(
    config_lines().map(lambda text: text.encode("utf-8")),
    documents.map(lambda document: yaml.safe_dump(document, allow_unicode=True).encode("utf-8")),
    st.tuples(config_lines(), st.text(max_size=9), st.integers(0, 200)).map(
        lambda parts: (parts[0][: parts[2]] + parts[1] + parts[0][parts[2] :]).encode("utf-8", "surrogatepass")
    ),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(),
)


def configs(
    examples: int, monkeypatch: pytest.MonkeyPatch, folder: Path, look: Callable[[str], tuple[str, str]]
) -> Counter[str]:
    """Try that many files in an empty folder; what `look` said of each."""
    ran: list[str] = []
    monkeypatch.setattr(os, "system", lambda *_: ran.append("system"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: ran.append("Popen"))
    mkdir = os.mkdir  # which hypothesis itself calls, the first time that it draws text
    monkeypatch.setattr(
        os, "mkdir", lambda path, *a, **k: ran.append("mkdir") if path == "ran" else mkdir(path, *a, **k)
    )
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_")) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    outcomes: Counter[str] = Counter()

    @tried(examples)
    @given(CONFIGS)
    def holds(content: bytes) -> None:
        path = folder / "accelerate.yaml"
        path.write_bytes(content)
        outcome, said = look(str(path))
        assert said
        assert SECRET not in said
        assert LONG_SECRET not in said
        assert os.listdir(folder) == ["accelerate.yaml"]
        assert path.read_bytes() == content
        assert ran == []
        outcomes[outcome] += 1

    holds()
    assert outcomes.total() >= examples
    assert outcomes["unreadable"] > examples / 10
    assert outcomes.total() - outcomes["unreadable"] > examples / 5
    return outcomes


@EXAMPLES
def test_configs(examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record) -> None:
    def look(path: str) -> tuple[str, str]:
        try:
            report = diagnose(config=path)
        except ConfigUnreadable as error:
            return "unreadable", str(error)
        said = str(report) + json.dumps(report.to_dict())
        return "fine" if report.ok else "errors", said

    for outcome, count in sorted(configs(examples, monkeypatch, tmp_path, look).items()):
        record_property(outcome, count)


@EXAMPLES
def test_configs_of_the_doctor(
    examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record
) -> None:
    """The same on the command line, and on a terminal that knows ASCII only."""
    from cpcompat.__main__ import main

    def look(path: str) -> tuple[str, str]:
        written = [io.BytesIO(), io.BytesIO()]
        out, err = (io.TextIOWrapper(stream, encoding="ascii") for stream in written)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(["doctor", "--config", path])
            except SystemExit as ended:
                code = ended.code
            out.flush()
            err.flush()
        assert code in (0, 1, 2)
        assert bool(written[0].getvalue()) == (code != 2)
        assert bool(written[1].getvalue()) == (code == 2)
        return ("fine", "errors", "unreadable")[code], (written[0].getvalue() + written[1].getvalue()).decode()

    for outcome, count in sorted(configs(examples, monkeypatch, tmp_path, look).items()):
        record_property(outcome, count)
