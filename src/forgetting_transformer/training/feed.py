"""Batches for the loop, also when a process that reads them is killed.

The position in the data is arithmetic (data/order.py), so readers can be restarted at the next batch.
"""

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How often a process restarts its readers.
RESTARTS = 3
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed|exited unexpectedly)")


class DataWorkerError(RuntimeError):
    """The processes that read data keep dying; the message says what to do."""


def feed(start: Callable[[int], Iterable[T]]) -> Iterator[T]:
    """Items of `start(0)`; if a data worker dies after n of them it goes on with `start(n)`.

    Raises:
        DataWorkerError: they have died more than RESTARTS times.
    """
    done = 0
    for attempt in range(RESTARTS + 1):
        try:
            iterator = iter(start(done))
            if threading.current_thread() is threading.main_thread():
                # PyTorch would raise out of a signal handler, in the middle of a step, where ranks no longer agree.
                # Without it the death is noticed where the next batch is asked for, within five seconds.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for item in iterator:
                done += 1
                yield item
            return
        except RuntimeError as error:
            if not _WORKER_DIED.search(str(error)):
                raise
            if attempt == RESTARTS:
                raise DataWorkerError(
                    f"{str(error).splitlines()[0]} This was the {RESTARTS + 1}th time. Memory is the usual reason: see "
                    "`dmesg`, lower datamodule.train_num_workers, then start the same command again"
                ) from error
            log.warning("%s Readers are restarted", str(error).splitlines()[0])
