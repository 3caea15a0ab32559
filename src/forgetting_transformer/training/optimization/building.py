"""The optimizer that the config names, with checks; groups of parameters; several optimizers as one."""

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.plugins import OPTIMIZERS
from forgetting_transformer.training.config import ConfigError, OptimizerConfig, TrainConfig


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


def named_by(key: str, patterns: Sequence[str], names: Iterable[str], of: str = "parameter of the model") -> set[str]:
    """The names that patterns cover, as in `["*.fgate_proj.*"]`.

    Args:
        key: of the config, for the message.
        of: owner of these names, for the message.

    Raises:
        ConfigError: a pattern covers none.
    """
    found: set[str] = set()
    for pattern in patterns:
        covered = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not covered:
            near = difflib.get_close_matches(pattern, names, 1)
            hint = f"did you mean {near[0]}?" if near else "give one that model.txt of a run lists"
            raise ConfigError(f"{key}={pattern} names no {of}; {hint}")
        found |= covered
    return found


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes all parameters but those that `train.only` names; without patterns none."""
    if patterns:
        trained = named_by("train.only", patterns, dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)


def undecayed_parameters(model: nn.Module, config: TrainConfig) -> set[str]:
    """Names of the parameters without weight decay, as in the paper's runs; all others are decayed.

    Not decayed, unless the config says so: norm weights, biases (of convolutions too), and whatever a module marks with
    `parameter._no_weight_decay = True`, such as a learned forget-gate bias. Decayed: weights of linear layers,
    embeddings and, unless the config says otherwise, convolution kernels.

    Names and not parameters, because sharding replaces parameters and loses their marks: call this before it.
    """
    return {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if getattr(parameter, "_no_weight_decay", False) or not _decays(module, name, config)
    }


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def block_matrices(model: nn.Module, undecayed: set[str]) -> dict[str, nn.Parameter]:
    """The weight matrices of the decoder's blocks, by name: no embeddings, output layer, norms, biases or kernels."""
    inside = {f"{name}." for name, module in model.named_modules() if isinstance(module, DecoderBlock)}
    return {
        name: parameter
        for name, parameter in trainable(model).items()
        if parameter.ndim == 2 and name not in undecayed and any(name.startswith(block) for block in inside)
    }


def group_parameters(named: dict[str, nn.Parameter], undecayed: set[str], config: Any) -> list[dict]:
    """Parameter groups with weight decay and without, each with `optimizer.lr_scale` and without.

    Every parameter is in exactly one.

    Args:
        config: a section `optimizer` with `weight_decay`.
    """
    scaled = {name for name in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.lr_scale_for)}
    groups = []
    for names, scale in ((named.keys() - scaled, {}), (scaled, {"lr_scale": config.lr_scale})):
        for decay, decayed in ((config.weight_decay, True), (0.0, False)):
            chosen = [p for name, p in named.items() if name in names and (name not in undecayed) == decayed]
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay, **scale})
    return groups


def _decays(module: nn.Module, name: str, config: TrainConfig) -> bool:
    if name == "bias":
        return config.bias_weight_decay
    if "Norm" in type(module).__name__:  # torch's and transformers' norms share no base class
        return config.normalization_weight_decay
    if isinstance(module, nn.Conv1d):
        return config.conv_weight_decay
    return True
