"""`output_dir/status.json`: how the last start of a run ended, for schedulers and people.

starting    it reads the corpus, builds the model, loads a checkpoint; if its process is gone it was killed
running     it trains; if its process is gone it was killed
done        trained to train.max_tokens
preempted   stopped by a signal, saved; the same command continues
failed      stopped by an error; the reason says what to do before the same command continues

What an earlier start left is replaced as soon as rank 0 holds the run's folder, before anything is built.
"""

import json
import os
import socket
import time
from pathlib import Path

from forgetting_transformer.redaction import redact
from forgetting_transformer.training.run_directory import RunDirectory, RunDirectoryError

_NAME = "status.json"


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
    temporary = root / f".status.json.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
        temporary.replace(root / _NAME)
    except OSError:
        temporary.unlink(missing_ok=True)


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
