"""Which parameters are decayed, and which are matrices of blocks."""

from torch import nn

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.training.config import TrainConfig


def undecayed_parameters(model: nn.Module, config: TrainConfig) -> set[str]:
    """Names of the parameters without weight decay, as in the paper's runs; all others are decayed.

    Not decayed, unless the config says so: norm weights, biases (of convolutions too), and whatever a module marks with
    `parameter._no_weight_decay = True`, such as a learned forget-gate bias. Decayed: weights of linear layers,
    embeddings and, unless the config says otherwise, convolution kernels.

    Names and not parameters, because sharding replaces parameters and loses their marks: ask before it.
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


def group_parameters(named: dict[str, nn.Parameter], undecayed: set[str], weight_decay: float) -> list[dict]:
    """Parameter groups with weight decay, and without. Every parameter is in exactly one."""
    groups = [
        {"params": [p for name, p in named.items() if name not in undecayed], "weight_decay": weight_decay},
        {"params": [p for name, p in named.items() if name in undecayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _decays(module: nn.Module, name: str, config: TrainConfig) -> bool:
    if name == "bias":
        return config.bias_weight_decay
    if "Norm" in type(module).__name__:  # torch's and transformers' norms share no base class
        return config.normalization_weight_decay
    if isinstance(module, nn.Conv1d):
        return config.conv_weight_decay
    return True
