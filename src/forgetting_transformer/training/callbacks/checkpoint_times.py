"""How long checkpoints took."""

from typing import TYPE_CHECKING

from forgetting_transformer.training.callbacks.base import Callback

if TYPE_CHECKING:
    from forgetting_transformer.training.checkpoint import Saved
    from forgetting_transformer.training.interface import TrainerInterface


class CheckpointTimes(Callback):
    """checkpoint.jsonl: seconds that training waited for the copy, and that writing took."""

    name = "checkpoint_times"

    def on_save(self, trainer: "TrainerInterface", saved: "Saved") -> None:
        values = {"checkpoint/checkpoint_time": saved.copy_seconds, "checkpoint/write_time": saved.write_seconds}
        trainer.report("checkpoint", values, step=saved.step)
