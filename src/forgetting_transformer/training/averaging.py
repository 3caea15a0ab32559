"""The mean of the weights of several checkpoints of a run, written as an exported model.

Tensor by tensor, summed in float64 in the order of the steps: the result does not depend on the machine, and needs
memory for one model and for some tensors of another.
"""

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forgetting_transformer.progress import Progress
from forgetting_transformer.training import export, official_checkpoint
from forgetting_transformer.training.checkpoint import (
    ROTATIONS,
    Checkpoint,
    CheckpointError,
    check_weights,
    newest_valid,
    read_weights,
    steps_in,
)
from forgetting_transformer.training.continuing import changes_that_alter_the_run
from forgetting_transformer.training.run_directory import RunDirectory

log = logging.getLogger(__name__)

#: Bytes of float32 weights that are summed at a time.
_GROUP = 1 << 28


def average(
    run_folder: Path,
    save_folder: Path,
    last: int | None = None,
    steps: list[int] | None = None,
    tokenizer: str | None = None,
    replace: bool = False,
) -> str:
    """Writes the mean of some checkpoints to `save_folder`, and returns a line that says so. The run is only read.

    Args:
        last: how many, the newest valid ones; or steps: the training tokens of each.
        tokenizer: folder or hub id; None for the run's own.
        replace: replace another run's export too.

    Raises:
        CheckpointError: there are not so many, they belong to runs of other settings, or a run that is training
            deletes them again and again.
        ExportError: as `export.export`.
    """
    export.check_place(save_folder, "--out")
    directory = RunDirectory(run_folder)
    for _ in range(ROTATIONS):
        chosen = find(directory, last, steps)
        try:
            newest, state, model = _mean(chosen)
            break
        except (CheckpointError, OSError) as error:
            # A run that trains deletes old checkpoints when it has written new ones.
            gone = [str(checkpoint.step) for checkpoint in chosen if not checkpoint.path.exists()]
            if not gone:
                raise
            log.warning("the checkpoint at %s tokens was deleted by its run while it was read", ", ".join(gone))
            if steps is not None:
                raise CheckpointError(
                    f"--steps: the run deleted its checkpoint at {', '.join(gone)} tokens while it was read; let it "
                    "keep more (checkpoint_keep_last, checkpoint_keep_interval), or average steps that stay"
                ) from error
    else:
        raise CheckpointError(
            f"--last={last}: {ROTATIONS} times the run in {run_folder} deleted a checkpoint while it was read; let it "
            "keep more than are averaged (checkpoint_keep_last), or give --steps of those that stay "
            "(checkpoint_keep_interval)"
        )
    numbers = [checkpoint.step for checkpoint in chosen]
    what = f"the average of {len(chosen)} checkpoints of {run_folder}, {numbers[0]:,} to {numbers[-1]:,} tokens,"
    about = {"average_of": numbers}
    options: dict[str, Any] = {"about": about, "flag": "--out", "replace": replace}
    return export.write(directory, newest, state, model.eval(), save_folder, tokenizer, what, **options)


def _mean(chosen: list[Checkpoint]) -> tuple[Checkpoint, dict[str, Any], PreTrainedModel]:
    """The newest of some checkpoints, its state, and a model with the mean of the weights of all."""
    states = [checkpoint.trainer_state() for checkpoint in chosen]
    _check_same(chosen, states)
    model = export.build_model(chosen[-1], states[-1])
    _fill_with_mean(model.state_dict(), chosen)
    check_weights(model, f"the average of {', '.join(str(checkpoint.path) for checkpoint in chosen)}")
    return chosen[-1], states[-1], model


def find(directory: RunDirectory, last: int | None, steps: list[int] | None) -> list[Checkpoint]:
    """The checkpoints to average, the oldest first, each checked against its manifest.

    Raises:
        CheckpointError: one is missing, or there are fewer valid ones than `last`.
    """
    folder = directory.checkpoints
    if official_checkpoint.is_official(directory):
        raise CheckpointError(
            f"{directory.root} is a run of the authors' code; make runs of its checkpoints with "
            "scripts/import_checkpoint.py first"
        )
    held = steps_in(folder)
    if not held:
        raise CheckpointError(f"{folder} holds no checkpoints; give the output_dir of a run")
    wanted = sorted(held if steps is None else {*steps}, reverse=True)
    found: list[Checkpoint] = []
    with Progress("checking", min(len(wanted), last or len(wanted)), "checkpoints") as progress:
        for step in wanted:
            checkpoint = newest_valid(folder, step)
            if checkpoint is None and steps is not None:
                raise CheckpointError(f"no valid checkpoint at step {step} in {folder}; it holds {held}")
            if checkpoint is not None:
                found.append(checkpoint)
                progress.advance(1)
            if len(found) == last:
                break
    if last is not None and len(found) < last:
        raise CheckpointError(
            f"--last={last}: {folder} has {len(found)} valid checkpoints ({held}); average fewer, or let a "
            "run keep more (checkpoint_keep_last, checkpoint_keep_interval)"
        )
    return found[::-1]


def _check_same(checkpoints: list[Checkpoint], states: list[dict[str, Any]]) -> None:
    """
    Raises:
        CheckpointError: two of them are of different models or runs.
    """
    for (one, before), (other, after) in pairwise(zip(checkpoints, states, strict=True)):
        changes = changes_that_alter_the_run(before["config"], after["config"])
        if before["model_config"] != after["model_config"]:
            changes.append("the configuration of the model")
        if changes:
            raise CheckpointError(
                f"{one.path.name} and {other.path.name} in {one.path.parent} belong to runs of other settings "
                f"({'; '.join(changes[:3])}); average those of one run with --steps"
            )


@torch.no_grad()
def _fill_with_mean(own: dict[str, Tensor], checkpoints: list[Checkpoint]) -> None:
    total = len(checkpoints) * sum(tensor.nbytes for tensor in own.values())
    with Progress("averaging", total, "B") as progress:
        for names in _groups(own):
            sums = {name: torch.zeros(own[name].shape, dtype=torch.float64) for name in names}
            for checkpoint in checkpoints:
                for name, tensor in read_weights(checkpoint, names).items():
                    sums[name] += tensor
                    progress.advance(tensor.nbytes)
            for name in names:
                own[name].copy_(sums[name] / len(checkpoints))


def _groups(own: dict[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors that are read together: opening a checkpoint for every one of them would take long."""
    names: list[str] = []
    size = 0
    for name, tensor in own.items():
        if names and size + tensor.nbytes > _GROUP:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names
