"""LongCrawl64 and corpora in its format.

Layout: `data_dir/<dataset>/{train,heldout}.zarr`, and for corpora of scripts/prepare_data.py also `manifest.json` and
`tokenizer/`. `data_dir` is a folder, or a URL of which the chunks that training needs are fetched into a cache. Labels
of a training example are a slice of S tokens. Inputs are the same slice shifted right by one, with the
beginning-of-sequence token in front, also from the middle of a document, as in the paper's runs.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from forgetting_transformer.data.corpus import Batch, DataInfo, shifted
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.order import Location, ReadingOrder
from forgetting_transformer.data.packed import keep_apart, lengths_of
from forgetting_transformer.data.sparse import SparseTokenArray
from forgetting_transformer.data.storage.remote import is_url, join
from forgetting_transformer.data.storage.remote_cache import CacheSettings, Folder
from forgetting_transformer.data.token_array import TokenArray
from forgetting_transformer.data.vocabulary import Vocabulary
from forgetting_transformer.data.worker import hand_over, received, sharing_memory, start_worker
from forgetting_transformer.ranges import divisors

#: Batches that are prepared ahead.
PREFETCHED_BATCHES = 8
#: Files of `tokenizer/` that are fetched from a URL.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(eq=False)
class LongCrawl64DataModule:
    """Loaders over LongCrawl64 or any corpus in its format.

    configs/datamodule/longcrawl64.yaml explains the other keys.

    Args:
        data_dir: folder or URL (s3://, gs://, hf://, https://, …) with `<dataset>/train.zarr` and
            `<dataset>/heldout.zarr`.
        packed: texts in a row are documents that the model keeps apart (`data.packed.keep_apart`).

    Raises:
        DataError: naming the file or key, the value and the fix.
    """

    data_dir: str
    _: KW_ONLY
    train_batch_len: int
    train_batch_size: int
    eval_batch_len: int
    eval_local_batch_size: int
    dataset: str = "longcrawl64"
    train_num_workers: int = 1
    eval_tokens: int | None = None
    eval_num_workers: int = 1
    vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    repeat: bool = False
    packed: bool = False
    missing_chunks: str = "error"
    cache_dir: str | None = None
    cache_gb: float = 20.0

    def __post_init__(self) -> None:
        folder = Path(self.cache_dir) if self.cache_dir else CacheSettings().folder
        self.cache = CacheSettings(folder, int(self.cache_gb * 1e9))
        #: The corpora that batches come from, and their shares: one, and several in a mixture.
        self.names, self.shares = [self.dataset], [1.0]
        self._arrays: dict[tuple[str, int], TokenArray] = {}

    @property
    def folder(self) -> Path:
        """Folder of the first part with a tokenizer, if one has it."""
        folders = [self.folder_of(part) for part in range(len(self.names))]
        return next((folder for folder in folders if (folder / "tokenizer").is_dir()), folders[0])

    def folder_of(self, part: int) -> Path:
        """Folder of a part on this machine; for a URL the copy of its tokenizer."""
        folder = Folder(self._place(part), self.cache)
        for name in TOKENIZER_FILES:
            folder.fetch(f"tokenizer/{name}", fresh=True)
        return folder.folder

    def _place(self, part: int, *below: str) -> str | Path:
        names = (self.names[part], *below)
        return join(self.data_dir, *names) if is_url(self.data_dir) else Path(self.data_dir, *names)

    @property
    def vocabulary(self) -> Vocabulary:
        return (next(iter(self._arrays.values()), None) or self.array("train")).vocabulary

    def array(self, split: str, part: int = 0) -> TokenArray:
        """The array "train" or "heldout" of a part, opened once; the wanted length must divide its documents.

        A run that only evaluates needs no train.zarr, and the reverse.

        Raises:
            DataError: they do not, it cannot be read, or the cache of a remote corpus has no room for a batch.
        """
        if (split, part) not in self._arrays:
            stated = (self.vocab_size, self.bos_token_id, self.eos_token_id)
            opened = SparseTokenArray if self.missing_chunks == "skip" else TokenArray
            array = opened(self._place(part, f"{split}.zarr"), stated, self.cache)
            key = "train_batch_len" if split == "train" else "eval_batch_len"
            check_length(f"datamodule.{key}", getattr(self, key), array)
            array.keep(self.rows_of(part) if split == "train" else self.eval_local_batch_size, getattr(self, key))
            self._arrays[split, part] = array
        return self._arrays[split, part]

    # Reading order: a mixture overrides these --------------------------------------------------------

    def batches(self) -> int:
        """Global batches until a corpus has been read once."""
        return self._order().batches

    def locate(self, batch: int) -> list[str]:
        return self._order().locate(batch).sequences()

    def places(self, batch: int, rank: int, world_size: int) -> Iterator[tuple[int, slice | np.ndarray, Location]]:
        """Parts of a rank's share of a batch: the number of a corpus, rows of the share, their place in the corpus."""
        yield 0, slice(None), self._order().locate(batch, rank, world_size)

    def rows_of(self, part: int) -> int:
        """The most sequences that a batch takes from a corpus."""
        return self.train_batch_size

    def eval_order(self, part: int) -> ReadingOrder:
        """Reading order of a part's held-out sequences, one sequence per batch.

        Raises:
            DataError: there are fewer than wanted.
        """
        array = self.array("heldout", part)
        available = array.documents * array.doc_len
        wanted = available if self.eval_tokens is None else int(self.eval_tokens * self.shares[part])
        if not array.doc_len <= wanted <= available:
            raise DataError(
                f"datamodule.eval_tokens={self.eval_tokens:,} takes {wanted:,} tokens of {array.path}; that must be "
                f"between one document ({array.doc_len:,} tokens) and all {available:,} tokens; use null for all"
            )
        return ReadingOrder(wanted // array.doc_len, array.doc_len, self.eval_batch_len, 1)

    def _order(self) -> ReadingOrder:
        array = self.array("train")
        return ReadingOrder(array.documents, array.doc_len, self.train_batch_len, self.train_batch_size, self.repeat)

    # Shared with mixtures ---------------------------------------------------------------------------------------------

    def train_info(self) -> DataInfo:
        return self._info("train", self.train_batch_len, self.train_batch_size, self.batches() * self.train_batch_size)

    def train_lengths(self) -> dict[int, float]:
        """Shares in the first batch, with packed documents: rows are shuffled."""
        if not self.packed:
            return {self.train_batch_len: 1.0}
        first = Loader(TrainBatches(self, 0, 1), range(1), 0, self.vocabulary, packed=True)
        return lengths_of(next(iter(first))["cu_seqlens"])

    def train_loader(self, first_batch: int, last_batch: int, rank: int, world_size: int) -> DataLoader:
        """Yields this rank's share of global batches [first_batch, last_batch), in order.

        Each item is a dict of `input_ids` and `labels`, both (train_batch_size // world_size, train_batch_len) int64.
        """
        dataset = TrainBatches(self, rank, world_size)
        return Loader(dataset, range(first_batch, last_batch), self.train_num_workers, self.vocabulary, self.packed)

    def eval_info(self) -> DataInfo:
        sequences = sum(self.eval_order(part).batches for part in range(len(self.names)))
        return self._info("heldout", self.eval_batch_len, self.eval_local_batch_size, sequences)

    def eval_loader(self, rank: int, world_size: int) -> DataLoader:
        """Yields this rank's share of the held-out sequences.

        Each item is a dict of `input_ids`, `labels`, both (B, eval_batch_len) int64, and `weight` (B,) float64: 1 for a
        sequence to count, 0 for one that only fills the batch. B is eval_local_batch_size, or a rank's share of all
        sequences where this is less. Every rank yields the same number of batches, because a sharded model needs all
        ranks in every forward pass.
        """
        dataset = EvalBatches(self, rank, world_size)
        return Loader(dataset, range(len(dataset)), self.eval_num_workers, self.vocabulary, self.packed)

    def _info(self, split: str, seq_len: int, batch_size: int, sequences: int) -> DataInfo:
        array = self.array(split)
        return DataInfo(
            path=str(array.path),
            vocab_size=self.vocabulary.size,
            bos_token_id=self.vocabulary.bos_token_id,
            eos_token_id=self.vocabulary.eos_token_id,
            documents=array.documents,
            doc_len=array.doc_len,
            seq_len=seq_len,
            global_batch_size=batch_size,
            total_batches=-(-sequences // batch_size),
            total_tokens=sequences * seq_len,
            fingerprint=array.fingerprint,
            unigram_entropy_nats=array.manifest.get("unigram_entropy_nats"),
            checksums=array.checksums,
        )


def check_length(key: str, seq_len: int, array: TokenArray) -> None:
    """Refuses a sequence length that does not divide the documents' length, naming the lengths that would."""
    if seq_len < 1 or array.doc_len % seq_len:
        nearest = sorted(sorted(divisors(array.doc_len), key=lambda n: abs(n - seq_len))[:3])
        raise DataError(
            f"{key}={seq_len} must divide the documents' length, {array.doc_len:,} tokens in {array.path}; "
            f"the nearest lengths that do are {', '.join(map(str, nearest))}"
        )


class TrainBatches(Dataset):
    """Map-style: global batch index -> this rank's share of it."""

    def __init__(self, data: LongCrawl64DataModule, rank: int, world_size: int) -> None:
        self.data, self.rank, self.world_size = data, rank, world_size
        self.arrays = [data.array("train", part) for part in range(len(data.names))]

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        dtype = np.result_type(*(array.dtype for array in self.arrays))
        rows = self.data.train_batch_size // self.world_size
        labels_BT = np.empty((rows, self.data.train_batch_len), dtype=dtype)
        for part, at, place in self.data.places(batch, self.rank, self.world_size):
            labels_BT[at] = self.arrays[part].read(*place)
        return {"labels": torch.from_numpy(labels_BT)}


class EvalBatches(Dataset):
    """Map-style: batch index of this rank -> held-out sequences, array after array."""

    def __init__(self, data: LongCrawl64DataModule, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.arrays = [data.array("heldout", part) for part in range(len(data.names))]
        self.orders = [data.eval_order(part) for part in range(len(data.names))]
        self.ends = list(itertools.accumulate(order.batches for order in self.orders))
        # No more rows than there are.
        self.batch_size = min(data.eval_local_batch_size, -(-self.ends[-1] // world_size))

    def __len__(self) -> int:
        return -(-self.ends[-1] // (self.batch_size * self.world_size))

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        first = (batch * self.world_size + self.rank) * self.batch_size
        wanted = np.arange(first, first + self.batch_size)
        # Past the end the last sequence again, with weight 0.
        rows = [self._read(sequence) for sequence in np.minimum(wanted, self.ends[-1] - 1).tolist()]
        weight = torch.from_numpy((wanted < self.ends[-1]).astype(np.float64))
        return {"labels": torch.from_numpy(np.concatenate(rows)), "weight": weight}

    def _read(self, sequence: int) -> np.ndarray:
        """Tokens `(1, length)`."""
        part = bisect.bisect_right(self.ends, sequence)
        order = self.orders[part]
        return self.arrays[part].read(*order.locate(sequence - self.ends[part] + order.batches))


class Loader(DataLoader):
    """Prefetches whole batches in a worker process, and makes inputs and labels of them.

    The worker hands over tokens as they are stored, 2 or 4 bytes each. Widened to inputs and labels they would be 16
    bytes to pass between processes, which costs more than all the rest. They are tensors, whose bytes do not go through
    the pipe: a worker in the middle of a long write would outlive a rank that is killed.
    """

    def __init__(
        self, dataset: Dataset, indices: range, num_workers: int, vocabulary: Vocabulary, packed: bool = False
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            sampler=indices,
            num_workers=min(num_workers, 1),
            collate_fn=hand_over if num_workers else None,
            prefetch_factor=PREFETCHED_BATCHES if num_workers else None,
            # Its own generator, so that making an iterator draws nothing from the global random state.
            generator=torch.Generator(),
            worker_init_fn=start_worker,
        )
        self.vocabulary, self.packed = vocabulary, packed

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # batches are widened
        with sharing_memory():
            items = super().__iter__()
        return map(self._widen, received(items))

    def _widen(self, item: dict[str, torch.Tensor]) -> Batch:
        bos, eos = self.vocabulary.bos_token_id, self.vocabulary.eos_token_id
        batch = item | shifted(item["labels"], bos, pinned=torch.cuda.is_available())
        return keep_apart(batch, bos, eos) if self.packed else batch
