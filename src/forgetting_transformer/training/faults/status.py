"""`output_dir/status.json`: how the last start of a run ended, for schedulers and people.

starting    it reads the corpus, builds the model, loads a checkpoint; if its process is gone it was killed
running     it trains; if its process is gone it was killed
done        trained to train.max_tokens
preempted   stopped by a signal, saved if there was anything to save; the same command continues
failed      stopped by an error; the reason says what to do before the same command continues

What an earlier start left is replaced as soon as rank 0 holds the run's folder, before anything is built. Where it
shows that a checkpoint was finished and nothing else does any more, that is noted in `last_checkpoint.json` first.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
from pathlib import Path

from forgetting_transformer.files import explain, write_atomically
from forgetting_transformer.redaction import redact
from forgetting_transformer.training.run_directory import RunDirectory, RunDirectoryError

_NAME = "status.json"
#: A file of so many bytes is kept for the next status, because what ends a run may be a disk with no room for one.
_RESERVE = ".status.json.reserve"
_RESERVED_BYTES = 8192
#: The loop and the sentinel's thread may write in the same moment, and each writes over the reserve.
_writing = threading.RLock()


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
    with _writing:
        _replace(root, text)


def write_own(directory: RunDirectory, status: str, step: int, reason: str = "") -> None:
    """`write_status` for a run whose folder this process holds; otherwise nothing: it may be another's by now."""
    with _writing:
        if directory.is_locked:
            write_status(directory.root, status, step, reason)


def _replace(root: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        _reserve(root)
    # Over bytes that are there, which needs no room: those of the reserve, or, not quite at once, those of the old
    # status.
    place = root / (_RESERVE if os.path.exists(root / _RESERVE) else _NAME)  # where Path.exists may raise
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
    with contextlib.suppress(FileNotFoundError):
        # A process that was killed while it wrote leaves a short one.
        if (root / _RESERVE).stat().st_size >= _RESERVED_BYTES:
            return
    write_atomically(root / _RESERVE, " " * _RESERVED_BYTES)  # zeros might be stored as none


def claim(directory: RunDirectory, resume: bool = True) -> None:
    """Takes the run's folder, unless this process has it, and replaces how the last start ended by "starting".

    Raises:
        RunDirectoryError: another run is writing there, the folder holds what is not a run's and would be replaced (or,
            without `resume`, moved), or it cannot be written; then nothing has changed.
    """
    if directory.is_locked:
        return
    directory.check_ours(resume)
    with _writing:
        directory.acquire()
        file = directory.root / _NAME
        directory.status_before = file.read_bytes() if file.is_file() else None
        try:
            _keep_what_it_proves(directory)
        except OSError as error:
            directory.release()
            raise RunDirectoryError(f"cannot write {explain(error)}; make room") from error
        write_status(directory.root, "starting", directory.newest_step())


def _keep_what_it_proves(directory: RunDirectory) -> None:
    """Notes that a checkpoint was finished, if only the status says so: the next one will not.

    A run that is done or preempted has saved. One that began at more than 0 tokens had a checkpoint to begin from,
    which of a fork was another run's. "failed" proves nothing: its tokens may never have been saved.
    """
    if directory.last_checkpoint.exists():
        return
    try:
        found = json.loads(directory.status_before or b"{}")
        name, step = found["status"], found["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # damaged, so unknown
    if (
        name not in ("done", "preempted", "starting", "running")
        or type(step) is not int
        or step <= _forked_at(directory)
    ):
        return
    # Imported here: it brings PyTorch along.
    from forgetting_transformer.training.checkpoint.folder import recorded_step

    if recorded_step(directory.last_checkpoint) is None:
        write_atomically(directory.last_checkpoint, json.dumps({"step": step, "checkpoint": f"step-{step:015d}"}))


def _forked_at(directory: RunDirectory) -> int:
    """Tokens that the run in the folder began with, by its config.yaml: 0 unless it is a fork."""
    try:
        found = re.search(rb"^fork_step: (\d{1,18})", directory.config.read_bytes(), flags=re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def move_aside(directory: RunDirectory) -> Path | None:
    """`RunDirectory.move_aside`. What is moved keeps the status that `claim` replaced; the run has its own again."""
    file = directory.root / _NAME
    with _writing:
        if directory.status_before is None:
            file.unlink(missing_ok=True)
        else:
            write_atomically(file, directory.status_before)
        moved = directory.move_aside()
        write_own(directory, "starting", 0)
        return moved


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


def end(directory: RunDirectory, reason: str, outcome: str = "failed") -> None:
    """A start that ends before its first step; gives the folder back."""
    with _writing:
        if directory.is_locked:
            write_status(directory.root, outcome, directory.newest_step(), reason)
            directory.release()
