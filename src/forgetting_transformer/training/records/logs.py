"""The log of a run: its file, and the terminal, which may show a live bar."""

import contextlib
import logging
import sys
import warnings
from pathlib import Path

from tqdm import tqdm

from forgetting_transformer import console
from forgetting_transformer.training.records.run_directory import RunDirectory

#: Marks a record of the log that a live bar shows too.
ON_THE_BAR = "on_the_bar"


class TerminalHandler(logging.Handler):
    """Prints log records above a live progress bar instead of through it, except what the bar itself shows."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not getattr(record, ON_THE_BAR, False):
                tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # a terminal that is gone, for example, is no reason to end a run
            self.handleError(record)


class LogFile(logging.FileHandler):
    """A run's log. Where it cannot be written, as on a full disk, the terminal shows this once, without tracebacks."""

    _said = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            with contextlib.suppress(OSError):  # the terminal may be a file on the same disk
                tqdm.write(
                    f"{self.baseFilename} cannot be written: {error.strerror}; lines of the log are lost",
                    file=sys.stderr,
                )


def start_logging(directory: RunDirectory, rank: int) -> None:
    """Every rank writes `logs/rank-<k>.log`; rank 0 also writes to the terminal, the others only warnings."""
    directory.logs.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    file = LogFile(directory.logs / f"rank-{rank}.log")
    terminal = TerminalHandler(logging.INFO if rank == 0 else logging.WARNING)
    for handler in (file, terminal):
        handler.setFormatter(console.log_format(rank))
        root.addHandler(handler)
    logging.captureWarnings(True)
    # torch warns at every checkpoint of a run on one process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # Newer releases of transformers warn about the only names that older ones have.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing_(en|dis)able.* is deprecated")
