"""The one exception of corpus preparation, and the translation of operating-system errors into it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forgetting_transformer.files import explain


class CorpusError(Exception):
    """Something the user can fix: the message names the file or the setting, what is wrong, and what to do."""


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Name `path` in any failure to read it. An input that cannot be read is an error, never a shorter corpus."""
    try:
        yield
    except OSError as error:
        _refuse_limit(error)
        raise CorpusError(
            f"cannot read {path}: {error.strerror or error}. Fix it, or leave it out with --exclude."
        ) from error


@contextmanager
def writing_under(folder: Path) -> Iterator[None]:
    """Say what a failed write below `folder` means: finished parts are kept and the same command continues."""
    try:
        yield
    except OSError as error:
        _refuse_limit(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else (error.strerror or str(error))
        where = error.filename or folder
        fix = "Free some space" if full else "Fix it"
        raise CorpusError(
            f"cannot write {where}: {what}. {fix} and run the same command again: it continues where it stopped."
        ) from error


def _refuse_limit(error: OSError) -> None:
    """
    Raises:
        CorpusError: too many files are open, for which no file is to blame.
    """
    if error.errno == errno.EMFILE:
        raise CorpusError(
            f"{explain(error)}; raise it, or use fewer --workers, and run the same command again."
        ) from error
