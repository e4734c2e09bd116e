"""Try the newest accelerate, torch and transformers: did upstream move, or did we break?

Prints the rows that the tables would get. Exit code 0: all is well; 3: upstream moved (a fact of the tables or a private name
no longer holds); 4: upstream is as the tables say, and the suite fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import resolve_bodies, upstream_bodies  # noqa: E402

from cpcompat.testing import run_ranks  # noqa: E402
from cpcompat.versions import installed  # noqa: E402

UPSTREAM_MOVED, WE_BROKE = 3, 4


def passes(*arguments: str) -> bool:
    """Whether a part of the suite passes here."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore::cpcompat.UntestedVersion", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def version(name: str) -> str:
    found = installed(name)
    return str(found.base) if found else "not installed"


def rows() -> None:
    """What the tables would say of these versions, as far as it is found by running."""
    behaviour: dict[str, Any] = run_ranks(upstream_bodies.behaviour, 2, timeout=120)[0]
    fields = ", ".join(f"{name}={value!r}" for name, value in behaviour.items())
    print(f'\nTorchRelease(("{version("torch")}",), {fields})')
    entry = run_ranks(resolve_bodies.entry, 2, "prepare", timeout=120)[0]
    own = "prepare" if entry["own"] else "never"
    release = version("accelerate")
    print(f'Release(since="{release}", tried=("{release}",), has_config=True, own_context="{own}", ...)\n')


def main() -> int:
    print(*(f"{name} {version(name)}" for name in ("accelerate", "torch", "transformers")), sep=", ")
    moved = not passes("tests/test_upstream.py")
    rows()
    if moved:
        print("upstream moved: the failures above say which row to write")
        return UPSTREAM_MOVED
    if not passes(*sys.argv[1:]):
        print("upstream is as the tables say, and the suite fails: cpcompat broke")
        return WE_BROKE
    print("all is well; write the rows above if the versions are new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
