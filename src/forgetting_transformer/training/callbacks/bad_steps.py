"""Says which updates were left out, and what was in their batches (faults/step_guard.py decides that)."""

import logging
from typing import TYPE_CHECKING

from forgetting_transformer.metric_names import BAD_STEP
from forgetting_transformer.training.callbacks.base import Callback, Interval, Step
from forgetting_transformer.training.records.metrics import prefixed

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


class BadSteps(Callback):
    """bad_step.jsonl, and a warning in every rank's log."""

    name = "bad_steps"
    all_ranks = True

    def on_step(self, trainer: "TrainerInterface", step: Step) -> None:
        self._report(trainer)

    def on_interval(self, trainer: "TrainerInterface", kind: Interval) -> None:
        if kind == "save":  # their lines must be there before the checkpoint is
            self._report(trainer)

    def on_end(self, trainer: "TrainerInterface") -> None:
        self._report(trainer)

    def _report(self, trainer: "TrainerInterface") -> None:
        for bad in trainer.guard.take_reports():
            where = trainer.data.locate(bad.batch)
            log.warning("the update of batch %d was left out: %s; %s", bad.batch, bad, where)
            values = prefixed(BAD_STEP, bad.describe(where))
            trainer.report(BAD_STEP, values, step=(bad.batch + 1) * trainer.tokens_per_step)
