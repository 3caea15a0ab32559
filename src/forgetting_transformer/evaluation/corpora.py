"""Held-out sequences of a corpus that a plug-in reads, for the loss at every position."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import Dataset

from forgetting_transformer.data.corpus import Batch, Corpus, check_batch
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.evaluation.models import EvaluatedModel
from forgetting_transformer.plugins import CORPORA, PluginError, UnknownComponentError
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.parsing import parse_section


@dataclass(frozen=True)
class HeldOutSequences:
    """Held-out sequences of a corpus: their number, `length` tokens each."""

    path: str
    folder: Path
    fingerprint: str
    vocab_size: int
    bos_token_id: int
    length: int
    sequences: int

    @property
    def corpus(self) -> str:
        """Name of its folder."""
        return self.folder.resolve().name

    def groups(self) -> np.ndarray | None:
        """For each sequence, the number of the held-out group of texts that it is from; None where that is unknown."""
        return None

    def batches(self, batches: Sequence[range]) -> Dataset:
        """Batch number of this process -> inputs and labels; None where the others have work and this one has not."""
        raise NotImplementedError


@dataclass(frozen=True)
class CorpusSequences(HeldOutSequences):
    """Sequences in the order in which a corpus gives them to one process.

    Attributes:
        source: with one sequence in a batch.
    """

    source: Corpus

    def batches(self, batches: Sequence[range]) -> Dataset:
        """They must be asked for in their order, by one process."""
        return _Batches(self, batches)


class _Batches(Dataset):
    def __init__(self, data: CorpusSequences, batches: Sequence[range]) -> None:
        self.data, self.batches = data, batches
        self._rows: Iterator[tuple[int, Batch]] = enumerate(data.source.eval_loader(0, 1))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Tensor] | None:
        wanted = self.batches[number]
        rows: list[Batch] = []
        while len(rows) < len(wanted):
            n, row = next(self._rows, (-1, None))
            if row is None:
                raise DataError(f"{self.data.path} gave fewer held-out sequences than its eval_info() says")
            if n in wanted:  # those before are of other processes, or of an earlier start
                check_batch(row, f"the corpus {self.data.path}", 1, self.data.length, weighted=True)
                rows.append(row)
        return {key: torch.cat([row[key] for row in rows]) for key in ("input_ids", "labels")} if rows else None


def count_sequences(length: int, available: int, path: object, tokens: int | None, at_most: int | None) -> int:
    """How many sequences of `length` tokens are evaluated, of `available` tokens.

    Args:
        tokens: to evaluate on, rounded down to whole sequences; None for all, or for `at_most` if there are more.

    Raises:
        DataError: there are fewer, or not one sequence.
    """
    wanted = min(available, at_most or available) if tokens is None else tokens
    if not length <= wanted <= available:
        raise DataError(
            f"--eval_tokens={wanted:,} must be between one sequence ({length:,} tokens) and all {available:,} tokens "
            f"of {path}; --eval_tokens all takes them all"
        )
    return wanted // length


def open_corpus(
    name: str,
    folder: Path,
    keys: Sequence[str],
    model: EvaluatedModel,
    length: int | None = None,
    tokens: int | None = None,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    at_most: int | None = None,
) -> CorpusSequences:
    """The held-out sequences of a corpus that a plug-in reads.

    Args:
        name: `datamodule.name`. folder: of the corpus. keys: further ones of `datamodule`, as "skip_tokens=5".
        length: tokens in a sequence; default that of the model's training.
        vocab_size, bos_token_id: default the model's.
        tokens, at_most: as of `count_sequences`.

    Raises:
        DataError: naming the flag and what the corpus has.
    """
    length = length or model.train_length
    if length is None:
        raise DataError(f"{model.source} does not say at which sequence length it was trained: set --eval_len")
    place, eos = folder.resolve(), model.eos_token_ids
    values: dict[str, Any] = {
        "name": name, "dataset": place.name, "train_batch_len": length, "train_batch_size": 1, "eval_batch_len": length,
        "eval_local_batch_size": 1, "train_num_workers": 0, "eval_num_workers": 0,
        "vocab_size": vocab_size or model.model.config.get_text_config().vocab_size,
        "bos_token_id": model.bos_token_id if bos_token_id is None else bos_token_id,
        "eos_token_id": eos[0] if eos else None,
    }  # fmt: skip
    try:
        config = parse_section("datamodule", OmegaConf.merge(values, OmegaConf.from_dotlist(list(keys))))
        source: Corpus = CORPORA.make(name, str(place.parent), config)
    except (ConfigError, PluginError, UnknownComponentError) as error:
        raise DataError(f"--corpus {' '.join([name, *keys])}: {error}") from error
    if source.packed:
        raise DataError(
            f"--corpus {name}: its rows hold several texts that are kept apart, so a position in a row says nothing of "
            "the context; use --corpus with a corpus of one text a row"
        )
    info = source.eval_info()
    sequences = count_sequences(length, info.total_batches * length, info.path, tokens, at_most)
    ids = info.vocab_size, info.bos_token_id
    return CorpusSequences(info.path, source.folder, info.fingerprint, *ids, length, sequences, source)
