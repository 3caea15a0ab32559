"""The optimizer that the config names, with checks; groups of parameters."""

import difflib
import fnmatch
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgetting_transformer.plugins import OPTIMIZERS
from forgetting_transformer.training.config import ConfigError, OptimizerConfig, TrainConfig


def build_optimizer(model: nn.Module, undecayed: set[str], config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer over the parameters of the model as the strategy has set it up: sharding replaces them.

    Raises:
        ConfigError: it is no PyTorch optimizer, which would show only when the run is continued, or does not hold
            exactly the model's trained parameters.
    """
    named_by("optimizer.lr_scale_for", config.lr_scale_for, trainable(model))
    optimizer = OPTIMIZERS.get(config.name).build(model, undecayed, config)
    if not (isinstance(optimizer, Optimizer) and "closure" in inspect.signature(optimizer.step).parameters):
        raise ConfigError(
            f"optimizer.name={config.name!r} made a {type(optimizer).__name__}; it must be a torch.optim.Optimizer "
            "whose step takes closure=None"
        )
    check_owns(model, optimizer, config.name)
    if config.lr_scale_for and not any("lr_scale" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer.lr_scale_for={config.lr_scale_for} has no effect with optimizer.name={config.name!r}, which "
            "does not make its groups with group_parameters; leave it out"
        )
    return optimizer


def check_owns(model: nn.Module, optimizer: Optimizer, name: str) -> None:
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
        first = f", such as {left_out[0]}" if left_out else ""
        raise ConfigError(
            f"optimizer.name={name!r} leaves out {len(left_out)} of the model's {len(used)} parameter tensors{first}, "
            f"and holds {foreign} that are not the model's; give it all of model.parameters(), and no copies"
        )


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


def group_parameters(named: dict[str, nn.Parameter], undecayed: set[str], config: Any) -> list[dict]:
    """Parameter groups with weight decay and without, each with `optimizer.lr_scale` and without.

    Every parameter is in exactly one.

    Args:
        config: a section `optimizer` with `weight_decay`.
    """
    grouped: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        is_scaled = any(fnmatch.fnmatchcase(name, pattern) for pattern in config.lr_scale_for)
        grouped.setdefault((is_scaled, name in undecayed), []).append(parameter)
    groups = []
    for (is_scaled, is_undecayed), parameters in sorted(grouped.items(), key=lambda item: item[0]):
        scale = {"lr_scale": config.lr_scale} if is_scaled else {}
        decay = 0.0 if is_undecayed else config.weight_decay
        groups.append({"params": parameters, "weight_decay": decay, **scale})
    return groups


def _decays(module: nn.Module, name: str, config: TrainConfig) -> bool:
    if name == "bias":
        return config.bias_weight_decay
    if "Norm" in type(module).__name__:  # torch's and transformers' norms share no base class
        return config.normalization_weight_decay
    if isinstance(module, nn.Conv1d):
        return config.conv_weight_decay
    return True
