"""What is installed, read without importing it: forks, development builds and local versions included."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["Installed", "base_version", "installed"]


@dataclass(frozen=True)
class Installed:
    """One importable package.

    Attributes:
        name: the import name.
        distribution: the distribution that brings it; differs for forks such as accelerate-kt.
        version: the version as the package states it.
    """

    name: str
    distribution: str
    version: str

    @property
    def base(self) -> Version | None:
        """The release without local, dev and pre parts (``2.9.0+cu128`` -> ``2.9.0``); None where it is no version."""
        return base_version(self.version)

    def older_than(self, release: str) -> bool:
        """Whether this is an earlier release; False where the version cannot be read, so that it is tried."""
        base, other = self.base, base_version(release)
        return base is not None and other is not None and base < other

    def newer_than(self, release: str) -> bool:
        """Whether this is a later release; False where the version cannot be read."""
        base, other = self.base, base_version(release)
        return base is not None and other is not None and base > other

    def __str__(self) -> str:
        fork = "" if self.distribution == self.name else f" (from {self.distribution})"
        return f"{self.name} {self.version}{fork}"


def base_version(text: str) -> Version | None:
    """Parse a version and keep its release numbers.

    Args:
        text: any text that a package gives as its version.

    Returns:
        The base version, or None where the text is no version.
    """
    from packaging.version import Version

    try:
        return Version(Version(text).base_version)
    except (ValueError, TypeError):  # InvalidVersion, and what int() says of thousands of digits
        return None


def installed(name: str) -> Installed | None:
    """Look up what provides an import name.

    An imported module is asked first: what runs is what counts, whatever the metadata say.

    Args:
        name: the import name, ``"accelerate"`` for instance.

    Returns:
        What is installed, or None.
    """
    from importlib import metadata

    module = sys.modules.get(name)
    try:
        stated = str(getattr(module, "__version__", None) or "")
    except Exception:  # a lazy module that fails to load, or a stand-in
        stated = ""
    try:
        distribution, version = name, metadata.version(name)
    except metadata.PackageNotFoundError:
        owners = metadata.packages_distributions().get(name)
        if owners:
            distribution, version = owners[0], metadata.version(owners[0])
        elif module is not None:
            distribution, version = name, "unknown"
        else:
            return None
    return Installed(name, distribution, stated or str(version))
