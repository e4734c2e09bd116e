"""`vendor` and `check`: a copy of this package inside another one, and whether it is still what it was.

A copy has what a library needs at run time, the licence, and a manifest with the version and a hash of each file. It is made
beside its place and then changes places with what stands there, in one step where the system has one, so that a run which
ends anywhere leaves the old copy or the new one. Nothing outside the destination is written, and what is read there is not
trusted: names come from this package, links are not followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import keyword
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from . import __version__
from .errors import VendorRefused
from .versions import Installed

__all__ = ["MANIFEST", "Change", "Vendored", "check", "vendor"]

MANIFEST = "vendored.json"
LICENCE = "LICENSE"

_SOURCE = Path(__file__).parent
_COMMAND_LINE = {"__main__", "running", "vendoring"}
_TESTING = {"launch", "preload", "pytest_plugin", "rank", "testing", "verifying"}
_FILE = re.compile(r"[A-Za-z_]\w*\.(py|typed)|LICENSE", re.ASCII)
_IGNORED = {"__pycache__", MANIFEST}


@dataclass(frozen=True)
class Change:
    """A file of a copy that is not as it should be.

    Attributes:
        file: its name in the copy.
        kind: ``"edited"`` or ``"missing"`` since it was vendored; ``"foreign"``: it never was; ``"older"`` or ``"newer"``:
            not the installed package's.
    """

    file: str
    kind: Literal["edited", "missing", "foreign", "older", "newer"]

    def __str__(self) -> str:
        return f"{self.kind:<8} {self.file if _FILE.fullmatch(self.file) else ascii(self.file)}"


class Vendored(NamedTuple):
    """What `vendor` did.

    Attributes:
        place: the copy.
        before: the version that stood there; None where there was none.
        written: False where the copy was as it should be.
    """

    place: Path
    before: str | None
    written: bool


class _Manifest(NamedTuple):
    version: str
    testing: bool
    files: dict[str, str]

    def dumps(self) -> bytes:
        note = "made by `python -m cpcompat vendor`; do not edit the files, vendor again"
        value = {"note": note, "package": "cpcompat", **self._asdict()}
        return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def vendor(dest: str | Path, name: str = "cpcompat", *, testing: bool | None = None, force: bool = False) -> Vendored:
    """Copy this package to ``dest/name``, or bring the copy there up to date.

    Args:
        dest: the folder of the package that it will belong to; made where it does not exist.
        name: the copy's name, a Python identifier.
        testing: whether `testing`, the pytest plugin and `verify` are wanted; by default as the copy there has it.
        force: overwrite files that were edited, too.

    Returns:
        What was done.

    Raises:
        VendorRefused: the name is none, something else stands there, files were edited, or writing failed. What stood
            there stands there still.
    """
    place = _place(dest, name)
    with _typed(f"{place} could not be written, and is as it was"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.parent):
            _recover(place)
            old = _read(place) if os.path.lexists(place) else None
            edited = [change for change in _changes(place, old) if change.kind in ("edited", "foreign")] if old else []
            if edited and not force:
                raise VendorRefused(
                    f"{place} was edited since it was vendored",
                    "; ".join(map(str, edited)),
                    "carry the edits elsewhere, or lose them with --force",
                    files=[change.file for change in edited],
                )
            files = _files(bool(old and old.testing) if testing is None else testing)
            new = _manifest(files)
            if old == new and not _changes(place, new):
                return Vendored(place, __version__, False)
            _write(place, {**files, MANIFEST: new.dumps()})
            return Vendored(place, old.version if old else None, True)


def check(dest: str | Path, name: str = "cpcompat") -> list[Change]:
    """Compare a copy with its manifest and with this package; nothing is written.

    Args:
        dest: as for `vendor`.
        name: as for `vendor`.

    Returns:
        Every file that is not as it should be; none where all is well.

    Raises:
        VendorRefused: there is no copy, or its manifest cannot be read.
    """
    place = _place(dest, name)
    with _typed(f"{place} could not be read"):
        old = _read(place) if os.path.lexists(place) else None
        if old is None:
            raise VendorRefused(f"there is no copy at {place}", "", "make it: the same command without --check")
        found = _changes(place, old)
        new = _manifest(_files(old.testing)).files
    named = {change.file for change in found}
    stale = {file for file in old.files.keys() | new.keys() if old.files.get(file) != new.get(file)} - named
    if stale:
        newer = Installed(name, name, old.version).newer_than(__version__)
        found += [Change(file, "newer" if newer else "older") for file in stale]
    return sorted(found, key=lambda change: (change.file, change.kind))


def _place(dest: str | Path, name: str) -> Path:
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or name.startswith("__"):
        raise VendorRefused(
            "the name of a copy is one Python identifier, as in `import name`",
            f"got {name!r}",
            "give the folder as DEST and its name as --name, such as `vendor src/product/_vendor --name cp_shim`",
        )
    return Path(dest) / name


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    """Let an error of the file system, or of a path that is none, be a `VendorRefused`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise VendorRefused(
            what, f"{type(error).__name__}: {error}", "see to the path, the permissions and the space there"
        ) from error


