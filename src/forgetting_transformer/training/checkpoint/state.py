"""Tensors of a checkpoint by name, and which rank writes which."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from forgetting_transformer.training.checkpoint.folder import CheckpointError


def model_tensors(model: nn.Module) -> dict[str, Any]:
    return {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns everything to save by name, `model.<parameter>` or `optimizer.state.<parameter>.<moment>`, and torch's
    flattened state of the optimizer.

    Names do not depend on how parameters are grouped or sharded. The optimizer's settings are not saved: the config
    sets them.
    """
    # The model first: FSDP2 has gathered weights after an evaluation, and this puts the shards back in their place.
    tensors = model_tensors(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    try:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    except NotImplementedError as error:  # state that is neither tensor nor number
        raise CheckpointError(f"{type(optimizer).__name__} keeps what a checkpoint cannot hold: {error}") from error
    moments = {name: value for name, value in optimizer_state.items() if name.startswith("state.")}
    # Some optimizers count their steps in a Python number.
    tensors |= {
        f"optimizer.{name}": value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in moments.items()
    }
    return tensors, optimizer_state


def share(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """What `rank` has to write: its shards, and of tensors that every rank holds whole about an equal share of bytes.

    Every rank computes the same division.
    """
    mine: dict[str, Tensor] = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    whole = {name: tensor for name, tensor in tensors.items() if name not in mine}
    load = [0] * world_size
    # The largest first, each to the rank with the least so far.
    for name, tensor in sorted(whole.items(), key=lambda item: (-item[1].nbytes, item[0])):
        writer = load.index(min(load))
        load[writer] += tensor.nbytes
        if writer == rank:
            mine[name] = tensor
    return mine
