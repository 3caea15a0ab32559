"""A mixture of corpora: every global batch takes its sequences from several of them, in proportion to weights.

Which corpus sequence s of a run comes from is arithmetic. Weights are brought to whole numbers without a common
divisor, and sequences repeat a pattern as long as their sum, in which every corpus has its weight and lies as evenly as
possible. So after n sequences corpus i has given `n // P · w_i + prefix_i[n % P]`, which is where it goes on.
Each corpus is read in its own order (order.py, at batch size 1): the first T tokens of every document, then the next T.

Axes: P sequences of the pattern, I corpora.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from forgetting_transformer.data.corpus import DataInfo, lengths_of
from forgetting_transformer.data.decoded_chunks import DecodedChunks
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.longcrawl64 import EvalBatches, Loader, LongCrawl64DataModule
from forgetting_transformer.data.order import Location, ReadingOrder
from forgetting_transformer.data.token_array import TokenArray
from forgetting_transformer.data.tokens import other_tokens
from forgetting_transformer.data.vocabulary import Vocabulary

#: Sequences of the longest pattern: weights of three digits.
LONGEST_PATTERN = 1000


class Interleaving:
    """Which corpus each sequence comes from, and which of its sequences it is.

    Args:
        weights: positive; what counts is their proportion.

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
        """How many of the first sequences each corpus gives, `(I,)`."""
        patterns, more = divmod(sequences, len(self.pattern_P))
        return patterns * self.weights_I + self.prefix_PI[more]

    def corpora(self, first: int, last: int) -> np.ndarray:
        """The corpora that sequences [first, last) come from."""
        return self.pattern_P[np.arange(first, last) % len(self.pattern_P)]

    def sequences_before(self, corpus: int, available: int) -> int:
        """The most sequences of a run that ask a corpus for no more than it has."""
        patterns, more = divmod(available, int(self.weights_I[corpus]))
        within = np.flatnonzero(self.prefix_PI[:-1, corpus] <= more)[-1]
        return patterns * len(self.pattern_P) + int(within)


@dataclass(frozen=True)
class MixedPlace:
    """Where the sequences of a batch lie: for each, the corpus and its place there."""

    rows: tuple[tuple[str, Location], ...]

    def __str__(self) -> str:
        names = dict.fromkeys(name for name, _ in self.rows)
        return "; ".join(f"{name}: {self._of(name)}" for name in names)

    def _of(self, name: str) -> str:
        places = [place for found, place in self.rows if found == name]
        return ", ".join(place.sequence(0) for place in places[:4]) + (", …" if len(places) > 4 else "")

    def sequence(self, row: int) -> str:
        name, place = self.rows[row]
        return f"{name}: {place.sequence(0)}"

    def describe(self, rows: Sequence[int]) -> dict[str, Any]:
        return {"place": str(self), "documents_not_finite": [self.sequence(row) for row in rows]}


