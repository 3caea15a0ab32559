"""The callback `tensorboard`: TensorBoard gets every report too, under the names that wandb has.

    python train.py … callbacks=[tensorboard]        and: tensorboard --logdir OUTPUT_DIR/tensorboard

Numbers are scalars, samples and other texts are texts, figures of evaluations are images; a step is a training token.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetting_transformer import plugins
from forgetting_transformer.training.callbacks.base import Callback, Interval
from forgetting_transformer.training.callbacks.figures import send_newest_figures
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.records.metrics import with_tables

if TYPE_CHECKING:
    from torch import Tensor

    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


@plugins.CALLBACKS.register("tensorboard", free=[plugins.ALL])
class TensorBoard(Callback):
    """A sink of the run's metrics; once training has begun it never stops for its sake.

    Events are on the disk before every checkpoint. So a start that goes on from a checkpoint of this callback hides
    what came at its step or later (`purge_step`), and writes the lines and figures of that step again: every step is
    there once. Any other start hides all and writes all lines again, and the newest figures.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:  # here, because all ranks come here
            raise ConfigError("callbacks=[tensorboard] needs the package tensorboard: pip install 'tensorboard>=2.16'")
        self._writer: Any = None
        self._complete = False

    def on_start(self, trainer: TrainerInterface) -> None:
        if trainer.metrics is None:
            return
        folder = trainer.directory.tensorboard
        known = self._complete and any(folder.glob("events.out.tfevents.*"))
        first = trainer.counters.token_count if known else 0
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first)
        except Exception as error:  # a full disk, a package of another version: none of these may stop a run
            log.warning("TensorBoard is not available (%s); metrics are in %s", error, trainer.directory.jsonlines)
            return
        for step, row in trainer.metrics.rows(first):
            self.log(step, row)
        send_newest_figures(trainer, self)
        trainer.metrics.sinks.append(self)
        self.summary = str(folder)

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind == "save":
            self._write("flush")

    def state(self) -> dict[str, Tensor]:
        import torch

        return {"complete": torch.tensor(self._writer is not None)}

    def load(self, state: dict[str, Tensor]) -> None:
        self._complete = bool(state["complete"])

    def log(self, step: int, values: dict[str, Any]) -> None:
        others, tables = with_tables(values)
        for name, value in others.items():
            if isinstance(value, int | float):
                self._write("add_scalar", name, value if math.isfinite(value) else math.nan, step)
            elif value is not None:
                self._write("add_text", name, value if isinstance(value, str) else json.dumps(value), step)
        for name, rows in tables.items():
            self._write("add_text", name, "\n\n---\n\n".join(map(_markdown, rows)), step)

    def image(self, step: int, name: str, file: Path) -> None:
        import matplotlib.image

        self._write("add_image", name, matplotlib.image.imread(file), step, dataformats="HWC")

    def close(self) -> None:
        self._write("close")

    def _write(self, method: str, *arguments: Any, **options: Any) -> None:
        try:
            if self._writer is not None:
                getattr(self._writer, method)(*arguments, **options)
        except Exception as error:
            log.warning("TensorBoard stopped taking metrics (%s); they are in the JSON-lines files", error)
            self._writer = None


def _markdown(row: dict[str, str]) -> str:
    """Each text under its name, indented, so that no character of it is taken for markup."""
    return "\n\n".join(f"**{name}**\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in row.items())
