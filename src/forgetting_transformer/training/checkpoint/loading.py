"""Loading a checkpoint into a run: on all ranks, whatever strategy and number of processes wrote it."""

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError
from forgetting_transformer.training.checkpoint.reading import (
    check_digests,
    check_names,
    digests_of,
    part_of,
    stored_names,
    unreadable,
)
from forgetting_transformer.training.checkpoint.safe_reader import TensorPlanner, TensorReader
from forgetting_transformer.training.checkpoint.state import model_tensors, tensors_of
from forgetting_transformer.training.faults.corruption import differing

log = logging.getLogger(__name__)


def load_training(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
    new_moments: bool,
) -> None:
    """`Checkpointer.load`.

    Args:
        group: gloo group of all ranks; None for one.
        new_moments: those of an optimizer that the checkpoint does not know begin at zero, as in a fork.
    """
    settings = [{k: v for k, v in param_group.items() if k != "params"} for param_group in optimizer.param_groups]
    tensors, optimizer_state = tensors_of(model, optimizer)
    stored = check_names(checkpoint, tensors)
    lacking = sorted(name for name in tensors if name.startswith("optimizer.") and name not in stored)
    if lacking:
        if not new_moments:
            raise CheckpointError(f"{checkpoint.path} was written with another optimizer: it has no {lacking[0]}")
        if group is None or dist.get_rank() == 0:
            log.warning("%s was written with another optimizer: moments begin at zero", checkpoint.path)
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    _read(checkpoint, tensors, group)
    set_model_state_dict(model, part_of("model.", tensors))
    if lacking:
        optimizer.state.clear()  # of the step that asking for it made
        now = model_tensors(model)
    else:
        loaded = dict(optimizer_state)
        for name, tensor in part_of("optimizer.", tensors).items():
            before = optimizer_state[name]
            loaded[name] = tensor if isinstance(before, Tensor) else type(before)(tensor.item())
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(model, optimizer, loaded, options=options)
        now = tensors_of(model, optimizer)[0]
    for param_group, setting in zip(optimizer.param_groups, settings, strict=True):
        param_group.update(setting)
    _check_loaded(checkpoint, now, group)


def load_large(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], prefix: str, group: dist.ProcessGroup | None, says: bool
) -> None:
    """`Checkpointer.load_large`.

    Args:
        says: whether this rank logs which states begin or end here.
    """
    stored = {name for name in stored_names(checkpoint) if name.startswith(prefix)}
    owner = {name: prefix + name.removeprefix(prefix).partition(".")[0] for name in {*stored, *tensors}}
    known = {name: tensor for name, tensor in tensors.items() if owner[name] in {owner[one] for one in stored}}
    for one in sorted({owner[name] for name in tensors.keys() - known.keys()}) if says else ():
        log.info("%s has no state of %s, which begins here", checkpoint.path, one)
    for one in sorted({owner[name] for name in stored} - {owner[n] for n in tensors}) if says else ():
        log.warning("%s has the state of %s, which this start does not choose: it ends here", checkpoint.path, one)
    if lacking := sorted(known.keys() - stored):
        raise CheckpointError(f"{checkpoint.path} was written with another model: it has no {lacking[0]}")
    if known:
        _read(checkpoint, known, group)
        _check_loaded(checkpoint, known, group)


def _read(checkpoint: Checkpoint, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fills tensors in place, on all ranks."""
    try:
        dcp.load(
            tensors,
            storage_reader=TensorReader(checkpoint.path / "state"),
            planner=TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise unreadable(checkpoint, error) from error


def _check_loaded(checkpoint: Checkpoint, now: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compares on all ranks what was loaded with what was to be saved."""
    wrong: list[Any] = [differing(digests_of(checkpoint), now)]
    if group is not None:
        mine, wrong = wrong[0], [None] * dist.get_world_size()
        dist.all_gather_object(wrong, mine, group=group)
    check_digests(checkpoint, wrong)
