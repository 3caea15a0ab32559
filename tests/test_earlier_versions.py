"""What an earlier version wrote still works: its run resumes, its corpus is read, its export loads and is evaluated.

`data/earlier/c2f0588.tar.xz` was made by the commit in its name: a corpus of scripts/prepare_data.py, the run of
`expected.json`'s command, stopped by SIGTERM half-way, an export of it, and what that commit computed from there on.
"""

import json
import shlex
import tarfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import forgetting_transformer.model  # noqa: F401 (registers the architectures)
from tests.processes import run_command

pytestmark = pytest.mark.slow
ARCHIVE = Path(__file__).parent / "data/earlier/c2f0588.tar.xz"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(earlier) -> dict:
    return json.loads((earlier / "expected.json").read_text())


def lines(run: Path, name: str) -> dict[int, dict]:
    found = (json.loads(line) for line in (run / f"metrics/jsonlines/{name}.jsonl").read_text().splitlines())
    return {line["step"]: line for line in found}


def succeeds(*words: str, folder: Path) -> str:
    ended = run_command(*words, folder=folder)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


def losses_from(log_probabilities: list[float]) -> torch.Tensor:
    return -torch.tensor(log_probabilities)


def test_its_run_resumes_and_ends_as_it_would_have(earlier, expected):
    arguments = shlex.split(expected["command"].partition("=")[2])[0].split()
    succeeds("train.py", *arguments, folder=earlier)
    losses, held_out = lines(earlier / "run", "train"), lines(earlier / "run", "val")
    for step, loss in expected["train_loss"].items():
        assert losses[int(step)]["train/loss"] == pytest.approx(loss, rel=1e-6), f"at {step} tokens"
    assert held_out[5120]["val/loss"] == pytest.approx(expected["val_loss"]["5120"], rel=1e-6)
    succeeds("save_model.py", "--hf_load_dir", "run", "--hf_save_dir", "hf_of_the_end", folder=earlier)
    assert (earlier / "hf_of_the_end/model.safetensors").stat().st_size > 0


def test_its_export_computes_the_same(earlier, expected):
    model = AutoModelForCausalLM.from_pretrained(earlier / "hf")
    ids = torch.arange(32)[None] * 7 % 257
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(losses, losses_from(expected["log_probabilities_of_ids"]), rtol=1e-6, atol=1e-6)


def test_its_export_is_evaluated(earlier):
    data = ("--data_path", "data", "--dataset", "words", "--eval_len", "64", "--save_dir", "results", "--model", "old")
    succeeds("eval/per_token_loss/run_per_token_loss.py", "--model_path", "hf", *data, folder=earlier)
    results = json.loads((earlier / "results/old/results.json").read_text())
    assert results["val/loss_avg_len_64"] < 5.5
