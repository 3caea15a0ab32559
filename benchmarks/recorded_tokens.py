"""A plug-in for runs of benchmarks/interruptions.py: every rank notes which tokens it takes, and when.

    python train.py … plugins=[recorded_tokens] +callbacks.recorded_tokens.folder=FOLDER      # benchmarks on PYTHONPATH

FOLDER/rank-K.jsonl gets a line with the rank's process and its share of batches when training begins, and one for each
step as the rank takes its batch, on the host, before it goes to the device: `step` (from 0), `time` (the system's
monotonic clock, seconds) and `sequences`, a digest of each sequence. It changes no bit of the run.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetting_transformer import plugins
from forgetting_transformer.training.callbacks import Callback


@dataclass
class RecordedTokensConfig:
    folder: str = ""


@plugins.CALLBACKS.register("recorded_tokens", config=RecordedTokensConfig, free=[plugins.ALL])
class RecordedTokens(Callback):
    all_ranks = True

    def __init__(self, config: RecordedTokensConfig) -> None:
        self._folder = Path(config.folder)

    def on_start(self, trainer: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / f"rank-{trainer.fabric.global_rank}.jsonl").open("w", buffering=1, encoding="utf-8")
        batches = trainer._batches

        def noted(count: int) -> Iterator[Any]:
            for batch in batches(count):
                sequences = [
                    hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in batch["labels"]
                ]
                line = {"step": trainer.counters.batch_count, "time": time.monotonic(), "sequences": sequences}
                file.write(json.dumps(line) + "\n")
                yield batch

        file.write(json.dumps({"pid": os.getpid(), "share": trainer.ranks.data_rank}) + "\n")
        # No hook of a callback gets the tokens: those of the loop's own iterator are the ones that it trains on.
        trainer._batches = noted
