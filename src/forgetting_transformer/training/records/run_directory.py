"""Files of a run under `output_dir`, and who may write there. docs/operations.md draws the tree."""

import contextlib
import json
import logging
import os
import re
import socket
import time
from pathlib import Path

from forgetting_transformer import metric_names as names
from forgetting_transformer.files import LocksUnsupportedError, explain, locked

log = logging.getLogger(__name__)

PREVIOUS = "previous"
#: All that a run, its plots, wandb and TensorBoard write there, besides `run.lock` and `previous/`. The rest is
#: somebody else's.
#: In the order in which they are moved aside: first what may be a mount and cannot be moved, late
#: `last_checkpoint.json`, which refuses a start that would not find the checkpoints. The lock, by which the run is
#: recognised, is not moved.
OWN_NAMES = (
    "checkpoints", "logs", "metrics", "tokenizer", "plots", "wandb", "tensorboard", "goodput.json",
    "model.txt", "decay_params.txt", "no_decay_params.txt", "status.json", "config.yaml", "last_checkpoint.json",
    "starts.jsonl",
)  # fmt: skip
#: All kinds of lines that a run writes. Only files of these names are the run's to cut and to read back.
KINDS = (
    names.TRAIN, names.NORM, names.THROUGHPUT, names.GOODPUT, names.TRAIN_EVAL, names.VAL, names.CHECKPOINT,
    names.BAD_STEP, names.RESUME, names.TRAIN_DATA_INFO, names.VAL_DATA_INFO, names.MODEL_INFO,
)  # fmt: skip
#: The same for arrays.
ARRAY_KINDS = (names.TRAIN_EVAL, names.VAL)
#: Folders in which other programs write too, such as a scheduler its logs; a start only adds to them.
_SHARED = ("logs", "plots", "wandb")
#: What makes a folder a token array or a corpus of them; besides, the manifest of a corpus.
_ARRAYS = ("*.zarr", "zarr.json", ".zarray")
#: Weights of a model in Hugging Face format.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: Files by which a run is recognised, and keys that they have; so is one by a checkpoint's trainer.json.
_MARKS = {
    "run.lock": {"pid", "host", "since"},
    "status.json": {"status", "step", "pid"},
    "last_checkpoint.json": {"step", "checkpoint"},
}
#: Keys of the manifest of a corpus.
_CORPUS_KEYS = {"vocab_size", "bos_token_id"}
#: A lock, a status or a manifest is far smaller; what is larger is something else's and is not read.
_LARGEST = 1 << 20


class RunDirectoryError(RuntimeError):
    """The run's folder cannot be used; the message says by whom or why, and what to do."""


def _keys(file: Path) -> set[str]:
    """The keys of a file that holds one JSON object; none if it is anything else."""
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return set()
        entry = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return set()
    return set(entry) if isinstance(entry, dict) else set()


