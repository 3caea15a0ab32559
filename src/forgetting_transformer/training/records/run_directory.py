"""Files of a run under `output_dir`, and who may write there. docs/operations.md draws the tree.

`status.json` has the state of the last start, for schedulers and people; docs/operations.md lists the states. It is
replaced as soon as rank 0 holds the run's folder, before anything is built; with resume=false when the earlier run is
moved aside.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

from forgetting_transformer import metric_names as names
from forgetting_transformer.command_line import CommandError
from forgetting_transformer.console import redact
from forgetting_transformer.files import explain, locked, write_atomically

#: All that a run, its plots and wandb write there, besides `run.lock` and `previous/`. All else belongs to others. In
#: the order in which they are moved aside: first what may be a mount and cannot be moved, last `metrics`, which refuse
#: a start that would not find the checkpoints. The lock, by which the run is recognised, is not moved.
OWN_NAMES = (
    "checkpoints", "logs", "tokenizer", "plots", "traces", "wandb", "goodput.json", "model.txt", "decay_params.txt",
    "no_decay_params.txt", "status.json", "config.yaml", "starts.jsonl", "metrics",
)  # fmt: skip
#: Folders in which other programs write too, such as a scheduler its logs; a start only adds to them.
_SHARED = ("logs", "plots", "traces", "wandb")


class RunDirectoryError(CommandError, RuntimeError):
    """The run's folder cannot be used; the message has the reason, or the run that uses it, and the fix."""


class RunDirectory:
    """Paths of a run. Only rank 0 writes, except for checkpoint shards and each rank's own log."""

    def __init__(self, output_dir: str | Path) -> None:
        self.root = Path(output_dir).expanduser().absolute()
        self.config = self.root / "config.yaml"
        self.checkpoints = self.root / "checkpoints"
        self.logs = self.root / "logs"
        self.jsonlines = self.root / "metrics" / "jsonlines"
        #: Has a line for every finished checkpoint, even where the folder of checkpoints is gone.
        self.saves = self.jsonlines / f"{names.CHECKPOINT}.jsonl"
        self.npz = self.root / "metrics" / "npz"
        self.wandb_run_id = self.root / "metrics" / "wandb" / "wandb_run_id.txt"
        self.tokenizer = self.root / "tokenizer"
        self.goodput = self.root / "goodput.json"
        self.traces = self.root / "traces"
        self._lock_file = self.root / "run.lock"
        self._lock = contextlib.ExitStack()
        #: The loop and the watchdog's thread may write the status in the same moment.
        self._writing = threading.Lock()
        self.is_locked = False  # whether this process may write here

    def newest_step(self) -> int:
        """Training tokens of the newest checkpoint folder, valid or not; 0 if there is none."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    @property
    def is_run(self) -> bool:
        """Whether a start wrote here, perhaps one that ended early, or checkpoints of a run were copied here."""
        names = ("run.lock", "starts.jsonl", "checkpoints/step-*/trainer.json")
        return any(path.is_file() for name in names for path in self.root.glob(name))

    @property
    def is_official(self) -> bool:
        """Whether the authors' code trained here."""
        return any(self.checkpoints.glob("step-*.pt"))

    def check_ours(self, resume: bool) -> None:
        """Checks that a start changes, or with `resume=False` moves, only files that a run wrote.

        Raises:
            RunDirectoryError: naming them.
        """
        if self.is_official:
            raise RunDirectoryError(
                f"output_dir={self.root} is a run of the authors' code: make a run of it in another folder with "
                "scripts/import_checkpoint.py and continue that, or choose another output_dir"
            )
        held = [name for name in OWN_NAMES if os.path.lexists(self.root / name) and not (resume and name in _SHARED)]
        if held and not self.is_run:
            raise RunDirectoryError(
                f"output_dir={self.root} holds {', '.join(held)}, and no run that wrote this is recognised there (by "
                "run.lock, starts.jsonl or checkpoints): a run would change what is not a run's; choose another "
                "output_dir"
            )

    def acquire(self) -> None:
        """Makes the folder and locks it for this process; the kernel releases it however the process ends.

        Raises:
            RunDirectoryError: another run is writing there, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Data workers are forked and would hold the lock for seconds after this process was killed.
            os.register_at_fork(after_in_child=self.release)
            descriptor = self._lock.enter_context(locked(self._lock_file, wait=False))
            os.ftruncate(descriptor, 0)
        except BlockingIOError as error:
            holder = self._lock_file.read_text(errors="replace").strip() or "an unknown process"
            raise RunDirectoryError(
                f"another run is writing to output_dir={self.root} ({holder}). Wait for it, stop it, or choose "
                "another output_dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to output_dir={self.root}: {explain(error)}; make room, or choose another output_dir"
            ) from error
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        # For people; the lock does not need it, as on a full disk.
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps(owner).encode())
        self.is_locked = True

    def claim(self, resume: bool = True) -> None:
        """Takes the folder, unless this process has it, and replaces how the last start ended by "starting".

        Without `resume` the run that is there keeps its status until `move_aside`.

        Raises:
            RunDirectoryError: another run is writing there, the folder holds what is not a run's and would be replaced
                (or, without `resume`, moved), or it cannot be written; then nothing has changed.
        """
        if not self.is_locked:
            self.check_ours(resume)
            self.acquire()
            if resume:
                self.write_status("starting", self.newest_step())

    def write_status(self, status: str, step: int, reason: str = "") -> None:
        """Replaces status.json at once, if this process holds the run's folder: it may be another's by now.

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
        file = self.root / "status.json"
        with self._writing, contextlib.suppress(OSError):
            if not self.is_locked:
                return
            try:
                write_atomically(file, json.dumps(entry, indent=1) + "\n")
            except OSError:
                # A full disk, which may be what ends the run: over the bytes of the old status, which needs no room.
                entry["reason"] = redact(reason)[:1000]
                with file.open("r+b") as stream:
                    stream.write(json.dumps(entry, indent=1).encode() + b"\n")
                    stream.truncate()

    def release(self) -> None:
        self._lock.close()
        self.is_locked = False

    def move_aside(self) -> Path | None:
        """Moves the files and folders of a run, with all that is in them, into `previous/<time>/`; returns that, None
        if there was nothing.

        After an interruption the same call moves the rest.

        Raises:
            RunDirectoryError: as `check_ours`, or something cannot be moved.
        """
        self.check_ours(resume=False)
        entries = [self.root / name for name in OWN_NAMES if os.path.lexists(self.root / name)]
        if not entries:
            return None
        target = self.root / "previous" / time.strftime("%Y%m%d-%H%M%S")
        target.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            try:
                if entry.is_symlink():  # which leads on where it led
                    (target / entry.name).symlink_to(os.path.realpath(entry))
                    entry.unlink()
                else:
                    entry.rename(target / entry.name)
            except OSError as error:
                raise RunDirectoryError(
                    f"resume=false cannot move {entry} into {target}: {error.strerror or error}. Mend this (a mount "
                    "must be unmounted) and start the same command again, or choose another output_dir"
                ) from error
        return target
