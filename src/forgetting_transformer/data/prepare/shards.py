"""Work on shards of text, in parallel and in order; a killed run keeps finished shards.

Each shard's results are appended to data files and then committed by one line in a log, with a hash of the shard. After
a kill the log counts up to its last whole line: unchanged shards are not worked on again; the first changed one and all
behind it are.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forgetting_transformer.data.worker import leave_with_parent, sharing_memory
from forgetting_transformer.files import append_durably as _append
from forgetting_transformer.files import write_atomically

#: Bytes of text in a shard, about.
SHARD_BYTES = 2 << 20

#: Rows for the data files, by name.
Result = dict[str, np.ndarray]
T = TypeVar("T")


def make_shards(items: Iterable[Any]) -> Iterator[tuple[list[Any], str]]:
    """Yields consecutive items (texts or pieces) that are worked on together, and a hash of their `identity()`."""
    batch: list[Any] = []
    n_bytes, hasher = 0, hashlib.blake2b(digest_size=16)
    for item in items:
        batch.append(item)
        n_bytes += item.n_bytes
        hasher.update(item.identity())
        if n_bytes >= SHARD_BYTES:
            yield batch, hasher.hexdigest()
            batch, n_bytes, hasher = [], 0, hashlib.blake2b(digest_size=16)
    if batch:
        yield batch, hasher.hexdigest()


class ShardLog:
    """Data files in `folder` that grow by a shard at a time, and `shards.jsonl` with a line for each.

    Args:
        dtypes: of a row of each data file.
    """

    def __init__(self, folder: Path, **dtypes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self.paths = {name: folder / f"{name}.bin" for name in dtypes}
        self.log = folder / "shards.jsonl"
        for path in (self.log, *self.paths.values()):
            path.touch()
        self.shards: list[dict[str, Any]] = []
        for line in self.log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the kill may have come in the middle of the last
                self.shards.append(json.loads(line))
        self.keep(len(self.shards))

    def keep(self, n_shards: int) -> None:
        """Drops all shards after the first `n_shards`, and incomplete ones."""
        self.shards = self.shards[:n_shards]
        write_atomically(self.log, "".join(json.dumps(shard) + "\n" for shard in self.shards))
        for name, path in self.paths.items():
            os.truncate(path, self._end(n_shards, name) * self.dtypes[name].itemsize)

    def append(self, digest: str, data: Result) -> None:
        """Commits one shard: its data is on the disk before its line in the log."""
        ends = {}
        for name, rows in data.items():
            _append(self.paths[name], rows.tobytes())
            ends[name] = self._end(len(self.shards), name) + len(rows)
        shard = {"digest": digest, "ends": ends}
        _append(self.log, (json.dumps(shard) + "\n").encode())
        self.shards.append(shard)

    def read(self, number: int, name: str) -> np.ndarray:
        """The rows of a shard in a data file."""
        first, end, dtype = self._end(number, name), self._end(number + 1, name), self.dtypes[name]
        return np.fromfile(self.paths[name], dtype, end - first, offset=first * dtype.itemsize)

    def _end(self, n_shards: int, name: str) -> int:
        """Rows in the first `n_shards` shards."""
        return self.shards[n_shards - 1]["ends"][name] if n_shards else 0


def work_through(
    items: Iterable[Any], log: ShardLog, start: Callable[[list[Any]], "Future[Result]"], workers: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yields the items of each shard with its number, in order, once its results are in the log.

    A caller that takes all of them has a log of these shards alone.

    Args:
        start: begins the work on the items of a shard that is not in the log.
    """

    def begun() -> Iterator[tuple[list[Any], str, "Future[Result] | None"]]:
        for number, (batch, digest) in enumerate(make_shards(items)):
            known = number < len(log.shards)
            if known and log.shards[number]["digest"] == digest:
                yield batch, digest, None
                continue
            if known:  # the text changed since the kill, here or earlier
                log.keep(number)
            yield batch, digest, start(batch)

    number = -1
    for number, (batch, digest, future) in enumerate(ahead(begun(), workers)):
        if future is not None:
            log.append(digest, future.result())
        yield number, batch
    log.keep(number + 1)  # the input may have become shorter since the kill


def ahead(begun: Iterable[T], workers: int) -> Iterator[T]:
    """Yields the items of `begun` in order, two per worker ahead of the caller; taking an item begins its work."""
    waiting: deque[T] = deque()
    for one in begun:
        waiting.append(one)
        if len(waiting) >= 2 * workers:
            yield waiting.popleft()
    yield from waiting


def open_pool(workers: int) -> Executor:
    """An executor for `workers` processes, or a thread for one, to be used as a context manager.

    Raises:
        DataError: there is too little shared memory for more than one.
    """
    if workers == 1:
        return ThreadPoolExecutor(1)
    # Not fork: the parent has threads by now. The fork server imports this package once for all workers.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["forgetting_transformer.data.prepare.stream"])
    with sharing_memory():
        return ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool; no traceback per worker
    leave_with_parent()
