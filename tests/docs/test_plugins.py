"""docs/extend.md followed in a folder outside the repository: first its files, then commands."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.docs.commands import ROOT, section, shell_commands, write_files
from tests.processes import Command, run_command
from tests.tiny import VOCAB, make_corpus
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
#: Commands of the optimizer, and of the mixer: that of the top, and the example's.
PARTS = {"optimizer": section(PAGE, "An optimizer"), "mixer": PAGE.partition("## A check in seconds")[0]}
#: What makes the demo a matter of seconds, added to the page's commands.
SMALL = [
    "datamodule.train_batch_len=32", "datamodule.train_batch_size=4", "datamodule.train_num_workers=0",
    "datamodule.eval_tokens=640", "scale.hidden_size=64", "scale.heads_of_64=1", "scale.num_hidden_layers=1",
    "train.grad_acc_tokens=64", "train.max_tokens=3200", "schedule.warmup_tokens=128", "wandb.mode=disabled",
    "fabric.accelerator=cpu", "checkpoint_interval=640", "datamodule.repeat=true", "log_interval=128",
]  # fmt: skip


def run(words: list[str], folder: Path) -> str:
    """Output of a command of the page, with the repository's scripts; it must succeed."""
    assert words[0] == "python"
    done = run_command(*words[1:], folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(words: list[str], folder: Path) -> str:
    done = run_command(*words[1:], folder=folder)
    assert done.returncode != 0
    return (done.stdout + done.stderr).strip()


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder with the corpus of the demo, small, and nothing else."""
    corpus = tmp_path / "quickstart/data/python_code"
    make_corpus(tmp_path)
    corpus.parent.mkdir(parents=True)
    (tmp_path / "tiny").rename(corpus)
    words = {"<eos>": 0, "import": 1, "os": 2} | {f"word{n}": n for n in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<eos>", eos_token="<eos>", unk_token="<eos>")
    fast.save_pretrained(corpus / "tokenizer")
    (corpus / "manifest.json").write_text(
        json.dumps({"format_version": 1, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0})
    )
    return tmp_path


@pytest.mark.parametrize("name", PARTS)
def test_a_page_followed_from_another_folder_trains_is_killed_continues_and_is_exported(name, elsewhere):
    write_files(PAGE, elsewhere)
    train, save, *more = [words for words in shell_commands(PARTS[name]) if "my_lab" in " ".join(words)]
    output = next(word.partition("=")[2] for word in train if word.startswith("output_dir="))
    checkpoints = elsewhere / output / "checkpoints"
    process = Command(*train[1:], *SMALL, folder=elsewhere)
    wait_until(lambda: list(checkpoints.glob("step-*/manifest.json")), lambda: process.poll() is None)
    process.kill()
    process.wait()
    without = [word for word in [*train, *SMALL] if not word.startswith("plugins=")]
    said = refused(without, elsewhere)
    assert (
        said.startswith("ConfigError: output_dir=") and "this run needs plugins=[my_lab]" in said and "\n" not in said
    )
    run([*train, *SMALL], elsewhere)
    log = (elsewhere / output / "logs/rank-0.log").read_text()
    assert "training finished: 3,200 tokens" in log and log.count("loading PyTorch") <= 2
    assert OmegaConf.load(elsewhere / output / "config.yaml").plugins == ["my_lab"]
    said = refused([word for word in save if word not in ("--plugins", "my_lab")], elsewhere)
    assert "this run needs plugins=[my_lab]" in said and "\n" not in said
    run(save, elsewhere)
    exported = elsewhere / f"{output}_hf"
    assert (exported / "model.safetensors").is_file()
    needs = json.loads((exported / "exported_from.json").read_text()).get("plugins")
    assert needs == (["my_lab"] if name == "mixer" else None)
    for words in more:
        bare = [word for word in words if word not in ("--plugins", "my_lab")]
        assert "this model needs plugins=[my_lab]" in refused(bare, elsewhere)
        run([*words, "--max_new_tokens", "4"], elsewhere)


def test_the_mixer_of_a_plug_in_in_a_hybrid_is_exported_with_the_name_of_the_plug_in(elsewhere):
    write_files(PAGE, elsewhere)
    hybrid = re.findall(r"^```yaml\n(name: hybrid\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    (elsewhere / "my_lab/configs/model/retention_fox.yaml").write_text(hybrid)
    # The demo's MLP and one layer; the corpus is that of the other commands.
    train = next(words for words in shell_commands(PAGE) if "my_lab" in " ".join(words))
    corpus = next(word for word in train if word.startswith("data_dir="))
    command = ["python", "train.py", "+experiment/demo=fox_pro", "plugins=[my_lab]", "model=retention_fox", corpus]
    run([*command, *SMALL, "scale.num_hidden_layers=4", "output_dir=hybrid", "train.max_tokens=640"], elsewhere)
    save = ["python", "save_model.py", "--hf_load_dir", "hybrid", "--hf_save_dir", "hybrid_hf"]
    assert "this run needs plugins=[my_lab]" in refused(save, elsewhere)
    assert "--plugins my_lab" in run([*save, "--plugins", "my_lab"], elsewhere)
    assert json.loads((elsewhere / "hybrid_hf/exported_from.json").read_text())["plugins"] == ["my_lab"]
