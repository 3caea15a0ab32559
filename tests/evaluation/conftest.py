"""A quickstart in miniature: a corpus of words with its tokenizer, a run trained on it for a few steps, and its export."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zarr
from transformers import PreTrainedTokenizerFast

from forgetting_transformer.training.export import export
from tests.training.conftest import train

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "house",
    "red",
    "small",
    "and",
    "then",
    ".",
    ",",
    "answer",
    "question",
    ":",
    "what",
    "is",
    "best",
    "thing",
    "to",
    "do",
    "in",
    "city",
    "eat",
    "sandwich",
    "park",
    "sunny",
    "day",
]
VOCABULARY = ["<eos>", "<unk>", *WORDS]
DOC_LEN, DOCUMENTS, TRAIN_LENGTH = 256, 24, 32


@dataclass(frozen=True)
class Quickstart:
    """Folders: `data` holds words/{train,heldout}.zarr, `run` is a run's output_dir, `hf` its export."""

    data: Path
    run: Path
    hf: Path


def sentences(seed: int, words: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(words))


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<eos>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    folder = tmp_path_factory.mktemp("quickstart")
    corpus = folder / "data" / "words"
    tokenizer = _tokenizer()
    for split, seed in (("train", 0), ("heldout", 1000)):
        tokens = np.array(
            [tokenizer(sentences(seed + n, DOC_LEN)).input_ids for n in range(DOCUMENTS)], dtype=np.uint16
        )
        zarr.create_array(corpus / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(8, 64))[:] = tokens
    tokenizer.save_pretrained(corpus / "tokenizer")
    (corpus / "manifest.json").write_text(
        f'{{"format_version": 1, "vocab_size": {len(VOCABULARY)}, "bos_token_id": 0, "eos_token_id": 0}}'
    )
    step = 4 * TRAIN_LENGTH
    train(
        {
            "output_dir": str(folder / "run"),
            "data_dir": str(folder / "data"),
            "log_interval": step,
            "train_eval_interval": 4 * step,
            "eval_interval": 8 * step,
            "skip_eval": False,
            "checkpoint_interval": 4 * step,
            "checkpoint_keep_interval": 4 * step,
            "fabric": {"precision": "32-true", "accelerator": "cpu"},
            "train": {"max_tokens": 8 * step, "grad_acc_tokens": 128},
            "eval": {"min_val_length": 8},
            "wandb": {"mode": "disabled"},
            "optimizer": {"lr": 1e-2},
            "schedule": {"name": "warmup_cosine", "warmup_tokens": 2 * step, "total_tokens": 8 * step},
            "datamodule": {
                "dataset": "words",
                "train_batch_len": TRAIN_LENGTH,
                "train_batch_size": 4,
                "train_num_workers": 0,
                "eval_tokens": 4 * DOC_LEN,
                "eval_batch_len": TRAIN_LENGTH,
                "eval_local_batch_size": 4,
                "eval_num_workers": 0,
            },
            "model": {
                "name": "forgetting_transformer",
                "config": {
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_heads": 2,
                    "qk_norm": True,
                    "use_output_gate": True,
                    "use_output_norm": True,
                    "use_k_shift": True,
                    "use_v_shift": True,
                    "log_pruning_tolerance": -10.0,
                },
            },
        }
    )
    export(folder / "run", folder / "hf")
    return Quickstart(folder / "data", folder / "run", folder / "hf")
