"""LongCrawl64 and corpora in its format.

Layout: `data_dir/<dataset>/{train,heldout}.zarr`, and for corpora of scripts/prepare_data.py also `manifest.json` and
`tokenizer/`. `data_dir` is a folder, or a URL of which the chunks that training needs are fetched into a cache. Labels
of a training example are a slice of S tokens. Inputs are the same slice shifted right by one, with the
beginning-of-sequence token in front, also from the middle of a document, as in the paper's runs.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from forgetting_transformer.data.corpus import Corpus, DataInfo
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.eval_batches import EvalBatches, held_out_order
from forgetting_transformer.data.order import ReadingOrder
from forgetting_transformer.data.packed import lengths_of
from forgetting_transformer.data.sparse import SparseTokenArray
from forgetting_transformer.data.storage.remote import is_url, join
from forgetting_transformer.data.storage.remote_cache import CacheSettings, Folder
from forgetting_transformer.data.token_array import TokenArray
from forgetting_transformer.data.vocabulary import Vocabulary
from forgetting_transformer.data.worker import Loader
from forgetting_transformer.ranges import divisors

#: Files of `tokenizer/` that are fetched from a URL.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(eq=False)
class LongCrawl64DataModule(Corpus):
    """Loaders over LongCrawl64 or any corpus in its format. `Corpus` explains what training calls.

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
        self._arrays: dict[str, TokenArray] = {}

    @property
    def folder(self) -> Path:
        """The corpus's folder on this machine; for a URL the copy of its tokenizer."""
        folder = Folder(self._place(), self.cache)
        for name in TOKENIZER_FILES:
            folder.fetch(f"tokenizer/{name}", fresh=True)
        return folder.folder

    def _place(self, *below: str) -> str | Path:
        names = (self.dataset, *below)
        return join(self.data_dir, *names) if is_url(self.data_dir) else Path(self.data_dir, *names)

    @property
    def vocabulary(self) -> Vocabulary:
        return (next(iter(self._arrays.values()), None) or self.array("train")).vocabulary

    def array(self, split: str) -> TokenArray:
        """The array "train" or "heldout", opened once. A run that only evaluates needs no train.zarr, and the reverse.

        Raises:
            DataError: it cannot be read, the sequence length does not divide its documents, or the cache of a remote
                corpus has no room for a batch.
        """
        if split not in self._arrays:
            stated = (self.vocab_size, self.bos_token_id, self.eos_token_id)
            array_class = SparseTokenArray if self.missing_chunks == "skip" else TokenArray
            array = array_class(self._place(f"{split}.zarr"), stated, self.cache)
            key = "train_batch_len" if split == "train" else "eval_batch_len"
            check_length(f"datamodule.{key}", getattr(self, key), array)
            # Decoded chunks that the next batch reads too stay in memory.
            array.keep(self.train_batch_size if split == "train" else self.eval_local_batch_size, getattr(self, key))
            self._arrays[split] = array
        return self._arrays[split]

    def order(self, batch_size: int) -> ReadingOrder:
        """Reading order of the documents of train.zarr."""
        array = self.array("train")
        return ReadingOrder(array.documents, array.doc_len, self.train_batch_len, batch_size, self.repeat)

    def batches(self) -> int:
        """Global batches until the corpus has been read once."""
        return self.order(self.train_batch_size).batches

    def labels(self, batch: int, rank: int, world_size: int) -> np.ndarray:
        """Tokens of a rank's share of a global batch, `(train_batch_size // world_size, train_batch_len)`."""
        return self.array("train").read(*self.order(self.train_batch_size).locate(batch, rank, world_size))

    def locate(self, batch: int) -> list[str]:
        return self.order(self.train_batch_size).locate(batch).sequences()

    def train_info(self) -> DataInfo:
        return self._info("train", self.train_batch_len, self.train_batch_size, self.batches() * self.train_batch_size)

    def train_loader(self, first_batch: int, last_batch: int, rank: int, world_size: int) -> Loader:
        dataset = TrainBatches(self, rank, world_size)
        return Loader(dataset, range(first_batch, last_batch), self.train_num_workers, self.vocabulary, self.packed)

    def train_lengths(self) -> dict[int, float]:
        """Shares in the first batch, with packed documents: rows are shuffled."""
        if not self.packed:
            return {self.train_batch_len: 1.0}
        first = Loader(TrainBatches(self, 0, 1), range(1), 0, self.vocabulary, packed=True)
        return lengths_of(next(iter(first))["cu_seqlens"])

    def held_out(self) -> list[tuple[TokenArray, ReadingOrder]]:
        """The held-out array and the order of its sequences, as many as `eval_tokens` fill.

        Raises:
            DataError: there are fewer.
        """
        array = self.array("heldout")
        return [(array, held_out_order(array, self.eval_batch_len, self.eval_tokens))]

    def eval_info(self) -> DataInfo:
        sequences = sum(order.batches for _, order in self.held_out())
        return self._info("heldout", self.eval_batch_len, self.eval_local_batch_size, sequences)

    def eval_loader(self, rank: int, world_size: int) -> Loader:
        """B is eval_local_batch_size, or a rank's share of all sequences where this is less."""
        dataset = EvalBatches(self.held_out(), self.eval_local_batch_size, rank, world_size)
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
    """Map-style: global batch index -> labels of this rank's share. `Loader` makes the inputs of them (worker.py)."""

    def __init__(self, data: LongCrawl64DataModule, rank: int, world_size: int) -> None:
        self.data, self.rank, self.world_size = data, rank, world_size
        data.batches()  # opens the arrays, so that their errors come here and not in the worker

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        return {"labels": torch.from_numpy(self.data.labels(batch, self.rank, self.world_size))}
