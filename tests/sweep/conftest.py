"""Sweeps whose jobs are a stand-in for train.py that takes a tenth of a second (fake_train.py)."""

import dataclasses
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgetting_transformer.sweep import composer, runner
from forgetting_transformer.sweep.jobs import Job
from forgetting_transformer.training import Config, parse
from tests.training.conftest import corpus  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_train.py")
DEMO = ["+experiment/demo=fox_pro", "data_dir=data"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> dict[str, str]:
    """Jobs are played by fake_train.py, with the faults that a test puts in here. What one worker composed all have."""
    kinds: dict[str, str] = {}

    def compose_once(overrides: Sequence[str]) -> Config:
        file = shared_folder / f"composed-{hashlib.sha256(json.dumps(list(overrides)).encode()).hexdigest()[:20]}"
        if not file.exists():
            temporary = file.with_name(f"{file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(dataclasses.asdict(compose(overrides))))
            temporary.replace(file)
        return parse(OmegaConf.create(json.loads(file.read_text())), overrides)

    compose = composer.compose_config
    monkeypatch.setattr(composer, "compose_config", compose_once)

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
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *arguments])
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as end:
            return end.code
        return None

    return run


def starts(output_dir: Path) -> list[str]:
    """A line for each start of a job: its CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS."""
    file = output_dir / "starts.txt"
    return file.read_text().splitlines() if file.exists() else []
