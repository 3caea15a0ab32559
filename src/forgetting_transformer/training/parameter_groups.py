"""Which parameters AdamW decays."""

from dataclasses import dataclass

from torch import nn

from forgetting_transformer.training.config import TrainConfig


@dataclass(frozen=True)
class ParameterGroups:
    """Names and parameters with and without weight decay; every trainable parameter is in exactly one list."""

    decay: list[tuple[str, nn.Parameter]]
    no_decay: list[tuple[str, nn.Parameter]]

    def for_optimizer(self, weight_decay: float) -> list[dict]:
        groups = [(self.decay, weight_decay), (self.no_decay, 0.0)]
        return [{"params": [p for _, p in named], "weight_decay": decay} for named, decay in groups if named]


def group_parameters(model: nn.Module, config: TrainConfig) -> ParameterGroups:
    """Splits a model's parameters as the paper's runs did.

    Not decayed, unless the config says so: norm weights, biases (of convolutions too), and whatever a module marks with
    `parameter._no_weight_decay = True`, such as a learned forget-gate bias. Decayed: weights of linear layers,
    embeddings and, unless the config says otherwise, convolution kernels.
    """
    decay, no_decay = [], []
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            wanted = _decays(module, name, config) and not getattr(parameter, "_no_weight_decay", False)
            if parameter.requires_grad:
                (decay if wanted else no_decay).append((full_name, parameter))
    return ParameterGroups(decay, no_decay)


def _decays(module: nn.Module, name: str, config: TrainConfig) -> bool:
    if name == "bias":
        return config.bias_weight_decay
    if "Norm" in type(module).__name__:  # torch's and transformers' norms share no base class
        return config.normalization_weight_decay
    if isinstance(module, nn.Conv1d):
        return config.conv_weight_decay
    return True
