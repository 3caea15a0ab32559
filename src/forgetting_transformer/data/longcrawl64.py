"""LongCrawl64 and corpora in its format: what the training loop asks data for.

Layout on disk: `data_dir/<dataset>/{train,heldout}.zarr`, and for corpora of scripts/prepare_data.py also
`manifest.json` and `tokenizer/`. A training example is a slice of S tokens as labels and the same slice shifted right
by one, with the beginning-of-sequence token in front, as inputs (also for slices from the middle of a document, as in
the paper's runs).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from forgetting_transformer.data.order import ReadingOrder
from forgetting_transformer.data.token_array import DataError, TokenArray, read_manifest
from forgetting_transformer.data.worker import start_worker

#: LongCrawl64 is tokenised with GPT-2's BPE: 50,257 ids, of which the last begins and ends a text.
GPT2_VOCAB_SIZE = 50257
GPT2_BOS_TOKEN_ID = 50256


@dataclass(frozen=True)
class DataInfo:
    """What a split offers at the chosen batch shape; written to `metrics/jsonlines/{train,val}_data_info.jsonl`."""

    path: str
    vocab_size: int
    bos_token_id: int
    documents: int
    doc_len: int
    seq_len: int
    global_batch_size: int
    total_batches: int
    total_tokens: int
    fingerprint: str
    #: Entropy of the token frequencies of the training split in nats: the loss of a model that knows no context.
    unigram_entropy_nats: float | None


class LongCrawl64DataModule:
    """Loaders over LongCrawl64 or any corpus in its format.

    Args:
        data_dir: folder that holds `<dataset>/train.zarr` and `<dataset>/heldout.zarr`.
        dataset: folder name of the corpus.
        train_batch_len: tokens in a training sequence; must divide the documents' length.
        train_batch_size: sequences in a global batch.
        train_num_workers: worker processes that read ahead, per rank; 0 reads in the training process.
        eval_tokens: held-out tokens to evaluate on; None for all. Rounded down to whole documents.
        eval_batch_len: tokens in an evaluation sequence; must divide the documents' length.
        eval_local_batch_size: sequences in one evaluation batch of one rank.
        eval_num_workers: as train_num_workers, for evaluation.
        vocab_size, bos_token_id: of the tokenizer that made the corpus; None reads them from the corpus's
            manifest.json, or means GPT-2's (50,257 and 50,256) where there is none.
        repeat: read the data again, in the same order, when it has been read once.

    Raises:
        DataError: naming the file or key, the value and the fix.
    """

    def __init__(
        self,
        data_dir: str,
        *,
        train_batch_len: int,
        train_batch_size: int,
        eval_batch_len: int,
        eval_local_batch_size: int,
        dataset: str = "longcrawl64",
        train_num_workers: int = 2,
        eval_tokens: int | None = None,
        eval_num_workers: int = 2,
        vocab_size: int | None = None,
        bos_token_id: int | None = None,
        repeat: bool = False,
    ) -> None:
        self.folder = Path(data_dir) / dataset
        manifest = read_manifest(self.folder)
        self.vocab_size = vocab_size or manifest.get("vocab_size", GPT2_VOCAB_SIZE)
        self.bos_token_id = (
            bos_token_id if bos_token_id is not None else manifest.get("bos_token_id", GPT2_BOS_TOKEN_ID)
        )
        self.unigram_entropy_nats: float | None = manifest.get("unigram_entropy_nats")
        if not 0 <= self.bos_token_id < self.vocab_size:
            raise DataError(f"datamodule.bos_token_id={self.bos_token_id} is not in [0, vocab_size={self.vocab_size})")
        self.train_batch_len, self.train_batch_size = train_batch_len, train_batch_size
        self.train_num_workers, self.repeat = train_num_workers, repeat
        self.eval_tokens, self.eval_batch_len = eval_tokens, eval_batch_len
        self.eval_local_batch_size, self.eval_num_workers = eval_local_batch_size, eval_num_workers

    # A run that only evaluates needs no train.zarr (and the reverse), so each array is opened when first asked for.
    def open_train(self) -> tuple[TokenArray, ReadingOrder]:
        array = TokenArray(self.folder / "train.zarr", self.vocab_size)
        check_length("datamodule.train_batch_len", self.train_batch_len, array)
        if array.documents < self.train_batch_size:
            raise DataError(
                f"datamodule.train_batch_size={self.train_batch_size} is more than the {array.documents:,} documents "
                f"of {array.path}; use a smaller batch or a corpus with more (shorter) documents"
            )
        order = ReadingOrder(array.documents, array.doc_len, self.train_batch_len, self.train_batch_size, self.repeat)
        return array, order

    def train_info(self) -> DataInfo:
        array, order = self.open_train()
        return self._info(array, order.seq_len, order.batch_size, order.batches)

    def train_loader(self, first_batch: int, last_batch: int, rank: int, world_size: int) -> DataLoader:
        """Yields this rank's share of global batches [first_batch, last_batch), in order.

        Each item is a dict of `input_ids` and `labels`, both (train_batch_size // world_size, train_batch_len) int64.
        """
        array, order = self.open_train()
        dataset = _TrainBatches(array, order, rank, world_size, self.bos_token_id)
        return _loader(dataset, range(first_batch, last_batch), self.train_num_workers)

    def eval_info(self) -> DataInfo:
        array = self._open_heldout()
        documents, sequences = self._eval_size(array)
        batches = -(-sequences // self.eval_local_batch_size)
        info = self._info(array, self.eval_batch_len, self.eval_local_batch_size, batches)
        return DataInfo(**{**info.__dict__, "total_tokens": documents * array.doc_len})

    def eval_loader(self, rank: int, world_size: int) -> DataLoader:
        """Yields this rank's share of the held-out sequences.

        Each item is a dict of `input_ids`, `labels`, both (eval_local_batch_size, eval_batch_len) int64, and `weight`
        (eval_local_batch_size,) float64: 1 for a sequence to count, 0 for one that only fills the batch. Every rank
        yields the same number of batches, because a sharded model needs all ranks in every forward pass.
        """
        array = self._open_heldout()
        _, sequences = self._eval_size(array)
        dataset = _EvalBatches(
            array, sequences, self.eval_batch_len, self.eval_local_batch_size, rank, world_size, self.bos_token_id
        )
        return _loader(dataset, range(len(dataset)), self.eval_num_workers)

    def _open_heldout(self) -> TokenArray:
        array = TokenArray(self.folder / "heldout.zarr", self.vocab_size)
        check_length("datamodule.eval_batch_len", self.eval_batch_len, array)
        return array

    def _eval_size(self, array: TokenArray) -> tuple[int, int]:
        available = array.documents * array.doc_len
        wanted = available if self.eval_tokens is None else self.eval_tokens
        documents = wanted // array.doc_len
        if not 1 <= documents <= array.documents:
            raise DataError(
                f"datamodule.eval_tokens={wanted:,} must be between one document ({array.doc_len:,} tokens) and all "
                f"{available:,} tokens of {array.path}; use null for all"
            )
        return documents, documents * (array.doc_len // self.eval_batch_len)

    def _info(self, array: TokenArray, seq_len: int, batch_size: int, batches: int) -> DataInfo:
        return DataInfo(
            path=str(array.path),
            vocab_size=self.vocab_size,
            bos_token_id=self.bos_token_id,
            documents=array.documents,
            doc_len=array.doc_len,
            seq_len=seq_len,
            global_batch_size=batch_size,
            total_batches=batches,
            total_tokens=batches * batch_size * seq_len,
            fingerprint=array.fingerprint,
            unigram_entropy_nats=self.unigram_entropy_nats,
        )


def check_length(key: str, seq_len: int, array: TokenArray) -> None:
    """Refuses a sequence length that does not divide the documents' length, naming the lengths that would."""
    if seq_len < 1 or array.doc_len % seq_len:
        divisors = [n for n in range(1, array.doc_len + 1) if array.doc_len % n == 0]
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - seq_len))[:3])
        raise DataError(
            f"{key}={seq_len} must divide the documents' length, {array.doc_len:,} tokens in {array.path}; "
            f"the nearest lengths that do are {', '.join(map(str, nearest))}"
        )


