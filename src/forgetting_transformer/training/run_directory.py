"""What a run keeps under `output_dir`, and who may write there. docs/run_directory.md draws the tree."""

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from pathlib import Path

PREVIOUS = "previous"
#: Files that every start replaces.
_REPLACED = ("config.yaml", "model.txt", "decay_params.txt", "no_decay_params.txt", "status.json")
#: All that a run, its plots and wandb write there, besides `run.lock` and `previous/`. The rest is somebody else's.
OWN_NAMES = (
    *_REPLACED, "starts.jsonl", "goodput.json", "last_checkpoint.json", "checkpoints", "logs", "metrics", "tokenizer", "plots",
    "wandb",
)  # fmt: skip


class RunDirectoryError(RuntimeError):
    """The run's folder cannot be used; the message says by whom or why, and what to do."""


def told(error: OSError, root: Path) -> str:
    """What went wrong and where: a write to a full disk does not name its file."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename or root}: {error.strerror}"


class RunDirectory:
    """Paths of a run. Only rank 0 writes, except for checkpoint shards and each rank's own log.

    Raises:
        RunDirectoryError: `output_dir` is empty; pathlib would take the current folder.
    """

    def __init__(self, output_dir: str | Path) -> None:
        if not str(output_dir).strip():
            raise RunDirectoryError(f"output_dir={str(output_dir)!r} is empty; give a folder, or . for the current one")
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
        self.status_before: bytes | None = None

    def newest_step(self) -> int:
        """Training tokens of the newest checkpoint folder, valid or not; 0 if there is none."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    @property
    def holds_run(self) -> bool:
        """Whether a run wrote here: by its config.yaml, or by starts.jsonl."""
        if (self.root / "starts.jsonl").is_file():
            return True
        try:
            text = self.config.read_bytes()
        except OSError:
            return False
        return all(re.search(rb"^%b:" % key, text, flags=re.MULTILINE) for key in (b"output_dir", b"datamodule"))

    def check_ours(self, resume: bool) -> None:
        """Looks whether a start would replace files, or with `resume=False` move things, that no run wrote.

        Raises:
            RunDirectoryError: naming them.
        """
        if self.holds_run:
            return
        names = _REPLACED if resume else OWN_NAMES
        strangers = [name for name in names if os.path.lexists(self.root / name) and not self._left_by_a_start(name)]
        if strangers:
            what = "a run would replace" if resume else "resume=false would move aside"
            raise RunDirectoryError(
                f"output_dir={self.root} holds {', '.join(strangers)}, and no run that wrote this is recognised there (by its "
                f"config.yaml or starts.jsonl): {what} what is not a run's; choose another output_dir"
            )

    def _left_by_a_start(self, name: str) -> bool:
        """Whether a start that failed before it wrote config.yaml left this."""
        path = self.root / name
        try:
            if name == "status.json":
                return {"status", "step", "pid"} <= json.loads(path.read_text(encoding="utf-8")).keys()
            if name == "last_checkpoint.json":
                return {"step", "checkpoint"} <= json.loads(path.read_text(encoding="utf-8")).keys()
            if name == "logs":
                return all(re.fullmatch(r"rank-\d+\.log", entry) for entry in os.listdir(path))
            return name == "checkpoints" and not os.listdir(path)
        except (OSError, ValueError, AttributeError):
            return False

    def make(self, folder: Path) -> None:
        """Makes a folder of the run.

        Raises:
            RunDirectoryError: something else has its name, or it cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RunDirectoryError(
                f"{folder} is a file, or lies under one, where a run keeps a folder: move it away, or choose another output_dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(f"cannot make {told(error, folder)}; make room, or choose another output_dir") from error

    def acquire(self) -> None:
        """Makes the folder and takes it for this process; the kernel gives it back however the process ends.

        Raises:
            RunDirectoryError: another run is writing there, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to output_dir={self.root}: {error.strerror}; make room, or choose another output_dir"
            ) from error
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
        # For people; the lock holds without it, on a full disk too.
        with contextlib.suppress(OSError):
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
        """Moves what a run wrote into `previous/<time>/`, and nothing else; returns that folder, None if there was nothing.

        Raises:
            RunDirectoryError: as `check_ours`.
        """
        self.check_ours(resume=False)
        entries = [self.root / name for name in OWN_NAMES if os.path.lexists(self.root / name)]
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
