"""`output_dir/status.json`: how the last start of a run ended, for schedulers and people.

starting    it reads the corpus, builds the model, loads a checkpoint; if its process is gone it was killed
running     it trains; if its process is gone it was killed
done        trained to train.max_tokens
preempted   stopped by a signal, saved; the same command continues
failed      stopped by an error; the reason says what to do before the same command continues

What an earlier start left is replaced as soon as rank 0 holds the run's folder, before anything is built.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from forgetting_transformer.redaction import redact
from forgetting_transformer.training.run_directory import RunDirectory, RunDirectoryError

_NAME = "status.json"
#: A file of so many bytes is kept for the next status, because what ends a run may be a disk with no room for one.
_RESERVE = ".status.json.reserve"
_RESERVED_BYTES = 8192


def write_status(root: Path, status: str, step: int, reason: str = "") -> None:
    """Replaces the file at once. `step` is training tokens done. Never raises: a run ends as it ends."""
    entry = {
        "status": status,
        "step": step,
        "reason": redact(reason),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    text = json.dumps(entry, indent=1) + "\n"
    if len(text.encode()) > _RESERVED_BYTES:
        entry["reason"] = redact(reason)[: _RESERVED_BYTES // 8] + " …"
        text = json.dumps(entry, indent=1) + "\n"
    with contextlib.suppress(OSError):
        _reserve(root)
    # Over bytes that are there, which needs no room: those of the reserve, or, not quite at once, those of the old status.
    place = root / (_RESERVE if (root / _RESERVE).exists() else _NAME)
    with contextlib.suppress(OSError):
        descriptor = os.open(place, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
            os.ftruncate(descriptor, len(text.encode()))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(place, root / _NAME)
    with contextlib.suppress(OSError):
        _reserve(root)


def _reserve(root: Path) -> None:
    """Keeps the room that the next status needs, if there is none kept."""
    if (root / _RESERVE).exists():
        return
    temporary = root / f"{_RESERVE}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, b" " * _RESERVED_BYTES)  # zeros might be stored as none
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, root / _RESERVE)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def claim(directory: RunDirectory, resume: bool = True) -> None:
    """Takes the run's folder, unless this process has it, and replaces how the last start ended by "starting".

    Raises:
        RunDirectoryError: another run is writing there, the folder holds what is not a run's and would be replaced (or,
            without `resume`, moved), or it cannot be written; then nothing has changed.
    """
    if directory.held:
        return
    directory.check_ours(resume)
    directory.acquire()
    file = directory.root / _NAME
    directory.status_before = file.read_text(encoding="utf-8") if file.is_file() else None
    write_status(directory.root, "starting", directory.newest_step())


def restore(directory: RunDirectory) -> None:
    """Puts back the status that `claim` replaced: what is moved aside keeps its own."""
    file = directory.root / _NAME
    if directory.status_before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(directory.status_before, encoding="utf-8")


def refuse(directory: RunDirectory, reason: str) -> None:
    """A start that failed before it knew its configuration: the status of the start before must not pass for its own.

    A folder without a status, and one in which a run is going on, are left alone.
    """
    if not (directory.root / _NAME).is_file():
        return
    try:
        claim(directory)
    except RunDirectoryError:
        return
    end(directory, reason)


def end(directory: RunDirectory, reason: str) -> None:
    """A start that fails before its first step; gives the folder back."""
    if directory.held:
        write_status(directory.root, "failed", directory.newest_step(), reason)
        directory.release()
