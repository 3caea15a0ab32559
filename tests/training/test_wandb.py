"""wandb, absent, failing or without a key, never stops a run, and has every step once."""

import os
import pty
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training.callbacks import wandb
from forgetting_transformer.training.records.metrics import MetricsLog
from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.training.conftest import STEP, changed, losses, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_has_every_step_once_although_it_loses_rows_when_killed(tiny, tmp_path, monkeypatch, mode):
    """Of five rows the server has two; offline all of them go into a new folder."""
    known: dict[int, dict] = {}
    started: list[str] = []

    def init(id: str, dir: str, **_: object) -> SimpleNamespace:
        started.append(id)
        (Path(dir) / f"wandb/offline-run-{len(started)}-{id}").mkdir(parents=True)
        for step in [*known] if mode == "offline" else [step for step in known if step > 256]:
            del known[step]  # lost
        step = max(known, default=-1) + 1
        return SimpleNamespace(step=step, log=lambda values, step: known.update({step: values}), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    config = training.parse(OmegaConf.create(changed(tiny, wandb__mode=mode)))
    for resumed, steps in ((0, range(1, 6)), (5, range(6, 9))):
        metrics = MetricsLog(RunDirectory(config.output_dir), resumed * STEP)
        wandb.Wandb().on_start(SimpleNamespace(config=config, metrics=metrics, resolved={}))
        for n in steps:
            metrics.report("train", n * STEP, {"train/loss": 1 / n})
    assert known == {n * STEP: {"train/loss": 1 / n} for n in range(1, 9)}
    assert len(set(started)) == 1, "a folder is one run"
    superseded = list((Path(config.output_dir) / "wandb").glob("superseded-offline-run-*"))
    assert len(superseded) == (1 if mode == "offline" else 0)


def test_wandb_absent_or_failing_never_stops_a_run(tiny, tmp_path):
    tiny = changed(tiny, wandb__mode="online", train__max_tokens=4 * STEP)
    absent = changed(tiny, output_dir=str(tmp_path / "absent"))
    train(absent, patch="import sys; sys.modules['wandb'] = None")
    assert "wandb is not available" in (tmp_path / "absent/logs/rank-0.log").read_text()
    for fault in ("init", "log", "finish"):
        patch = f"""
import sys, types
def fails(*arguments, **options):
    raise OSError("no network")
works = lambda *arguments, **options: None
run = types.SimpleNamespace(step=0, log=fails if {fault == "log"} else works, finish=fails)
init = fails if {fault == "init"} else lambda **options: run
sys.modules["wandb"] = types.SimpleNamespace(init=init, Settings=dict)
"""
        train(changed(tiny, output_dir=str(tmp_path / fault)), patch=patch)
        assert "(no network)" in (tmp_path / fault / "logs/rank-0.log").read_text()
        assert len(losses(str(tmp_path / fault))) == 4


def test_wandb_without_a_key_asks_nothing_of_a_terminal(tiny, tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "", "NETRC": "none", "WANDB_CONFIG_DIR": ""}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    os.write(master, b"3\n")  # an answer that lets wandb.init go through
    config = training.parse(OmegaConf.create(changed(tiny, wandb__mode="online")))
    callback, metrics = wandb.Wandb(), MetricsLog(RunDirectory(config.output_dir), 0)
    with os.fdopen(os.dup(slave), "r") as keyboard, os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr(sys, "stderr", screen)
        callback.on_start(SimpleNamespace(config=config, metrics=metrics, resolved={}))
        assert sys.stdin is keyboard
    os.close(master)
    assert callback.summary == "not available" and not metrics.sinks
    (record,) = [record for record in caplog.records if record.name == wandb.__name__]
    assert record.levelname == "WARNING" and "API key" in record.message and "\n" not in record.message
