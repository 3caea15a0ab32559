"""A rank's part of a batch: some rows, and with `strategy.context` a part of each.

With `strategy.context=N`, each N consecutive ranks share their sequences, the r-th of them the r-th of N equal parts.
Such groups are to each other what single ranks are otherwise: they take different rows. Gradients are averaged over all
ranks, which all have as many tokens.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from forgetting_transformer.ops import context

T = TypeVar("T")


def on_rank_zero(fabric: Fabric, action: Callable[[], T]) -> T | None:
    """Runs a block on rank 0 while the others wait; if it fails, every rank raises the same error."""
    result, error = None, None
    if fabric.is_global_zero:
        try:
            result = action()
        except Exception as failure:
            error = failure
    error = fabric.broadcast(error)
    if error is not None:
        raise error
    return result


class Ranks:
    """Place of this rank among all.

    Args:
        rank, world_size: of this process.
        context_size: N, a divisor of world_size. All ranks make theirs at the same time.
        timeout: of the operations among N ranks.

    Attributes:
        data_rank, data_size: number of its share of the rows, and number of shares.
        context_size: N.
    """

    def __init__(self, rank: int, world_size: int, context_size: int, timeout: timedelta) -> None:
        self.data_rank, self.data_size = rank // context_size, world_size // context_size
        self.context_size = context_size
        self._context, self._group = None, None
        if context_size > 1:
            self._context = context.Context(rank % context_size, context_size)
            self._group, _ = dist.new_subgroups(group_size=context_size, timeout=timeout)

    def in_context(self) -> contextlib.AbstractContextManager[None]:
        """Context of forward and backward passes in which a model takes this rank's part of sequences."""
        return context.activate(self._context, self._group)

    def part(self, length: int) -> slice:
        """This rank's positions of a sequence of so many tokens."""
        return slice(length) if self._context is None else self._context.part(length)

    def part_of(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's arguments for this rank's part, of those for whole sequences. `cu_seqlens` stays whole."""
        if self._context is None:
            return inputs
        part = self.part(inputs["input_ids"].shape[1])
        return {name: x if name == "cu_seqlens" else x[:, part] for name, x in inputs.items()}
