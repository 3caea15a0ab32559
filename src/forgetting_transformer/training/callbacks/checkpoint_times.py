"""How long checkpoints took."""

from typing import TYPE_CHECKING

from forgetting_transformer.metric_names import CHECKPOINT
from forgetting_transformer.training.callbacks.base import Callback
from forgetting_transformer.training.records.metrics import prefixed

if TYPE_CHECKING:
    from forgetting_transformer.training.checkpoint import Saved
    from forgetting_transformer.training.interface import TrainerInterface


class CheckpointTimes(Callback):
    """checkpoint.jsonl: seconds that training waited for the copy, and that writing took."""

    name = "checkpoint_times"

    def on_save(self, trainer: "TrainerInterface", saved: "Saved") -> None:
        values = {"checkpoint_time": saved.copy_seconds, "write_time": saved.write_seconds}
        trainer.report(CHECKPOINT, prefixed(CHECKPOINT, values), step=saved.step)
