"""Origin of a start: a checkpoint of the run, another run's (a fork), or nothing."""

import logging
from dataclasses import fields
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from forgetting_transformer.data import DataInfo
from forgetting_transformer.training.callbacks import Callback
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint import folder as checkpoints
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError
from forgetting_transformer.training.checkpoint.writing import remove_leftovers
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.config.continuing import check_continues
from forgetting_transformer.training.counters import Counters, Origin
from forgetting_transformer.training.execution.choice import Execution
from forgetting_transformer.training.faults.step_guard import StepGuard
from forgetting_transformer.training.parallel.ranks import on_rank_zero
from forgetting_transformer.training.records.logs import start_logging
from forgetting_transformer.training.records.metrics import MetricsLog
from forgetting_transformer.training.records.run_directory import RunDirectory

log = logging.getLogger(__name__)


def prepare_directory(directory: RunDirectory, resumes: bool, fabric: Fabric) -> None:
    """Removes what killed saves left; with resume=false moves the run there into `previous/` and begins the log."""

    def prepare() -> None:
        if not resumes:
            if moved := directory.move_aside():
                log.warning("resume=false: what the run in %s had written is now in %s", directory.root, moved)
            directory.write_status("starting", 0)
        remove_leftovers(directory.checkpoints)

    on_rank_zero(fabric, prepare)
    directory.checkpoints.mkdir(parents=True, exist_ok=True)
    if not resumes:
        start_logging(directory, fabric.global_rank)


def find_checkpoint(config: Config, run: RunDirectory, fabric: Fabric) -> Origin:
    """Finds the origin of the start: the newest valid checkpoint, else the fork, else nothing. `load` reads it.

    Raises:
        CheckpointError: there is no such checkpoint, or no usable one where some were made.
    """
    if not config.resume:
        return Origin()
    checkpoint = _newest(fabric, run.checkpoints, None, run.saves)
    if checkpoint is not None or not config.fork_dir:
        return Origin(checkpoint=checkpoint)
    directory = RunDirectory(config.fork_dir)
    if directory.is_official:
        raise CheckpointError(
            f"fork_dir={config.fork_dir} is a run of the authors' code: make a run of it with "
            "scripts/import_checkpoint.py and fork that"
        )
    checkpoint = _newest(fabric, directory.checkpoints, config.fork_step)
    if checkpoint is None:
        raise CheckpointError(
            f"fork_step={config.fork_step}: no valid checkpoint of that many tokens in {directory.checkpoints}, which "
            f"holds {checkpoints.steps_in(directory.checkpoints) or 'none'}"
        )
    return Origin(checkpoint=checkpoint, forked=True)


def _newest(fabric: Fabric, folder: Path, step: int | None, record: Path | None = None) -> Checkpoint | None:
    """The newest valid checkpoint, or the one at `step`, the same on every rank; None if none was ever finished.

    Raises:
        CheckpointError: checkpoints were finished, and none can be used.
    """

    def find() -> Checkpoint | None:
        found = checkpoints.newest_valid(folder, step)
        if found is None and step is None:
            checkpoints.refuse_to_start_over(folder, record)
        return found

    return fabric.broadcast(on_rank_zero(fabric, find))


def load(
    origin: Origin,
    config: Config,
    data: DataInfo,
    checkpointer: Checkpointer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    guard: StepGuard,
) -> None:
    """Fills model, optimizer, guard and `origin` from the checkpoint, if there is one.

    Args:
        data: the corpus as it is now.

    Raises:
        ConfigError: the config would change the run. CheckpointError: it cannot be read.
    """
    checkpoint = origin.checkpoint
    if checkpoint is None:
        origin.data_checksums = data.checksums
        return
    state, name = checkpoint.trainer_state(), str(checkpoint.path)
    check_continues(name, state, config, data, origin.forked)
    if not origin.forked:
        # The authors' code does not record it.
        origin.execution = Execution(**state["execution"]) if state["execution"] else None
    # A list of checksums that is gone and comes back must be the one that the run began with.
    origin.data_checksums = data.checksums or (None if origin.forked else state.get("data_checksums"))
    how = "forked from" if origin.forked else "continuing from"
    log.info("%s %s", how, name)
    origin.text = f"{how} {name} ({checkpoint.step:,} tokens)"
    checkpointer.load(checkpoint, model, optimizer)
    origin.counters = Counters(**{counter.name: state[counter.name] for counter in fields(Counters)})
    origin.callback_state = checkpoint.callback_state()
    guard.load(origin.callback_state)


def unreported(due: list[Callback], origin: Origin, metrics: MetricsLog | None, fabric: Fabric) -> list[Callback]:
    """Evaluations that were due at the checkpoint and have no line there, because a signal came first.

    Called by all ranks, and the same on each.
    """
    step = origin.saved_step
    if not step or not due:
        return []
    missing = on_rank_zero(
        fabric, lambda: [c.name for c in due if metrics is not None and not metrics.has(c.kind, step)]
    )
    missing = fabric.broadcast(missing) or []
    return [callback for callback in due if callback.name in missing]
