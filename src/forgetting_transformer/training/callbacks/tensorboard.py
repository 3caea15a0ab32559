"""The callback `tensorboard`: TensorBoard gets every report too, under the names that wandb has.

    python train.py … callbacks=[tensorboard]        and: tensorboard --logdir OUTPUT_DIR/tensorboard

Numbers are scalars, samples and other texts are texts; a step is a training token.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import textwrap
from typing import TYPE_CHECKING, Any

from forgetting_transformer import plugins
from forgetting_transformer.training.callbacks.base import Callback, Interval
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.records.metrics import with_tables

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


@plugins.CALLBACKS.register("tensorboard", free=[plugins.ALL])
class TensorBoard(Callback):
    """A sink of the run's metrics; once training has begun it never stops for its sake.

    Every start hides what earlier ones have written (`purge_step`) and writes all lines again, so every step is there
    once.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:  # here, because all ranks come here
            raise ConfigError("callbacks=[tensorboard] needs the package tensorboard: pip install 'tensorboard>=2.16'")
        self._writer: Any = None

    def on_start(self, trainer: TrainerInterface) -> None:
        if trainer.metrics is None:
            return
        self.summary = str(trainer.directory.tensorboard)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.summary, purge_step=0)
        except Exception as error:  # a full disk, a package of another version: none of these may stop a run
            log.warning("TensorBoard is not available (%s); metrics are in %s", error, trainer.directory.jsonlines)
            self.summary = "not available"
            return
        for step, row in trainer.metrics.rows():
            self.log(step, row)
        trainer.metrics.sinks.append(self)

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind == "save":
            self._write("flush")

    def log(self, step: int, values: dict[str, Any]) -> None:
        others, tables = with_tables(values)
        for name, value in others.items():
            if isinstance(value, int | float):
                self._write("add_scalar", name, value if math.isfinite(value) else math.nan, step)
            elif value is not None:
                self._write("add_text", name, value if isinstance(value, str) else json.dumps(value), step)
        for name, rows in tables.items():
            self._write("add_text", name, "\n\n---\n\n".join(map(_markdown, rows)), step)

    def close(self) -> None:
        self._write("close")

    def _write(self, method: str, *arguments: Any) -> None:
        try:
            if self._writer is not None:
                getattr(self._writer, method)(*arguments)
        except Exception as error:
            log.warning("TensorBoard stopped taking metrics (%s); they are in the JSON-lines files", error)
            self._writer = None


def _markdown(row: dict[str, str]) -> str:
    """Each text under its name, indented, so that no character of it is taken for markup."""
    return "\n\n".join(f"**{name}**\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in row.items())
