"""Loader that reads batches ahead in a worker process; the worker's start, and shared memory for its batches."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from forgetting_transformer.data.corpus import Batch, shifted
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.packed import keep_apart
from forgetting_transformer.data.vocabulary import Vocabulary
from forgetting_transformer.files import size_in_words

#: Batches that are prepared ahead.
PREFETCHED_BATCHES = 8
#: Seconds that a reader continues after SIGTERM.
GRACE = 5
#: Folder of the memory that processes share on Linux. A container has 64 MiB of it unless it was started with more.
SHARED_MEMORY = "/dev/shm"


class Loader(DataLoader):
    """Prefetches whole batches in a worker process, and makes inputs and labels of them.

    The worker hands over tokens as they are stored, 2 or 4 bytes each. Widened to inputs and labels they would be 16
    bytes to pass between processes, which costs more than all the rest. They are tensors, whose bytes do not go through
    the pipe: a worker in the middle of a long write would outlive a rank that is killed.

    Args:
        dataset: batch index -> `labels`, and `weight` for held-out sequences. indices: of the batches, in order.
        packed: whether texts in a row are kept apart.
    """

    def __init__(
        self, dataset: Dataset, indices: range, num_workers: int, vocabulary: Vocabulary, packed: bool = False
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            sampler=indices,
            num_workers=min(num_workers, 1),
            collate_fn=hand_over if num_workers else None,
            prefetch_factor=PREFETCHED_BATCHES if num_workers else None,
            # Its own generator, so that making an iterator draws nothing from the global random state.
            generator=torch.Generator(),
            worker_init_fn=start_worker,
        )
        self.vocabulary, self.packed = vocabulary, packed

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # batches are widened
        with sharing_memory():
            items = super().__iter__()
        return map(self._widen, received(items))

    def _widen(self, item: dict[str, torch.Tensor]) -> Batch:
        bos, eos = self.vocabulary.bos_token_id, self.vocabulary.eos_token_id
        batch = item | shifted(item["labels"], bos, pinned=torch.cuda.is_available())
        return keep_apart(batch, bos, eos) if self.packed else batch


def start_worker(_worker: int) -> None:
    """Gives a worker one thread, and makes it slow to obey the signals that ask a run to stop.

    Readers copy and decompress; more threads would only take cores from the ranks. Launchers send signals to every
    process of a group or a job, and the run still needs batches for the steps until its ranks have agreed where to
    stop. (If that takes longer, it starts new readers.)
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # A process that ends sends its readers SIGTERM too, once, and waits for them. The alarm ends one that is blocked.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
    leave_with_parent()


def leave_with_parent() -> None:
    """Ends this process when its parent is gone: a killed parent cannot stop its workers.

    PyTorch's readers watch their parent too, but they note which process it is only when they first wait for work. A
    reader whose rank was killed before that would watch another process, and wait for ever.
    """
    if (parent := multiprocessing.parent_process()) is not None:

        def leave() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()


def hand_over(batch: Any) -> Any:
    """Moves a batch into shared memory, in the worker itself; passes on anything else.

    PyTorch would do so in a thread that prints its errors and drops the batch, for which training would wait for ever.

    Raises:
        DataError: there is too little shared memory.
    """
    with sharing_memory():
        return batch and {name: tensor.share_memory_() for name, tensor in batch.items()}


@contextlib.contextmanager
def sharing_memory() -> Iterator[None]:
    """Names shared memory in errors of code that takes it: the system's error does not.

    Raises:
        DataError: naming the resource, its size and the fix.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "filename", None) is None and os.strerror(errno.ENOSPC) in str(error):
            size = ""
            with contextlib.suppress(OSError):
                total, _, free = map(size_in_words, shutil.disk_usage(SHARED_MEMORY))
                size = f" ({total}, {free} free)"
            raise DataError(
                f"{SHARED_MEMORY}{size} is too small for the processes that read data: start the container with a "
                f"larger `--shm-size`, or use no further processes (datamodule.train_num_workers=0 "
                "datamodule.eval_num_workers=0, --workers 1)"
            ) from error
        raise


def received(items: Iterator[Any]) -> Iterator[Any]:
    """Yields a loader's items. Reports a worker that was killed while it passed on a batch as PyTorch reports others.

    Raises:
        DataError: of a worker, without the traceback that PyTorch puts before it.
    """
    try:
        yield from items
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(
            "DataLoader worker (pid unknown) exited unexpectedly, while it handed over a batch"
        ) from error
    except DataError as error:
        raise DataError(str(error).rpartition(f"{type(error).__name__}: ")[2].strip()) from error
