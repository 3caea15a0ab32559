"""The scripts in benchmarks/ as modules, and a start of one that is killed."""

import importlib.util
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """benchmarks/NAME.py, loaded afresh, so that a test may change it."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_until_killed(function: Callable[..., Any], *arguments: Any) -> None:
    """Runs what kills itself with SIGKILL in a copy of this process."""

    def alone() -> None:
        torch.set_num_threads(1)  # threads that the parent started are not there after a fork
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
