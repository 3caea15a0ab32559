"""Which versions of Python and of packages made something: a corpus, a run, a measurement."""

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
