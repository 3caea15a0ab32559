"""A mixture of corpora: every global batch takes its sequences from several of them, in proportion to weights.

Which corpus sequence s of a run comes from is arithmetic. Weights are brought to whole numbers without a common
divisor. Sequences repeat a pattern as long as their sum, in which every corpus has its weight and is spread as evenly
as possible. So sequence s is number `s // P · w_i + number[s % P]` of corpus i, for P sequences of the pattern. Each
corpus is read in its own order (order.py, at batch size 1): the first T tokens of every document, then the next T.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.longcrawl64 import LongCrawl64DataModule
from forgetting_transformer.data.order import Location, ReadingOrder
from forgetting_transformer.data.token_array import TokenArray
from forgetting_transformer.data.vocabulary import Vocabulary, other_token, tokens_of

#: Sequences of the longest pattern: weights of three digits.
LONGEST_PATTERN = 1000


class Interleaving:
    """Maps each sequence of a run to a corpus and to a sequence of that corpus.

    Args:
        weights: positive; only their proportion counts.

    Raises:
        ValueError: they have too many digits.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * denominator) for weight in exact]
        self.weights = [weight // math.gcd(*whole) for weight in whole]
        if sum(self.weights) > LONGEST_PATTERN:
            raise ValueError(f"the shortest pattern in this proportion has {sum(self.weights):,} sequences")
        #: Corpus of each sequence of the pattern, and the sequence's number there.
        self.pattern: list[tuple[int, int]] = []
        given = [0] * len(weights)
        for _ in range(sum(self.weights)):
            # Sainte-Laguë: each place goes to the corpus that is furthest behind its share. After a whole pattern every
            # corpus has exactly its share.
            corpus = int(np.argmax(np.array(self.weights) / (2 * np.array(given) + 1)))
            self.pattern.append((corpus, given[corpus]))
            given[corpus] += 1

    def locate(self, sequence: int) -> tuple[int, int]:
        """The corpus that a sequence of the run comes from, and its number there."""
        patterns, within = divmod(sequence, len(self.pattern))
        corpus, number = self.pattern[within]
        return corpus, patterns * self.weights[corpus] + number

    def sequences_before(self, corpus: int, available: int) -> int:
        """The most sequences of a run that need no more of a corpus than it has."""
        patterns, more = divmod(available, self.weights[corpus])
        return patterns * len(self.pattern) + self.pattern.index((corpus, more))


class MixtureDataModule(LongCrawl64DataModule):
    """Loaders over several corpora of LongCrawl64DataModule's format, with one tokenizer.

    Args:
        data_dir: folder or URL that holds all of them.
        parts: their folder names, and how many sequences of each there are in proportion to the others; positive.
        options: as for one corpus; eval_tokens are shared out in proportion to the weights.

    Raises:
        DataError: naming the key and the fix.
    """

    def __init__(self, data_dir: str, *, parts: Mapping[str, float], **options: Any) -> None:
        # Sorted by name, so that the order in the config changes nothing.
        weights = dict(sorted(parts.items()))
        try:
            self.interleaving = Interleaving(list(weights.values()))
        except ValueError as error:
            raise DataError(f"datamodule.parts={weights}: {error}; use weights of fewer digits") from error
        super().__init__(data_dir, **options)
        self.corpora = []
        for name, weight in weights.items():
            share = weight / sum(weights.values())
            most = math.ceil(share * self.train_batch_size) + 1  # sequences of it in a batch
            held_out = self.eval_tokens and int(self.eval_tokens * share)
            own = {"dataset": name, "train_batch_size": most, "eval_tokens": held_out}
            self.corpora.append(LongCrawl64DataModule(data_dir, **options | own))

    @property
    def folder(self) -> Path:
        """Folder of the first corpus with a tokenizer, if one has it."""
        folders = [corpus.folder for corpus in self.corpora]
        return next((folder for folder in folders if (folder / "tokenizer").is_dir()), folders[0])

    @property
    def vocabulary(self) -> Vocabulary:
        return self.corpora[0].vocabulary

    def check_tokenizers(self) -> None:
        """Fetches the tokenizers of corpora at URLs, so call it on one process.

        Raises:
            DataError: ids stand for other tokens in one corpus than in the first.
        """
        tokens = {corpus.dataset: tokens_of(corpus.folder) for corpus in self.corpora}
        described = [(name, of_corpus) for name, of_corpus in tokens.items() if of_corpus is not None]
        for (first, of_first), (name, of_corpus) in itertools.product(described[:1], described[1:]):
            if difference := other_token(of_corpus, of_first, first):
                raise DataError(
                    f"datamodule.parts: {name} was made with another tokenizer than {first}: {difference}; "
                    "prepare them with one (scripts/prepare_data.py --tokenizer FOLDER)"
                )

    def batches(self) -> int:
        available = [corpus.order(1).batches for corpus in self.corpora]
        sequences = itertools.starmap(self.interleaving.sequences_before, enumerate(available))
        batches = min(sequences) // self.train_batch_size
        return max(1, batches) if self.repeat else batches  # then corpora begin again one by one, also within a batch

    def locate(self, batch: int) -> list[str]:
        return [f"{corpus.dataset}: {place.sequences()[0]}" for corpus, place in self._sequences(batch, 0, 1)]

    def labels(self, batch: int, rank: int, world_size: int) -> np.ndarray:
        sequences = self._sequences(batch, rank, world_size)
        return np.concatenate([corpus.array("train").read(*place) for corpus, place in sequences])

    def _sequences(self, batch: int, rank: int, world_size: int) -> Iterator[tuple[LongCrawl64DataModule, Location]]:
        """Yields corpus and place of each sequence of a rank's share of a batch."""
        share = self.train_batch_size // world_size
        first = batch * self.train_batch_size + rank * share
        for corpus, number in map(self.interleaving.locate, range(first, first + share)):
            yield self.corpora[corpus], self.corpora[corpus].order(1).locate(number)

    def held_out(self) -> list[tuple[TokenArray, ReadingOrder]]:
        return [one for corpus in self.corpora for one in corpus.held_out()]

    def _info(self, split: str, seq_len: int, batch_size: int, sequences: int) -> DataInfo:
        names, arrays = zip(*((corpus.dataset, corpus.array(split)) for corpus in self.corpora), strict=True)
        if len({array.vocabulary for array in arrays}) > 1:
            listed = ", ".join(f"{name}: {array.vocabulary}" for name, array in zip(names, arrays, strict=True))
            raise DataError(
                f"datamodule.parts: the corpora have different vocabularies ({listed}); prepare them with one "
                "tokenizer (scripts/prepare_data.py --tokenizer FOLDER)"
            )
        weighted = zip(arrays, self.interleaving.weights, strict=True)
        contents = "".join(f"{array.fingerprint} {weight}\n" for array, weight in weighted)
        checksums = [array.checksums for array in arrays]
        return dataclasses.replace(
            self.corpora[0]._info(split, seq_len, batch_size, sequences),
            path=f"{str(self.data_dir).rstrip('/')}/{{{','.join(names)}}}/{split}.zarr",
            documents=sum(array.documents for array in arrays),
            doc_len=max(array.doc_len for array in arrays),
            fingerprint=_short_hash(contents),
            unigram_entropy_nats=None,
            checksums=_short_hash(" ".join(map(str, checksums))) if all(checksums) else None,
        )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