# --- what a copy has ----------------------------------------------------------------------------------------------------


def _files(testing: bool) -> dict[str, bytes]:
    left_out = _COMMAND_LINE if testing else _COMMAND_LINE | _TESTING
    files = {path.name: path.read_bytes() for path in sorted(_SOURCE.glob("*.py")) if path.stem not in left_out}
    return {**files, "py.typed": b"", LICENCE: _licence()}


def _licence() -> bytes:
    """In a checkout it lies beside the package, in an environment in the distribution's metadata."""
    root = _SOURCE.parent
    if (root / "pyproject.toml").is_file() and (root / LICENCE).is_file():
        return (root / LICENCE).read_bytes()
    with contextlib.suppress(metadata.PackageNotFoundError):
        text = metadata.distribution("cpcompat").read_text(f"licenses/{LICENCE}")
        if text:
            return text.encode()
    raise VendorRefused(
        "the licence of cpcompat cannot be found, and no copy may be made without it",
        f"looked beside {_SOURCE} and in the metadata of the distribution cpcompat",
        "install cpcompat by pip, and vendor from there",
    )


def _manifest(files: dict[str, bytes]) -> _Manifest:
    return _Manifest(__version__, "testing.py" in files, {name: _hash(data) for name, data in files.items()})


def _hash(data: bytes) -> str:
    """Of the text: git may turn line ends on another system."""
    return "sha256:" + hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()


# --- what stands there --------------------------------------------------------------------------------------------------


def _read(place: Path) -> _Manifest | None:
    """The manifest of a copy; None for an empty folder. Anything else is somebody's, and not ours to replace."""
    if place.is_symlink() or not place.is_dir():
        kind = "a symbolic link" if place.is_symlink() else "no folder"
        raise VendorRefused(f"{place} is {kind}", "", "remove it, or choose another --name")
    if not any(place.iterdir()):
        return None
    path = place / MANIFEST
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link")
        value = json.loads(path.read_bytes())
        version, testing, files = value["version"], value["testing"], value["files"]
        if not (isinstance(version, str) and isinstance(testing, bool) and isinstance(files, dict)):
            raise ValueError("a value of another kind")
        odd = [name for name in files if not _FILE.fullmatch(name)]
        if odd:
            raise ValueError(f"no name of a file: {odd[0]!r}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise VendorRefused(
            f"{place} is no copy made by vendor: its {MANIFEST} cannot be read",
            f"{type(error).__name__}: {error}",
            "remove the folder if nothing in it is needed, or choose another --name",
        ) from error
    return _Manifest(version, testing, files)


def _changes(place: Path, manifest: _Manifest) -> list[Change]:
    """What was done to a copy since its manifest was written."""
    found = []
    for name, wanted in manifest.files.items():
        path = place / name
        if not os.path.lexists(path):
            found.append(Change(name, "missing"))
        elif path.is_symlink() or not path.is_file() or _hash(path.read_bytes()) != wanted:
            found.append(Change(name, "edited"))
    there = {path.name for path in place.iterdir()} - _IGNORED
    return found + [Change(name, "foreign") for name in sorted(there - manifest.files.keys())]


# --- writing ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs from the folder; the system lets go of it however this process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VendorRefused(f"another run is at work in {folder}", "", "wait for its end") from None
        yield
    finally:
        os.close(handle)


def _beside(place: Path) -> tuple[Path, Path]:
    return place.with_name(f".{place.name}.new"), place.with_name(f".{place.name}.old")


def _recover(place: Path) -> None:
    """Take up what a run that was killed has left."""
    new, old = _beside(place)
    if old.is_dir() and not os.path.lexists(place):
        os.rename(old, place)
    for left in (new, old):
        if os.path.lexists(left):
            shutil.rmtree(left)


def _write(place: Path, files: dict[str, bytes]) -> None:
    new, old = _beside(place)
    try:
        new.mkdir()
        for name, data in files.items():
            (new / name).write_bytes(data)
        if not place.exists():
            os.rename(new, place)
        elif not _exchange(new, place):
            os.rename(place, old)
            os.rename(new, place)
    finally:
        _recover(place)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where this system or this disk cannot."""
    import ctypes

    name, here = {"linux": ("renameat2", -100), "darwin": ("renameatx_np", -2)}.get(sys.platform, ("", 0))
    try:
        rename = getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):
        return False
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), 2) == 0)
