"""Contents of a run's checkpoints and results of its saves. The trainer decides when; checkpoint/ writes the files."""

import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.faults.corruption import compare_ranks
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.parallel.sharding import local

log = logging.getLogger(__name__)


def save(trainer: TrainerInterface, permanent: bool, must_succeed: bool) -> None:
    """Begins a save, unless a checkpoint of this step is there. All ranks call it, and `collect`, after the same step.

    With `must_succeed`, or with checkpoint_background=false, it returns when the checkpoint is complete.
    """
    trainer.guard.poll(wait=True)
    collect(trainer, wait=True)
    if trainer.checkpointer.last_good != trainer.counters.token_count:
        _begin(trainer, permanent)
    if must_succeed or not trainer.config.checkpoint_background:
        collect(trainer, wait=True, must_succeed=must_succeed)


def collect(trainer: TrainerInterface, wait: bool = False, must_succeed: bool = False) -> None:
    """Reports the save in flight to callbacks, if it has ended. A failed one costs a checkpoint and not the run."""
    saved = trainer.checkpointer.take_result(wait)
    if saved is None:
        return
    if saved.error is None:
        trainer.callbacks.call_all("on_save", saved)
    elif must_succeed:
        raise TrainingError(
            f"{saved.error}; {trainer.last_good_checkpoint}. Make room and start the same command again"
        )
    else:
        log.error("%s; %s. Training continues", saved.error, trainer.last_good_checkpoint)


def compare_if_due(trainer: TrainerInterface, before_save: bool = False) -> None:
    """Compares weights and moments of all ranks, after every `compare_steps` steps and before a save.

    Raises:
        TrainingError: ranks hold different weights or moments; on every rank.
    """
    fabric, steps, batch_count = trainer.fabric, trainer.config.strategy.compare_steps, trainer.counters.batch_count
    if steps is None or (batch_count % steps and not before_save):
        return
    if fabric.world_size == 1 or not isinstance(fabric.strategy, DDPStrategy):  # no two ranks hold the same
        return
    model, optimizer = trainer.model.module, trainer.optimizer.optimizer
    if found := compare_ranks(batch_count, model, optimizer):
        collect(trainer, wait=True)
        raise TrainingError(
            f"weights or moments are corrupt: {found}. All ranks should hold the same, so memory or a GPU has failed; "
            f"nothing was saved since, and {trainer.last_good_checkpoint}. Leave that machine out, or test it, and "
            "start the same command again"
        )


def _begin(trainer: TrainerInterface, permanent: bool) -> None:
    model: Any = trainer.model.module
    optimizer, tokens = trainer.optimizer.optimizer, trainer.counters.token_count
    compare_if_due(trainer, before_save=True)
    if not _all_finite(model, optimizer):
        raise TrainingError(
            f"weights or moments became infinite or NaN before {tokens:,} tokens, though every update that was "
            f"made had a finite gradient; {trainer.last_good_checkpoint}, and nothing was saved since. Lower "
            "optimizer.lr, and if that does not help suspect the hardware"
        )
    trainer.callbacks.call_all("on_interval", "save")
    state = {
        **dataclasses.asdict(trainer.counters),
        "config": trainer.resolved,
        "model_config": model.config.to_dict(),
        "data_fingerprint": trainer.data_info.fingerprint,
        "data_checksums": trainer.origin.data_checksums,
        "world_size": trainer.fabric.world_size,
        "environment": trainer.environment,
        "execution": dataclasses.asdict(trainer.execution),
    }
    trainer.checkpointer.save(
        tokens,
        model,
        optimizer,
        state,
        trainer.callbacks.state() | trainer.guard.state(),
        permanent,
        before_manifest=trainer.metrics.flush if trainer.metrics is not None else lambda: None,
    )


@torch.no_grad()
def _all_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether every weight and every moment is finite, on all ranks. Called by all ranks; waits for the device once."""
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    parts = [local(t) for t in tensors if torch.is_tensor(t)]
    finite = torch.isfinite(torch.stack(torch._foreach_norm([t for t in parts if t.numel()]))).all().float()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite.item())
