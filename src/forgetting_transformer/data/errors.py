"""The exception for reading, fetching and preparing data."""

import errno
from pathlib import Path

from forgetting_transformer.command_line import CommandError
from forgetting_transformer.console import redact
from forgetting_transformer.files import explain


class DataError(CommandError, ValueError):
    """An error that the user can fix. The message names the file or key and the fix, without passwords of URLs."""

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


def cannot_write(error: OSError, folder: Path) -> DataError:
    """Error of a command that cannot write a file below `folder` and can continue later.

    Too many open files name no file.
    """
    if error.errno == errno.EMFILE:
        return DataError(f"{explain(error)}; raise it, or use fewer --workers, and run the same command again.")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full" if full else (error.strerror or str(error))
    return DataError(
        f"cannot write {error.filename or folder}: {reason}. {'Free some space' if full else 'Fix it'} and run the "
        "same command again: it continues where it stopped."
    )
