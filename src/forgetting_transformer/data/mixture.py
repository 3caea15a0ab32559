"""A mixture of corpora: every global batch takes its sequences from several of them, in proportion to weights.

Which corpus sequence s of a run comes from is arithmetic. Weights are brought to whole numbers without a common
divisor. Sequences repeat a pattern as long as their sum, in which every corpus has its weight and is spread as evenly
as possible. So after n sequences corpus i has given `n // P · w_i + prefix_i[n % P]`, from where it continues. Each
corpus is read in its own order (order.py, at batch size 1): the first T tokens of every document, then the next T.

Axes: P sequences of the pattern, I corpora.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.longcrawl64 import LongCrawl64DataModule
from forgetting_transformer.data.order import Location, ReadingOrder
from forgetting_transformer.data.vocabulary import other_token, tokens_of

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
        self.weights_I = np.array([weight // math.gcd(*whole) for weight in whole])
        if self.weights_I.sum() > LONGEST_PATTERN:
            raise ValueError(f"the shortest pattern in this proportion has {self.weights_I.sum():,} sequences")
        given_I = np.zeros_like(self.weights_I)
        pattern = []
        for _ in range(self.weights_I.sum()):
            # Sainte-Laguë: each place goes to the corpus that is furthest behind its share. After a whole pattern every
            # corpus has exactly its share.
            pattern.append(int(np.argmax(self.weights_I / (2 * given_I + 1))))
            given_I[pattern[-1]] += 1
        self.pattern_P = np.array(pattern)
        members_PI = self.pattern_P[:, None] == np.arange(len(self.weights_I))
        self.prefix_PI = np.concatenate([np.zeros((1, len(weights)), dtype=np.int64), members_PI.cumsum(0)])

    def counts(self, sequences: int) -> np.ndarray:
        """Number of the first sequences that each corpus gives, `(I,)`."""
        patterns, more = divmod(sequences, len(self.pattern_P))
        return patterns * self.weights_I + self.prefix_PI[more]

    def corpora(self, first: int, last: int) -> np.ndarray:
        """The corpora that sequences [first, last) come from."""
        return self.pattern_P[np.arange(first, last) % len(self.pattern_P)]

    def sequences_before(self, corpus: int, available: int) -> int:
        """The most sequences of a run that need no more of a corpus than it has."""
        patterns, more = divmod(available, int(self.weights_I[corpus]))
        within = np.flatnonzero(self.prefix_PI[:-1, corpus] <= more)[-1]
        return patterns * len(self.pattern_P) + int(within)


class MixtureDataModule(LongCrawl64DataModule):
    """Loaders over several corpora of LongCrawl64DataModule's format, with one tokenizer.

    Args:
        data_dir: folder or URL that holds all of them.
        parts: their folder names, and how many sequences of each there are in proportion to the others; positive.
        dataset: name of the mixture in messages.
        options: as for one corpus; eval_tokens are shared out in proportion to the weights.

    Raises:
        DataError: naming the key and the fix.
    """

    def __init__(self, data_dir: str, *, parts: Mapping[str, float], dataset: str = "mixture", **options: Any) -> None:
        # Sorted by name, so that the order in the config changes nothing.
        weights = dict(sorted(parts.items()))
        try:
            self.interleaving = Interleaving(list(weights.values()))
        except ValueError as error:
            raise DataError(f"datamodule.parts={weights}: {error}; use weights of fewer digits") from error
        super().__init__(data_dir, **options)
        self.names, self.shares = list(weights), [weight / sum(weights.values()) for weight in weights.values()]

    def check_tokenizers(self) -> None:
        """Fetches the tokenizers of parts at URLs, so call it on one process.

        Raises:
            DataError: ids stand for other tokens in one part than in the first.
        """
        tokens = {name: tokens_of(self.folder_of(part)) for part, name in enumerate(self.names)}
        described = [(name, of_part) for name, of_part in tokens.items() if of_part is not None]
        for (first, of_first), (name, of_part) in itertools.product(described[:1], described[1:]):
            if difference := other_token(of_part, of_first, first):
                raise DataError(
                    f"datamodule.parts: {name} was made with another tokenizer than {first}: {difference}; "
                    "prepare them with one (scripts/prepare_data.py --tokenizer FOLDER)"
                )

    def batches(self) -> int:
        available = [self._order_of(part).batches for part in range(len(self.names))]
        sequences = itertools.starmap(self.interleaving.sequences_before, enumerate(available))
        batches = min(sequences) // self.train_batch_size
        return max(1, batches) if self.repeat else batches  # then parts begin again one by one, also within a batch

    def locate(self, batch: int) -> list[str]:
        rows = [""] * self.train_batch_size
        for part, at, place in self.places(batch, 0, 1):
            for row, sequence in zip(at.tolist(), place.sequences(), strict=True):
                rows[row] = f"{self.names[part]}: {sequence}"
        return rows

    def places(self, batch: int, rank: int, world_size: int) -> Iterator[tuple[int, np.ndarray, Location]]:
        share = self.train_batch_size // world_size
        first = batch * self.train_batch_size + rank * share
        before, after = self.interleaving.counts(first), self.interleaving.counts(first + share)
        corpora = self.interleaving.corpora(first, first + share)
        for part in range(len(self.names)):
            rows, order = np.flatnonzero(corpora == part), self._order_of(part)
            done, end = int(before[part]), int(after[part])
            while done < end:
                place = order.locate(done)
                # As far as sequences are neighbouring documents.
                count = min(end - done, order.documents - place.first_document)
                yield part, rows[:count], place._replace(last_document=place.first_document + count)
                rows, done = rows[count:], done + count

    def rows_of(self, part: int) -> int:
        share = int(self.interleaving.weights_I[part]) / len(self.interleaving.pattern_P)
        return math.ceil(share * self.train_batch_size) + 1

    def _order_of(self, part: int) -> ReadingOrder:
        array = self.array("train", part)
        return ReadingOrder(array.documents, array.doc_len, self.train_batch_len, 1, self.repeat)

    def _info(self, split: str, seq_len: int, batch_size: int, sequences: int) -> DataInfo:
        arrays = [self.array(split, part) for part in range(len(self.names))]
        if len({array.vocabulary for array in arrays}) > 1:
            listed = ", ".join(f"{name}: {array.vocabulary}" for name, array in zip(self.names, arrays, strict=True))
            raise DataError(
                f"datamodule.parts: the corpora have different vocabularies ({listed}); prepare them with one "
                "tokenizer (scripts/prepare_data.py --tokenizer FOLDER)"
            )
        weighted = zip(arrays, self.interleaving.weights_I.tolist(), strict=True)
        contents = "".join(f"{array.fingerprint} {weight}\n" for array, weight in weighted)
        checksums = [array.checksums for array in arrays]
        return dataclasses.replace(
            super()._info(split, seq_len, batch_size, sequences),
            path=f"{str(self.data_dir).rstrip('/')}/{{{','.join(self.names)}}}/{split}.zarr",
            documents=sum(array.documents for array in arrays),
            doc_len=max(array.doc_len for array in arrays),
            fingerprint=_short_hash(contents),
            unigram_entropy_nats=None,
            checksums=_short_hash(" ".join(map(str, checksums))) if all(checksums) else None,
        )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
