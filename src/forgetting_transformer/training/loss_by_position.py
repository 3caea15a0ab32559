"""Loss at every position: how it is summed, in training and in every evaluation, and what is reported of it."""

import math

import numpy as np
import torch
from torch import Tensor


class PositionSums:
    """Loss at each position summed over sequences, and their number.

    Args:
        flat: `(T + 1,)` float64, the sums and behind them the number: one vector, so that ranks add theirs at once.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.loss_T, self.sequences = flat[:-1], flat[-1]

    @classmethod
    def zeros(cls, length: int, device: torch.device) -> "PositionSums":
        return cls(torch.zeros(length + 1, dtype=torch.float64, device=device))

    def add(self, loss_BT: Tensor, weight_B: Tensor | None = None) -> None:
        """Adds sequences; those that only fill up a batch have the weight 0, the others 1."""
        loss_BT = loss_BT.double()
        self.loss_T += loss_BT.sum(0) if weight_B is None else weight_B @ loss_BT
        self.sequences += len(loss_BT) if weight_B is None else weight_B.sum()

    def mean_T(self) -> np.ndarray:
        """Waits for the device."""
        return (self.loss_T / self.sequences).cpu().numpy()


def by_length(kind: str, mean_T: np.ndarray, shortest: int) -> dict[str, float]:
    """Mean loss over the first L positions, for L the full length, half of it, …, down to `shortest`."""
    values, length = {}, mean_T.size
    while length >= min(shortest, mean_T.size):
        loss = float(mean_T[:length].mean())
        values[f"{kind}/loss_avg_len_{length}"] = loss
        values[f"{kind}/perplexity_len_{length}"] = math.exp(min(loss, 700.0))
        length //= 2
    return values
