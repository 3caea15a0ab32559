"""An array with chunks missing on purpose: its complete documents, and their places on disk.

Only whole rows of chunks are of use: a document lies in all chunks of a row. Other documents do not exist for a run,
and the list of those that do is part of the fingerprint.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import product

import numpy as np

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.token_array import Chunk, TokenArray


class SparseTokenArray(TokenArray):
    """A token array of the documents whose chunks are all there, renumbered in order.

    Raises:
        DataError: as of TokenArray; there is no such document, or the files cannot be listed.
    """

    def _count_documents(self) -> int:
        whole = whole_rows(keys_of(self), self.files.names())
        if not whole:
            raise DataError(
                f"{self.path} has no row of chunks with all its files, so missing_chunks=skip leaves no document. "
                "scripts/verify_data.py shows what is there"
            )
        #: Rows of chunks that are whole.
        self.present_rows = np.array(whole)
        #: The first document of each of them, and the number of all documents at the end.
        self._firsts = np.cumsum([0, *(documents_in(self, [row]) for row in whole)])
        return int(self._firsts[-1])

    def stored_row(self, document: int) -> int:
        block = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return int(self.present_rows[block]) * self.chunk_shape[0] + document - int(self._firsts[block])

    def _shape_in_words(self) -> str:
        if self.documents == self.stored_documents:  # nothing is missing, so it is the whole array
            return super()._shape_in_words()
        return f"{super()._shape_in_words()}present {self.chunk_shape[0]}-row blocks {self.present_rows.tolist()}"


def keys_of(array: TokenArray) -> dict[Chunk, str]:
    """Names of the files of all chunks."""
    rows, columns = (-(-array.stored_documents // array.chunk_shape[0]), -(-array.doc_len // array.chunk_shape[1]))
    return {chunk: array.key(chunk) for chunk in product(range(rows), range(columns))}


def whole_rows(keys: Mapping[Chunk, str], there: Collection[str]) -> list[int]:
    """Rows of chunks of which all files in `keys` are in `there`."""
    return sorted({row for row, _ in keys} - {row for (row, _), key in keys.items() if key not in there})


def documents_in(array: TokenArray, rows: Iterable[int]) -> int:
    """Documents in rows of chunks."""
    height = array.chunk_shape[0]
    return sum(min((row + 1) * height, array.stored_documents) - row * height for row in rows)
