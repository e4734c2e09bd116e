"""What a person asks accelerate for, by environment variables or a config file, and whether it will be heard.

Of the environment only the variables named here are read, and only plain words and numbers are ever shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import util

from .findings import Finding
from .layouts import RELEASES, Release
from .seen import ROTATE_METHODS
from .versions import Installed, installed

__all__ = [
    "SWITCH",
    "ConfigUnreadable",
    "Settings",
    "find",
    "from_environment",
    "from_file",
    "judge",
    "release",
    "topology",
]

SWITCH, _PREFIX = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"
_KINDS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_TRUE = ("true", "1", "yes", "on", "t", "y")
_PLAIN = re.compile(r"[\w.+-]{1,24}", re.ASCII)
_COUNT = re.compile(r"[1-9]\d{0,8}")  # of ranks


class ConfigUnreadable(ValueError):
    """The config file is not there, or is no mapping in YAML or JSON."""


@dataclass(frozen=True)
class Settings:
    """What one place asks accelerate for.

    Attributes:
        place: its name.
        switched_on: whether accelerate reads the sizes at all.
        sizes: dp_replicate, dp_shard, cp, sp, tp.
        processes: of all machines together; None where that is not known.
        sharding: ``"FSDP1"``, ``"FSDP2"``, ``"DeepSpeed"``, ``"none"``, or None where that is not known or does not matter.
        method: the rotate method; None where none is named.
        unread: names that accelerate does not read in that place.
        odd: names and values that it cannot understand.
    """

    place: str
    switched_on: bool
    sizes: dict[str, int]
    processes: int | None = None
    sharding: str | None = None
    method: str | None = None
    unread: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()


def _show(value: object) -> str:
    """A value that may be printed: a plain word or number, and nothing that could be a secret."""
    text = _text(value)
    return text if _PLAIN.fullmatch(text) else "(set, not shown)"


def _text(value: object) -> str:
    """A word or number as text; nothing for what is neither, and may have no end: lists of lists, thousands of digits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return ""
    return str(value) if value is None or isinstance(value, str | int | float) else ""


def _sizes(values: Mapping[str, object], name: str) -> tuple[dict[str, int], list[str]]:
    """The sizes under names such as ``parallelism_config_{}_size``, and those that are none."""
    sizes, odd = {}, []
    for kind in _KINDS:
        value = values.get(name.replace("{}", kind if name.islower() else kind.upper()))
        if value is None:
            continue
        if _COUNT.fullmatch(_text(value).strip()):
            sizes[kind] = int(_text(value))
        else:
            odd.append(f"{kind} size {_show(value)}")
    return sizes, odd


def _number(value: object) -> int | None:
    return int(_text(value)) if _COUNT.fullmatch(_text(value)) else None


def from_environment() -> list[Settings]:
    """Read the variables that accelerate launch sets.

    Returns:
        What they say, in a list of one; an empty one where none is set.
    """
    env = os.environ
    sizes, odd = _sizes(env, f"{_PREFIX}{{}}_SIZE")
    if not sizes and not odd and SWITCH not in env:
        return []
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _TRUE:
        sharding: str | None = "DeepSpeed"
    elif env.get("ACCELERATE_USE_FSDP", "").lower() in _TRUE:
        sharding = "FSDP2" if env.get("FSDP_VERSION", "1") == "2" else "FSDP1"
    else:
        sharding = None
    method = env.get(f"{_PREFIX}CP_COMM_STRATEGY")
    return [
        Settings(
            "the environment",
            env.get(SWITCH, "").lower() == "true",  # accelerate takes no other word
            sizes,
            _number(env.get("WORLD_SIZE")),
            sharding,
            method,
            odd=tuple(odd),
        )
    ]


def from_file(path: str | os.PathLike[str]) -> Settings:
    """Read a file that ``accelerate config`` wrote, or a person.

    Args:
        path: of YAML or JSON.

    Returns:
        What it says.

    Raises:
        ConfigUnreadable: it cannot be read, or is no mapping.
    """
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise ConfigUnreadable("reading a config file needs PyYAML, which accelerate brings") from error
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigUnreadable(f"{path}: {error}") from error
    except Exception as error:  # YAMLError, and what its constructors raise: a 13th month, a thousand brackets
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigUnreadable(f"{path}{where}: no YAML") from error
    if not isinstance(content, dict):
        raise ConfigUnreadable(f"{path}: a mapping is expected, as accelerate config writes it")
    block = content.get("parallelism_config") or {}
    block = block if isinstance(block, dict) else {}
    sizes, odd = _sizes(block, "parallelism_config_{}_size")
    known = {f"parallelism_config_{kind}_size" for kind in _KINDS}
    names = {f"{kind}_size" for kind in _KINDS} | known
    unread = [f"{key} at the top" for key in content if key in names]
    unread += [f"parallelism_config: {key}" for key in block if key in names - known]
    fsdp = content.get("fsdp_config") or {}
    fsdp = fsdp if isinstance(fsdp, dict) else {}
    kind = _text(content.get("distributed_type", "NO")).upper()
    version = _text(fsdp.get("fsdp_version", fsdp.get("version", 1)))
    sharding: str | None = {"FSDP": "FSDP2" if version == "2" else "FSDP1", "DEEPSPEED": "DeepSpeed"}.get(kind, "none")
    method = block.get("parallelism_config_cp_comm_strategy")
    return Settings(
        os.fspath(path),
        bool(block),
        sizes,
        _number(content.get("num_processes")),
        None if content.get("use_cpu") or kind == "MULTI_CPU" else sharding,
        None if method is None else _text(method),
        tuple(unread),
        tuple(odd),
    )


