"""The handlers of a run's log: its file, and the terminal, which may show a live bar."""

import contextlib
import logging
import sys
from pathlib import Path

from tqdm import tqdm

#: Marks a record of the log that a live bar shows too.
ON_THE_BAR = "on_the_bar"


class TerminalHandler(logging.Handler):
    """Prints log records above a live progress bar instead of through it, except what the bar itself shows."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not getattr(record, ON_THE_BAR, False):
                tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # a terminal that is gone, say, is no reason to end a run
            self.handleError(record)


class LogFile(logging.FileHandler):
    """A run's log. Where it cannot be written, on a full disk say, the terminal says so once, without tracebacks."""

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
