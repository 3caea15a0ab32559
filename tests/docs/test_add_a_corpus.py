"""The section on a corpus of docs/extend.md, followed to the letter, in a folder that is not this repository."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.docs.commands import ROOT, blocks, section, write_files
from tests.processes import run_command

pytestmark = pytest.mark.slow

EXTEND = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
PAGE = section(EXTEND, "A corpus")
#: The page's command, in seconds instead of minutes.
SMALL = [
    "scale.hidden_size=32",
    "scale.num_hidden_layers=1",
    "scale.heads_of_64=1",
    "datamodule.train_batch_len=32",
    "log_interval=256",
    "schedule.warmup_tokens=512",
    "train.grad_acc_tokens=256",
    "eval.min_val_length=8",
    "checkpoint_interval=512",
    "fabric.accelerator=cpu",
    "seed=3",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    """A folder with the files of the page, and tokens."""
    folder = tmp_path_factory.mktemp("lab")
    write_files(EXTEND, folder)
    (folder / "data/tales").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, size in (("train.bin", 32 * 8 * 12), ("val.bin", 32 * 10)):
        generator.integers(1, 64, size=size).astype(np.uint16).tofile(folder / "data/tales" / name)
    return folder


TRAIN, EVALUATE, EXPORT = (
    line.split() for block in blocks(PAGE, "sh") for line in block.replace("\\\n", " ").strip().splitlines()
)


def start(lab: Path, *more: str, without: str = "nothing") -> subprocess.CompletedProcess:
    """The training command of the page in that folder, with further arguments."""
    assert TRAIN[:3] == ["python", "-m", "forgetting_transformer.train"]
    return run([word for word in TRAIN if not word.startswith(without)] + SMALL, lab, *more)


def run(words: list[str], lab: Path, *more: str) -> subprocess.CompletedProcess:
    assert words[0] == "python"
    return run_command(*words[1:], *more, folder=lab)


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics/jsonlines/train.jsonl").read_text().splitlines()
    return {entry["step"]: entry["train/loss"] for entry in map(json.loads, lines)}


def said(run: subprocess.CompletedProcess) -> str:
    assert run.returncode == 1, run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_the_corpus_of_the_page_trains_and_resumes_exactly(lab):
    whole = start(lab, "train.max_tokens=3072", "output_dir=whole")
    assert whole.returncode == 0, whole.stderr
    for tokens in (1024, 3072):
        part = start(lab, f"train.max_tokens={tokens}", "schedule.total_tokens=3072")
        assert part.returncode == 0, part.stderr
    assert losses(lab / "output/tales") == losses(lab / "whole") and len(losses(lab / "whole")) == 12
    assert (lab / "whole/metrics/jsonlines/val.jsonl").exists()
    changed = start(lab, "train.max_tokens=3328", "datamodule.skip_tokens=256", "datamodule.repeat=true")
    assert "datamodule.skip_tokens: 0 -> 256" in changed.stderr
    again = start(lab, "train.max_tokens=3328", "schedule.total_tokens=3072", "datamodule.repeat=true")
    assert again.returncode == 0, again.stderr
    without = start(lab, without="plugins=")
    assert "needs plugins=[my_lab]" in said(without) or "unknown" in said(without)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("datamodule.skip_tokens=-1", r"datamodule\.skip_tokens=-1 must be greater than or equal to 0"),
        ("datamodule.dataset=tails", r"tails/train\.bin cannot be read .* check data_dir and datamodule\.dataset"),
        (
            "datamodule.skip_tokens=2880",
            r"train\.bin has no batch of 8 sequences of 32 tokens; lower datamodule\.train_",
        ),
        ("train.max_tokens=30720", r"train\.max_tokens=30,720 is more than the 3,072 tokens of .*train\.bin"),
    ],
)
def test_mistakes_are_one_line(lab, argument, message):
    repeat = ["datamodule.repeat=true"] if "skip_tokens=2880" in argument else []
    assert re.search(message, said(start(lab, argument, *repeat, "output_dir=mistake")))


def test_its_held_out_texts_are_evaluated_and_its_model_is_exported_as_the_page_says(lab):
    (lab / "data/more_tales").mkdir()
    shutil.copy(lab / "data/tales/val.bin", lab / "data/more_tales")
    trained = start(lab, "train.max_tokens=768", "output_dir=few", "eval_sets.more=more_tales")
    assert trained.returncode == 0, trained.stderr
    logged, again = (
        json.loads((lab / f"few/metrics/jsonlines/{kind}.jsonl").read_text().splitlines()[-1])[f"{kind}/loss"]
        for kind in ("val", "val_more")
    )
    assert logged == again
    evaluated = run([word.replace("output/tales", "few") for word in EVALUATE], lab)
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads((lab / "output/per_token_loss/few/results.json").read_text())
    assert (results["corpus"], results["eval_tokens"]) == ("tales", 320)
    assert results["val/loss_avg_len_32"] == pytest.approx(logged, abs=1e-5)
    exported = run([word.replace("output/tales", "few") for word in EXPORT], lab)
    assert exported.returncode == 0 and "data/tales/tokenizer" in exported.stdout, exported.stderr
    assert (lab / "few_hf/model.safetensors").is_file()
