"""Restarts of killed data readers.

The position in the data is arithmetic (data/order.py), so readers can be restarted at the next batch.
"""

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Number of times that a process restarts its readers.
RESTARTS = 3
_END: Any = object()
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed|exited unexpectedly)")


class DataWorkerError(RuntimeError):
    """The processes that read data died too often. The message has the fix."""


def restarted(
    start: Callable[[int], Iterable[T]],
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[T]:
    """Yields the items of `start(0)`. If a data worker dies after n items, those of `start(n)` follow.

    Args:
        waiting: context entered while an item is awaited.

    Raises:
        DataWorkerError: they have died more than RESTARTS times.
    """
    done = 0
    for attempt in range(RESTARTS + 1):
        try:
            with waiting():
                iterator = iter(start(done))
            if threading.current_thread() is threading.main_thread():
                # PyTorch would raise out of a signal handler, in the middle of a step, where ranks no longer agree.
                # Without it the death is noticed where the next batch is requested, within five seconds.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            while True:
                with waiting():
                    item = next(iterator, _END)
                if item is _END:
                    return
                done += 1
                yield item
        except RuntimeError as error:
            if not _WORKER_DIED.search(str(error)):
                raise
            if attempt == RESTARTS:
                raise DataWorkerError(
                    f"{str(error).splitlines()[0]} This was the {RESTARTS + 1}th time. Memory is the usual reason: see "
                    "`dmesg`, set datamodule.train_num_workers=0, or start the container with a larger `--shm-size`"
                ) from error
            log.warning("%s Readers are restarted", str(error).splitlines()[0])
