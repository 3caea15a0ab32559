"""Packages that are installed, whose versions a corpus, a run or a measurement records, and how to get others."""

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Name → version, Python's first. Packages that are not installed, such as this one on PYTHONPATH, are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this package, which is in no package index."""
    return f'pip install -e ".[{extra}]" in a clone of this repository'
