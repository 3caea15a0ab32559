"""Writer of a checkpoint: all ranks write beside, flush, name the files in a manifest, and rename last."""

import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from forgetting_transformer.files import flush, size_in_words, write_atomically
from forgetting_transformer.training.checkpoint import folder as checkpoints
from forgetting_transformer.training.checkpoint.folder import (
    CALLBACK_STATE,
    MANIFEST,
    NAME,
    CheckpointError,
    checksum,
    reason_of,
    step_of,
)

log = logging.getLogger(__name__)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns everything to save by name, `model.<parameter>` or `optimizer.state.<parameter>.<moment>`, and torch's
    flattened state of the optimizer.

    Names do not depend on how parameters are grouped or sharded. The optimizer's settings are not saved: the config
    sets them.
    """
    # The model first: FSDP2 has gathered weights after an evaluation, and this puts the shards back in their place.
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}
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


def remove_leftovers(folder: Path) -> None:
    """Removes what an interrupted save or deletion left behind; on rank 0."""
    for path in sorted(folder.glob(".*")):
        if checkpoints.LEFTOVER.fullmatch(path.name):
            log.warning("removing %s, which an interrupted save or deletion left behind", path)
            shutil.rmtree(path, ignore_errors=True)


class Writer:
    """Writes checkpoints on all ranks, and deletes old ones.

    Args:
        folder, keep_last: as of `Checkpointer`.
        group: gloo group of all ranks; None for one.
    """

    def __init__(self, folder: Path, keep_last: int, group: dist.ProcessGroup | None) -> None:
        self.folder, self.keep_last, self._group = folder, keep_last, group
        self.rank = 0 if group is None else dist.get_rank()

    def divide(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that this rank writes: its shards, and an equal share of those that every rank holds whole."""
        mine: dict[str, Tensor] = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        # The same division on every rank: the largest first, each to the rank with the least so far.
        load = [0] * (1 if self._group is None else dist.get_world_size())
        for name in sorted(tensors.keys() - mine.keys(), key=lambda name: (-tensors[name].nbytes, name)):
            writer = load.index(min(load))
            load[writer] += tensors[name].nbytes
            if writer == self.rank:
                mine[name] = tensors[name]
        return mine

    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        size: int,
        trainer_state: dict[str, Any],
        callback_state: bytes,
        permanent: bool,
        before_manifest: Callable[[], None],
    ) -> None:
        """Writes this rank's `tensors`, of a checkpoint of `size` bytes.

        Raises:
            CheckpointError: on every rank, if any rank could not write (full disk, no permission, …). What was written
                is removed, older checkpoints are untouched, and training may go on.
        """
        final = self.folder / checkpoints.name_of(step)
        temporary = self.folder / f"{checkpoints.TEMPORARY}{final.name}"
        self._agree(lambda: self._prepare(temporary, size), "make room for")
        try:
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(temporary / "state", overwrite=False),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (Exception, CheckpointException):
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        checksums = self._gather_checksums(temporary)

        def publish() -> None:
            before_manifest()
            (temporary / CALLBACK_STATE).write_bytes(callback_state)
            (temporary / "trainer.json").write_text(json.dumps(trainer_state, indent=1), encoding="utf-8")
            for name in (CALLBACK_STATE, "trainer.json"):
                flush(temporary / name)
                checksums[name] = checksum(temporary / name)
            flush(temporary / "state")
            manifest = {"format": checkpoints.FORMAT, "step": step, "permanent": permanent, "files": checksums}
            write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))  # flushes the folder too
            self._give_name(temporary, final)

        self._agree(publish, "finish")
        if self.rank == 0:
            self._remove_old(step)

    def _prepare(self, temporary: Path, size: int) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "state").mkdir(parents=True)
        if (free := shutil.disk_usage(temporary).free) < size:
            words = f"the disk has {size_in_words(free)} left, a checkpoint needs {size_in_words(size)}"
            raise OSError(errno.ENOSPC, words)

    def _gather_checksums(self, temporary: Path) -> dict[str, dict[str, int]]:
        """Every rank reads back what it wrote, so that the work is shared: `__3_0.distcp` is rank 3's."""
        files = [*(temporary / "state").glob(f"__{self.rank}_*")]
        if self.rank == 0:
            files.append(temporary / "state" / ".metadata")
        mine = {f"state/{file.name}": checksum(file) for file in files}
        if self._group is None:
            return mine
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, mine, group=self._group)
        return {name: entry for part in gathered for name, entry in part.items()}

    def _give_name(self, temporary: Path, final: Path) -> None:
        try:
            checkpoints.inspect(final)
            # It is whole: the start could not read it for a while. It stays, for while it is replaced there would be
            # none.
            shutil.rmtree(temporary)
        except CheckpointError as error:
            if final.exists():  # damaged, and may still be mended
                log.warning("%s cannot be used (%s); it is now %s", final, error, checkpoints.set_aside(final))
            temporary.rename(final)
        flush(self.folder)

    def _remove_old(self, step: int) -> None:
        """Keeps the newest `keep_last` checkpoints up to `step` and the permanent ones."""
        older = [
            path
            for path in sorted(self.folder.glob("step-*"), reverse=True)
            if NAME.fullmatch(path.name) and step_of(path) <= step and (path / MANIFEST).is_file()
        ]
        for path in older[self.keep_last :]:
            try:
                if not json.loads((path / MANIFEST).read_text(encoding="utf-8"))["permanent"]:
                    checkpoints.remove(path)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                # Housekeeping: folders that cannot be read or deleted stay, and training continues.
                log.warning("could not tidy up %s: %s", path, error)

    def _agree(self, action: Callable[[], None], what: str) -> None:
        """Runs an action on rank 0; if it fails, every rank raises."""
        problem: list[str | None] = [None]
        if self.rank == 0:
            try:
                action()
            except Exception as error:  # whatever it is, the other ranks must hear of it
                problem = [reason_of(error)]
                remove_leftovers(self.folder)
        if self._group is not None:
            dist.broadcast_object_list(problem, src=0, group=self._group)
        if problem[0] is not None:
            raise CheckpointError(f"could not {what} a checkpoint in {self.folder}: {problem[0]}")
