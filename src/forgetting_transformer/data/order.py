"""The order in which a run reads its documents: arithmetic on the step, with no state to save or lose.

The paper's order sweeps the first `seq_len` tokens of every document before it reads the second `seq_len` tokens
of any. With D documents, global batch size B and sequence length S there are R = D // B rows and C = doc_len // S
columns; global batch b sits in row r = b % R of column c = b // R and holds

    documents [r·B, (r+1)·B),  tokens [c·S, (c+1)·S).

Ranks slice last: of W ranks, rank k reads the k-th contiguous B/W of those documents. The tokens of a global batch
therefore do not depend on W, so a run may continue on another number of processes.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Location(NamedTuple):
    """Place of a batch's sequences in the array: documents [first, last), tokens [begin, end) of each."""

    first_document: int
    last_document: int
    begin_token: int
    end_token: int

    def sequences(self) -> list[str]:
        """Place of each sequence, in words."""
        tokens = f"tokens {self.begin_token:,}–{self.end_token - 1:,}"
        return [f"document {document:,}, {tokens}" for document in range(self.first_document, self.last_document)]


@dataclass(frozen=True)
class ReadingOrder:
    """The paper's reading order over `documents` rows of `doc_len` tokens (see the module docstring).

    Attributes:
        documents: rows of the array; the last `documents % batch_size` of them are never read.
        doc_len: tokens in a document.
        seq_len: tokens in a training sequence; must divide `doc_len`.
        batch_size: sequences in a *global* batch.
        repeat: whether batches after the last start again at the first (a second epoch, in the same order).
    """

    documents: int
    doc_len: int
    seq_len: int
    batch_size: int
    repeat: bool = False

    @property
    def rows(self) -> int:
        return self.documents // self.batch_size

    @property
    def columns(self) -> int:
        return self.doc_len // self.seq_len

    @property
    def batches(self) -> int:
        """Global batches in one pass over the array."""
        return self.rows * self.columns

    def locate(self, batch: int, rank: int = 0, world_size: int = 1) -> Location:
        """The share of global batch `batch` that `rank` of `world_size` reads.

        Raises:
            IndexError: the batch lies past the end of the data and `repeat` is off.
        """
        if batch >= self.batches and not self.repeat:
            raise IndexError(
                f"global batch {batch:,} lies past the last of {self.batches:,} batches "
                f"({self.documents:,} documents × {self.doc_len:,} tokens at batch size {self.batch_size}, "
                f"sequence length {self.seq_len:,}); set datamodule.repeat=true to read the data again"
            )
        column, row = divmod(batch % self.batches, self.rows)
        share = self.batch_size // world_size
        first = row * self.batch_size + rank * share
        return Location(first, first + share, column * self.seq_len, (column + 1) * self.seq_len)
