"""Decoded chunks, kept while neighbouring batches need them, in memory that the workers of a rank share.

A chunk of LongCrawl64 holds 2048 documents × 2048 tokens, 8 MiB. A batch of 32 × 16,384 tokens needs 32 rows of 8
chunks, and the next 63 batches need the other rows of the same chunks. Decoding per batch does 64 times the work of
decoding once. Several worker processes take turns at the batches, so each of them needs every chunk: they share the
decoded ones here, and the first to need a chunk decodes it for all.

Room is made in the order of the data, not of the clock: of two workers one may be eight batches behind the other,
and what the faster one used last is then not what is needed next.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

#: What a slot of the table says: nothing in it, being decoded into, or holding a chunk.
EMPTY, FILLING, READY = 0, 1, 2
#: Columns of the table, one line per slot. LAST_TURN is the furthest batch in the order of the data that used the
#: chunk, LAST_USED counts uses as they happened, FILLER is the process that decodes, or decoded, into the slot.
STATE, CHUNK_ROW, CHUNK_COLUMN, LAST_TURN, LAST_USED, FILLER = range(N_COLUMNS := 6)

#: Seconds between looks at a chunk that another decodes (some milliseconds; seconds where it is fetched). Looks, and
#: no condition variable: multiprocessing's waits for sleepers that were killed.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
#: Seconds after which the lock, which is held for fractions of a millisecond, is held by a process that was killed.
LONGEST_HOLD = 20.0

Chunk = tuple[int, int]


class DecodedChunks:
    """A fixed number of decoded chunks; the one whose last user comes first in the order of the data makes room.

    Args:
        chunk_shape: documents and tokens of a chunk.
        slots: chunks kept; the memory is `slots` × documents × tokens × bytes of a token, taken when the object is
            made.
        context: multiprocessing context of the worker processes, started later, that are to see the same chunks;
            None: only threads of this process do.
        dtype: of the tokens.

    The memory belongs to no name that could outlive its processes: it is gone when the last of them is, however it
    ends. A worker may be killed at any moment; no other waits for it for ever.
    """

    def __init__(
        self,
        chunk_shape: tuple[int, int],
        slots: int,
        context: Any | None,
        dtype: np.dtype | type[np.generic],
    ) -> None:
        self.chunk_shape, self.slots, self.dtype = chunk_shape, slots, np.dtype(dtype)
        n_tokens = slots * chunk_shape[0] * chunk_shape[1]
        if context is not None:
            self._raw_tokens: Any = context.RawArray(np.ctypeslib.as_ctypes_type(self.dtype), n_tokens)
            self._raw_table: Any = context.RawArray(ctypes.c_int64, N_COLUMNS * slots)
            self._raw_counts: Any = context.RawArray(ctypes.c_int64, 2)
            self._lock: Any = context.Lock()
        else:
            self._raw_tokens = np.empty(n_tokens, dtype=self.dtype)
            self._raw_table = np.zeros(N_COLUMNS * slots, dtype=np.int64)
            self._raw_counts = np.zeros(2, dtype=np.int64)
            self._lock = threading.Lock()
        self._view()

    def _view(self) -> None:
        """Arrays over the memory: made in each process, because a pickled array would be a copy."""
        rows, columns = self.chunk_shape
        self._tokens = np.frombuffer(self._raw_tokens, dtype=self.dtype).reshape(self.slots, rows, columns)
        self._table = np.frombuffer(self._raw_table, dtype=np.int64).reshape(self.slots, N_COLUMNS)
        self._counts = np.frombuffer(self._raw_counts, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_tokens", "_table", "_counts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view()

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes

    @property
    def decoded(self) -> int:
        """Chunks decoded so far, by all processes."""
        return int(self._counts[0])

    def copy(
        self,
        chunk: Chunk,
        decode: Callable[[], np.ndarray],
        source: tuple[slice, slice],
        target: np.ndarray,
        turn: int = 0,
    ) -> None:
        """Copies the part `source` of a chunk into `target`, after `decode()` if no one has decoded it yet.

        `decode` returns at most chunk_shape tokens (fewer at the ragged edges of an array); what it raises is raised
        here, and the next one to need the chunk tries again. `turn` is the number of the batch that needs it, in the
        order of the data; within a turn the chunk unused for longest makes room.
        """
        pause = SHORTEST_PAUSE
        while True:
            with self._locked():
                slot = self._find(chunk)
                if slot is None:
                    slot = self._claim(chunk, turn)
                    if slot is not None:
                        break  # ours to decode
                elif self._table[slot, STATE] == READY:
                    self._table[slot, LAST_TURN] = max(turn, int(self._table[slot, LAST_TURN]))
                    self._table[slot, LAST_USED] = self._tick()
                    target[...] = self._tokens[slot][source]
                    return
            # Another decodes this chunk, or all slots are being filled.
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        try:
            # Outside the lock: others copy from, and decode, other chunks meanwhile. No one takes a slot being filled.
            tokens = decode()
            self._tokens[slot, : tokens.shape[0], : tokens.shape[1]] = tokens
        except BaseException:
            self._set_state(slot, EMPTY)
            raise
        target[...] = tokens[source]
        self._set_state(slot, READY)

    def lacking(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of `chunks` that are not here and that no one is decoding."""
        with self._locked():
            here = {(int(line[CHUNK_ROW]), int(line[CHUNK_COLUMN])) for line in self._table if line[STATE] != EMPTY}
        return [chunk for chunk in chunks if chunk not in here]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(True, LONGEST_HOLD):
            raise RuntimeError("another worker was killed while it held the lock of the decoded chunks")
        try:
            yield
        finally:
            self._lock.release()

    def _find(self, chunk: Chunk) -> int | None:
        table = self._table
        found = np.flatnonzero(
            (table[:, STATE] != EMPTY) & (table[:, CHUNK_ROW] == chunk[0]) & (table[:, CHUNK_COLUMN] == chunk[1])
        )
        if not found.size:
            return None
        slot = int(found[0])
        if table[slot, STATE] == FILLING and not _exists(int(table[slot, FILLER])):
            table[slot, STATE] = EMPTY  # killed while it decoded
            return None
        return slot

    def _claim(self, chunk: Chunk, turn: int) -> int | None:
        """A slot for the caller to fill: an empty one, else one that makes room; None while all are being filled."""
        table = self._table
        if (table[:, STATE] == FILLING).all():
            return None
        rank = np.select([table[:, STATE] == EMPTY, table[:, STATE] == FILLING], [0, 2], 1)
        slot = int(np.lexsort((table[:, LAST_USED], table[:, LAST_TURN], rank))[0])
        table[slot] = (FILLING, *chunk, turn, self._tick(), os.getpid())
        return slot

    def _set_state(self, slot: int, state: int) -> None:
        with self._locked():
            self._table[slot, STATE] = state
            if state == READY:
                self._counts[0] += 1

    def _tick(self) -> int:
        self._counts[1] += 1
        return int(self._counts[1])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def slots_for(chunk_shape: tuple[int, int], window_documents: int, seq_len: int, doc_len: int, documents: int) -> int:
    """Chunks to keep so that batches in flight never push out one that another of them, or the next one, needs.

    Batches sweep a column of `seq_len` tokens over all documents, then the next column. While batches o … o + n - 1
    may be in work, what they still need was last used by batch o - 1 or later. So a window of n + 1 batches is
    enough, however far one worker is ahead of another: whatever else is here was last used before it.

    Args:
        window_documents: sequences from the first of the oldest batch in that window to the last of the newest.
        seq_len: tokens that a batch takes of each document.
        documents: how many are swept.

    Returns:
        What one row of chunks needs, times the rows of chunks that such a window can touch; no more than there are.
    """
    rows, columns = chunk_shape
    aligned = seq_len % columns == 0 or columns % seq_len == 0
    across = -(-seq_len // columns) + (0 if aligned else 1)
    all_down = -(-documents // rows)
    # Inside a column a window of any length can begin and end in the middle of a row of chunks.
    down = min((window_documents - 1) // rows + 2, all_down)
    # Or it begins in one column, at document `first`, covers some whole, and ends in another, before `end`.
    first = np.arange(max(0, documents - window_documents), documents)
    whole, end = np.divmod(window_documents - (documents - first), documents)
    down = max(down, int((all_down - first // rows + whole * all_down + -(-end // rows)).max()))
    return min(across * down, all_down * -(-doc_len // columns))
