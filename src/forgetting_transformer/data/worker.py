"""Start of a worker process, and the shared memory in which it hands over batches."""

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

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.files import size_in_words

#: Seconds that a reader continues after SIGTERM.
GRACE = 5
#: Folder of the memory that processes share on Linux. A container has 64 MiB of it unless it was started with more.
SHARED_MEMORY = "/dev/shm"
_LITTLE_SHARED_MEMORY = 1 << 30
_NO_WORKERS = "datamodule.train_num_workers=0 and datamodule.eval_num_workers=0"
_MORE_MEMORY = "start the container with a larger `--shm-size`"


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
    """From here on this process ends when the one that started it is gone: killed, it could not stop its workers.

    PyTorch's readers look for their parent too, but take for it the one they have when they first wait for work. A
    reader whose rank was killed before that would wait for ever.
    """
    threading.Thread(target=_wait_and_leave, daemon=True).start()


def _wait_and_leave() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def hand_over(batch: Any) -> Any:
    """Moves a batch, if it is one, into shared memory, in the worker itself.

    PyTorch would do so in a thread that prints its errors and drops the batch, for which training would wait for ever.

    Raises:
        DataError: there is too little shared memory.
    """
    with sharing_memory():
        return batch and {name: tensor.share_memory_() for name, tensor in batch.items()}


@contextlib.contextmanager
def sharing_memory(fix: str = f", or set {_NO_WORKERS}") -> Iterator[None]:
    """Around what takes shared memory: the system's error does not name it.

    Args:
        fix: what helps besides more of it, for the message.

    Raises:
        DataError: naming the resource, its size and the fix.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "filename", None) is None and os.strerror(errno.ENOSPC) in str(error):
            raise DataError(
                f"{shared_memory()} is too small for the processes that read data: {_MORE_MEMORY}{fix}"
            ) from error
        raise


def received(items: Iterator[Any]) -> Iterator[Any]:
    """A loader's items. A worker that was killed while it handed over a batch is reported as PyTorch reports others.

    Raises:
        DataError: of a worker, without the traceback that PyTorch puts before it.
    """
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except (ConnectionError, EOFError) as error:
            raise RuntimeError(
                "DataLoader worker (pid unknown) exited unexpectedly, while it handed over a batch"
            ) from error
        except DataError as error:
            raise DataError(str(error).rpartition(f"{type(error).__name__}: ")[2].strip()) from error
        yield item


def shared_memory() -> str:
    """The memory that processes share, with its size."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return "shared memory"
    return f"{SHARED_MEMORY} ({size_in_words(usage.total)}, {size_in_words(usage.free)} free)"


def shared_memory_hint() -> str:
    """The end of a message about readers that give nothing, where there is little shared memory; else nothing."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(SHARED_MEMORY).total < _LITTLE_SHARED_MEMORY:
            return f"; {shared_memory()} may be too small: {_MORE_MEMORY}, or set {_NO_WORKERS}"
    return ""
