"""`output_dir/status.json`: state of the last start of a run, for schedulers and people.

starting    it reads the corpus, builds the model, loads a checkpoint; if its process is gone it was killed
running     it trains; if its process is gone it was killed
done        trained to train.max_tokens
preempted   stopped by a signal, saved if there was anything to save; the same command continues
failed      stopped by an error; the reason says what to do before the same command continues

The status of an earlier start is replaced as soon as rank 0 holds the run's folder, before anything is built; with
resume=false when the earlier run is moved aside.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

from forgetting_transformer.console import redact
from forgetting_transformer.files import write_atomically
from forgetting_transformer.training.records.run_directory import RunDirectory

#: The loop and the watchdog's thread may write in the same moment.
_writing = threading.Lock()


def write_status(directory: RunDirectory, status: str, step: int, reason: str = "") -> None:
    """Replaces the file at once, if this process holds the run's folder: it may be another's by now.

    Never raises: a run ends as it ends.

    Args:
        step: training tokens done.
    """
    entry: dict[str, str | int] = {
        "status": status,
        "step": step,
        "reason": redact(reason),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    file = directory.root / "status.json"
    with _writing, contextlib.suppress(OSError):
        if not directory.is_locked:
            return
        try:
            write_atomically(file, json.dumps(entry, indent=1) + "\n")
        except OSError:
            # A full disk, which may be what ends the run: over the bytes of the old status, which needs no room.
            entry["reason"] = redact(reason)[:1000]
            with file.open("r+b") as stream:
                stream.write(json.dumps(entry, indent=1).encode() + b"\n")
                stream.truncate()


def claim(directory: RunDirectory, resume: bool = True) -> None:
    """Takes the run's folder, unless this process has it, and replaces how the last start ended by "starting".

    Without `resume` the run that is there keeps its status until `move_aside`.

    Raises:
        RunDirectoryError: another run is writing there, the folder holds what is not a run's and would be replaced (or,
            without `resume`, moved), or it cannot be written; then nothing has changed.
    """
    if directory.is_locked:
        return
    directory.check_ours(resume)
    directory.acquire()
    if resume:
        write_status(directory, "starting", directory.newest_step())


def move_aside(directory: RunDirectory) -> Path | None:
    """`RunDirectory.move_aside`, including the run's status; the new run has its own."""
    moved = directory.move_aside()
    write_status(directory, "starting", 0)
    return moved
