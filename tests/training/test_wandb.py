"""wandb, absent, failing or without a key, never stops a run, and has every step once."""

import json
import os
import pty
import struct
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training.callbacks import wandb
from forgetting_transformer.training.records.metrics import MetricsLog
from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.training.conftest import STEP, Job, changed, train
from tests.training.test_resume import losses
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def wandb_rows(file: Path) -> list[dict]:
    """History rows of an offline run: a LevelDB-style log of protocol-buffer records."""
    from wandb.proto import wandb_internal_pb2

    data, position, record, rows = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            record = b""
    return rows


def test_wandb_has_every_step_once_although_it_loses_rows_when_killed(tiny):
    tiny = changed(tiny, wandb__mode="offline", datamodule__repeat=True, train__max_tokens=60 * STEP)
    tiny = changed(tiny, schedule__total_tokens=60 * STEP, skip_eval=True)
    log = Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl"
    job = Job(tiny)
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 31, job.processes[0].is_alive, job.errors)
    job.kill()
    train(tiny)
    folder = Path(tiny["output_dir"]) / "wandb"
    assert len(list(folder.glob("superseded-offline-run-*"))) == 1
    (file,) = folder.glob("offline-run-*/*.wandb")
    rows = [row for row in wandb_rows(file) if "train/loss" in row]
    assert [row["_step"] for row in rows] == [n * STEP for n in range(1, 61)]
    logged = losses(tiny["output_dir"])
    assert all(row["train/loss"] == pytest.approx(logged[row["_step"]]) for row in rows)


def test_wandb_absent_or_failing_never_stops_a_run(tiny, tmp_path):
    tiny = changed(tiny, wandb__mode="online", train__max_tokens=4 * STEP)
    absent = changed(tiny, output_dir=str(tmp_path / "absent"))
    job = Job(absent, patch="import sys; sys.modules['wandb'] = None")
    assert job.wait() == [0], job.errors()
    assert "wandb is not installed" in (tmp_path / "absent/logs/rank-0.log").read_text()
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
        job = Job(changed(tiny, output_dir=str(tmp_path / fault)), patch=patch)
        assert job.wait() == [0], job.errors()
        assert "(no network)" in (tmp_path / fault / "logs/rank-0.log").read_text()
        assert len(losses(str(tmp_path / fault))) == 4


def test_wandb_without_a_key_asks_nothing_of_a_terminal(tiny, tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": tmp_path,
        "NETRC": tmp_path / "none",
        "WANDB_CONFIG_DIR": tmp_path,
        "TERM": "xterm",
    }.items():
        monkeypatch.setenv(name, str(value))
    master, slave = pty.openpty()
    os.write(master, b"3\n")  # an answer that lets wandb.init go through
    config = training.parse(OmegaConf.create(changed(tiny, wandb__mode="online")))
    callback, metrics = wandb.Wandb(), MetricsLog(RunDirectory(config.output_dir), 0)
    with os.fdopen(os.dup(slave), "r") as keyboard, os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr(sys, "stderr", screen)
        callback.open(metrics, config, {})
        assert sys.stdin is keyboard
    os.close(master)
    assert callback.summary == "not available" and not metrics.sinks
    (record,) = [record for record in caplog.records if record.name == wandb.__name__]
    assert record.levelname == "WARNING" and "API key" in record.message and "\n" not in record.message


def test_wandb_gets_no_folder_that_is_not_utf_8(tiny, tmp_path, monkeypatch, caplog, capfd):
    """It would print tracebacks of its own; with wandb.log_dir it records the run, whose config has that name."""
    pytest.importorskip("wandb")
    run = tmp_path / os.fsdecode(b"caf\xe9")
    monkeypatch.setattr(sys, "argv", ["train.py", f"output_dir={run}"])
    config = training.parse(OmegaConf.create(changed(tiny, output_dir=str(run), wandb__mode="offline")))
    metrics = MetricsLog(RunDirectory(config.output_dir), 0)
    callback = wandb.Wandb()
    callback.open(metrics, config, {})
    assert callback.summary == "not available" and "set wandb.log_dir=FOLDER" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    config.wandb.log_dir = str(tmp_path / "wandb")
    callback.open(metrics, config, {"output_dir": str(run)})
    callback.close()
    assert callback.summary == f"offline, {tmp_path}/wandb/wandb" and callback in metrics.sinks
