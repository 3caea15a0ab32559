"""Types of command-line arguments, for argparse. Imports only the standard library."""

import argparse
from pathlib import Path


def name(text: str) -> str:
    """A path, a URL or a name that must say something.

    Raises:
        argparse.ArgumentTypeError: it is empty, as a variable of the shell that is not set leaves it. argparse adds the flag.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty (a variable that is not set?); give a path or a name")
    return text


def path(text: str) -> Path:
    """A path, which pathlib would take for the current folder if it were empty.

    Raises:
        argparse.ArgumentTypeError: as `name`.
    """
    return Path(name(text))
