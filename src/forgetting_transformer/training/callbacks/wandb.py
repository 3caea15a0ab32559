"""Passes every report to wandb, if it is available."""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forgetting_transformer.command_line import one_line
from forgetting_transformer.console import redact_tree
from forgetting_transformer.files import write_atomically
from forgetting_transformer.training.callbacks.base import Callback
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


class Wandb(Callback):
    """A sink of the run's metrics; its errors never stop a run.

    wandb keeps rows in memory for a while, so a killed process loses some. So every start sends it the missing rows
    from the JSON-lines files: online those past the last step on the server, offline all of them, in a new folder that
    supersedes the older ones of the run. Either way every step is there once.
    """

    name = "wandb"

    def on_start(self, trainer: TrainerInterface) -> None:
        config, metrics = trainer.config, trainer.metrics
        mode: Any = config.wandb.mode
        self._run: Any = None
        self.summary = mode
        if mode == "disabled" or metrics is None:
            return
        self.summary = "not available"
        with self._failing("is not available"):  # not installed, no network, no login, a full quota
            import wandb

            id_file = metrics.directory.wandb_run_id  # the same at every start
            if not id_file.is_file():
                id_file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(id_file, secrets.token_hex(4))
            run_id = id_file.read_text(encoding="utf-8").strip()
            log_dir = Path(config.wandb.log_dir or metrics.directory.root)
            log_dir.mkdir(parents=True, exist_ok=True)
            if mode == "offline":
                for folder in log_dir.glob(f"wandb/offline-run-*-{run_id}"):
                    folder.rename(folder.with_name(f"superseded-{folder.name}"))
            with _shielded():
                self._run = wandb.init(
                    project=config.wandb.project,
                    name=config.tag,
                    group=config.exp,
                    id=run_id,
                    dir=str(log_dir),
                    mode=mode,
                    resume="allow",
                    config=trainer.resolved,
                    settings=wandb.Settings(silent=True, init_timeout=60),
                )
            address = getattr(self._run, "url", None) if mode == "online" else None
            self.summary = f"{mode}, {address or log_dir / 'wandb'}"
            for step, row in metrics.rows():
                self.log(step, row)
            metrics.sinks.append(self)

    def log(self, step: int, values: dict[str, Any]) -> None:
        with self._failing("takes no more metrics"):
            if self._run is not None and step >= self._run.step:
                self._run.log(values, step=step)

    def close(self) -> None:
        with self._failing("did not finish"):
            if self._run is not None:
                self._run.finish()

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            level = logging.INFO if isinstance(error, ImportError) else logging.WARNING
            log.log(level, "wandb %s (%s); all metrics are in the JSON-lines files", what, one_line(error))
            self._run = None


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Protects `wandb.init`, which records the command line (here without passwords), and without an API key would ask
    a terminal for one and wait for ever (so standard input is empty)."""
    before = sys.argv, sys.stdin
    sys.argv = redact_tree(sys.argv)
    with open(os.devnull, encoding="utf-8") as sys.stdin:
        try:
            yield
        finally:
            sys.argv, sys.stdin = before
