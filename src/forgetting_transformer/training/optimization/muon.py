"""Parts of Muon: the choice of its parameters, and an optimizer that combines several."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.training.optimization.building import trainable


def block_matrices(model: nn.Module, undecayed: set[str]) -> dict[str, nn.Parameter]:
    """The weight matrices of the decoder's blocks, by name: no embeddings, output layer, norms, biases or kernels."""
    inside = {f"{name}." for name, module in model.named_modules() if isinstance(module, DecoderBlock)}
    return {
        name: parameter
        for name, parameter in trainable(model).items()
        if parameter.ndim == 2 and name not in undecayed and any(name.startswith(block) for block in inside)
    }


class CombinedOptimizer(Optimizer):
    """Steps one optimizer after the other. Groups and state are those of all, so that a checkpoint holds every moment.

    Args:
        optimizers: whose parameters do not overlap.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Lets the parts use the groups and the state of the whole."""
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
