"""Protocol between training and a corpus, and the definition of a batch.

A corpus is registered by name (`plugins.CORPORA`) as a function `build(data_dir, config)` that returns a
`Corpus`, with a dataclass of its keys that derives from `DataModuleConfig`. docs/extend.md adds one.

Axes: B sequences of a batch, T tokens of a sequence, S = T + 1 entries of cu_seqlens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forgetting_transformer.data.packed import one_after_another

#: `input_ids` and `labels`, `(B, T)` int64, where `labels[t]` is the token after `input_ids[t]`. Optional: `cu_seqlens`
#: `(B, S)` int32, where the documents of each row begin, filled up with T: the model keeps them apart. In
#: held-out batches also `weight` `(B,)` float64: 1 for a sequence to count, 0 for one that fills the batch.
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DataInfo:
    """Contents of a split at one batch shape; written to `metrics/jsonlines/{train,val}_data_info.jsonl`."""

    path: str
    vocab_size: int
    bos_token_id: int
    documents: int
    doc_len: int
    seq_len: int
    global_batch_size: int
    total_batches: int
    total_tokens: int
    #: Identifies the contents: a run continues only on data with the fingerprint that it began with.
    fingerprint: str
    #: Entropy of the token frequencies of the training split in nats: the loss of a model that knows no context.
    unigram_entropy_nats: float | None
    #: A short hash of the list of checksums of all chunks; None where the corpus has none.
    checksums: str | None = None
    #: The token that ends a text; by default BOS, which ends one text and begins the next.
    eos_token_id: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.eos_token_id is None:
            object.__setattr__(self, "eos_token_id", self.bos_token_id)


class Corpus(Protocol):
    """A corpus at one batch shape. A class that derives from it need not define `train_lengths`.

    The tokens of a global batch are a function of its number alone, and ranks slice it last. So a continued run reads
    the same tokens as an uninterrupted one, and the number of processes may change. The only position is the number of
    steps.
    """

    #: Whether batches have `cu_seqlens`.
    packed: bool = False

    @property
    def folder(self) -> Path:
        """A folder on this machine that holds the corpus's tokenizer in `tokenizer/`, if it has one."""

    def train_info(self) -> DataInfo:
        """
        Raises:
            DataError: the corpus cannot be trained on at this batch shape. Names the key, the value and the fix.
        """

    def train_loader(self, first_batch: int, last_batch: int, rank: int, world_size: int) -> Iterable[Batch]:
        """Yields this rank's rows of global batches [first_batch, last_batch): rank k of W has the k-th B/W rows."""

    def train_lengths(self) -> Mapping[int, float]:
        """Share of training tokens in documents of each length (of those that the model keeps apart), for counting
        FLOPs: `{T: 1.0}` without `cu_seqlens`. It may be an estimate, the same at every start."""
        return {self.train_info().seq_len: 1.0}

    def locate(self, batch: int) -> Sequence[str]:
        """Place of each sequence of a global batch, in order, as text for bad_step.jsonl and the log."""

    def eval_info(self) -> DataInfo:
        """
        Raises:
            DataError: as train_info, of the held-out documents.
        """

    def eval_loader(self, rank: int, world_size: int) -> Iterable[Batch]:
        """Yields this rank's share of the held-out sequences. Every rank yields as many batches, because a sharded
        model needs all ranks in every forward pass."""


def shifted(labels_BT: np.ndarray | Tensor, bos_token_id: int, pinned: bool = False) -> Batch:
    """Batch of int64 labels, and of inputs: the token before each label, `bos_token_id` before the first.

    `pinned`: in memory from which a GPU can copy by itself. Not in worker processes, which must not touch CUDA.
    """
    tokens_BT = torch.as_tensor(labels_BT)
    labels = torch.empty(tokens_BT.shape, dtype=torch.int64, pin_memory=pinned)
    input_ids = torch.empty(tokens_BT.shape, dtype=torch.int64, pin_memory=pinned)
    labels.copy_(tokens_BT)
    input_ids[:, 0] = bos_token_id
    input_ids[:, 1:] = tokens_BT[:, :-1]
    return {"input_ids": input_ids, "labels": labels}


def model_inputs(batch: Batch, rows: slice = slice(None)) -> dict[str, Tensor]:
    """A model's arguments for some rows of a batch: `input_ids`, `labels`, and `cu_seqlens` over all their tokens."""
    inputs = {name: batch[name][rows] for name in ("input_ids", "labels")}
    if "cu_seqlens" in batch:
        inputs["cu_seqlens"] = one_after_another(batch["cu_seqlens"][rows])
    return inputs