def judge(settings: Settings) -> Iterator[Finding]:
    """Tell whether what one place asks for will be heard, and can be done.

    Args:
        settings: what it asks for.

    Yields:
        Findings, also of what is fine.
    """
    place, sizes = settings.place, settings.sizes
    cp, sp = sizes.get("cp", 1), sizes.get("sp", 1)
    seen = f"{place}: " + (", ".join(f"{kind} {size}" for kind, size in sizes.items()) or "no sizes")
    if settings.odd:
        yield Finding.of("CP111", "error", f"{place}: {'; '.join(settings.odd)}")
    if cp > 1 and settings.method not in (None, *ROTATE_METHODS):
        yield Finding.of("CP111", "error", f"{place}: rotate method {_show(settings.method)}")
    if settings.unread:
        yield Finding.of(
            "CP101",
            "error",
            f"{place}: {'; '.join(settings.unread)}",
            title="A size stands where accelerate does not read it",
            remedy="parallelism_config:, and in it parallelism_config_cp_size: 2",
        )
    if sp > 1:
        yield Finding.of("CP107", "error" if cp > 1 else "warning", seen)
    if cp < 2:
        if not settings.odd and not settings.unread and sp < 2:
            yield Finding.of("CP101", "note", seen, title="Context parallelism is not asked for: cp size 1")
        return
    accelerate = find("accelerate")
    if accelerate is not None and not release(accelerate).has_config:
        yield Finding.of(
            "CP106", "error", f"{seen}; {accelerate}", title="This accelerate does not read these settings"
        )
    if not settings.switched_on:
        yield Finding.of(
            "CP101",
            "error",
            f"{seen}; {SWITCH}={_show(os.environ.get(SWITCH))}",
            title="A cp size is set, and the switch beside it is not: accelerate does not read it",
            remedy=f"{SWITCH}=true, or accelerate launch --use_parallelism_config",
        )
        return
    yield Finding.of("CP101", "ok", seen, title="Context parallelism is asked for")
    yield from topology(settings)


def topology(settings: Settings) -> Iterator[Finding]:
    """Whether the sizes go together with the processes, and with how the model is sharded.

    Args:
        settings: with a cp size above 1.

    Yields:
        What does not.
    """
    place, sizes = settings.place, settings.sizes
    product, words = 1, []
    for kind in _KINDS:
        size = sizes.get(kind, 1)
        product *= size
        if size > 1:
            words.append(f"{kind} {size}")
    text = f"{place}: {' x '.join(words)} = {product}"
    if settings.processes is not None and product != settings.processes:
        yield Finding.of("CP109", "error", f"{text}, and {settings.processes} processes")
    elif sizes.get("dp_replicate", 1) > 1 and sizes.get("dp_shard", 1) == 1:
        yield Finding.of(
            "CP109",
            "error",
            f"{place}: {', '.join(words)}, dp_shard 1",
            title="Context parallelism with replicas, and nothing sharded: accelerate refuses it",
            remedy="set dp_shard_size above 1 instead of dp_replicate_size",
        )
    elif settings.processes is not None:
        yield Finding.of("CP109", "ok", text, title="The sizes multiply to the number of processes")
    standalone = os.environ.get("ACCELERATE_ALLOW_CP_STANDALONE", "").lower() == "true"
    if settings.sharding in ("FSDP1", "DeepSpeed") or (settings.sharding == "none" and not standalone):
        yield Finding.of("CP110", "error", f"{place}: {settings.sharding}, cp size {sizes.get('cp', 1)}")
    elif settings.sharding is not None:
        yield Finding.of("CP110", "ok", f"{place}: {settings.sharding}", title="Sharding goes with the cp mesh")


def find(name: str) -> Installed | None:
    """Look up what is installed, without the long search through every distribution for what is not.

    Args:
        name: the import name.

    Returns:
        What provides it, or None.
    """
    try:
        return installed(name) if util.find_spec(name) is not None else None
    except ValueError:  # a module without a spec stands under that name
        return installed(name)


def release(accelerate: Installed) -> Release:
    """The row of the table for an accelerate.

    Args:
        accelerate: the installed one.
    """
    return next((row for row in reversed(RELEASES) if not accelerate.older_than(row.since)), RELEASES[0])
