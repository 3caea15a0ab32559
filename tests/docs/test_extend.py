"""docs/extend.md followed to the letter in a folder that is not the repository: first its files, then its commands."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.plugins import CALLBACKS
from forgetting_transformer.training.callbacks import Callback
from tests.docs.commands import ROOT, section, shell_commands, write_files
from tests.processes import Command, run_command
from tests.tiny import VOCAB, make_corpus
from tests.training.conftest import word_tokenizer
from tests.waiting import wait_until

PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
#: What makes the page's commands a matter of seconds.
SMALL = [
    "scale.hidden_size=64", "scale.num_hidden_layers=1", "scale.heads_of_64=1", "datamodule.train_batch_len=32",
    "datamodule.train_num_workers=0", "eval.min_val_length=8", "schedule.warmup_tokens=128", "log_interval=256",
    "checkpoint_interval=512", "fabric.accelerator=cpu", "wandb.mode=disabled",
]  # fmt: skip
#: The corpus of the demo in the same way.
DEMO = [
    "datamodule.train_batch_size=4", "datamodule.eval_tokens=640", "datamodule.repeat=true", "train.grad_acc_tokens=128"
]  # fmt: skip


def commands(of: str) -> list[list[str]]:
    """The commands of a part of the page that use the plug-in."""
    sections = re.sub(r"^```sh$", "```bash", of, flags=re.MULTILINE)
    return [words for words in shell_commands(sections) if "my_lab" in " ".join(words)]


def run(words: list[str], folder: Path, *more: str) -> str:
    """Output of a command, which must succeed."""
    assert words[0] == "python"
    done = run_command(*words[1:], *more, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(words: list[str], folder: Path, *more: str) -> str:
    """The line with which a command ends."""
    done = run_command(*words[1:], *more, folder=folder)
    said = (done.stdout + done.stderr).strip()
    assert done.returncode != 0 and "Traceback" not in said, said
    return said.splitlines()[-1]


def logged(run: Path, kind: str) -> dict[int, dict]:
    lines = (run / f"metrics/jsonlines/{kind}.jsonl").read_text().splitlines()
    return {entry["step"]: entry for entry in map(json.loads, lines)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    """A folder with the files of the page, the corpus of the demo, small, and the tokens of the page's own corpus."""
    folder = tmp_path_factory.mktemp("lab")
    write_files(PAGE, folder)
    corpus = folder / "quickstart/data/python_code"
    make_corpus(folder)
    corpus.parent.mkdir(parents=True)
    (folder / "tiny").rename(corpus)
    words = {"<eos>": 0, "import": 1, "os": 2} | {f"word{n}": n for n in range(3, VOCAB)}
    word_tokenizer(corpus / "tokenizer", words, bos_token="<eos>", eos_token="<eos>", unk_token="<eos>")
    about = {"format_version": 1, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    (corpus / "manifest.json").write_text(json.dumps(about))
    generator = np.random.default_rng(0)
    for name, size in (("tales/train.bin", 32 * 8 * 12), ("tales/val.bin", 32 * 10)):
        (folder / "data/tales").mkdir(parents=True, exist_ok=True)
        generator.integers(1, 64, size=size).astype(np.uint16).tofile(folder / "data" / name)
    return folder


@pytest.mark.slow
def test_a_mixer_trains_is_killed_continues_is_exported_and_loaded(lab):
    train, save, *more = commands(PAGE.partition("## A check in seconds")[0])
    train = [*train, *SMALL, *DEMO, "train.max_tokens=3200"]
    output = lab / next(word.partition("=")[2] for word in train if word.startswith("output_dir="))
    process = Command(*train[1:], folder=lab)
    wait_until(lambda: list(output.glob("checkpoints/step-*/manifest.json")), lambda: process.poll() is None)
    process.kill()
    process.wait()
    said = refused([word for word in train if not word.startswith("plugins=")], lab)
    assert said.startswith("ConfigError: there is no model=") and "plug-in, which is named first: plugins=[…]" in said
    run(train, lab)
    assert "training finished: 3,200 tokens" in (output / "logs/rank-0.log").read_text()
    assert "this run needs plugins=[my_lab]" in refused([w for w in save if w not in ("--plugins", "my_lab")], lab)
    run(save, lab)
    assert json.loads(Path(f"{output}_hf/exported_from.json").read_text())["plugins"] == ["my_lab"]
    for words in more:
        run(words, lab, "--max_new_tokens", "4")
    bare = [word for word in words if word not in ("--plugins", "my_lab")]
    assert "this model needs plugins=[my_lab]" in refused(bare, lab)


@pytest.mark.slow
def test_a_mixer_in_a_hybrid_is_exported_with_the_name_of_the_plug_in(lab):
    hybrid = re.findall(r"^```yaml\n(name: hybrid\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    (lab / "my_lab/configs/model/retention_fox.yaml").write_text(hybrid)
    train = ["python", "train.py", "+experiment/demo=fox_pro", "plugins=[my_lab]", "model=retention_fox"]
    more = ["data_dir=quickstart/data", "scale.num_hidden_layers=4", "output_dir=hybrid", "train.max_tokens=640"]
    run([*train, *SMALL, *DEMO, *more], lab)
    save = ["python", "save_model.py", "--hf_load_dir", "hybrid", "--hf_save_dir", "hybrid_hf"]
    assert "--plugins my_lab" in run([*save, "--plugins", "my_lab"], lab)
    assert json.loads((lab / "hybrid_hf/exported_from.json").read_text())["plugins"] == ["my_lab"]


@pytest.mark.slow
def test_an_optimizer_trains_continues_and_leaves_an_export_that_needs_no_plug_in(lab):
    train, save, *_ = commands(section(PAGE, "An optimizer"))
    output = lab / next(word.partition("=")[2] for word in train if word.startswith("output_dir="))
    for tokens in (1280, 2560):
        run([*train, *SMALL, *DEMO, "schedule.total_tokens=2560"], lab, f"train.max_tokens={tokens}")
    assert "continuing from" in (output / "logs/rank-0.log").read_text()
    run(save, lab)
    assert "plugins" not in json.loads(Path(f"{output}_hf/exported_from.json").read_text())


@pytest.mark.slow
def test_a_callback_works_and_its_state_survives_a_stop(lab):
    (train,) = commands(section(PAGE, "A callback"))
    train = [*train, *SMALL, *DEMO, "schedule.total_tokens=2560", "log_interval=128"]
    for tokens in (1280, 2560):
        run(train, lab, f"train.max_tokens={tokens}")
    jumps, mean, count = logged(lab / "output/jumps", "loss_jumps"), 0.0, 0
    for step, entry in logged(lab / "output/jumps", "train").items():
        loss = entry["train/loss"]
        count += mean != 0 and loss > 1.05 * mean
        mean = loss if mean == 0 else 0.9 * mean + 0.1 * loss
        assert jumps[step]["loss_jumps/mean"] == pytest.approx(mean, rel=1e-5)
        assert jumps[step]["loss_jumps/jumps"] == count
    assert sorted(jumps) == list(range(128, 2561, 128))
    wrong = ("callbacks.loss_jumps.factor=0.5", "output_dir=typo")
    assert "callbacks.loss_jumps.factor=0.5 must be greater than 1" in refused(train, lab, *wrong)
    assert not (lab / "typo").exists()


def test_the_page_names_every_hook_and_every_callback():
    part = section(PAGE, "A callback")
    assert re.findall(r"^\| `(on_\w+)\(", part, re.MULTILINE) == [n for n in vars(Callback) if n.startswith("on_")]
    configs = {file.stem for file in (ROOT / "configs/callbacks").glob("*.yaml")}
    assert all(f"`{name}`" in part and name in CALLBACKS for name in configs)
    training = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    shown = {name for names in re.findall(r"callbacks=\[([\w,]+)\]", training) for name in names.split(",")}
    assert shown >= configs, "each in a command"


@pytest.mark.slow
def test_a_corpus_trains_resumes_exactly_is_evaluated_and_exported(lab):
    train, evaluate, save = commands(section(PAGE, "A corpus"))
    train = [*train, *SMALL, "train.grad_acc_tokens=256"]
    run(train, lab, "train.max_tokens=3072", "output_dir=whole")
    for tokens in (1024, 3072):
        run(train, lab, f"train.max_tokens={tokens}", "schedule.total_tokens=3072")
    part, whole = logged(lab / "output/tales", "train"), logged(lab / "whole", "train")
    assert {step: entry["train/loss"] for step, entry in part.items()} == {
        step: entry["train/loss"] for step, entry in whole.items()
    }
    held_out = [entry["val/loss"] for entry in logged(lab / "whole", "val").values()]
    run(evaluate, lab)
    results = json.loads((lab / "output/per_token_loss/tales/results.json").read_text())
    assert (results["corpus"], results["eval_tokens"]) == ("tales", 320)
    assert results["val/loss_avg_len_32"] == pytest.approx(held_out[-1], abs=1e-5)
    assert "without a tokenizer" in run(save, lab)
    said = refused(train, lab, "train.max_tokens=30720", "output_dir=mistake")
    assert re.search(r"train\.max_tokens=30,720 is more than the 3,072 tokens of .*train\.bin", said)
