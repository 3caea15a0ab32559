"""Reads a checkpoint of any strategy: into a run, on all ranks, or whole on the CPU of one process."""

import contextlib
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from forgetting_transformer.ops.finite import NotFiniteError, check_finite
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, reason_of
from forgetting_transformer.training.checkpoint.safe_reader import (
    TensorPlanner,
    TensorReader,
    read_tensors,
)
from forgetting_transformer.training.checkpoint.writing import tensors_of


def load_training(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
) -> None:
    """Fills model and optimizer, on all ranks. Learning rate, decay and betas stay as the config set them.

    Args:
        group: gloo group of all ranks; None for one.

    Raises:
        CheckpointError: its tensors are not those of this model, or cannot be read.
    """
    settings = [{k: v for k, v in param_group.items() if k != "params"} for param_group in optimizer.param_groups]
    tensors, optimizer_state = tensors_of(model, optimizer)
    stored = _check_names(checkpoint, tensors)
    if lacking := sorted(tensors.keys() - stored):
        raise CheckpointError(
            f"{checkpoint.path} was written with another optimizer: it has no {lacking[0]}; to begin with its weights "
            "alone, export it and give init_from"
        )
    reader = TensorReader(checkpoint.path / "state")
    with _named(checkpoint):
        dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), process_group=group, no_dist=group is None)
    set_model_state_dict(model, _part_of("model.", tensors))
    for name, tensor in _part_of("optimizer.", tensors).items():
        before = optimizer_state[name]
        optimizer_state[name] = tensor if isinstance(before, Tensor) else type(before)(tensor.item())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for param_group, setting in zip(optimizer.param_groups, settings, strict=True):
        param_group.update(setting)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fills a plain model on one process."""
    names = [f"model.{name}" for name in model.state_dict()]
    _check_names(checkpoint, names)
    model.load_state_dict(_part_of("model.", load_tensors(checkpoint, names)))
    check_weights(model, checkpoint.path)


def check_weights(model: nn.Module, where: Any) -> None:
    """Checks once that weights are finite; their origin is for the message.

    Raises:
        CheckpointError: one is not finite.
    """
    try:
        check_finite(model.named_parameters(), where)
    except NotFiniteError as error:
        raise CheckpointError(str(error)) from error


def load_tensors(checkpoint: Checkpoint, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint on the CPU, on one process; all of them without `names`.

    Raises:
        CheckpointError: they cannot be read.
    """
    with _named(checkpoint):
        return read_tensors(checkpoint.path / "state", names)


@contextlib.contextmanager
def _named(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns errors of reading a checkpoint into CheckpointErrors that name it."""
    try:
        yield
    except (CheckpointException, OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{checkpoint.path} was not loaded: {reason_of(error)}; bring back a copy, or take another checkpoint"
        ) from error


def _part_of(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_names(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """The names of all tensors in the checkpoint.

    Raises:
        CheckpointError: its weights are not the `model.*` among `names`.
    """
    with _named(checkpoint):
        stored = set(TensorReader(checkpoint.path / "state").tensors())
    wanted, present = ({name for name in of if name.startswith("model.")} for of in (names, stored))
    if wanted != present:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another model: missing {sorted(wanted - present)[:3]}, "
            f"unexpected {sorted(present - wanted)[:3]}"
        )
    return stored
