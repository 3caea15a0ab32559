"""The figures of evaluations for wandb and TensorBoard, as `scripts/plot_run.py` draws them."""

import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetting_transformer.training.callbacks.base import Callback
from forgetting_transformer.training.records.metrics import Sink

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


#: Most of the wall time that drawing may take, but for the first and the last figures of a start.
_SHARE = 0.01


class Figures(Callback):
    """Draws them after an evaluation, where anything but files takes them.

    Short runs that evaluate often leave some out: training waits while figures are drawn.
    """

    name = "figures"

    def __init__(self) -> None:
        self._seconds = 0.0
        self._drawn: set[str] = set()

    def on_evaluate(self, trainer: "TrainerInterface", kind: str, values: dict[str, Any]) -> None:
        rare = self._seconds <= _SHARE * sum(trainer.clock.seconds().values())
        if trainer.metrics is not None and (rare or trainer.finished or kind not in self._drawn):
            started = time.perf_counter()
            send_figures(trainer, trainer.metrics.sinks, [kind])
            self._seconds += time.perf_counter() - started
            self._drawn.add(kind)


def send_figures(trainer: "TrainerInterface", sinks: Sequence[Sink], kinds: Iterable[str]) -> None:
    """Draws what evaluations of these kinds have found and hands it to the sinks; a run never stops for their sake."""
    if not sinks:
        return
    try:
        from forgetting_transformer.analysis import run_figures

        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, Path] = {}
            for kind in kinds:
                found |= run_figures.of_evaluation(trainer.directory.root, kind, Path(folder))
            for name, file in found.items():
                for sink in sinks:
                    sink.image(trainer.counters.token_count, f"figures/{name}", file)
    except Exception as error:
        log.warning("the figures of %s were not drawn (%s)", ", ".join(kinds), error)


def send_newest_figures(trainer: "TrainerInterface", sink: Sink) -> None:
    """Those of the checkpoint that a start goes on from, which a sink that begins afresh does not have."""
    metrics, step = trainer.metrics, trainer.counters.token_count
    if metrics is not None and step:
        send_figures(trainer, [sink], [kind for kind in sorted(metrics.kinds) if metrics.has(kind, step)])
