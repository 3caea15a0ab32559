"""The section on a callback of docs/extend.md, followed to the letter, in a folder that is not the repository."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, blocks, section, write_files
from tests.processes import run_command
from tests.tiny import STEP, make_corpus, tiny_config
from tests.training.conftest import Job, changed, checkpoint_tensors

EXTEND = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
PAGE = section(EXTEND, "A callback")
#: A corpus and a model of seconds in the place of the demo's.
SMALL = [
    "datamodule.dataset=tiny",
    "datamodule.vocab_size=64",
    "datamodule.bos_token_id=0",
    "datamodule.train_batch_len=32",
    "datamodule.train_batch_size=4",
    "datamodule.train_num_workers=0",
    "datamodule.eval_batch_len=32",
    "datamodule.eval_local_batch_size=4",
    "datamodule.eval_num_workers=0",
    "scale.hidden_size=64",
    "scale.num_hidden_layers=1",
    "scale.heads_of_64=1",
    "train.grad_acc_tokens=128",
    "log_interval=128",
    "train_eval_interval=512",
    "eval_interval=1024",
    "checkpoint_interval=512",
    "fabric.accelerator=cpu",
    "wandb.mode=disabled",
    "schedule.warmup_tokens=128",
    "schedule.total_tokens=2560",
]


@pytest.fixture
def lab(tmp_path) -> Path:
    """A folder with the files of the page and a corpus."""
    write_files(EXTEND, tmp_path)
    make_corpus(tmp_path / "quickstart/data")
    return tmp_path


def run(lab: Path, *changes: str) -> subprocess.CompletedProcess:
    command = shlex.split(blocks(PAGE, "sh")[0].replace("\\\n", " "))
    assert command[:3] == ["python", "-m", "forgetting_transformer.train"]
    return run_command(*command[1:], *SMALL, *changes, folder=lab)


def jumps(lab: Path) -> dict[int, dict]:
    lines = (lab / "output/jumps/metrics/jsonlines/loss_jumps.jsonl").read_text().splitlines()
    return {entry["step"]: entry for entry in map(json.loads, lines)}


@pytest.mark.slow
def test_the_page_works_from_another_folder_and_its_state_survives_a_stop(lab):
    done = run(lab, "train.max_tokens=1280")
    assert done.returncode == 0, done.stderr
    assert sorted(jumps(lab)) == list(range(128, 1281, 128))
    done = run(lab, "train.max_tokens=2560")
    assert done.returncode == 0 and "continuing from" in done.stderr, done.stderr
    stopped = jumps(lab)
    losses = (lab / "output/jumps/metrics/jsonlines/train.jsonl").read_text().splitlines()
    mean, count = 0.0, 0
    for entry in map(json.loads, losses):
        loss = entry["train/loss"]
        count += mean != 0 and loss > 1.05 * mean
        mean = loss if mean == 0 else 0.9 * mean + 0.1 * loss
        assert stopped[entry["step"]]["loss_jumps/mean"] == pytest.approx(mean, rel=1e-5)
        assert stopped[entry["step"]]["loss_jumps/jumps"] == count
    assert len(stopped) == 20


@pytest.mark.slow
def test_a_usual_typo_is_answered_in_one_line(lab):
    for typo, said in {
        "callbacks.loss_jumps.factr=2": "did you mean 'callbacks.loss_jumps.factor'",
        "callbacks.loss_jumps.factor=0.5": "callbacks.loss_jumps.factor=0.5 must be greater than 1",
    }.items():
        done = run(lab, "+" * ("factr" in typo) + typo)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (lab / "output").exists()


@pytest.mark.slow
def test_the_example_changes_no_weight(tmp_path):
    make_corpus(tmp_path / "data")
    config = changed(tiny_config(tmp_path / "run", tmp_path / "data"), train__max_tokens=8 * STEP)
    other = changed(config, output_dir=str(tmp_path / "other"), callbacks={"loss_jumps": {"factor": 1.05}})
    for each, patch in ((config, None), (other, blocks(PAGE, "python")[0])):
        job = Job(each, patch=patch)
        assert job.wait() == [0], job.errors()
    ours, theirs = (checkpoint_tensors(str(tmp_path / name), 8 * STEP) for name in ("run", "other"))
    assert all((tensor == theirs[name]).all() for name, tensor in ours.items())


def test_the_page_names_every_hook_and_every_choice():
    from forgetting_transformer.plugins import CALLBACKS
    from forgetting_transformer.training.callbacks import Callback

    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    assert re.findall(r"^\| `(on_\w+)\(", PAGE, re.MULTILINE) == hooks
    configs = {file.stem for file in (ROOT / "configs/callbacks").glob("*.yaml")}
    for name in configs:
        assert f"`{name}`" in PAGE and name in CALLBACKS
    shown = {name for names in re.findall(r"callbacks=\[([\w,]+)\]", PAGE) for name in names.split(",")}
    assert shown >= configs