class MixtureDataModule:
    """Loaders over several corpora of LongCrawl64DataModule's format, with one tokenizer.

    Args:
        data_dir: folder or URL that holds all of them.
        parts: their folder names, and how many sequences of each there are in proportion to the others.
        dataset: what the mixture is called in messages.
        train_batch_len, train_batch_size, eval_batch_len: as for one corpus.
        eval_tokens: held-out tokens in all, shared out in proportion to the weights; None for all of every corpus.
        recorded, options: as for one corpus.

    Raises:
        DataError: naming the key and the fix.
    """

    def __init__(
        self,
        data_dir: str,
        *,
        parts: Mapping[str, float],
        dataset: str = "mixture",
        eval_tokens: int | None = None,
        recorded: Vocabulary | None = None,
        **options: Any,
    ) -> None:
        wrong = [f"{name}: {weight}" for name, weight in parts.items() if not 0 < weight < math.inf]
        if not parts or wrong:
            raise DataError(
                f"datamodule.parts={{{', '.join(wrong)}}}: name the corpora in data_dir and give each a positive "
                "weight, as in datamodule.parts={code: 3, prose: 1}"
            )
        # In the order of names, so that the order in which they are written changes nothing.
        weights = dict(sorted(parts.items()))
        try:
            self.interleaving = Interleaving(list(weights.values()))
        except ValueError as error:
            raise DataError(f"datamodule.parts={weights}: {error}; use weights of fewer digits") from error
        total = sum(weights.values())
        self.names = list(weights)
        self.parts = [
            LongCrawl64DataModule(
                data_dir,
                dataset=name,
                eval_tokens=None if eval_tokens is None else int(eval_tokens * (weight / total)),
                recorded=recorded,
                **options,
            )
            for name, weight in weights.items()
        ]
        self.eval_tokens = eval_tokens
        self.data_dir, first = str(data_dir).rstrip("/"), self.parts[0]
        self.batch_size, self.batch_len, self.num_workers = (
            first.train_batch_size,
            first.train_batch_len,
            first.train_num_workers,
        )
        self.packed, self.repeat = first.packed, first.repeat
        self._check_vocabularies()

    @property
    def folder(self) -> Path:
        """That of the first part with a tokenizer, if one has it."""
        folders = [part.folder for part in self.parts]
        return next((folder for folder in folders if (folder / "tokenizer").is_dir()), folders[0])

    def check_tokenizers(self) -> None:
        """Fetches the tokenizers of parts at URLs, so call it on one process.

        Raises:
            DataError: ids stand for other tokens in one part than in the first.
        """
        folders = {name: part.folder for name, part in zip(self.names, self.parts, strict=True)}
        described = [name for name, folder in folders.items() if (folder / "tokenizer").is_dir()]
        for name in described[1:]:
            if difference := other_tokens(folders[name], folders[described[0]]):
                raise DataError(
                    f"datamodule.parts: {name} was made with another tokenizer than {described[0]}: {difference}; "
                    "prepare them with one (scripts/prepare_data.py --tokenizer FOLDER)"
                )

    def _check_shares(self) -> None:
        """
        Raises:
            DataError: of one part the share of eval_tokens is less than a document, or more than it has.
        """
        for name, part in zip(self.names, self.parts, strict=True):
            array, share = part.array("heldout"), part.eval_tokens
            available = array.documents * array.doc_len
            if self.eval_tokens is not None and share is not None and not array.doc_len <= share <= available:
                raise DataError(
                    f"datamodule.eval_tokens={self.eval_tokens:,} gives {name} {share:,} tokens by its weight, which "
                    f"must be between one document ({array.doc_len:,} tokens) and all {available:,} tokens of "
                    f"{array.path}; {'raise' if share < array.doc_len else 'lower'} it, or use null for all"
                )

    def train_info(self) -> DataInfo:
        orders = [self._order(part) for part in self.parts]
        sequences = [self.interleaving.sequences_before(number, order.batches) for number, order in enumerate(orders)]
        batches = min(sequences) // self.batch_size
        # With `repeat`, parts begin again one by one, also within a batch.
        return self._info("train", self.batch_len, self.batch_size, max(1, batches) if self.repeat else batches)

    def eval_info(self) -> DataInfo:
        self._check_shares()
        first, sequences = self.parts[0], sum(part.eval_size()[1] for part in self.parts)
        batches = -(-sequences // first.eval_local_batch_size)
        info = self._info("heldout", first.eval_batch_len, first.eval_local_batch_size, batches)
        return DataInfo(**{**vars(info), "total_tokens": sequences * first.eval_batch_len})

    def train_loader(self, first_batch: int, last_batch: int, rank: int, world_size: int) -> DataLoader:
        dataset = _MixedBatches(self, rank, world_size, [DecodedChunks(slots) for slots in self._train_slots()])
        batches = range(first_batch, last_batch)
        return Loader(dataset, batches, self.num_workers, self.parts[0].vocabulary, self.packed)

    def eval_loader(self, rank: int, world_size: int) -> DataLoader:
        first = self.parts[0]
        parts = [part.held_out(world_size) for part in self.parts]
        dataset = EvalBatches(parts, first.eval_local_batch_size, rank, world_size)
        return Loader(dataset, range(len(dataset)), first.eval_num_workers, first.vocabulary, self.packed)

    def train_lengths(self) -> dict[int, float]:
        """Of packed documents those of the first batch."""
        if not self.packed:
            return {self.batch_len: 1.0}
        first = _MixedBatches(self, 0, 1, [None] * len(self.parts))
        loader = Loader(first, range(1), 0, self.parts[0].vocabulary, packed=True)
        return lengths_of(next(iter(loader))["cu_seqlens"])

    def locate(self, batch: int) -> MixedPlace:
        rows: list[tuple[str, Location] | None] = [None] * self.batch_size
        for number, at, place in self.places(batch, 0, 1):
            for i, row in enumerate(at.tolist()):
                document = place.first_document + i
                rows[row] = (
                    self.names[number],
                    Location(document, document + 1, place.begin_token, place.end_token),
                )
        return MixedPlace(tuple(row for row in rows if row is not None))

    def places(self, batch: int, rank: int, world_size: int) -> Iterator[tuple[int, np.ndarray, Location]]:
        """What a rank reads of a global batch: a corpus's number, rows of the rank's share, and what fills them."""
        share = self.batch_size // world_size
        first = batch * self.batch_size + rank * share
        before, after = self.interleaving.counts(first), self.interleaving.counts(first + share)
        corpora = self.interleaving.corpora(first, first + share)
        for number, part in enumerate(self.parts):
            rows, order = np.flatnonzero(corpora == number), self._order(part)
            done, end = int(before[number]), int(after[number])
            while done < end:
                place = order.locate(done)
                # As far as sequences are neighbouring documents.
                count = min(end - done, order.documents - place.first_document)
                stretch = Location(
                    place.first_document, place.first_document + count, place.begin_token, place.end_token
                )
                yield number, rows[:count], stretch
                rows, done = rows[count:], done + count

    def check_cache(self, world_size: int, evaluates: bool) -> None:
        self._train_slots()
        if evaluates:
            for part in self.parts:
                part.held_out_slots(world_size)

    def _train_slots(self) -> list[int]:
        counts = self.interleaving.weights_I * self.batch_size / len(self.interleaving.pattern_P)
        return [
            part.slots(part.array("train"), math.ceil(count) + 1, self.batch_len)
            for part, count in zip(self.parts, counts.tolist(), strict=True)
        ]

    def _order(self, part: LongCrawl64DataModule) -> ReadingOrder:
        array = part.array("train")
        return ReadingOrder(array.documents, array.doc_len, self.batch_len, 1, self.repeat)

    def _info(self, split: str, seq_len: int, batch_size: int, batches: int) -> DataInfo:
        arrays = [part.array(split) for part in self.parts]
        weights = self.interleaving.weights_I.tolist()
        digest = hashlib.sha256()
        for array, weight in zip(arrays, weights, strict=True):
            digest.update(f"{array.fingerprint} {weight}\n".encode())
        checksums = [array.checksums for array in arrays]
        listed = hashlib.sha256(" ".join(map(str, checksums)).encode()).hexdigest()[:16] if all(checksums) else None
        shown, vocabulary = Path(str(arrays[0].path)).name, self.parts[0].vocabulary
        return DataInfo(
            path=f"{self.data_dir}/{{{','.join(self.names)}}}/{shown}",
            vocab_size=vocabulary.size,
            bos_token_id=vocabulary.bos_token_id,
            eos_token_id=vocabulary.eos_token_id,
            documents=sum(array.documents for array in arrays),
            doc_len=max(array.doc_len for array in arrays),
            seq_len=seq_len,
            global_batch_size=batch_size,
            total_batches=batches,
            total_tokens=batches * batch_size * seq_len,
            fingerprint=digest.hexdigest()[:16],
            unigram_entropy_nats=None,
            checksums=listed,
        )

    def _check_vocabularies(self) -> None:
        found = {name: part.vocabulary for name, part in zip(self.names, self.parts, strict=True)}
        if len({*found.values()}) > 1:
            listed = ", ".join(
                f"{name}: {one.size:,} ids, BOS {one.bos_token_id}, EOS {one.eos_token_id}"
                for name, one in found.items()
            )
            raise DataError(
                f"datamodule.parts: the corpora have different vocabularies ({listed}); prepare them with one "
                "tokenizer (scripts/prepare_data.py --tokenizer FOLDER)"
            )


class _MixedBatches(Dataset):
    """Map-style: global batch index -> this rank's share of it."""

    def __init__(
        self, mixture: MixtureDataModule, rank: int, world_size: int, kept: Sequence[DecodedChunks | None]
    ) -> None:
        self.mixture, self.rank, self.world_size, self.kept = mixture, rank, world_size, kept

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        mixture = self.mixture
        dtype = np.result_type(*(part.array("train").dtype for part in mixture.parts))
        labels_BT = np.empty((mixture.batch_size // self.world_size, mixture.batch_len), dtype=dtype)
        for number, rows, place in mixture.places(batch, self.rank, self.world_size):
            array: TokenArray = mixture.parts[number].array("train")
            labels_BT[rows] = array.read(
                place.first_document,
                place.last_document,
                place.begin_token,
                place.end_token,
                self.kept[number],
            )
        return {"labels": torch.from_numpy(labels_BT)}
