"""Shared parts of callbacks that evaluate the model in training."""

import logging
import time
from typing import Any

from torch.distributed.tensor import DTensor

from forgetting_transformer.command_line import one_line
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.export import tokenizer_of_run
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.metrics import duration

log = logging.getLogger(__name__)


class BrokenOff(Exception):
    """All ranks stop here."""


class EvaluationCallback(Callback):
    """An evaluation every `interval` training tokens. A signal interrupts it; the next start repeats it.

    With ddp ranks share the work. With fsdp every rank does all of it: a shard alone is no model.
    """

    all_ranks = True
    evaluates = True

    def __init__(self, config: Any) -> None:
        self.config, self.interval = config, config.interval

    def prepare(self, trainer: TrainerInterface) -> None:
        """Checks before the first step, and not after hours, that the evaluation has all it needs.

        Raises:
            EvaluationError, ConfigError, DataError: naming what is missing.
        """
        raise NotImplementedError

    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        """Returns the values to report. Calls `beat` before every batch."""
        raise NotImplementedError

    def on_start(self, trainer: TrainerInterface) -> None:
        """
        Raises:
            ConfigError: as `prepare`. DataError: nothing is held out.
        """
        try:
            self.prepare(trainer)
        except EvaluationError as error:
            raise ConfigError(f"callbacks=[{self.name}]: {error}") from error

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        started, tokens = time.perf_counter(), f"{trainer.counters.token_count:,}"
        trainer.model.eval()
        try:
            with trainer.uncompiled():  # texts have many lengths
                values = self.evaluate(trainer)
        except BrokenOff:
            log.info("%s after %s tokens was broken off", self.name, tokens)
            return
        trainer.report(self.kind, values)
        log.info("%s after %s tokens took %s", self.name, tokens, duration(time.perf_counter() - started))


def beat(trainer: TrainerInterface) -> None:
    """
    Raises:
        BrokenOff: all ranks have agreed to stop.
    """
    if trainer.should_stop():
        raise BrokenOff


def team(trainer: TrainerInterface) -> Workers:
    """The ranks that share an evaluation: all with ddp, this one alone with fsdp."""
    fabric = trainer.fabric
    if any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()):
        return Workers(0, 1, fabric.device)
    return Workers(fabric.global_rank, fabric.world_size, fabric.device)


def evaluated_model(trainer: TrainerInterface, callback: str, tokenizer: str | None) -> EvaluatedModel:
    """The model in training with its tokenizer; every rank calls it.

    Args:
        callback: its name, for messages about its key `tokenizer`.
        tokenizer: folder or hub id; None: the corpus's.

    Raises:
        ConfigError: there is no such tokenizer, or it has another vocabulary.
    """
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


def precision(trainer: TrainerInterface) -> str:
    """The precision of training, by its name in evaluations."""
    return "bf16" if trainer.config.fabric.precision == "bf16-mixed" else "fp32"
