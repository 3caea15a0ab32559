"""Decoded chunks, kept while neighbouring batches need them, in memory that the workers of a rank share.

A chunk of LongCrawl64 holds 2048 documents × 2048 tokens, 8 MiB. A batch of 32 × 16,384 tokens needs 32 rows of 8
chunks, and the next 63 batches need the other rows of the same chunks. Decoding per batch does 64 times the work of
decoding once. Several worker processes take turns at the batches, so each of them needs every chunk: they share the
decoded ones here, and the first to need a chunk decodes it for all.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

#: What a slot of the table says: nothing in it, being decoded into, or holding a chunk.
EMPTY, FILLING, READY = 0, 1, 2
#: Columns of the table, one line per slot.
STATE, CHUNK_ROW, CHUNK_COLUMN, LAST_USED = range(4)

Chunk = tuple[int, int]


class DecodedChunks:
    """A fixed number of decoded chunks; the one unused for longest makes room.

    Args:
        chunk_shape: documents and tokens of a chunk.
        slots: chunks kept; the memory is `slots` × documents × tokens × 2 bytes, taken when the object is made.
        context: multiprocessing context of the worker processes, started later, that are to see the same chunks;
            None: only threads of this process do.

    The memory belongs to no name that could outlive its processes: it is gone when the last of them is, however it
    ends.
    """

    def __init__(self, chunk_shape: tuple[int, int], slots: int, context: Any | None) -> None:
        self.chunk_shape, self.slots = chunk_shape, slots
        n_tokens = slots * chunk_shape[0] * chunk_shape[1]
        if context is not None:
            self._raw_tokens: Any = context.RawArray(ctypes.c_uint16, n_tokens)
            self._raw_table: Any = context.RawArray(ctypes.c_int64, 4 * slots)
            self._raw_counts: Any = context.RawArray(ctypes.c_int64, 2)
            self._changed: Any = context.Condition()
        else:
            self._raw_tokens = np.empty(n_tokens, dtype=np.uint16)
            self._raw_table = np.zeros(4 * slots, dtype=np.int64)
            self._raw_counts = np.zeros(2, dtype=np.int64)
            self._changed = threading.Condition()
        self._view()

    def _view(self) -> None:
        """Arrays over the memory: made in each process, because a pickled array would be a copy."""
        rows, columns = self.chunk_shape
        self._tokens = np.frombuffer(self._raw_tokens, dtype=np.uint16).reshape(self.slots, rows, columns)
        self._table = np.frombuffer(self._raw_table, dtype=np.int64).reshape(self.slots, 4)
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
        self, chunk: Chunk, decode: Callable[[], np.ndarray], source: tuple[slice, slice], target: np.ndarray
    ) -> None:
        """Copies the part `source` of a chunk into `target`, after `decode()` if no one has decoded it yet.

        `decode` returns at most chunk_shape tokens (fewer at the ragged edges of an array); what it raises is raised
        here, and the next one to need the chunk tries again.
        """
        with self._changed:
            while True:
                slot = self._find(chunk)
                if slot is None:
                    slot = self._claim(chunk)
                    if slot is not None:
                        break  # ours to decode
                elif self._table[slot, STATE] == READY:
                    self._table[slot, LAST_USED] = self._tick()
                    target[...] = self._tokens[slot][source]
                    return
                self._changed.wait()  # until another has decoded this chunk, or a slot is free
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
        with self._changed:
            here = {(int(line[CHUNK_ROW]), int(line[CHUNK_COLUMN])) for line in self._table if line[STATE] != EMPTY}
        return [chunk for chunk in chunks if chunk not in here]

    def _find(self, chunk: Chunk) -> int | None:
        table = self._table
        found = np.flatnonzero(
            (table[:, STATE] != EMPTY) & (table[:, CHUNK_ROW] == chunk[0]) & (table[:, CHUNK_COLUMN] == chunk[1])
        )
        return int(found[0]) if found.size else None

    def _claim(self, chunk: Chunk) -> int | None:
        """A slot for the caller to fill: an empty one, else the one unused for longest; None while all are filled."""
        states = self._table[:, STATE]
        if (states == FILLING).all():
            return None
        age = np.select([states == EMPTY, states == FILLING], [-1, np.iinfo(np.int64).max], self._table[:, LAST_USED])
        slot = int(age.argmin())
        self._table[slot] = (FILLING, *chunk, self._tick())
        return slot

    def _set_state(self, slot: int, state: int) -> None:
        with self._changed:
            self._table[slot, STATE] = state
            if state == READY:
                self._counts[0] += 1
            self._changed.notify_all()

    def _tick(self) -> int:
        self._counts[1] += 1
        return int(self._counts[1])


def slots_for(chunk_shape: tuple[int, int], window_documents: int, seq_len: int, doc_len: int, documents: int) -> int:
    """Chunks to keep so that batches in flight never push out one that another of them needs.

    Args:
        window_documents: documents from the first of the oldest batch in flight to the last of the newest.
        seq_len: tokens that a batch takes of each document.

    Returns:
        What one row of chunks needs, times the rows of chunks that such a window can touch.
    """
    rows, columns = chunk_shape
    aligned = seq_len % columns == 0 or columns % seq_len == 0
    across = -(-seq_len // columns) + (0 if aligned else 1)
    # A window that is no longer than a row of chunks can lie across two of them.
    down = (window_documents - 1) // rows + 2
    return min(across, -(-doc_len // columns)) * min(down, -(-documents // rows))
