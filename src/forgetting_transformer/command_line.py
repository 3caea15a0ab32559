"""Shared parts of the commands: types of arguments for argparse, and how a command ends. Quick to import."""

import argparse
import contextlib
import io
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from forgetting_transformer import plugins
from forgetting_transformer.files import LINK_TO_IT, UnreadableError, is_utf8
from forgetting_transformer.ranges import COUNT, POSITIVE, TOKENS, Range


class CommandError(Exception):
    """An error that the user can fix; one line has cause and fix. `run` and train.py end a command with it."""


def make_parser(description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser that shows the docstring of its script, and an epilog, as they are written."""
    as_written = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, epilog=epilog, formatter_class=as_written)


def name(text: str) -> str:
    """A path, URL or name that must not be empty.

    Raises:
        argparse.ArgumentTypeError: it is empty, as a variable of the shell that is not set leaves
            it, or not UTF-8, which safetensors and tokenizers cannot open. argparse adds the flag.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty (a variable that is not set?); give a path or a name")
    return _in_utf8(text)


def path(text: str) -> Path:
    """A path, which pathlib would take for the current folder if it were empty.

    Raises:
        argparse.ArgumentTypeError: as `name`, also where the current folder is not UTF-8.
    """
    _in_utf8(os.path.abspath(name(text)))
    return Path(text)


def _in_utf8(text: str) -> str:
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8; {LINK_TO_IT}")
    return text


def number(allowed: Range, whole: bool = False) -> Callable[[str], Any]:
    """A type of argument: numbers in this range. Others are refused by argparse, which adds the flag."""

    def read(text: str) -> int | float:
        try:
            value = (int if whole else float)(text)
        except ValueError:
            value = math.nan
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed.describe(whole)}")
        return value

    return read


def at_least(low: int) -> Callable[[str], int]:
    """A type of argument: whole numbers from `low` on."""
    return number(Range(low, COUNT.high), whole=True)


count, positive = at_least(1), number(POSITIVE)
seed = number(Range(0, 2**64 - 1), whole=True)
port = number(Range(1, 2**16 - 1), whole=True)
#: Type for the training tokens of a checkpoint.
step = number(Range(0, TOKENS.high), whole=True)
#: Tokens, FLOPs, or FLOPs per second, which may be written as 2e9.
large = number(Range(0, 1e40, above=True))


def whole_numbers(text: str) -> list[int]:
    """ "0,1,2" -> [0, 1, 2].

    Raises:
        argparse.ArgumentTypeError: it is anything else, or has a negative number; argparse adds the flag.
    """
    try:
        return [seed(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give whole numbers from 0 on with commas between them, as in 0,1,2"
        ) from error


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """--plugins NAME …: plug-ins (plugins.py) that a run or a model needs, imported when the option is read."""

    def loaded(name: str) -> str:
        try:
            plugins.load([name])
        except plugins.PluginError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return name

    parser.add_argument("--plugins", nargs="+", default=[], metavar="NAME", type=loaded, help="plug-ins that it needs")


def take_any_text() -> None:
    """Lets standard streams pass text that their encoding lacks, such as é in ASCII."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # a notebook or a test may have put something else here
            stream.reconfigure(errors=errors)


def one_line(error: BaseException) -> str:
    """Text of a library's error, which may be a title and a list, for the middle of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Name → version, Python's first. Packages that are not installed, such as this one on PYTHONPATH, are left out."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def run(main: Callable[[], int | None], interrupted: str = "interrupted") -> int | None:
    """Calls `main` and returns the exit code, without a traceback for Ctrl-C and for a closed pipe (`… | head`).

    Args:
        interrupted: one line, printed after Ctrl-C.
    """
    take_any_text()
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130  # as a shell reports SIGINT
    except (CommandError, UnreadableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        if error.filename is None:
            raise
        # A path of the command line, such as --out below a file.
        print(f"error: {error.filename}: {error.strerror}; give another path", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Python flushes the stream when it ends, and would report an error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports SIGPIPE
    return code
