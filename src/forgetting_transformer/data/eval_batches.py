"""Batches of the held-out documents, for the evaluations of a run."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.order import ReadingOrder
from forgetting_transformer.data.token_array import TokenArray


def held_out_order(array: TokenArray, seq_len: int, eval_tokens: int | None) -> ReadingOrder:
    """Reading order of the sequences that `eval_tokens` fill, one per batch; None takes all.

    Raises:
        DataError: there are fewer.
    """
    available = array.documents * array.doc_len
    wanted = available if eval_tokens is None else eval_tokens
    if not array.doc_len <= wanted <= available:
        raise DataError(
            f"datamodule.eval_tokens takes {wanted:,} tokens of {array.path}; that must be between one document "
            f"({array.doc_len:,} tokens) and all {available:,} tokens; use null for all"
        )
    return ReadingOrder(wanted // array.doc_len, array.doc_len, seq_len, 1)


class EvalBatches(Dataset):
    """Map-style: batch index of this rank -> held-out sequences, array after array."""

    def __init__(
        self, held_out: Sequence[tuple[TokenArray, ReadingOrder]], batch_size: int, rank: int, world_size: int
    ) -> None:
        self.held_out, self.rank, self.world_size = held_out, rank, world_size
        self.ends = list(itertools.accumulate(order.batches for _, order in held_out))
        # No more rows than there are.
        self.batch_size = min(batch_size, -(-self.ends[-1] // world_size))

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
        corpus = bisect.bisect_right(self.ends, sequence)
        array, order = self.held_out[corpus]
        return array.read(*order.locate(sequence - self.ends[corpus] + order.batches))
