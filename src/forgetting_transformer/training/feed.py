"""Batches for the loop, with checks, and restarts of killed data readers.

The position in the data is arithmetic (data/order.py), so readers can be restarted at the next batch.
"""

import contextlib
import itertools
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from forgetting_transformer.data.batch_checks import check_batch, check_tokens
from forgetting_transformer.data.corpus import Batch
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Number of times that a process restarts its readers.
RESTARTS = 3
_END: Any = object()
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed|exited unexpectedly)")


class DataWorkerError(RuntimeError):
    """The processes that read data died too often. The message has the fix."""


def batches(trainer: TrainerInterface, count: int) -> Iterator[Batch]:
    """Yields this rank's shares of the next `count` global batches.

    Raises:
        DataError: the corpus yields something else than a batch. TrainingError: it yields fewer.
    """
    first, data = trainer.counters.batch_count, trainer.config.datamodule
    corpus = f"datamodule.name={data.name!r}"
    rank, size = trainer.ranks.data_rank, trainer.ranks.data_size
    loader = restarted(
        lambda done: trainer.data.train_loader(first + done, first + count, rank, size),
        lambda: trainer.watchdog.reading(corpus),
    )
    given = 0
    for given, batch in enumerate(itertools.islice(loader, count), 1):
        check_batch(batch, corpus, data.train_batch_size // size, data.train_batch_len)
        if given == 1:
            check_tokens(batch, corpus, trainer.data_info.vocab_size)
        yield batch
    if given < count:
        raise TrainingError(
            f"{corpus} gave {given} batches instead of {count}, from batch {first:,} on; "
            f"{trainer.last_good_checkpoint}. Its train_loader must yield every batch of its range"
        )


def restarted(
    read: Callable[[int], Iterable[T]],
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[T]:
    """Yields the items of `read(0)`. If a data worker dies after n items, those of `read(n)` follow.

    Args:
        waiting: context entered while an item is awaited.

    Raises:
        DataWorkerError: they have died more than RESTARTS times.
    """
    done = 0
    for attempt in range(RESTARTS + 1):
        try:
            with waiting():
                iterator = iter(read(done))
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
