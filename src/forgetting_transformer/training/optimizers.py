"""The optimizers of this package: what `optimizer.name` may be, and the keys of each. Reading this loads no PyTorch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forgetting_transformer.plugins import OPTIMIZERS
from forgetting_transformer.ranges import Range, within
from forgetting_transformer.training.config import ConfigError, OptimizerConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class AdamWConfig(OptimizerConfig):
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = within(Range(0, 1, above=True), 1e-8)
    #: Of the parameters that `undecayed_parameters` (parameter_groups.py) leaves.
    weight_decay: float = within(Range(0, 1000), 0.1)

    def check(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={self.betas} must be two numbers in [0, 1), such as [0.9, 0.95]")


@OPTIMIZERS.register("adamw", config=AdamWConfig)
def adamw(model: "nn.Module", undecayed: set[str], config: AdamWConfig) -> "torch.optim.Optimizer":
    """AdamW with PyTorch's fused kernel."""
    import torch

    from forgetting_transformer.training.parameter_groups import group_parameters

    return torch.optim.AdamW(
        group_parameters(model, undecayed, config.weight_decay),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
