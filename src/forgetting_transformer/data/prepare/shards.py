"""Work on shards of text, in parallel and in order, of which a killed run keeps what is done.

Each shard's results are appended to data files and then committed by one line in a log, with a hash of the shard. After
a kill the log is believed up to its last whole line: a shard that is still the same is not worked on again, and from
the first that changed everything is.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from forgetting_transformer.files import append_durably as _append
from forgetting_transformer.files import write_atomically

#: Bytes of text in a shard, about.
SHARD_BYTES = 2 << 20


class HasDigest(Protocol):
    @property
    def digest(self) -> str: ...


Shard = TypeVar("Shard", bound=HasDigest)
#: Data files by name, and other facts for the log.
Result = tuple[dict[str, np.ndarray], dict[str, Any]]


class ShardLog:
    """Data files in `folder` that grow by a shard at a time, and `shards.jsonl` with a line for each.

    Args:
        dtypes: of the data files, by name; their rows have `width` items.
    """

    def __init__(self, folder: Path, dtypes: dict[str, np.dtype], width: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.dtypes = {name: np.dtype(dtype).newbyteorder("<") for name, dtype in dtypes.items()}
        self.width, self.paths = width, {name: folder / f"{name}.bin" for name in dtypes}
        self.log = folder / "shards.jsonl"
        for path in (self.log, *self.paths.values()):
            path.touch()
        rows = {name: path.stat().st_size // self._row_bytes(name) for name, path in self.paths.items()}
        self.shards: list[dict[str, Any]] = []
        for line in self.log.read_text().splitlines(keepends=True):
            # The kill may have come in the middle of a line, or a machine lost power before the data was there.
            if not line.endswith("\n") or any(json.loads(line)["ends"][name] > rows[name] for name in rows):
                break
            self.shards.append(json.loads(line))
        self.keep(len(self.shards))

    def _row_bytes(self, name: str) -> int:
        return self.dtypes[name].itemsize * self.width

    def _end(self, n_shards: int, name: str) -> int:
        """Rows in the first `n_shards` shards."""
        return self.shards[n_shards - 1]["ends"][name] if n_shards else 0

    def keep(self, n_shards: int) -> None:
        """Forgets all shards after the first `n_shards`, and what a kill left behind them."""
        self.shards = self.shards[:n_shards]
        write_atomically(self.log, "".join(json.dumps(shard) + "\n" for shard in self.shards))
        for name, path in self.paths.items():
            os.truncate(path, self._end(n_shards, name) * self._row_bytes(name))

    def append(self, digest: str, data: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
        """Commits one shard: the data is on the disk before the line that says so."""
        ends = {}
        for name, rows in data.items():
            _append(self.paths[name], rows.astype(self.dtypes[name], copy=False).tobytes())
            ends[name] = self._end(len(self.shards), name) + len(rows)
        shard = {"digest": digest, "ends": ends, **facts}
        _append(self.log, (json.dumps(shard) + "\n").encode())
        self.shards.append(shard)

    def has(self, number: int, digest: str) -> bool:
        return number < len(self.shards) and self.shards[number]["digest"] == digest

    def read(self, number: int, name: str) -> np.ndarray:
        """The rows of a shard, `(rows, width)`."""
        first, end = self._end(number, name), self._end(number + 1, name)
        return self.rows(name, first, end - first)

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        """Some rows of all shards, `(count, width)`."""
        found = np.fromfile(
            self.paths[name], self.dtypes[name], count * self.width, offset=first * self._row_bytes(name)
        )
        return found.reshape(count, self.width)


def work_through(
    shards: Iterable[Shard], log: ShardLog, start: Callable[[Shard], "Future[Result]"], workers: int
) -> Iterator[tuple[int, Shard]]:
    """Yields each shard with its number, in order, once its results are in the log.

    At most two shards per worker are held in memory. A caller that takes all of them has a log of these shards alone.

    Args:
        start: begins the work on a shard that is not in the log.
    """
    waiting: deque[tuple[Shard, Future[Result]]] = deque()

    def commit() -> tuple[int, Shard]:
        shard, future = waiting.popleft()
        log.append(shard.digest, *future.result())
        return len(log.shards) - 1, shard

    number = -1
    for number, shard in enumerate(shards):
        if log.has(number, shard.digest):
            yield number, shard
            continue
        if number < len(log.shards):  # the text changed since the kill, here or earlier
            log.keep(number)
        waiting.append((shard, start(shard)))
        if len(waiting) >= 2 * workers:
            yield commit()
    while waiting:
        yield commit()
    log.keep(number + 1)  # the input may have become shorter since the kill
