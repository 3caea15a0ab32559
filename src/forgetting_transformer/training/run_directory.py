"""What a run keeps under `output_dir`, and who may write there. docs/run_directory.md draws the tree."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

PREVIOUS = "previous"


class RunDirectoryError(RuntimeError):
    """The run's folder cannot be used; the message says by whom or why, and what to do."""


class RunDirectory:
    """Paths of a run. Only rank 0 writes, except for checkpoint shards and each rank's own log."""

    def __init__(self, output_dir: str | Path) -> None:
        self.root = Path(output_dir).expanduser().absolute()
        self.config = self.root / "config.yaml"
        self.checkpoints = self.root / "checkpoints"
        #: Says that a checkpoint was finished, even where the folder of checkpoints is gone.
        self.last_checkpoint = self.root / "last_checkpoint.json"
        self.logs = self.root / "logs"
        self.jsonlines = self.root / "metrics" / "jsonlines"
        self.npz = self.root / "metrics" / "npz"
        self.wandb_run_id = self.root / "metrics" / "wandb" / "wandb_run_id.txt"
        self.tokenizer = self.root / "tokenizer"
        self.goodput = self.root / "goodput.json"
        self._lock_file = self.root / "run.lock"
        self._lock_descriptor: int | None = None
        #: What status.json held before this process replaced it (status.py).
        self.status_before: str | None = None

    def newest_step(self) -> int:
        """Training tokens of the newest checkpoint folder, valid or not; 0 if there is none."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    def acquire(self) -> None:
        """Makes the folder and takes it for this process; the kernel gives it back however the process ends.

        Raises:
            RunDirectoryError: another run is writing there, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"cannot write to output_dir={self.root}: {error.strerror}") from error
        # Data workers are forked and would hold the lock for seconds after this process was killed.
        os.register_at_fork(after_in_child=self.release)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 4096).decode(errors="replace").strip() or "an unknown process"
            os.close(descriptor)
            raise RunDirectoryError(
                f"another run is writing to output_dir={self.root} ({holder}). Wait for it, stop it, or choose "
                "another output_dir"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise RunDirectoryError(
                f"the file system of output_dir={self.root} does not support locks ({error.strerror}), which keep two runs "
                "out of one folder; choose an output_dir on another one"
            ) from error
        os.ftruncate(descriptor, 0)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.write(descriptor, json.dumps(owner).encode())
        self._lock_descriptor = descriptor

    @property
    def held(self) -> bool:
        """Whether this process may write here."""
        return self._lock_descriptor is not None

    def release(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def move_aside(self) -> Path | None:
        """Moves everything the folder holds into `previous/<time>/`; returns that folder, None if there was nothing."""
        entries = [e for e in self.root.iterdir() if e != self._lock_file and e.name != PREVIOUS]
        if not entries:
            return None
        target = self.root / PREVIOUS / time.strftime("%Y%m%d-%H%M%S")
        number = 1
        while target.exists():
            target = target.with_name(f"{target.name.split('.')[0]}.{number}")
            number += 1
        target.mkdir(parents=True)
        for entry in entries:
            entry.rename(target / entry.name)
        return target
