"""A tiny corpus and a tiny configuration, for tests of training and for the campaign of faults."""

from pathlib import Path
from typing import Any

import numpy as np
import zarr

VOCAB, DOC_LEN, DOCUMENTS = 64, 64, 96
STEP = 4 * 32  # tokens of a training step in the configuration below


def make_corpus(folder: Path) -> None:
    """Documents in which the next token depends on the last, so that losses fall and differ from step to step."""
    generator = np.random.default_rng(0)
    table = generator.integers(1, VOCAB, size=(VOCAB, 4))
    for split in ("train", "heldout"):
        tokens = np.zeros((DOCUMENTS, DOC_LEN), dtype=np.uint16)
        state = generator.integers(1, VOCAB, size=DOCUMENTS)
        for position in range(DOC_LEN):
            tokens[:, position] = state
            state = table[state, generator.integers(0, 4, size=DOCUMENTS)]
        array = zarr.create_array(
            folder / "tiny" / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(16, 32)
        )
        array[:] = tokens


def tiny_config(output_dir: Path, data_dir: Path) -> dict[str, Any]:
    """20 steps of 4 sequences of 32 tokens; a checkpoint every 4 steps."""
    return {
        "output_dir": str(output_dir),
        "data_dir": str(data_dir),
        "log_interval": STEP,
        "train_eval_interval": 6 * STEP,
        "eval_interval": 10 * STEP,
        "skip_eval": False,
        "checkpoint_interval": 4 * STEP,
        "checkpoint_keep_interval": 8 * STEP,
        "fabric": {"precision": "32-true", "accelerator": "cpu"},
        "train": {"max_tokens": 20 * STEP, "grad_acc_tokens": 64},
        "eval": {"min_val_length": 8},
        "wandb": {"mode": "disabled"},
        "optimizer": {"lr": 1e-2},
        "schedule": {"name": "warmup_cosine", "warmup_tokens": 4 * STEP, "total_tokens": 20 * STEP},
        "datamodule": {
            "dataset": "tiny",
            "train_batch_len": 32,
            "train_batch_size": 4,
            "train_num_workers": 0,
            "eval_tokens": 10 * DOC_LEN,
            "eval_batch_len": 32,
            "eval_local_batch_size": 4,
            "eval_num_workers": 0,
            "vocab_size": VOCAB,
            "bos_token_id": 0,
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
            },
        },
    }
