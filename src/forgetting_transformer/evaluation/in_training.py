"""What evaluations of the model in training share: its tokenizer, its form as evaluations take it, and an early end."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.metrics import read_lines

if TYPE_CHECKING:
    from forgetting_transformer.evaluation.models import EvaluatedModel
    from forgetting_transformer.evaluation.workers import Workers
    from forgetting_transformer.training.interface import TrainerInterface


log = logging.getLogger(__name__)


class BrokenOff(Exception):
    """All ranks stop here."""


def beat(trainer: TrainerInterface) -> None:
    """
    Raises:
        BrokenOff: all ranks have agreed to stop.
    """
    if trainer.beat():
        raise BrokenOff


def share(trainer: TrainerInterface) -> Workers:
    """The ranks that divide an evaluation: all with ddp, and this one alone where a shard is no model."""
    from lightning.fabric.strategies import ModelParallelStrategy

    from forgetting_transformer.evaluation.workers import Workers

    fabric = trainer.fabric
    if isinstance(fabric.strategy, ModelParallelStrategy):
        return Workers(0, 1, fabric.device)
    return Workers(fabric.global_rank, fabric.world_size, fabric.device)


def evaluated_model(trainer: TrainerInterface, callback: str, tokenizer: str | None) -> EvaluatedModel:
    """The model in training with its tokenizer; every rank calls it.

    Args:
        callback: whose key `tokenizer` it is.
        tokenizer: folder or hub id; None: the corpus's.

    Raises:
        ConfigError: there is no such tokenizer, or it has another vocabulary.
    """
    from forgetting_transformer.command_line import one_line
    from forgetting_transformer.evaluation.models import EvaluatedModel
    from forgetting_transformer.training.export import tokenizer_of_run

    trainer.fabric.barrier()  # rank 0 has copied the corpus's tokenizer then
    config, model = trainer.config, trainer.model.module
    state: dict[str, Any] = {"config": trainer.resolved, "model_config": model.config.to_dict()}
    try:
        found = tokenizer_of_run(trainer.directory, state, tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"callbacks.{callback}.tokenizer={tokenizer}: {one_line(error)}; give a folder or a hub id with the "
            "tokenizer that the corpus was made with"
        ) from error
    length, source = config.datamodule.train_batch_len, str(trainer.directory.root)
    return EvaluatedModel(model, found, config.tag, source, length, trainer.counters.token_count)


def fingerprint(*parts: Any) -> str:
    """12 hexadecimal digits of what a test asks: arrays and texts, in their order."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.tobytes() if hasattr(part, "tobytes") else str(part).encode()
        whole.update(f"{len(data)} ".encode() + data)
    return whole.hexdigest()[:12]


def warn_of_another_test(trainer: TrainerInterface, kind: str, test: Mapping[str, Any]) -> None:
    """Says so where the newest line of this run has another test under a key of `test`; rank 0 only.

    Scores of both stand in one file, and where metrics go besides files, under one name.
    """
    file = trainer.directory.jsonlines / f"{kind}.jsonl"
    lines = read_lines(file) if trainer.fabric.is_global_zero and file.is_file() else []
    before = lines[-1] if lines else {}
    changed = [key for key, value in test.items() if key in before and before[key] != value]
    if changed:
        said = "; ".join(f"{key}: {before[key]} -> {test[key]}" for key in changed)
        log.warning(
            "callbacks.%s is another test than before in this run (%s): figures draw it as another curve; wandb and "
            "TensorBoard know one name only and join the two", kind, said,
        )  # fmt: skip


def precision(trainer: TrainerInterface) -> str:
    """As in training, by the names of evaluations."""
    return "bf16" if trainer.config.fabric.precision == "bf16-mixed" else "fp32"
