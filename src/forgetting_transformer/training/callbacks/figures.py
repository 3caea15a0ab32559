"""The figures of evaluations for wandb and TensorBoard, as `scripts/plot_run.py` draws them."""

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetting_transformer.training.callbacks.base import Callback

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


class Figures(Callback):
    """Draws them after an evaluation, where anything but files takes them; a run never stops for their sake."""

    name = "figures"

    def on_evaluate(self, trainer: "TrainerInterface", kind: str, values: dict[str, Any]) -> None:
        metrics = trainer.metrics
        if metrics is None or not metrics.sinks:
            return
        try:
            from forgetting_transformer.analysis import figures

            with tempfile.TemporaryDirectory() as folder:
                for name, file in figures.of_evaluation(trainer.directory.root, kind, Path(folder)).items():
                    for sink in metrics.sinks:
                        sink.image(trainer.counters.token_count, f"figures/{name}", file)
        except Exception as error:
            log.warning("the figure of %s was not drawn (%s)", kind, error)