def _holds_something(path: Path) -> bool:
    """Whether a name leads to more than empty files, which a start leaves on a full disk."""
    try:
        if path.is_dir():
            return any(inner.is_dir() or inner.stat().st_size for inner in path.iterdir())
        return os.path.lexists(path) and path.stat().st_size > 0
    except OSError:
        return True


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
        self.tensorboard = self.root / "tensorboard"
        self.tokenizer = self.root / "tokenizer"
        self.goodput = self.root / "goodput.json"
        self._lock_file = self.root / "run.lock"
        self._lock = contextlib.ExitStack()
        self.is_locked = False  # whether this process may write here

    def newest_step(self) -> int:
        """Training tokens of the newest checkpoint folder, valid or not; 0 if there is none."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    @property
    def is_run(self) -> bool:
        """Whether a start wrote here, perhaps one that ended early, or checkpoints of a run were copied here."""
        return (
            (self.root / "starts.jsonl").is_file()
            or any(_keys(self.root / name) >= keys for name, keys in _MARKS.items())
            or any(
                re.fullmatch(r"step-\d{15}", path.parent.name) for path in self.checkpoints.glob("step-*/trainer.json")
            )
        )

    def check_ours(self, resume: bool) -> None:
        """Looks whether a start would change files, or with `resume=False` move things, that no run wrote.

        Raises:
            RunDirectoryError: naming them.
        """
        if official := next(self.checkpoints.glob("step-*.pt"), None):
            raise RunDirectoryError(
                f"output_dir={self.root} is a run of the authors' code (it holds checkpoints/{official.name}): make a "
                "run of it in another folder with scripts/import_checkpoint.py and continue "
                "that, or choose another output_dir"
            )
        if not (self.is_run and resume) and (sign := self.sign_of_a_corpus()):
            what = "a run would write among its files" if resume else "resume=false would move its tokenizer aside"
            raise RunDirectoryError(
                f"output_dir={self.root} is a folder of token arrays (it holds {sign}): "
                f"{what}; choose another output_dir"
            )
        if self.is_run:
            return
        weights = sorted(path.name for pattern in _WEIGHTS for path in self.root.glob(pattern))
        if weights and (self.root / "config.json").is_file():
            raise RunDirectoryError(
                f"output_dir={self.root} holds a model (config.json, {weights[0]}), which evaluations of the run would "
                "take for the run's; choose another output_dir"
            )
        changed = (*OWN_NAMES, self._lock_file.name)
        names = [name for name in changed if not (resume and name in _SHARED) and _holds_something(self.root / name)]
        if names:
            raise RunDirectoryError(
                f"output_dir={self.root} holds {', '.join(names)}, and no run that wrote this is recognised there (by "
                "run.lock, status.json, starts.jsonl or checkpoints): a run would change what is not a run's; choose "
                "another output_dir"
            )

    def sign_of_a_corpus(self) -> str | None:
        """The name that shows that this is a token array, or a folder of them; None if it is neither."""
        found = (path.name for pattern in _ARRAYS for path in self.root.glob(pattern))
        manifest = self.root / "manifest.json"
        return next(found, manifest.name if _keys(manifest) >= _CORPUS_KEYS else None)

    def make(self, folder: Path) -> None:
        """Makes a folder of the run.

        Raises:
            RunDirectoryError: something else has its name, or it cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RunDirectoryError(
                f"{folder} is a file, or lies under one, where a run keeps a folder: move it "
                "away, or choose another output_dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(f"cannot make {explain(error)}; make room, or choose another output_dir") from error

    def acquire(self) -> None:
        """Makes the folder and takes it for this process; the kernel gives it back however the process ends.

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
        except LocksUnsupportedError as error:
            raise RunDirectoryError(
                f"the file system of output_dir={self.root} does not support locks ({error.strerror}), which keep two "
                "runs out of one folder; choose an output_dir on another one"
            ) from error
        except (FileExistsError, NotADirectoryError) as error:
            raise RunDirectoryError(
                f"output_dir={self.root} is a file, or lies under one; choose another output_dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to output_dir={self.root}: {explain(error)}; make room, or choose another output_dir"
            ) from error
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        # For people; the lock holds without it, on a full disk too.
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps(owner).encode())
        self.is_locked = True

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
        target = self.root / PREVIOUS / time.strftime("%Y%m%d-%H%M%S")
        number = 1
        while target.exists():
            target = target.with_name(f"{target.name.split('.')[0]}.{number}")
            number += 1
        target.mkdir(parents=True)
        for entry in entries:
            try:
                _move(entry, target)
            except OSError as error:
                with contextlib.suppress(OSError):
                    target.rmdir()  # unless something is in it
                moved = f"; what came before it is in {target}" if target.exists() else ""
                raise RunDirectoryError(
                    f"resume=false cannot move {entry} aside: {error.strerror or error}{moved}. Mend this (a mount "
                    "must be unmounted) and start the same command again, or choose another output_dir"
                ) from error
        return target


def belongs_to(folder: Path) -> str | None:
    """Relation of a folder to a run or a corpus, such as "is the folder of a training run"; None if it is neither's.

    What a link leads to counts as well: the checkpoints of a run may lie elsewhere.
    """
    for path in dict.fromkeys((Path(os.path.realpath(folder)), Path(os.path.abspath(folder)))):
        try:
            said = _belongs_to(path)
        except OSError:
            continue  # whatever is there cannot be written either
        if said:
            return said
    return None


def _belongs_to(path: Path) -> str | None:
    here = RunDirectory(path)
    if here.is_run or any(here.checkpoints.glob("step-*.pt")):
        return "is the folder of a training run"
    if sign := here.sign_of_a_corpus():
        return f"is a folder of token arrays (it holds {sign})"
    for part in (path, *path.parents):
        above = RunDirectory(part.parent)
        if part.name in OWN_NAMES and (above.is_run or any(above.checkpoints.glob("step-*.pt"))):
            return f"is a part of the training run {above.root}"
        if part.suffix == ".zarr" or (part.name == here.tokenizer.name and above.sign_of_a_corpus()):
            return f"is a part of the corpus {above.root}"
    if any(path.glob("step-*/trainer.json")) or any(path.glob("step-*.pt")):
        return "is a folder of checkpoints"
    return None


def _move(entry: Path, folder: Path) -> None:
    """Moves `entry` into `folder`; a link goes on to lead where it led."""
    if not entry.is_symlink():
        entry.rename(folder / entry.name)
        return
    place = os.path.realpath(entry)
    (folder / entry.name).symlink_to(place)
    entry.unlink()
    log.warning(
        "%s was a link to %s. The link is now in %s, and the new run writes into %s itself; "
        "stop it and make a new link if it "
        "should write elsewhere", entry, place, folder, entry,
    )  # fmt: skip
