"""The optimizer that the config names, with checks, and several optimizers as one."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forgetting_transformer.plugins import OPTIMIZERS
from forgetting_transformer.training.config import ConfigError, OptimizerConfig
from forgetting_transformer.training.optimization.parameter_groups import named_by, trainable


def build_optimizer(model: nn.Module, undecayed: set[str], config: OptimizerConfig) -> torch.optim.Optimizer:
    """
    Raises:
        ConfigError: it is no PyTorch optimizer, which would show only when the run is continued.
    """
    named_by("optimizer.lr_scale_for", config.lr_scale_for, trainable(model))
    optimizer = OPTIMIZERS.get(config.name).build(model, undecayed, config)
    if (
        not isinstance(optimizer, torch.optim.Optimizer)
        or "closure" not in inspect.signature(optimizer.step).parameters
    ):
        raise ConfigError(
            f"optimizer.name={config.name!r} made a {type(optimizer).__name__}; it must be a torch.optim.Optimizer "
            "whose step takes closure=None"
        )
    if config.lr_scale_for and not any("lr_scale" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer.lr_scale_for={config.lr_scale_for} has no effect with optimizer.name={config.name!r}, which "
            "does not make its groups with group_parameters; leave it out"
        )
    return optimizer


def check_owns(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuses an optimizer that leaves parameters untrained in silence, as one that was built before sharding.

    Args:
        name: of the optimizer in the config.

    Raises:
        ConfigError: it does not hold exactly the model's parameters that need a gradient.
    """
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    used = {id(p): key for key, p in model.named_parameters() if p.requires_grad}
    left_out, foreign = [key for parameter, key in used.items() if parameter not in owned], len(owned - used.keys())
    if left_out or foreign:
        first = f", such as {left_out[0].removeprefix('_forward_module.').removeprefix('module.')}" if left_out else ""
        raise ConfigError(
            f"optimizer.name={name!r} leaves out {len(left_out)} of the model's {len(used)} parameter tensors{first}, "
            f"and holds {foreign} that are not the model's; give it all of model.parameters(), and no copies"
        )


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
