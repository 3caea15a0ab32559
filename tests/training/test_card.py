"""The card of an exported model says what its run recorded, and nothing of the machine or the account that made it."""

import json
from pathlib import Path

import yaml

from forgetting_transformer.training.export.card import CARD, snippet, write

HOST = "trainbox-17"
SECRETS = {
    "data_dir": "/home/agnes/private/corpora",
    "output_dir": "/home/agnes/runs/best",
    "wandb": {"project": "secret-project", "log_dir": "/scratch/agnes", "mode": "online"},
    "fork_dir": "/home/agnes/runs/before",
    "callbacks": {"alarm": {"url": "https://hooks.example/services/T0/B0/xyzzy", "to": ["agnes@lab"]}},
    "plugins": ["my_lab"],
    "exp": f"on {HOST}, key hf_abcdefghijklmnop",
    "api_key": "correct horse",
}


def make_run(folder: Path) -> Path:
    lines = folder / "metrics" / "jsonlines"
    lines.mkdir(parents=True)
    train = [{"step": step, "train/loss": 5 - step / 1000} for step in range(100, 2100, 100)]
    val = [{"step": step, "val/loss": 5.5 - step / 1000, "val/val_token_count": 640} for step in (1000, 2000)]
    info = {"path": "/home/agnes/private/corpora/c/train.zarr", "documents": 12, "total_tokens": 500}
    data = {"step": 0, **{f"train_data_info/{name}": value for name, value in info.items()}}
    for kind, records in {"train": train, "val": val, "train_data_info": [data]}.items():
        (lines / f"{kind}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


SETTINGS = {
    "model": {"name": "forgetting_transformer", "label": "fox_pro", "config": {"hidden_size": 8}},
    "optimizer": {"name": "adamw", "lr": 0.002},
    "schedule": {"name": "warmup_cosine", "warmup_tokens": 1024},
    "datamodule": {"dataset": "books", "train_batch_len": 32, "train_batch_size": 4, "cache_dir": "/home/agnes/cache"},
    "fabric": {"precision": "bf16-mixed"},
    "tag": "small_fox",
    "seed": 7,
    **SECRETS,
}


def card(run_folder: Path, step: int = 1000) -> str:
    folder = run_folder / "hf"
    folder.mkdir(exist_ok=True)
    origin = {"checkpoint": step, "weights_from": {"source": "lab/fox", "revision": "a" * 40}}
    write(folder, run_folder, SETTINGS, origin, 12345, True)
    return (folder / CARD).read_text(encoding="utf-8")


def test_it_says_what_the_run_recorded_up_to_the_checkpoint(tmp_path):
    text = card(make_run(tmp_path))
    assert "| held-out | 4.5000 | mean over 640 held-out tokens, after 1,000 training tokens |" in text
    assert "| training | 4.0000 |" in text, "what was logged after the checkpoint does not count"
    for row in (
        "| fabric.precision | bf16-mixed |", "| optimizer.lr | 0.002 |", "| seed | 7 |",
        f"| init_from | lab/fox, {'a' * 40} |", "12,345 parameters", "trained on 1,000 tokens",
        "| datamodule.dataset | books |",
    ):  # fmt: skip
        assert row in text, row
    assert "license" not in yaml.safe_load(text.split("---\n")[1]) and "None has been chosen" in text
    assert "| held-out | 3.5000 |" in card(tmp_path, step=2000)


def test_nothing_of_the_machine_or_the_account_is_in_it(tmp_path):
    text = card(make_run(tmp_path))
    for secret in (
        "/home", "agnes", "scratch", HOST, "secret", "hf_abcdef", "horse", "hooks.example", "xyzzy", "diary", "0.31",
        str(tmp_path), "wandb",
    ):  # fmt: skip
        assert secret not in text, secret


def test_the_example_is_python_for_every_model():
    longcrawl64 = snippet(["my_lab.models"], "longcrawl64", True)
    compile(longcrawl64, "card", "exec")
    compile(snippet([], None, False), "card", "exec")
    assert "import forgetting_transformer.tokenizer" in longcrawl64 and "import my_lab.models" in longcrawl64


def test_a_run_that_recorded_nothing_has_a_card_all_the_same(tmp_path):
    """Such as one of the authors' code."""
    config = {"model": {"name": "transformer"}, "exp": "/home/agnes/first", "data_dir": "/home/agnes"}
    write(tmp_path, tmp_path, config, {"checkpoint": 64}, 5, False)
    text = (tmp_path / CARD).read_text(encoding="utf-8")
    assert "The run left no record of its losses." in text and "None |" not in text and "agnes" not in text
    assert "token ids" in text
