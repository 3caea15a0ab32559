"""Settings of a corpus: all that change a byte of the result, and no others."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetting_transformer.data.errors import DataError

DEFAULT_HELDOUT_FRACTION = 0.01
DEFAULT_DEDUP = 0.8
DEFAULT_DEDUP_WORDS = 5
MIN_TRAINED_VOCAB = 257  # the 256 bytes and <|endoftext|>
MAX_TRAINED_VOCAB = 1 << 20  # the trainer allocates memory for all of it before the first merge


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of one corpus: the options of scripts/prepare_data.py, whose --help explains them.

    Two runs with equal settings and inputs write byte-identical arrays. The number of workers is not here, because it
    changes only the time. `include` is --glob, `dataset_split` is --split.
    """

    inputs: tuple[str, ...] = ()
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_field: str = "text"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keep_duplicates: bool = False
    dedup: float | None = None
    dedup_words: int | None = None
    max_bytes: int | None = None
    tokenizer: str = "train:32768"
    doc_len: int = 65536
    heldout_docs: int | None = None
    heldout_fraction: float | None = None
    seed: int = 0
    chunk_docs: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        # Absolute, so that the same input is the same setting from any folder. Symbolic links stay: the hub's cache
        # links data.parquet to a file without suffix.
        absolute = tuple(dict.fromkeys(os.path.abspath(path) for path in self.inputs))
        object.__setattr__(self, "inputs", absolute)
        if self.heldout_docs is None and self.heldout_fraction is None:
            object.__setattr__(self, "heldout_fraction", DEFAULT_HELDOUT_FRACTION)
        if self.dedup is not None and self.dedup_words is None:
            object.__setattr__(self, "dedup_words", DEFAULT_DEDUP_WORDS)
        if self.tokenizer != "bytes" and os.path.isdir(self.tokenizer):
            object.__setattr__(self, "tokenizer", os.path.abspath(self.tokenizer))
        self._check()

    def _check(self) -> None:
        if bool(self.inputs) == bool(self.dataset):
            raise DataError("give either files and folders to read, or --dataset, and not both.")
        if self.heldout_docs is not None and self.heldout_fraction is not None:
            raise DataError("give --heldout_docs or --heldout_fraction, not both.")
        if self.heldout_fraction is not None and not 0 < self.heldout_fraction < 1:
            raise DataError(f"--heldout_fraction must lie between 0 and 1, got {self.heldout_fraction}.")
        if self.dedup is not None:
            if not 0.5 <= self.dedup < 1:
                raise DataError(f"--dedup must be a similarity from 0.5 to below 1, such as 0.8; got {self.dedup}.")
            if self.keep_duplicates:
                raise DataError("--dedup leaves duplicates out and --keep_duplicates keeps them: give one of them.")
        elif self.dedup_words is not None:
            raise DataError(f"--dedup_words {self.dedup_words} needs --dedup.")
        if self.doc_len < 2:
            raise DataError(f"--doc_len {self.doc_len} leaves no token to predict: a row needs 2 or more.")
        if self.chunk_tokens is not None and self.chunk_tokens > self.doc_len:
            raise DataError(f"--chunk_tokens {self.chunk_tokens:,} is longer than a row (--doc_len {self.doc_len:,}).")
        if self.tokenizer.startswith("train:"):
            self.trained_vocab_size()

    def trained_vocab_size(self) -> int:
        """N of `train:N`."""
        number = self.tokenizer.removeprefix("train:").replace("_", "")
        if not number.isdigit() or not MIN_TRAINED_VOCAB <= int(number) <= MAX_TRAINED_VOCAB:
            raise DataError(
                f"--tokenizer {self.tokenizer}: N in train:N must be a number from {MIN_TRAINED_VOCAB} (256 bytes and "
                f"<|endoftext|>) to {MAX_TRAINED_VOCAB:,}, for example train:32768."
            )
        return int(number)

    def as_json(self) -> dict[str, Any]:
        """The settings as they come back from a JSON file (tuples as lists)."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def different_from(self, written: dict[str, Any]) -> list[str]:
        """Names of the settings that have another value in `written`, the settings of an existing corpus."""
        return [name for name, value in self.as_json().items() if written.get(name) != value]

    def refuse_if_different(self, written: dict[str, Any], out: Path) -> None:
        """Raise unless `written`, the settings of the corpus in `out`, are these."""
        mine = self.as_json()
        if different := self.different_from(written):
            lines = [f"  {name}: {written.get(name)!r} there, {mine[name]!r} here" for name in different]
            raise DataError(
                f"{out} holds a corpus with other settings:\n" + "\n".join(lines) + "\n"
                "Give another --out, or --force to build this one in its place."
            )
