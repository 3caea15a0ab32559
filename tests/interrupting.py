"""Ctrl-C in a script that is run in this process."""

import argparse
import builtins
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest


def code_when_interrupted(
    script: Path, moment: str, late: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> object:
    """Runs a script that gets Ctrl-C while it is "importing" or "working", and returns its exit code.

    Args:
        late: whether a module of this name is imported when the script has begun.
    """
    really_import = builtins.__import__

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted_import(name: str, *arguments: object, **options: object) -> object:
        if late(name):
            raise KeyboardInterrupt
        return really_import(name, *arguments, **options)

    if moment == "importing":
        monkeypatch.setattr(builtins, "__import__", interrupted_import)
    else:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", interrupted)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    return end.value.code
