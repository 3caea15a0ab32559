"""What a start goes on from: which checkpoint, whether it may, and what was left undone at it."""

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch
from lightning.fabric import Fabric

from forgetting_transformer.training import setup
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, steps_in
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.config.continuing import check_continues
from forgetting_transformer.training.execution import choice as execution
from forgetting_transformer.training.export.official_checkpoint import is_official
from forgetting_transformer.training.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import PartsInterface

log = logging.getLogger(__name__)


def find_checkpoint(config: Config, checkpointer: Checkpointer, fabric: Fabric) -> tuple[Checkpoint | None, bool]:
    """What to start from, and whether it is another run's: the newest valid checkpoint, else the fork, else nothing.

    Raises:
        CheckpointError: there is no such checkpoint, or no usable one where some were made.
    """
    if not config.resume:
        return None, False
    checkpoint = checkpointer.newest()
    if checkpoint is not None or not config.fork_dir:
        return checkpoint, False
    folder = RunDirectory(config.fork_dir).checkpoints
    source = Checkpointer(folder, 1, fabric.global_rank, fabric.world_size)
    checkpoint = source.newest(config.fork_step)
    if checkpoint is None and is_official(RunDirectory(config.fork_dir)):
        raise CheckpointError(
            f"fork_dir={config.fork_dir} is a run of the authors' code; make a run of it with "
            "scripts/import_checkpoint.py first, and continue or fork that"
        )
    if checkpoint is None:
        raise CheckpointError(
            f"fork_step={config.fork_step}: no valid checkpoint of that many tokens in {folder}; it holds "
            f"{steps_in(folder) or 'nothing'}"
        )
    return checkpoint, True


def load_checkpoint(parts: "PartsInterface", checkpoint: Checkpoint, forked: bool) -> dict[str, torch.Tensor]:
    """Fills model, optimizer, counters and guard; returns the state of the callbacks.

    Raises:
        ConfigError: the config would change the run. CheckpointError: it cannot be read.
    """
    state = checkpoint.trainer_state()
    check_continues(str(checkpoint.path), state, parts.config, parts.data_info, forked)
    if not forked:
        parts.before = execution.recorded(state)
        name, rank = str(checkpoint.path), parts.fabric.global_rank
        parts.data_checksums = setup.list_held_to(name, state, parts.data_info, rank)
        parts.kinds |= {*state.get("kinds", ())}
    how = "forked from" if forked else "continuing from"
    log.info("%s %s", how, checkpoint.path)
    parts.origin = f"{how} {checkpoint.path} ({checkpoint.step:,} tokens)"
    parts.weights_from = state.get("weights_from")
    parts.checkpointer.load(checkpoint, parts.model.module, parts.optimizer.optimizer)
    for field in dataclasses.fields(parts.counters):
        setattr(parts.counters, field.name, state[field.name])
    windows = {name: torch.from_numpy(array) for name, array in checkpoint.windows().items()}
    parts.guard.load(windows)
    return windows
