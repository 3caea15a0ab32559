"""Checkpoints, complete or absent.

    checkpoints/step-000000123456/         the number is training tokens
        state/.metadata, state/*.distcp    weights and AdamW's moments, sharded (torch.distributed.checkpoint)
        trainer.json                       counters, resolved config, data fingerprint, versions
        callback_state.safetensors         states of callbacks, and of the guard against bad steps
        manifest.json                      size and CRC-32 of every file above; written last

A save writes everything into a folder with a temporary name, the manifest last, flushes it to disk and renames the
folder. A deletion renames first too. So a folder `step-*` was whole once: without a valid manifest, or with files that
do not match it, it is damaged. Loading passes over it, says why, and takes the next older one; nothing deletes it, and
where no valid one is left the run is refused. The format is the same for every strategy and number of processes.

Writing (writing.py) may happen in a thread while training continues: the loop then waits only until a copy in the
host's memory is made. The thread has its own gloo group, because collectives of two threads in one group would mix.
It is a thread, and not torch.distributed.checkpoint.async_save, because checksums, the manifest and the deletion of
older checkpoints follow the same writing. With async_save, a strategy with the whole model on every rank would also
copy all of it on every rank.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, pack, reason_of
from forgetting_transformer.training.checkpoint.reading import load_training
from forgetting_transformer.training.checkpoint.writing import Writer, tensors_of


@dataclass(frozen=True)
class Saved:
    """End of a save, the same on every rank.

    Attributes:
        step: training tokens done, as in the name of a checkpoint's folder.
        copy_seconds, write_seconds: duration of training's wait for the copy, and of writing.
        error: reason why there is no checkpoint; None if there is one.
    """

    step: int
    copy_seconds: float
    write_seconds: float
    error: CheckpointError | None


class Checkpointer:
    """Saves and loads the checkpoints of one run.

    Args:
        folder: `output_dir/checkpoints`.
        keep_last: rolling checkpoints to keep; two, so that a damaged newest one costs one interval and not the run.
        background: write in a thread, from a copy in the host's memory. False needs no memory for the copy.
        watch: makes a context for every wait for the writer, from a description of the wait.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        background: bool = False,
        watch: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.folder, self.background, self.watch = folder, background, watch
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        # In effect without a limit: a rank with a slow disk is not gone, and `watch` ends a wait for one that hangs.
        self._group = None if is_alone else dist.new_group(backend="gloo", timeout=timedelta(days=7))
        self._stager, self._staged = BlockingAsyncStager(cache_staged_state_dict=True), set[str]()
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        #: Tokens of the last finished checkpoint, or of the one that the run continues from.
        self.last_good: int | None = None
        self._step = 0
        self._writer = Writer(folder, keep_last, self._group)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer_state: dict[str, Any],
        callback_state: dict[str, Tensor],
        permanent: bool,
        before_manifest: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves a checkpoint; called by every rank after the same step. `take_result` returns how it ended.

        Args:
            trainer_state: as JSON. callback_state: small tensors, the same on every rank.
            before_manifest: called on rank 0; puts on disk what must be there before the checkpoint counts.

        Raises:
            CheckpointError: there is nothing to save yet.
        """
        if self._thread is not None:
            raise RuntimeError("take the result of the last save from `take_result` first: one is in flight at a time")
        if not optimizer.state:
            # Asking FSDP2 for the state of a fresh optimizer makes it take a step.
            raise CheckpointError("there is nothing to save before the first optimizer step")
        started = time.perf_counter()
        tensors = tensors_of(model, optimizer)[0]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        mine = self._writer.divide(tensors)
        if self.background:
            mine = self._copied(mine)
        small = pack(callback_state)
        copy_seconds = time.perf_counter() - started
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def write() -> None:
            began, problem = time.perf_counter(), None
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a thread begins on GPU 0
                self._writer.write(step, mine, size, trainer_state, small, permanent, before_manifest)
                self.last_good = step
            except CheckpointError as error:
                problem = error
            except (Exception, CheckpointException) as error:  # the second derives from BaseException alone
                problem = CheckpointError(f"could not write a checkpoint in {self.folder}: {reason_of(error)}")
            self._saved = Saved(step, copy_seconds, time.perf_counter() - began, problem)

        self._step = step
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        if not self.background:
            self._wait()

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy in the host's memory; for tensors of a GPU in pinned memory, which the next copy writes over."""
        if not _on_gpu(tensors):
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if tensors.keys() != self._staged:  # at the first save, or when a parameter has had its first gradient
            self._stager, self._staged = BlockingAsyncStager(cache_staged_state_dict=True), {*tensors}
        return self._stager.stage(tensors)

    def take_result(self, wait: bool = False) -> Saved | None:
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
        return saved

    def _wait(self) -> None:
        """Waits until the save in flight, if any, has ended."""
        if self._thread is not None:
            with self.watch(f"the checkpoint at {self._step:,} tokens"):
                self._thread.join()

    def load(self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fills model and optimizer (reading.py)."""
        load_training(checkpoint, model, optimizer, self._group)


def _on_gpu(tensors: dict[str, Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values())
