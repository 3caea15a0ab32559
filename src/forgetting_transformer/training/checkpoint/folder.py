"""Folder of a checkpoint: its name, its manifest, and the check for damage."""

import errno
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from forgetting_transformer.command_line import CommandError

log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST, CALLBACK_STATE = "manifest.json", "callback_state.safetensors"
NAME = re.compile(r"step-(\d{15})")
TEMPORARY, DELETED = ".tmp-", ".deleted-"
#: Names that an interrupted save or deletion leaves. Other names are not this program's.
LEFTOVER = re.compile(rf"({re.escape(TEMPORARY)}|{re.escape(DELETED)}){NAME.pattern}")
_CHUNK = 1 << 24
T = TypeVar("T")


class CheckpointError(CommandError, RuntimeError):
    """A checkpoint could not be written or read; the message names it, the reason and what is still usable."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed `inspect`."""

    path: Path
    step: int
    permanent: bool

    def trainer_state(self) -> dict[str, Any]:
        return json.loads((self.path / "trainer.json").read_text(encoding="utf-8"))

    def callback_state(self) -> dict[str, Tensor]:
        return safetensors.torch.load((self.path / CALLBACK_STATE).read_bytes())


def pack(callback_state: dict[str, Tensor]) -> bytes:
    """Contents of the file that `Checkpoint.callback_state` reads. Tensors that it cannot hold raise various errors."""
    whole = torch.contiguous_format
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in callback_state.values()):
        raise TypeError("not all are tensors, or one is a rank's part of a tensor")
    return safetensors.torch.save({n: x.detach().clone(memory_format=whole) for n, x in callback_state.items()})


def newest_valid(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest valid checkpoint in `folder`, or the one at `step`; logs why it skips others."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        if not NAME.fullmatch(path.name) or step not in (None, step_of(path)):
            continue
        try:
            return inspect(path)
        except CheckpointError as error:
            if not os.path.lexists(path):  # its run has deleted it meanwhile, and written a newer one
                return newest_valid(folder, step)
            log.warning("passing over checkpoint %s: %s", path, error)
    return None


def read_newest(folder: Path, read: Callable[[Checkpoint], T], step: int | None = None) -> T:
    """Reads the newest valid checkpoint, or the one at `step`, with `read`.

    The run may be training, and deletes old checkpoints when it has written new ones. Where the checkpoint that is
    being read goes, the next one is read.

    Raises:
        CheckpointError: there is none, or what `read` raised, of a checkpoint that is still there.
    """
    while (checkpoint := newest_valid(folder, step)) is not None:
        try:
            return read(checkpoint)
        except (CheckpointError, OSError) as error:
            if checkpoint.path.exists():
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{checkpoint.path} cannot be read: {reason_of(error)}") from error
            log.info("%s was deleted while it was read; taking the next", checkpoint.path)
    wanted = "" if step is None else f" at step {step}"
    raise CheckpointError(f"no valid checkpoint{wanted} in {folder}; it holds {steps_in(folder) or 'nothing'}")


def inspect(path: Path) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: the damage.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError("it has no manifest.json, so part of it is missing")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"its format is {manifest['format']}, this version reads {FORMAT}")
        for name, recorded in manifest["files"].items():
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise CheckpointError(f"its manifest names {name}, a file outside its folder")
            if not (path / name).is_file():
                raise CheckpointError(f"{name} is missing")
            size = (path / name).stat().st_size
            if size != recorded["bytes"]:
                raise CheckpointError(f"{name} has {size} bytes instead of {recorded['bytes']}")
            if checksum(path / name) != recorded:
                raise CheckpointError(f"the contents of {name} do not match its checksum")
        return Checkpoint(path, step_of(path), manifest["permanent"] is True)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise  # the checkpoint is not to blame, and an older one would be taken
        raise CheckpointError(f"it cannot be read ({error})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its manifest.json is damaged ({type(error).__name__}: {error})") from error


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint folder, without looking at the files; None if there is none that can be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        sum(entry["bytes"] for entry in manifest["files"].values())
        return manifest if isinstance(manifest["permanent"], bool) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def name_of(step: int) -> str:
    return f"step-{step:015d}"


def step_of(path: Path) -> int:
    """Training tokens of a checkpoint folder, from its name."""
    return int(path.name.removeprefix("step-"))


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoint folders, valid or not, for messages."""
    return sorted(step_of(path) for path in folder.glob("step-*") if NAME.fullmatch(path.name))


def remove(path: Path) -> None:
    """Deletes a checkpoint; renames it first, so that no half-deleted folder looks like one."""
    going = path.with_name(f"{DELETED}{path.name}")
    if going.exists():  # of a deletion that was interrupted
        shutil.rmtree(going)
    path.rename(going)
    shutil.rmtree(going)


def set_aside(path: Path) -> Path:
    """Renames an unusable checkpoint in its folder, where nothing deletes it; returns the path."""
    target = path.with_name(f"damaged-{path.name}-{time.time_ns()}")
    path.rename(target)
    return target


def checksum(file: Path) -> dict[str, int]:
    crc, size = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(_CHUNK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


def reason_of(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        # A BaseException that maps ranks to (exception, traceback).
        error = next(iter(error.failures.values()))[0]
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]


def refuse_to_start_over(folder: Path, record: Path | None) -> None:
    """Refuses to start over where a run has finished checkpoints but no usable one.

    Args:
        record: lines of the checkpoints that the run has finished; None: not known.

    Raises:
        CheckpointError: checkpoints were finished, and none can be used. A run that starts over would write over what
            is left of it.
    """
    if steps := steps_in(folder):
        names = ", ".join(name_of(step) for step in steps)
        problem = (
            f"none of the checkpoints in {folder} can be used ({names}; the log says why). Bring back a copy of one"
        )
    elif record is not None and record.is_file() and record.stat().st_size:
        problem = f"{record} says that a checkpoint was finished, and {folder} holds none. Bring the folder back"
    else:
        return
    raise CheckpointError(f"{problem}, or choose another output_dir")
