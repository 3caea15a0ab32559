"""Decoded chunks, kept while the batches that follow need them.

A chunk of LongCrawl64 holds 2048 documents × 2048 tokens, 8 MiB. A batch of 32 × 16,384 tokens needs 32 rows of 8
chunks, and the next 63 batches need the other rows of the same chunks. Decoding per batch does 64 times the work of
decoding once. One process reads all batches of a rank in order, so the chunks used last are the ones needed next.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

Chunk = tuple[int, int]


class DecodedChunks:
    """The `slots` chunks used last, of one array and one process."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._chunks: OrderedDict[Chunk, np.ndarray] = OrderedDict()

    def lacking(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """The chunks that are not kept."""
        return [chunk for chunk in chunks if chunk not in self._chunks]

    def get(self, chunk: Chunk, decode: Callable[[Chunk], np.ndarray]) -> np.ndarray:
        """The tokens of a chunk, after `decode(chunk)` if they are not kept."""
        if chunk not in self._chunks:
            while len(self._chunks) >= self.slots:
                self._chunks.popitem(last=False)
            self._chunks[chunk] = decode(chunk)
        self._chunks.move_to_end(chunk)
        return self._chunks[chunk]


def slots_for(chunk_shape: tuple[int, int], n_documents: int, seq_len: int) -> int:
    """Most chunks that `seq_len` tokens of `n_documents` neighbouring documents touch.

    So many are enough: whatever the next batch shares with this one was used last.
    """
    rows, columns = chunk_shape
    aligned = seq_len % columns == 0 or columns % seq_len == 0
    across = -(-seq_len // columns) + (0 if aligned else 1)
    down = (n_documents - 1) // rows + 2  # the first and the last may be in the middle of a chunk
    return across * down
