"""`diagnose`: what people check by hand when context parallelism fails, done by the library.

Without an accelerator it reads what is installed, the environment and accelerate's config file, and imports none of the
packages that it talks about.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from .findings import Finding, Report, Severity
from .layouts import MIN_TORCH, RELEASES, TRAINER_EVALUATES_SINCE
from .settings import SWITCH, find, from_environment, from_file, judge, release

__all__ = ["diagnose"]

_LISTED = ("accelerate", "torch", "transformers", "trl", "deepspeed", "axolotl", "unsloth", "simpletuner")
_OWNERS = {
    "axolotl": "axolotl (from 0.16 on its context does nothing, and its own ring attention works)",
    "unsloth": "unsloth",
    "simpletuner": "SimpleTuner",
    "optimum-habana": "optimum-habana",
}
# First release without the fault, and the fault of torch's own context; (since, until, what).
_TORCH_FAULTS = (
    ("2.10.0", "2.11.0", "position ids made with expand(B, -1) are sharded in the wrong order"),
    (MIN_TORCH, "2.13.0", "an exception in the block leaves attention patched and buffers short"),
)


def diagnose(acc: Any = None, *, config: str | os.PathLike[str] | None = None) -> Report:
    """Look for everything that is known to make context parallelism fail, or silently give wrong numbers.

    Nothing is changed and no other rank is asked, so that it can be called at any time, on any rank.

    Args:
        acc: an ``accelerate.Accelerator``: its configuration, mesh, context, models and loaders are looked at.
        config: the path of accelerate's config file, as ``accelerate config`` writes it.

    Returns:
        The report; as text it is a list in 80 columns.

    Raises:
        ConfigUnreadable: there is no such file, or it is no YAML mapping.
    """
    asked = [from_file(config)] if config is not None else []
    if acc is None:
        asked += from_environment()
    found = [finding for settings in asked for finding in judge(settings)]
    if acc is None and not asked:
        found.append(
            Finding.of(
                "CP101",
                "note",
                f"{SWITCH} is not set, and no config file was given",
                title="Neither the environment nor a config file asks for context parallelism",
                remedy="that is fine where the script asks: diagnose(acc) in it tells; here, doctor --config FILE",
            )
        )
    wanted = acc is not None or any(settings.sizes.get("cp", 1) > 1 for settings in asked)
    found += _installed(wanted, alone=acc is None)
    if acc is not None:
        from .examining import examine

        found += examine(acc)
    listed = {name: package for name in _LISTED if (package := find(name)) is not None}
    return Report(tuple(found), {name: str(package).removeprefix(f"{name} ") for name, package in listed.items()})


# --- what is installed --------------------------------------------------------------------------------------------------


def _installed(wanted: bool, *, alone: bool) -> Iterator[Finding]:
    accelerate, torch, transformers = find("accelerate"), find("torch"), find("transformers")
    if accelerate is None or torch is None:
        missing = " and ".join(name for name, found in (("accelerate", accelerate), ("torch", torch)) if found is None)
        yield Finding.of("CP106", "error", title=f"{missing} cannot be imported here", remedy=f"pip install {missing}")
    if accelerate is not None:
        row = release(accelerate)
        if accelerate.newer_than(RELEASES[-1].tried[-1]):
            yield Finding.of("CP401", "warning", f"{accelerate}; newest tried: {RELEASES[-1].tried[-1]}")
        if accelerate.distribution != accelerate.name:
            yield Finding.of("CP405", "note", str(accelerate))
        if not row.has_config:
            yield Finding.of(
                "CP106", "note", f"{accelerate}: {row.lost}", title="This accelerate has no ParallelismConfig"
            )
        elif alone and row.own_context == "never":
            yield Finding.of("CP403", "warning", f"{accelerate}: {row.lost}")
        elif alone:
            yield Finding.of("CP403", "ok", str(accelerate), title="This accelerate makes its context in prepare()")
    if torch is not None and torch.older_than(MIN_TORCH):
        yield Finding.of("CP106", "error", f"{torch}; needed: {MIN_TORCH} or later")
    elif torch is not None:
        for since, until, fault in _TORCH_FAULTS:
            if not torch.older_than(since) and torch.older_than(until):
                yield Finding.of("CP404", "note", f"{torch}: {fault}")
    if transformers is not None and transformers.older_than(TRAINER_EVALUATES_SINCE):
        severity: Severity = "warning" if wanted else "note"
        yield Finding.of("CP402", severity, f"{transformers}; {TRAINER_EVALUATES_SINCE} brought the repair")
    for name, words in _OWNERS.items():
        try:
            yield Finding.of("CP108", "note", f"{name} {metadata.version(name)}", title=f"Installed: {words}")
        except metadata.PackageNotFoundError:
            continue
