"""Loss at every position: its sums in training and evaluations, and the reported means.

Axes: B sequences, T positions. With packed documents, positions count within each document.
"""

import math

import numpy as np
import torch
from torch import Tensor

from forgetting_transformer import metric_names as names
from forgetting_transformer.training.config import DataModuleConfig
from forgetting_transformer.training.parallel.ranks import Ranks


class PositionSums:
    """Sums over sequences of the loss at each position, and the number of sequences that have it.

    Args:
        length: T. more: numbers that a subclass has behind them.

    Attributes:
        flat: float64, the sums and behind them the numbers: one vector, so that ranks add theirs at once.
    """

    def __init__(self, length: int, device: torch.device, more: int = 0) -> None:
        self.flat = torch.zeros(2 * length + more, dtype=torch.float64, device=device)
        self.loss_T, self.sequences_T = self.flat[: 2 * length].view(2, -1)

    def add(
        self,
        loss_BT: Tensor,
        weight_B: Tensor | None = None,
        position_BT: Tensor | None = None,
        part: slice = slice(None),
    ) -> None:
        """Adds sequences.

        Args:
            weight_B: 0 for those that only fill up a batch, 1 for the others. Default 1.
            position_BT: with packed documents, the position of each token in its document; for whole rows.
            part: positions of the rows that the losses belong to.
        """
        if position_BT is not None:
            position_N = position_BT[:, part].flatten().long()
            weight_BT = torch.ones_like(loss_BT, dtype=torch.float64)
            if weight_B is not None:
                weight_BT *= weight_B[:, None]
            _add_at(self.loss_T, position_N, (weight_BT * loss_BT).flatten())
            _add_at(self.sequences_T, position_N, weight_BT.flatten())
        elif weight_B is not None:
            self.loss_T[part] += weight_B @ loss_BT.double()
            self.sequences_T[part] += weight_B.sum()
        else:
            self.loss_T[part] += loss_BT.sum(0, dtype=torch.float64)
            self.sequences_T[part] += len(loss_BT)

    def mean_T(self) -> np.ndarray:
        """NaN at a position that no document has. Waits for the device."""
        return (self.loss_T / self.sequences_T).cpu().numpy()

    def counts_T(self) -> np.ndarray | None:
        """Number of sequences that have each position; None if all have all. Waits for the device."""
        counts_T = self.sequences_T.cpu().numpy().copy()  # on a CPU it would be the sums themselves
        return None if (counts_T == counts_T[0]).all() else counts_T


class StepLosses(PositionSums):
    """Losses of a training step: at every position, and of every sequence of the global batch, `loss_B`.

    Both are in one vector, `flat`, which holds what this rank has until it is summed over all ranks.

    Args:
        data: shape of the global batch. ranks: which part of it is this rank's.
    """

    def __init__(self, data: DataModuleConfig, ranks: Ranks, device: torch.device) -> None:
        length = data.train_batch_len
        super().__init__(length, device, more=data.train_batch_size)
        self.loss_B = self.flat[2 * length :]
        self._part, self._context_size = ranks.part(length), ranks.context_size
        self._first_row = ranks.data_rank * (data.train_batch_size // ranks.data_size)

    def add_micro_batch(self, loss_BT: Tensor, start: int, position_BT: Tensor | None) -> None:
        """Adds a micro-batch.

        Args:
            start: its first row among this rank's.
            position_BT: as of `add`.
        """
        self.add(loss_BT, position_BT=position_BT, part=self._part)
        row = self._first_row + start
        self.loss_B[row : row + len(loss_BT)] = loss_BT.mean(1, dtype=torch.float64) / self._context_size


def _add_at(total_T: Tensor, position_N: Tensor, value_N: Tensor) -> None:
    """`total[position[n]] += value[n]` in the same order at every start: one function keeps it on GPUs, one on CPUs."""
    if total_T.is_cuda:
        total_T.index_put_((position_N,), value_N, accumulate=True)
    else:
        total_T.index_add_(0, position_N, value_N)


def by_length(kind: str, mean_T: np.ndarray, shortest: int, counts_T: np.ndarray | None = None) -> dict[str, float]:
    """Mean loss over the first L positions, for L the full length, half of it, …, down to `shortest`.

    Args:
        counts_T: how many sequences have each position; None if all have all.
    """
    values, length = {}, mean_T.size
    while length >= min(shortest, mean_T.size):
        loss = mean_loss(mean_T[:length], None if counts_T is None else counts_T[:length])
        values[names.name_of(kind, f"{names.LOSS_OVER}{length}")] = loss
        values[names.name_of(kind, f"{names.PERPLEXITY_OVER}{length}")] = math.exp(min(loss, 700.0))
        length //= 2
    return values


def mean_loss(mean_T: np.ndarray, counts_T: np.ndarray | None) -> float:
    """Mean loss per token at these positions."""
    if counts_T is None:
        return float(mean_T.mean())
    return float(np.where(counts_T > 0, mean_T * counts_T, 0).sum() / counts_T.sum())
