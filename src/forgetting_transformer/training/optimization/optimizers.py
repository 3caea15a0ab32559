"""The optimizers of this package: values of `optimizer.name`, and the keys of each. Reading this loads no PyTorch.

An optimizer is a function of the model, the names of the parameters without weight decay and its section of the config.
It returns a torch.optim.Optimizer over all trainable parameters. Before every step the trainer sets each group's "lr"
to the schedule's rate, times the group's "lr_scale" where it has one.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forgetting_transformer.plugins import OPTIMIZERS
from forgetting_transformer.training.config import OptimizerConfig, Positive

if TYPE_CHECKING:
    import torch
    from torch import nn


#: The share of an average that a step keeps. At 1 gradients would have no weight.
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [0.9, 0.95])
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    #: Decay of the parameters that `undecayed_parameters` (building.py) leaves.
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.1


@OPTIMIZERS.register("adamw", config=AdamWConfig)
def adamw(model: "nn.Module", undecayed: set[str], config: AdamWConfig) -> "torch.optim.Optimizer":
    """AdamW with PyTorch's fused kernel, which leaves out a step on the device (faults/step_guard.py)."""
    from forgetting_transformer.training.optimization.building import group_parameters, trainable

    return _adamw(group_parameters(trainable(model), undecayed, config), config)


def _adamw(groups: list[dict], config: AdamWConfig) -> "torch.optim.Optimizer":
    import torch

    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """Muon's keys, and AdamW's for the parameters that are no matrices of blocks. Both have `weight_decay`."""

    name: str = "muon"
    momentum: Beta = 0.95
    nesterov: bool = True
    #: Newton-Schulz iterations that make an update orthogonal.
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    #: "match_rms_adamw": updates as large as AdamW's, so that its learning rates and weight decay serve. "original": of
    #: Jordan et al. 2024, whose rates are ten times as high and more.
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    #: AdamW's learning rate relative to Muon's.
    adamw_lr_scale: Positive = 1.0


@OPTIMIZERS.register("muon", config=MuonConfig)
def muon(model: "nn.Module", undecayed: set[str], config: MuonConfig) -> "torch.optim.Optimizer":
    """Muon (Jordan et al. 2024, torch.optim.Muon) for the matrices of the blocks, AdamW for all other parameters."""
    import torch

    from forgetting_transformer.training.optimization.building import group_parameters, trainable
    from forgetting_transformer.training.optimization.muon import CombinedOptimizer, block_matrices

    matrices = block_matrices(model, undecayed)
    others = {name: parameter for name, parameter in trainable(model).items() if name not in matrices}
    of_adamw = [
        group | {"lr_scale": config.adamw_lr_scale * group.get("lr_scale", 1.0)}
        for group in group_parameters(others, undecayed, config)
    ]
    return CombinedOptimizer(
        torch.optim.Muon(
            group_parameters(matrices, undecayed, config),
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.ns_steps,
            adjust_lr_fn=config.adjust_lr,
        ),
        _adamw(of_adamw, config),
    )