class _TrainBatches(Dataset):
    """Map-style: global batch index -> this rank's share of it."""

    def __init__(self, array: TokenArray, order: ReadingOrder, rank: int, world_size: int, bos_token_id: int) -> None:
        self.array, self.order, self.rank, self.world_size = array, order, rank, world_size
        self.bos_token_id = bos_token_id

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        where = self.order.locate(batch, self.rank, self.world_size)
        labels = self.array.read(where.first_document, where.last_document, where.begin_token, where.end_token)
        return shifted(labels, self.bos_token_id)


class _EvalBatches(Dataset):
    """Map-style: batch index of this rank -> held-out sequences; sequence n is slice n // D of document n % D."""

    def __init__(
        self,
        array: TokenArray,
        sequences: int,
        seq_len: int,
        batch_size: int,
        rank: int,
        world_size: int,
        bos_token_id: int,
    ) -> None:
        self.array, self.sequences, self.seq_len, self.batch_size = array, sequences, seq_len, batch_size
        self.rank, self.world_size, self.bos_token_id = rank, world_size, bos_token_id
        self.documents = sequences // (array.doc_len // seq_len)

    def __len__(self) -> int:
        return -(-self.sequences // (self.batch_size * self.world_size))

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        first = (batch * self.world_size + self.rank) * self.batch_size
        wanted = np.arange(first, first + self.batch_size)
        rows = []
        for sequence in np.minimum(wanted, self.sequences - 1):  # past the end: the last one again, with weight 0
            column, document = divmod(int(sequence), self.documents)
            rows.append(self.array.read(document, document + 1, column * self.seq_len, (column + 1) * self.seq_len))
        item = shifted(np.concatenate(rows), self.bos_token_id)
        item["weight"] = torch.from_numpy((wanted < self.sequences).astype(np.float64))
        return item


def shifted(labels_BT: np.ndarray, bos_token_id: int) -> dict[str, torch.Tensor]:
    """Labels as int64 and inputs that see the token before each label, `bos_token_id` before the first."""
    labels = torch.from_numpy(labels_BT.astype(np.int64))
    input_ids = labels.roll(1, dims=1)
    input_ids[:, 0] = bos_token_id
    return {"input_ids": input_ids, "labels": labels}


class _Indices:
    """A sampler that yields a range in order; its length is what the loader reports."""

    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _loader(dataset: Dataset, indices: range, num_workers: int) -> DataLoader:
    """A loader that prefetches whole batches in worker processes and keeps their order.

    The generator is the loader's own, so that making an iterator draws nothing from the global random state.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=_Indices(indices),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if num_workers else None,
        generator=torch.Generator(),
        worker_init_fn=start_worker,
    )
