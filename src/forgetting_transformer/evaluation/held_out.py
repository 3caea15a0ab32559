"""Held-out sequences to evaluate on: rows of `heldout.zarr`, sequences of a plug-in's corpus, or single texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from forgetting_transformer.data.batch_checks import check_batch
from forgetting_transformer.data.corpus import Batch, Corpus, shifted
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.longcrawl64 import check_length
from forgetting_transformer.data.model_tokenizer import check_size_and_bos
from forgetting_transformer.data.token_array import TokenArray
from forgetting_transformer.data.vocabulary import Vocabulary, other_token, tokens_of
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError
from forgetting_transformer.plugins import CORPORA, UnknownComponentError
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.config.parsing import parse_section


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
        """For each sequence, the number of its held-out group of texts; None where unknown."""
        return None

    def read_batches(self, batches: Sequence[range]) -> Iterator[dict[str, Tensor] | None]:
        """Inputs and labels of sequences, in order; None where other processes have work and this one has not."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeldOut(HeldOutSequences):
    """Sequences of a corpus's held-out documents, in the order of the array."""

    array: TokenArray

    def groups(self) -> np.ndarray | None:
        """`HeldOutSequences.groups`, from the corpus's manifest."""
        rows = self.array.manifest.get("split", {}).get("group_of_heldout_row")
        if not isinstance(rows, list) or len(rows) != self.array.documents:
            return None
        return np.repeat(rows, self.array.doc_len // self.length)[: self.sequences]

    def read(self, sequence: int) -> np.ndarray:
        """Tokens `(1, length)` of one sequence."""
        document, column = divmod(sequence, self.array.doc_len // self.length)
        return self.array.read(document, document + 1, column * self.length, (column + 1) * self.length)

    def read_batches(self, batches: Sequence[range]) -> Iterator[dict[str, Tensor] | None]:
        # Documents that follow each other share chunks, and all their columns are read. One process reads.
        self.array.keep(max(1, *map(len, batches)) if batches else 1, self.array.doc_len)
        for sequences in batches:
            rows = [self.read(n) for n in sequences]
            yield shifted(np.concatenate(rows), self.bos_token_id) if rows else None


@dataclass(frozen=True)
class CorpusSequences(HeldOutSequences):
    """Sequences in the order in which a corpus gives them to one process.

    Attributes:
        source: with one sequence in a batch.
    """

    source: Corpus

    def read_batches(self, batches: Sequence[range]) -> Iterator[dict[str, Tensor] | None]:
        given: Iterator[tuple[int, Batch]] = enumerate(self.source.eval_loader(0, 1))
        for wanted in batches:
            rows: list[Batch] = []
            while len(rows) < len(wanted):
                n, row = next(given, (-1, None))
                if row is None:
                    raise DataError(f"{self.path} gave fewer held-out sequences than its eval_info() says")
                if n in wanted:  # those before are of other processes, or of an earlier start
                    check_batch(row, f"the corpus {self.path}", 1, self.length, weighted=True)
                    rows.append(row)
            yield {key: torch.cat([row[key] for row in rows]) for key in ("input_ids", "labels")} if rows else None


def find_heldout(data_path: str | Path) -> Path:
    """The folder of `heldout.zarr`: `data_path` itself, or the only one in it.

    Raises:
        DataError: there is none, or there are several.
    """
    data_path = Path(data_path).expanduser()
    if (data_path / "heldout.zarr").is_dir():
        return data_path
    inside = [path.parent for path in sorted(data_path.glob("*/heldout.zarr"))]
    if len(inside) == 1:
        return inside[0]
    several = f"; there are {', '.join(map(str, inside))}" if inside else ""
    raise DataError(
        f"no heldout.zarr in {data_path}{several}: set --data_path to a corpus's folder; for the corpus of a plug-in, "
        "name it with --corpus. docs/data.md says how to make one"
    )


def open_data(model: EvaluatedModel, data_path: str, corpus: Sequence[str] = (), **chosen: Any) -> HeldOutSequences:
    """The held-out sequences of a command line.

    Args:
        corpus: `datamodule.name` of a plug-in that reads the folder, and further keys; otherwise it has heldout.zarr.
        chosen: arguments that `open_heldout` and `open_corpus` share.

    Raises:
        DataError: naming the flag and what the corpus has.
    """
    if not corpus:
        return open_heldout(find_heldout(data_path), **chosen)
    return open_corpus(corpus[0], Path(data_path).expanduser(), corpus[1:], model, **chosen)


def open_heldout(
    folder: Path,
    length: int | None = None,
    tokens: int | None = None,
    assumed: Vocabulary | None = None,
    at_most: int | None = None,
) -> HeldOut:
    """Opens held-out documents; only `heldout.zarr` need be there.

    Args:
        folder: of the corpus.
        length: tokens in a sequence, a divisor of the documents' length; default whole documents.
        assumed: vocabulary of a corpus that is not LongCrawl64 and has none in its manifest.
        tokens, at_most: as of `count_sequences`.

    Raises:
        DataError: naming the flag and what the corpus has.
    """
    array = TokenArray(folder / "heldout.zarr", (None, None, None), assumed=assumed)
    length = length or array.doc_len
    check_length("--eval_len", length, array)
    sequences = count_sequences(length, array.documents * array.doc_len, array.path, tokens, at_most)
    ids = array.vocab_size, array.vocabulary.bos_token_id
    return HeldOut(str(array.path), folder, array.fingerprint, *ids, length, sequences, array)


def count_sequences(length: int, available: int, path: object, tokens: int | None, at_most: int | None) -> int:
    """Number of sequences of `length` tokens to evaluate, of `available` tokens.

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
    at_most: int | None = None,
) -> CorpusSequences:
    """The held-out sequences of a corpus that a plug-in reads.

    Args:
        name: `datamodule.name`. folder: of the corpus. keys: further ones of `datamodule`, as "skip_tokens=5".
        length: tokens in a sequence; default that of the model's training.
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
        "vocab_size": model.model.config.get_text_config().vocab_size, "bos_token_id": model.bos_token_id,
        "eos_token_id": eos[0] if eos else None,
    }  # fmt: skip
    try:
        config = parse_section("datamodule", OmegaConf.merge(values, OmegaConf.from_dotlist(list(keys))))
        source: Corpus = CORPORA.get(name).build(str(place.parent), config)
    except (ConfigError, UnknownComponentError) as error:
        raise DataError(f"--corpus {' '.join([name, *keys])}: {error}") from error
    if source.packed:
        raise DataError(
            f"--corpus {name}: its rows hold several texts that are kept apart, so a position in a row does not "
            "measure the context; use --corpus with a corpus of one text a row"
        )
    info = source.eval_info()
    sequences = count_sequences(length, info.total_batches * length, info.path, tokens, at_most)
    ids = info.vocab_size, info.bos_token_id
    return CorpusSequences(info.path, source.folder, info.fingerprint, *ids, length, sequences, source)


def check_vocabulary(model: EvaluatedModel, data: HeldOutSequences) -> None:
    """Refuses a corpus of another tokenizer than the model's, whose losses would mean nothing.

    Raises:
        EvaluationError: with the difference: sizes, BOS tokens, or the tokens of ids, where both are known.
        DataError: the corpus's tokenizer.json is damaged.
    """
    vocab_size, bos = model.model.config.get_text_config().vocab_size, model.bos_token_id
    if bos is not None and bos >= vocab_size:  # a default of transformers for another vocabulary
        bos = None
    tokens = tokens_of(data.folder) if model.tokenizer is not None else None
    try:
        check_size_and_bos(data.vocab_size, data.bos_token_id, vocab_size, bos)
        if tokens is not None:
            known = {id: token for token, id in model.tokenizer.get_vocab().items()}
            if difference := other_token(tokens, known, "the model's tokenizer"):
                raise ValueError(difference)
    except ValueError as error:
        raise EvaluationError(
            f"the corpus {data.path} was made with another tokenizer than {model.source} reads: {error}"
        ) from error


def read_tokens(model: EvaluatedModel, text: Path | None, data_path: str, document: int, max_length: int) -> np.ndarray:
    """One text as `(T,)` int64, T ≤ max_length, the beginning-of-sequence token first.

    Args:
        text: a file, in UTF-8; or
        data_path, document: a held-out document of a corpus that was made with the model's tokenizer.

    Raises:
        EvaluationError: no such file or document, or an empty one.
    """
    if text is None:
        ids = read_documents(model, data_path, 1, document)
    elif text.is_file():
        ids = model.encode(text.read_text(encoding="utf-8", errors="replace"))
    else:
        raise EvaluationError(f"--text={text}: no such file")
    if len(ids) == 0:
        raise EvaluationError(f"--text={text} is empty")
    return np.concatenate([model.first, ids])[:max_length]


def read_documents(model: EvaluatedModel, data_path: str, needed: int, first: int = 0) -> np.ndarray:
    """Held-out documents of a corpus that was made with the model's tokenizer, as many as make `needed` tokens.

    Raises:
        EvaluationError: there is no document number `first`, or the corpus is another tokenizer's.
    """
    # A corpus that does not name its tokenizer counts as the model's.
    bos = model.bos_token_id or 0
    assumed = Vocabulary(model.model.config.get_text_config().vocab_size, bos, bos)
    data = open_heldout(find_heldout(data_path), assumed=assumed)
    check_vocabulary(model, data)
    if first >= data.sequences:
        raise EvaluationError(f"--document={first}: {data.array.path} has documents 0 to {data.sequences - 1}")
    last = min(data.sequences, first - (-needed // data.length))
    return np.concatenate([data.read(n)[0] for n in range(first, last)]).astype(np.int64)
