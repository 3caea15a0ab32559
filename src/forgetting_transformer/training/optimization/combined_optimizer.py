"""Several optimizers, each for some of the parameters, as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Steps one optimizer after the other. Groups and state are those of all, so that a checkpoint holds every moment.

    Args:
        optimizers: whose parameters do not overlap.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def parameter_counts(self) -> dict[str, int]:
        """Class of each optimizer -> numbers that it trains."""
        return {
            type(optimizer).__name__: sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            for optimizer in self._optimizers
        }

    def _share(self) -> None:
        """The parts see the groups and the state of the whole."""
        first = 0
        for optimizer in self._optimizers:
            last = first + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[first:last], self.state
            first = last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss
