"""Checkpoints that are whole or not there.

    checkpoints/step-000000123456/         the number is training tokens
        state/.metadata, state/*.distcp    weights, AdamW's moments and large states of callbacks, sharded
                                           (torch.distributed.checkpoint)
        trainer.json                       counters, resolved config, data fingerprint, versions
        windows.npz                        running sums of metrics that are not yet reported
        manifest.json                      size and CRC-32 of every file above; written last

A save writes everything into a folder with a temporary name, the manifest last, flushes it to disk and renames the
folder. A deletion renames first too. So a folder `step-*` was whole once: without a valid manifest, or with files that
do not match it, it is damaged. Loading passes over it, says why, and takes the next older one; nothing deletes it, and
where no valid one is left the run is refused. `last_checkpoint.json`, beside the folder of all checkpoints, says that
one was finished, for the case that the folder is gone. The format is the same for every strategy
and number of processes.

Writing may happen in a thread while training goes on: the loop then waits only until a copy in the host's memory is
made (host_copy.py). The thread has its own gloo group, because collectives of two threads in one group would mix.
A thread, and not torch.distributed.checkpoint.async_save, because checksums, manifest and pruning belong behind the
same writing, and because a strategy that holds the whole model on every rank would copy all of it on every rank.
"""

import contextlib
import errno
import json
import logging
import pickle
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from forgetting_transformer.files import flush, size_in_words, write_atomically
from forgetting_transformer.ops.finite import NotFiniteError, check_finite
from forgetting_transformer.training.checkpoint.host_copy import HostCopy, share
from forgetting_transformer.training.checkpoint.safe_reader import (
    TensorPlanner,
    TensorReader,
    UnsafeCheckpointError,
    read_tensors,
)
from forgetting_transformer.training.faults.corruption import differing, digests_of_whole
from forgetting_transformer.training.run_directory import RunDirectory, RunDirectoryError

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{15})")
_TEMPORARY, _DELETED = ".tmp-", ".deleted-"
#: What a save or a deletion leaves that was interrupted. Other names are not this program's.
_LEFTOVER = re.compile(rf"({re.escape(_TEMPORARY)}|{re.escape(_DELETED)}){_NAME.pattern}")
#: What every checkpoint consists of, besides its shards.
_ALWAYS = ("state/.metadata", "trainer.json", "windows.npz")
_CHUNK = 1 << 24
#: Seconds between two looks at a save that is waited for.
_LOOK_SECONDS = 1.0
#: Checkpoints that a reader tries while their run deletes one after another.
ROTATIONS = 20
T = TypeVar("T")


#: What watches a wait for a writer: takes a name for people and the seconds that the save before took, and yields what
#: is called whenever bytes were written.
Watch = Callable[[str, float], AbstractContextManager[Callable[[], None]]]


@contextlib.contextmanager
def _unwatched(name: str, last_write: float) -> Iterator[Callable[[], None]]:
    yield lambda: None


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what still holds."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed `inspect`."""

    path: Path
    step: int
    permanent: bool

    def trainer_state(self) -> dict[str, Any]:
        return json.loads((self.path / "trainer.json").read_text(encoding="utf-8"))

    def windows(self) -> dict[str, np.ndarray]:
        with np.load(self.path / "windows.npz", allow_pickle=False) as arrays:
            return dict(arrays)


@dataclass(frozen=True)
class Saved:
    """How a save ended, on every rank alike. Seconds: that training waited for the copy, and that writing took."""

    step: int
    copy_seconds: float
    write_seconds: float
    error: CheckpointError | None


class Checkpointer:
    """Saves, finds and loads the checkpoints of one run.

    Args:
        folder: `output_dir/checkpoints`.
        keep_last: rolling checkpoints to keep; two, so that a damaged newest one costs one interval and not the run.
        rank, world_size: of this process. Collective calls go over a separate gloo group, which needs no GPU.
        timeout: how long a rank waits for the others in one. Where `watch` ends a wait for a writer that writes
            nothing, a very long one: a rank with a slow disk is not gone.
        background: write in a thread, from a copy in the host's memory. False needs no memory for the copy.
        record: file outside `folder` that says that a checkpoint was finished; None keeps none.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        rank: int,
        world_size: int,
        timeout: timedelta | None = None,
        background: bool = False,
        record: Path | None = None,
    ) -> None:
        self.folder, self.keep_last, self.rank, self.world_size = folder, keep_last, rank, world_size
        self.record = record
        #: The run began from another's checkpoint: resume=false, which begins with nothing, cannot start it over.
        self.forked = False
        self.background = background
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        #: Around every wait for the writer.
        self.watch: Watch = _unwatched
        #: Tokens of the checkpoint that this process finished last, whether `finished` has told or not.
        self.last_good: int | None = None
        self._step, self._last_write, self._moved = 0, 0.0, 0

    def reserve(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Tensor] | None = None
    ) -> None:
        """Makes room for the copies of later saves, as of `save`; worth calling after the first optimizer step."""
        if self.background:
            self._copy.reserve(share(_tensors(model, optimizer)[0] | (others or {}), self.rank, self.world_size))

    @property
    def reserving(self) -> bool:
        """Whether that is still under way."""
        return self._copy.reserving

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer_state: dict[str, Any],
        windows: dict[str, Tensor],
        permanent: bool,
        before_manifest: Callable[[], None] = lambda: None,
        others: dict[str, Tensor] | None = None,
    ) -> None:
        """Saves a checkpoint; called by every rank after the same step. `finished` tells how it ended.

        Args:
            trainer_state: as JSON. windows: small tensors, the same on every rank.
            others: large tensors by name, besides weights and moments: sharded, or the same on every rank.
            before_manifest: what has to be on disk before the checkpoint counts; called on rank 0.

        Raises:
            CheckpointError: there is nothing to save yet.
        """
        if self._thread is not None or self._saved is not None:
            raise RuntimeError("take the result of the last save from `finished` first: one is in flight at a time")
        if not optimizer.state:
            # Asking FSDP2 for the state of a fresh optimizer makes it take a step.
            raise CheckpointError("there is nothing to save before the first optimizer step")
        started = time.perf_counter()
        tensors = _tensors(model, optimizer)[0] | (others or {})
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        trainer_state = {**trainer_state, "digests": digests_of_whole(tensors)}
        mine = share(tensors, self.rank, self.world_size)
        mine |= {f"windows.{name}": tensor for name, tensor in windows.items()}
        copied = None
        if self.background:
            mine, copied = self._copy.take(mine)
        copy_seconds = time.perf_counter() - started
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def write() -> None:
            began, problem = time.perf_counter(), None
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a thread begins on GPU 0
                if copied is not None:
                    copied.synchronize()
                self._write(step, mine, needed, trainer_state, permanent, before_manifest)
            except CheckpointError as error:
                problem = error
            except (Exception, CheckpointException) as error:  # a rank that is gone, for one: training will hear of it
                problem = CheckpointError(f"could not write a checkpoint in {self.folder}: {_reason(error)}")
            if problem is None:
                self.last_good = step
            self._saved = Saved(step, copy_seconds, time.perf_counter() - began, problem)

        self._step = step
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        if not self.background:
            self._wait()

    def finished(self, wait: bool = False) -> Saved | None:
        """The result of the last save, once; None while it is being written or if there was none.

        Args:
            wait: until it is written.
        """
        if wait:
            self._wait()
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread = None
        saved, self._saved = self._saved, None
        if saved is not None:
            self._last_write = saved.write_seconds
        return saved

    def _wait(self) -> None:
        """Until the save in flight, if there is one, has ended."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self.watch(f"the checkpoint at {self._step:,} tokens", self._last_write) as moves:
            before = -1
            while self._thread.is_alive():
                self._thread.join(timeout=_LOOK_SECONDS)
                if (now := self._progress()) != before:
                    before = now
                    moves()

    def _progress(self) -> int:
        """A number that changes when any rank has written bytes of the save in flight, or this one has come further."""
        count = self._moved
        with contextlib.suppress(OSError):
            for file in (self.folder / f"{_TEMPORARY}{_name(self._step)}").rglob("*"):
                count += file.stat().st_size
        return count

    def _move(self, amount: int = 1) -> None:
        self._moved += amount

    def close(self) -> None:
        """Waits for a save in flight, and gives the memory of the copy back."""
        self.finished(wait=True)
        self._copy.close()

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        needed: int,
        trainer_state: dict[str, Any],
        permanent: bool,
        before_manifest: Callable[[], None],
    ) -> None:
        """Writes this rank's `tensors`, of a checkpoint of `needed` bytes.

        Raises:
            CheckpointError: on every rank, if any rank could not write (full disk, no permission, …). What was written
                is removed, older checkpoints are untouched, and training may go on.
        """
        final = self.folder / _name(step)
        temporary = self.folder / f"{_TEMPORARY}{final.name}"
        windows = {name: t for name, t in tensors.items() if name.startswith("windows.")}
        state = {name: tensor for name, tensor in tensors.items() if name not in windows}
        self._agree(lambda: self._prepare(temporary, needed), "make room for")
        try:
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(temporary / "state", overwrite=False),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (CheckpointException, OSError, RuntimeError) as error:
            self._on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
            raise CheckpointError(f"could not write {final}: {_reason(error)}") from error
        self._move()
        checksums = self._gather_checksums(temporary)
        arrays = {name.removeprefix("windows."): tensor.cpu().numpy() for name, tensor in windows.items()}

        def publish() -> None:
            before_manifest()
            self._publish(temporary, final, checksums, trainer_state, arrays, permanent)

        self._move()
        self._agree(publish, "finish")
        self._move()
        self._on_rank_zero(lambda: self._prune(step))

    def newest(self, step: int | None = None) -> Checkpoint | None:
        """The newest valid checkpoint (or the one at `step`), the same on every rank; None if none was ever finished.

        Raises:
            CheckpointError: checkpoints were finished and none is valid, or none is there. A run that starts over would
                write over what is left of it.
        """
        answer: list[Any] = [None, None]
        if self.rank == 0:
            answer[0] = newest_valid(self.folder, step)
            if answer[0] is None and step is None:
                answer[1] = self._why_not_from_the_start()
            elif answer[0] is not None and step is None and (recorded_step(self.record) or 0) > answer[0].step:
                log.warning(
                    "a checkpoint was finished at %s tokens; the newest that can be used is at %s",
                    f"{recorded_step(self.record):,}",
                    f"{answer[0].step:,}",
                )
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def _why_not_from_the_start(self) -> str | None:
        """What speaks against training from the first token where no checkpoint can be used; None for a new run."""
        over = "start over with resume=false, which moves what is left of the run aside"
        if self.forked or not _can_be_moved_aside(self.folder.parent):
            over = "choose another output_dir"
        if steps := steps_in(self.folder):
            names = ", ".join(_name(step) for step in steps)
            return (
                f"none of the checkpoints in {self.folder} can be used ({names}; the log says why). Bring back a copy "
                f"of one, or {over}"
            )
        step = recorded_step(self.record)
        if step is None:
            return None
        when = f" at {step:,} tokens" if step else ""
        return f"a checkpoint was finished{when}, and {self.folder} holds none. Bring the folder back, or {over}"

    def load(self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fills model and optimizer. Learning rate, decay and betas stay as the config set them.

        Raises:
            CheckpointError: its tensors are not those of this model, or not what was saved.
        """
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        tensors, optimizer_state = _tensors(model, optimizer)
        stored = _check_names(checkpoint, tensors)
        lacking = sorted(name for name in tensors if name.startswith("optimizer.") and name not in stored)
        if lacking:
            if not self.forked:
                raise CheckpointError(f"{checkpoint.path} was written with another optimizer: it has no {lacking[0]}")
            if self.rank == 0:
                log.warning("%s was written with another optimizer: moments begin at zero", checkpoint.path)
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        self._read(checkpoint, tensors)
        set_model_state_dict(model, _part("model.", tensors))
        if lacking:
            optimizer.state.clear()  # of the step that asking for it made
            now = _model_tensors(model)
        else:
            loaded = dict(optimizer_state)
            for name, tensor in _part("optimizer.", tensors).items():
                before = optimizer_state[name]
                loaded[name] = tensor if isinstance(before, Tensor) else type(before)(tensor.item())
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(model, optimizer, loaded, options=options)
            now = _tensors(model, optimizer)[0]
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self._check_loaded(checkpoint, now)

    def load_others(self, checkpoint: Checkpoint, tensors: dict[str, Tensor], prefix: str) -> None:
        """Fills `tensors` in place with those of their names, if the checkpoint has them.

        Args:
            prefix: of the names of all that are not weights or moments.

        Raises:
            CheckpointError: it has some of them only, or they cannot be read or are not what was saved.
        """
        stored = {name for name in _stored(checkpoint) if name.startswith(prefix)}
        owner = {name: prefix + name.removeprefix(prefix).partition(".")[0] for name in {*stored, *tensors}}
        known = {name: tensor for name, tensor in tensors.items() if owner[name] in {owner[one] for one in stored}}
        for one in sorted({owner[name] for name in tensors.keys() - known.keys()}) if self.rank == 0 else ():
            log.info("%s has no state of %s, which begins here", checkpoint.path, one)
        for one in sorted({owner[name] for name in stored} - {owner[n] for n in tensors}) if self.rank == 0 else ():
            log.warning("%s has the state of %s, which this start does not choose: it ends here", checkpoint.path, one)
        if lacking := sorted(known.keys() - stored):
            raise CheckpointError(f"{checkpoint.path} was written with another model: it has no {lacking[0]}")
        if known:
            self._read(checkpoint, known)
            self._check_loaded(checkpoint, known)

    def _read(self, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        """Fills tensors in place, on all ranks."""
        try:
            dcp.load(
                tensors,
                storage_reader=TensorReader(checkpoint.path / "state"),
                planner=TensorPlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (CheckpointException, OSError, ValueError, RuntimeError) as error:
            raise _unreadable(checkpoint, error) from error

    def _check_loaded(self, checkpoint: Checkpoint, now: dict[str, Tensor]) -> None:
        """Compares on all ranks what was loaded with what was to be saved."""
        wrong: list[Any] = [differing(_digests(checkpoint), now)]
        if self._group is not None:
            mine, wrong = wrong[0], [None] * self.world_size
            dist.all_gather_object(wrong, mine, group=self._group)
        _check_digests(checkpoint, wrong)

    def clean(self) -> None:
        """Removes what an interrupted save or deletion left behind; rank 0, at start-up."""
        for leftover in sorted(self._leftovers()):
            log.warning("removing %s, which an interrupted save or deletion left behind", leftover)
            shutil.rmtree(leftover, ignore_errors=True)

    def _leftovers(self) -> list[Path]:
        return [path for path in self.folder.glob(".*") if _LEFTOVER.fullmatch(path.name)]

    def _prepare(self, temporary: Path, needed: int) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "state").mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed:
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(
                errno.ENOSPC,
                f"the disk has {size_in_words(free)} left, a checkpoint needs {size_in_words(needed)}",
            )

    def _gather_checksums(self, temporary: Path) -> dict[str, dict[str, int]]:
        """Every rank reads back the shards it wrote, so that the work is shared."""
        shards = sorted((temporary / "state").iterdir())
        mine = {f"state/{file.name}": _checksum(file, self._move) for file in shards if _writer_of(file) == self.rank}
        if self._group is None:
            return mine
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, mine, group=self._group)
        return {name: entry for part in gathered for name, entry in part.items()}

    def _publish(
        self,
        temporary: Path,
        final: Path,
        checksums: dict[str, dict[str, int]],
        trainer_state: dict[str, Any],
        windows: dict[str, np.ndarray],
        permanent: bool,
    ) -> None:
        arrays: dict[str, Any] = dict(windows)
        np.savez(temporary / "windows.npz", **arrays)
        (temporary / "trainer.json").write_text(json.dumps(trainer_state, indent=1), encoding="utf-8")
        for name in ("windows.npz", "trainer.json"):
            flush(temporary / name)
            checksums[name] = _checksum(temporary / name)
        flush(temporary / "state")
        manifest = {
            "format": FORMAT,
            "step": trainer_state["token_count"],
            "permanent": permanent,
            "files": checksums,
        }
        write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))  # flushes the folder too
        if self._is_whole(final):
            # Of the same step of this run, which could not be read for a while. To replace it is to have none in
            # between.
            shutil.rmtree(temporary)
        else:
            temporary.rename(final)
        flush(self.folder)
        if self.record is not None:
            try:
                write_atomically(
                    self.record, json.dumps({"step": trainer_state["token_count"], "checkpoint": final.name})
                )
            except OSError as error:  # the checkpoint itself is whole
                log.warning("could not note in %s that %s is finished: %s", self.record, final.name, error)

    @staticmethod
    def _is_whole(final: Path) -> bool:
        """Whether a checkpoint is there already. One that is damaged makes room, for somebody may still mend it."""
        if not final.exists():
            return False
        try:
            inspect(final)
        except CheckpointError as error:
            kept = set_aside(final)
            log.warning("%s cannot be used (%s); it is now %s", final, error, kept)
            return False
        return True

    def _prune(self, step: int) -> None:
        """Keeps the newest `keep_last` checkpoints up to `step` and the permanent ones."""
        older = [
            path
            for path in sorted(self.folder.glob("step-*"), reverse=True)
            if _NAME.fullmatch(path.name) and step_of(path) <= step and (path / MANIFEST).is_file()
        ]
        for path in older[self.keep_last :]:
            try:
                if not json.loads((path / MANIFEST).read_text(encoding="utf-8"))["permanent"]:
                    remove(path)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                # Housekeeping: what cannot be read or deleted stays, and training goes on.
                log.warning("could not tidy up %s: %s", path, error)

    def _agree(self, action: Callable[[], None], what: str) -> None:
        """Rank 0 acts; if it fails, every rank raises."""
        problem: list[str | None] = [None]
        if self.rank == 0:
            try:
                action()
            except Exception as error:  # whatever it is, the other ranks must hear of it
                problem = [_reason(error)]
                for leftover in self._leftovers():
                    shutil.rmtree(leftover, ignore_errors=True)
        if self._group is not None:
            dist.broadcast_object_list(problem, src=0, group=self._group)
        if problem[0] is not None:
            raise CheckpointError(f"could not {what} a checkpoint in {self.folder}: {problem[0]}")

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        if self.rank == 0:
            action()
        if self._group is not None:
            dist.barrier(group=self._group)


def newest_valid(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest valid checkpoint in `folder`, or the one at `step`; says in the log why it passes over others."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        if not _NAME.fullmatch(path.name) or step not in (None, step_of(path)):
            continue
        try:
            return inspect(path)
        except CheckpointError as error:
            if path.exists():  # else its run has deleted it meanwhile
                log.warning("passing over checkpoint %s: %s", path, error)
    return None


def read_newest(folder: Path, read: Callable[[Checkpoint], T], step: int | None = None) -> T | None:
    """What `read` makes of the newest valid checkpoint, or of the one at `step`; None if there is none.

    The run may be training, and deletes old checkpoints when it has written new ones. Where the checkpoint that is
    being read goes, the next one is read.

    Raises:
        CheckpointError: what `read` raised, of a checkpoint that is still there.
    """
    for _ in range(ROTATIONS):
        before = steps_in(folder)
        checkpoint = newest_valid(folder, step)
        if checkpoint is None:
            if steps_in(folder) == before:
                return None
            continue
        try:
            return read(checkpoint)
        except (CheckpointError, OSError) as error:
            if checkpoint.path.exists():
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{checkpoint.path} cannot be read: {_reason(error)}") from error
            log.info("%s was deleted while it was read; taking the next", checkpoint.path)
    raise CheckpointError(
        f"each of {ROTATIONS} checkpoints in {folder} was deleted by its run while it was read; raise "
        f"checkpoint_keep_last or "
        "checkpoint_interval there, or export a step that stays (checkpoint_keep_interval)"
    )


def inspect(path: Path) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: what is wrong with it.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError("it has no manifest.json, so part of it is missing")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"its format is {manifest['format']}, this version reads {FORMAT}")
        listed = manifest["files"]
        lacking = [name for name in _ALWAYS if name not in listed]
        lacking += [
            f"state/{file.name}" for file in (path / "state").glob("*.distcp") if f"state/{file.name}" not in listed
        ]
        if lacking or not any(name.endswith(".distcp") for name in listed):
            raise CheckpointError(
                f"its manifest does not list {', '.join(lacking) or 'any shard'}, so nothing holds that to its contents"
            )
        for name, recorded in listed.items():
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise CheckpointError(f"its manifest names {name}, a file outside its folder")
            if not (path / name).is_file():
                raise CheckpointError(f"{name} is missing")
            size = (path / name).stat().st_size
            if size != recorded["bytes"]:
                raise CheckpointError(f"{name} has {size} bytes instead of {recorded['bytes']}")
            if _checksum(path / name) != recorded:
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


def _name(step: int) -> str:
    return f"step-{step:015d}"


def step_of(path: Path) -> int:
    """Training tokens of a checkpoint folder, from its name."""
    return int(path.name.removeprefix("step-"))


def _can_be_moved_aside(folder: Path) -> bool:
    """Whether resume=false is allowed in this output_dir: only where a run is recognised."""
    try:
        RunDirectory(folder).check_ours(resume=False)
    except RunDirectoryError:
        return False
    return True


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoint folders, valid or not, for messages."""
    return sorted(step_of(path) for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fills a plain model on one process with the weights of a checkpoint that any strategy wrote."""
    own = model.state_dict()
    _check_names(checkpoint, {f"model.{name}": tensor for name, tensor in own.items()})
    tensors = load_tensors(checkpoint, [f"model.{name}" for name in own])
    model.load_state_dict(_part("model.", tensors))
    _check_digests(checkpoint, [differing(_digests(checkpoint), tensors)])
    check_weights(model, checkpoint.path)


def check_weights(model: nn.Module, where: Any) -> None:
    """Looks once at weights that are to be used; where they are from is for the message.

    Raises:
        CheckpointError: one is not finite.
    """
    try:
        check_finite(model.named_parameters(), where)
    except NotFiniteError as error:
        raise CheckpointError(str(error)) from error


def read_weights(checkpoint: Checkpoint, names: Iterable[str] | None = None, part: str = "model.") -> dict[str, Tensor]:
    """Weights of a checkpoint on the CPU, on one process, by the model's names; all of them without `names`.

    Args:
        part: prefix of their names in the checkpoint; "callbacks.ema." for what the callback ema keeps of them.

    Raises:
        CheckpointError: they are not there, cannot be read, or are not what was saved.
    """
    stored = _stored(checkpoint)
    wanted = [name for name in stored if name.startswith(part)] if names is None else [f"{part}{n}" for n in names]
    if lacking := sorted({*wanted} - stored):
        raise CheckpointError(f"{checkpoint.path} belongs to another model: it has no {lacking[0].removeprefix(part)}")
    tensors = load_tensors(checkpoint, wanted)
    _check_digests(checkpoint, [differing(_digests(checkpoint), tensors)])
    return _part(part, tensors)


def load_tensors(checkpoint: Checkpoint, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint on the CPU, on one process; all of them without `names`.

    Raises:
        CheckpointError: naming the shard that cannot be read, if that is it.
    """
    try:
        return read_tensors(checkpoint.path / "state", names)
    except (CheckpointException, OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise _unreadable(checkpoint, error) from error


def _unreadable(checkpoint: Checkpoint, error: BaseException) -> CheckpointError:
    """Why tensors could not be read, with the shard where one is to blame."""
    if isinstance(error, CheckpointException):
        # A BaseException that maps ranks to (exception, traceback).
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, UnsafeCheckpointError):
        return CheckpointError(f"{checkpoint.path} was not loaded: {error}")
    for file in sorted((checkpoint.path / "state").glob("*")):
        try:
            _checksum(file)
        except OSError as broken:
            return CheckpointError(
                f"{file} cannot be read: {broken.strerror}; bring back a copy, or take another checkpoint"
            )
    if isinstance(error, OSError):
        return CheckpointError(f"{error.filename or checkpoint.path} cannot be read: {error.strerror}")
    return CheckpointError(f"{checkpoint.path} does not fit this model: {_reason(error)}")


def recorded_step(record: Path | None) -> int | None:
    """Training tokens at which a run finished a checkpoint last, whether it is still there or not.

    Args:
        record: the run's `last_checkpoint.json`.

    Returns:
        None if it never finished one; 0 if it did and the record does not say when.
    """
    if record is None:
        return None
    try:
        return int(json.loads(record.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0  # it is there, so there was a checkpoint


def remove(path: Path) -> None:
    """Deletes a checkpoint. It loses its name first, so that no half-deleted folder looks like one."""
    going = path.with_name(f"{_DELETED}{path.name}")
    if going.exists():  # of a deletion that was interrupted
        shutil.rmtree(going)
    path.rename(going)
    shutil.rmtree(going)


def set_aside(path: Path) -> Path:
    """Gives a checkpoint that cannot be used another name beside it, which nothing deletes; returns that."""
    target = path.with_name(f"damaged-{path.name}")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"damaged-{path.name}.{number}")
    path.rename(target)
    return target


def _model_tensors(model: nn.Module) -> dict[str, Any]:
    return {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything to save, by name: `model.<parameter>`, `optimizer.state.<parameter>.<moment>`. Names do not depend on
    how parameters are grouped or sharded. And the optimizer's state as torch flattens it, with
    the settings, which are not
    saved: they come from the config."""
    # The model first: FSDP2 has gathered weights after an evaluation, and this puts the shards back in their place.
    tensors = _model_tensors(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    try:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    except NotImplementedError as error:  # state that is neither tensor nor number
        raise CheckpointError(f"{type(optimizer).__name__} keeps what a checkpoint cannot hold: {error}") from error
    moments = {name: value for name, value in optimizer_state.items() if name.startswith("state.")}
    # Some optimizers count their steps in a Python number.
    tensors |= {
        f"optimizer.{name}": value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in moments.items()
    }
    return tensors, optimizer_state


def _part(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_names(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> set[str]:
    """The names of all tensors in the checkpoint.

    Raises:
        CheckpointError: those of the model are not the names of this one.
    """
    stored = _stored(checkpoint)
    wanted = {name for name in tensors if name.startswith("model.")}
    present = {name for name in stored if name.startswith("model.")}
    if wanted != present:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another model: missing {sorted(wanted - present)[:3]}, "
            f"unexpected {sorted(present - wanted)[:3]}"
        )
    return stored


def _stored(checkpoint: Checkpoint) -> set[str]:
    """The names of all tensors in the checkpoint.

    Raises:
        CheckpointError: its list of them cannot be read.
    """
    try:
        return set(TensorReader(checkpoint.path / "state").tensors())
    except (UnsafeCheckpointError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint.path} was not loaded: {error}") from error


def _digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of what was to be saved, by tensor."""
    return checkpoint.trainer_state()["digests"]


def _check_digests(checkpoint: Checkpoint, wrong: list[list[str]]) -> None:
    """
    Args:
        wrong: for each rank the tensors that are not, now that they are loaded, what was to be saved.

    Raises:
        CheckpointError: there are such tensors.
    """
    ranks = [rank for rank, names in enumerate(wrong) if names]
    if not ranks:
        return
    names = wrong[ranks[0]]
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    where = "" if len(wrong) == 1 or len(ranks) == len(wrong) else f" on rank {', '.join(map(str, ranks))}"
    older = [step for step in steps_in(checkpoint.path.parent) if step < checkpoint.step]
    back = f"the last good checkpoint before it is at {older[-1]:,} tokens" if older else "there is no older checkpoint"
    raise CheckpointError(
        f"{checkpoint.path}: {names[0]}{more}{where} is not what training held after {checkpoint.step:,} tokens, "
        "though the files are as they were written: memory or a GPU failed, at the save or now. Start again on "
        "another machine; if it stays so, move this checkpoint away and the same command goes "
        f"on from the one before ({back})"
    )


def _checksum(file: Path, moves: Callable[[int], None] = lambda count: None) -> dict[str, int]:
    crc, size = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(_CHUNK):
            crc, size = zlib.crc32(block, crc), size + len(block)
            moves(len(block))
    return {"bytes": size, "crc32": crc}


def _writer_of(file: Path) -> int:
    """The rank that wrote a shard: `__3_0.distcp` is rank 3's, `.metadata` rank 0's."""
    match = re.match(r"__(\d+)_", file.name)
    return int(match[1]) if match else 0


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        # A BaseException that maps ranks to (exception, traceback).
        error = next(iter(error.failures.values()))[0]
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]
