"""A study that is stopped and started again has the numbers of one that ran through: real runs, of a tiny model."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forgetting_transformer.training.continuing import decisive
from studies.engine import results as studies
from studies.engine import tables as study_tables
from studies.engine.plan import read_plan
from tests.sweep.conftest import ROOT
from tests.tiny import DOC_LEN, STEP, VOCAB
from tests.waiting import HANG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

PLAN = f"""
group: demo
models: {{fox_pro: FoX (Pro)}}
seeds: [0, 1]
start_rate: 1.0e-2
overrides:
  runs:
    train.max_tokens: {20 * STEP}
    train.grad_acc_tokens: 64
    schedule.warmup_tokens: {4 * STEP}
    log_interval: {STEP}
    eval_interval: {10 * STEP}
    train_eval_interval: {20 * STEP}
    checkpoint_interval: {4 * STEP}
    eval.min_val_length: 8
    scale.hidden_size: 64
    scale.num_hidden_layers: 1
    scale.heads_of_64: 1
    datamodule: longcrawl64
    datamodule.dataset: tiny
    datamodule.train_batch_len: 32
    datamodule.train_batch_size: 4
    datamodule.train_num_workers: 0
    datamodule.eval_num_workers: 0
    datamodule.eval_batch_len: 32
    datamodule.eval_tokens: {10 * DOC_LEN}
    datamodule.eval_local_batch_size: 4
    +datamodule.vocab_size: {VOCAB}
    +datamodule.bos_token_id: 0
    fabric.accelerator: cpu
  search: {{train.max_tokens: {8 * STEP}}}
  variants: {{train.max_tokens: {8 * STEP}}}
variants: {{fox_pro: [fox_pro]}}
"""


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.is_file() else 0


def test_a_study_in_three_pieces_is_the_study_that_ran_through(corpus, tmp_path):
    plan = tmp_path / "study.yaml"
    plan.write_text(PLAN)

    def start(folder: str) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "studies/run.py"), "--study", str(plan)]
        command += [f"output_dir={tmp_path / folder}", f"data_dir={corpus}"]
        said = (tmp_path / f"{folder}.log").open("a")
        return subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def log(name: str) -> Path:
        return tmp_path / "pieces" / name / "metrics/jsonlines/train.jsonl"

    # In the second run of the search, and in the run: both have a checkpoint to go on from, and one that is not whole.
    for name in ("search/fox_pro/lr1e-2_seed0", "runs/fox_pro_seed0"):
        study = start("pieces")
        wait_until(lambda name=name: lines(log(name)) > 1, lambda study=study: study.poll() is None)
        study.send_signal(signal.SIGTERM)
        assert study.wait(HANG) == 1, "jobs are not finished"
    assert start("pieces").wait(HANG) == 0, (tmp_path / "pieces.log").read_text()
    assert start("straight").wait(HANG) == 0, (tmp_path / "straight.log").read_text()

    found = {}
    for folder in ("pieces", "straight"):
        study = studies.collect(tmp_path / folder, tmp_path / "none", (), decisive, read_plan(plan))
        starts = studies.read_run(tmp_path / folder / "runs/fox_pro_seed0").starts
        found[folder] = {key: value for key, value in study.items() if key not in ("started", "environment")}
        assert (len(starts) > 1) == (folder == "pieces"), "the run was stopped, and went on"
    assert found["pieces"] == found["straight"]
    assert study_tables.models_table(found["pieces"]) == study_tables.models_table(found["straight"])
    assert len(found["pieces"]["models"]["fox_pro"]["heldout_curve"][0]) == 2
