"""Sweeps whose jobs are a stand-in for train.py that takes a tenth of a second (fake_train.py)."""

import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forgetting_transformer import command_line
from forgetting_transformer.sweep import composer, runner
from forgetting_transformer.sweep.jobs import Job
from tests.processes import run_here
from tests.training.conftest import corpus  # noqa: F401 (a fixture)

FAKE = Path(__file__).with_name("fake_train.py")
#: What one test of a worker composed the next ones have: it takes a moment.
composed = functools.cache(lambda *overrides, compose=composer.compose_config: compose(overrides))
DEMO = ["+experiment/demo=fox_pro", "data_dir=data"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Jobs are played by fake_train.py, with the faults that a test puts in here."""
    kinds: dict[str, str] = {}
    monkeypatch.setattr(composer, "compose_config", lambda overrides: copy.deepcopy(composed(*overrides)))

    def command(job, devices):
        return [sys.executable, str(FAKE), json.dumps(dataclasses.asdict(job.config)), json.dumps(kinds)]

    monkeypatch.setattr(Job, "command", command)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return kinds


@pytest.fixture
def train_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int | str | None]:
    """Runs `python train.py ARGUMENTS` in this process and returns its exit code or message, None for success."""

    def run(*arguments: str) -> int | str | None:
        monkeypatch.chdir(tmp_path)
        return run_here("train.py", *arguments)

    return run


@pytest.fixture
def search(faults, tmp_path, capsys, request) -> Callable[..., tuple[int, str, str]]:
    """Runs the script of the test's module in the folder `sweep` and returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        given = [*DEMO, f"output_dir={tmp_path / 'sweep'}", *arguments]
        code = command_line.run(lambda: request.module.script.main(given))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def starts(output_dir: Path) -> list[str]:
    """A line for each start of a job: its CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS."""
    file = output_dir / "starts.txt"
    return file.read_text().splitlines() if file.exists() else []
