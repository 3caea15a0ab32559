"""One Zarr array of token ids, (documents, doc_len) uint16 or uint32, read without ever inventing data.

Zarr silently returns its fill value, zero, for a chunk that is not on disk. A partial copy of a corpus would then train
on documents of zeros. Here a chunk is read from its file, or an error names the file. sparse.py has the array of which
some chunks are missing on purpose.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.array_files import ArrayFiles, open_array
from forgetting_transformer.data.storage.checksums import identity
from forgetting_transformer.data.storage.remote import is_url
from forgetting_transformer.data.storage.remote_cache import CacheSettings
from forgetting_transformer.data.vocabulary import (
    TOKEN_DTYPES,
    StatedVocabulary,
    Vocabulary,
    read_manifest,
    vocabulary_of,
)

#: Rows looked at when an array is opened, spread evenly over it: enough to catch a wrong tokenizer or a wrong file.
SAMPLED_ROWS = 16
SAMPLED_TOKENS = 1024

#: Row and column among the chunks of an array.
Chunk = tuple[int, int]


class TokenArray:
    """A Zarr v2 or v3 array of uint16 or uint32 token ids, one document per row, each chunk a file.

    A chunk of LongCrawl64 holds 2048 documents × 2048 tokens, 8 MiB. A batch of 32 × 16,384 tokens needs 32 rows of 8
    chunks, and the next 63 batches need the other rows of the same chunks. Decoding per batch does 64 times the work
    of decoding once, so decoded chunks are kept (`keep`).

    Args:
        path: the array's folder, such as `data/longcrawl64/train.zarr`, or a URL such as s3://bucket/train.zarr.
        vocabulary: stated by the user; the manifest beside the array and `assumed` complete it (vocabulary_of). Or a
            number that ids must be below, where BOS and EOS do not matter.
        cache: where the files of a URL are kept, and how many; None is the default of CacheSettings.
        sampled: whether to check some rows now.

    Attributes:
        documents, doc_len: the shape that can be read.
        dtype: of the ids as they are stored, one of TOKEN_DTYPES.
        chunk_shape: documents and tokens that are decoded together.

    Raises:
        DataError: no array there, or one of another shape or dtype, with ids out of range or with missing chunks
            among the sampled rows.
    """

    def __init__(
        self,
        path: str | Path,
        vocabulary: int | StatedVocabulary,
        cache: CacheSettings | None = None,
        assumed: Vocabulary | None = None,
        sampled: bool = True,
    ) -> None:
        self.files = ArrayFiles(path, cache or CacheSettings())
        self.path = self.files.path
        corpus = str(path).rstrip("/").rpartition("/")[0] if is_url(path) else Path(path).parent
        self.manifest = read_manifest(corpus)
        array = open_array(self.files)
        if array.ndim != 2 or array.dtype not in TOKEN_DTYPES:
            raise DataError(
                f"{self.path} has shape {array.shape} and dtype {array.dtype}; expected (documents, doc_len) of "
                "uint16 or uint32. scripts/prepare_data.py writes arrays in this format"
            )
        self._array, self.dtype = array, np.dtype(array.dtype)
        self.stored_documents, self.doc_len = (int(size) for size in array.shape)
        stated = (vocabulary, 0, 0) if isinstance(vocabulary, int) else vocabulary
        split = Path(self.path).stem
        self.vocabulary = vocabulary_of(corpus, split, self.doc_len, self.manifest, stated, assumed)
        self.vocab_size = self.vocabulary.size
        self.chunk_shape = (int(array.chunks[0]), int(array.chunks[1]))
        self._kept: OrderedDict[Chunk, np.ndarray] = OrderedDict()
        self._slots = 0
        self.documents = self._count_documents()
        if self.documents == 0:
            raise DataError(f"{self.path} holds no documents; make or fetch it again")
        if sampled:
            _ = self._sample  # reads them, and so checks them

    def keep(self, n_documents: int, seq_len: int) -> None:
        """Keeps as many decoded chunks as `seq_len` tokens of `n_documents` neighbouring documents touch.

        These are enough where batches are read in order: what the next one shares with this one was used last.

        Raises:
            DataError: the cache of a remote array has no room for so many.
        """
        rows, columns = self.chunk_shape
        aligned = seq_len % columns == 0 or columns % seq_len == 0
        # Documents may begin and end in the middle of a chunk, and so may sequences that are not aligned.
        slots = (-(-seq_len // columns) + (0 if aligned else 1)) * ((n_documents - 1) // rows + 2)
        needed, limit = slots * math.prod(self.chunk_shape) * self.dtype.itemsize, self.files.settings.limit_bytes
        if self.files.remote is not None and limit < needed:
            raise DataError(
                f"datamodule.cache_gb={limit / 1e9:g} is less than the {needed / 1e9:.3g} GB that a batch needs of "
                f"{self.path}; raise it"
            )
        self._slots = max(self._slots, slots)

    def read(self, first: int, last: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of documents [first, last), shape (last - first, end - begin), dtype `self.dtype`.

        Raises:
            DataError: a chunk is missing or cannot be decoded, an id is out of range or a document is all zeros.
        """
        pieces = list(self._pieces(first, last, begin, end))
        self.files.fetch_all([self.key(chunk) for chunk, _, _ in pieces if chunk not in self._kept])
        tokens = np.empty((last - first, end - begin), dtype=self.dtype)
        for chunk, source, target in pieces:
            decoded = self._kept.pop(chunk, None)
            if decoded is None:
                decoded = self.decode(chunk)
            if self._slots:  # least recently used first
                while len(self._kept) >= self._slots:
                    self._kept.popitem(last=False)
                self._kept[chunk] = decoded
            tokens[target] = decoded[source]
        self._check_tokens(tokens, first, begin)
        return tokens

    def decode(self, chunk: Chunk) -> np.ndarray:
        """One chunk; smaller at the array's edges.

        Raises:
            DataError: there is no file for it, or it cannot be decoded.
        """
        rows, columns = self.chunk_shape
        window = (
            slice(chunk[0] * rows, min((chunk[0] + 1) * rows, self.stored_documents)),
            slice(chunk[1] * columns, min((chunk[1] + 1) * columns, self.doc_len)),
        )
        return self.files.decoded(self.key(chunk), lambda: np.asarray(self._array[window]), window[0].start)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash that identifies the contents: two copies of a corpus agree, another corpus does not.

        It covers the shape and, where the corpus was made by scripts/prepare_data.py, the hash of every token that
        its manifest states; otherwise the sampled rows.
        """
        digest = hashlib.sha256(self._shape_in_words().encode())
        recorded = self.manifest.get("arrays", {}).get(Path(self.path).stem, {}).get("content_hash")
        digest.update(str(recorded).encode() if recorded else self._sample.tobytes())
        return digest.hexdigest()[:16]

    @property
    def checksums(self) -> str | None:
        """A short hash of the list of checksums beside the array (checksums.py); None where there is none."""
        return identity(self.files.checksums) if self.files.checksums is not None else None

    def stored_row(self, document: int) -> int:
        """The row on disk of a document; SparseTokenArray renumbers."""
        return document

    def key(self, chunk: Chunk) -> str:
        """The name of a chunk's file."""
        return self._array.metadata.encode_chunk_key(chunk)

    def _pieces(
        self, first: int, last: int, begin: int, end: int
    ) -> Iterator[tuple[Chunk, tuple[slice, slice], tuple[slice, slice]]]:
        """Parts of chunks that make up a slice: the chunk, the place in it, and the place in the slice."""
        rows, columns = self.chunk_shape
        start = first
        while first < last:
            row = self.stored_row(first)
            # Documents that follow each other on disk within one chunk.
            n_rows = min(last - first, rows - row % rows, self.stored_documents - row)
            source_rows = slice(row % rows, row % rows + n_rows)
            target_rows = slice(first - start, first - start + n_rows)
            for column in range(begin // columns, (end - 1) // columns + 1):
                from_token, to_token = max(begin, column * columns), min(end, (column + 1) * columns)
                source = slice(from_token - column * columns, to_token - column * columns)
                target = slice(from_token - begin, to_token - begin)
                yield (row // rows, column), (source_rows, source), (target_rows, target)
            first += n_rows

    def _count_documents(self) -> int:
        return self.stored_documents

    def _shape_in_words(self) -> str:
        return f"{self.documents}x{self.doc_len}"

    @cached_property
    def _sample(self) -> np.ndarray:
        rows = np.unique(np.linspace(0, self.documents - 1, SAMPLED_ROWS, dtype=np.int64)).tolist()
        end = min(self.doc_len, SAMPLED_TOKENS)
        chunks = [chunk for row in rows for chunk, _, _ in self._pieces(row, row + 1, 0, end)]
        self.files.fetch_all([self.key(chunk) for chunk in dict.fromkeys(chunks)])
        return np.concatenate([self.read(row, row + 1, 0, end) for row in rows])

    def _check_tokens(self, tokens: np.ndarray, first: int, begin: int) -> None:
        if int(tokens.max()) >= self.vocab_size:
            row, column = np.argwhere(tokens >= self.vocab_size)[0].tolist()
            file, document = self._where(first + row, begin + column)
            raise DataError(
                f"{file}: token id {tokens[row, column]} in {document} at position {begin + column:,} is not below "
                f"vocab_size={self.vocab_size}. Set datamodule.vocab_size to the vocabulary of the tokenizer that made "
                "the corpus"
            )
        zero_rows = np.flatnonzero(~tokens.any(axis=1))
        if zero_rows.size:
            file, document = self._where(first + int(zero_rows[0]), begin)
            raise DataError(
                f"{file}: {document} is all zeros from position {begin:,}; the array was not filled completely. Make "
                "or fetch it again"
            )

    def _where(self, document: int, position: int) -> tuple[str, str]:
        """Place of the chunk that holds a token, and name of the document, for messages."""
        row, (rows, columns) = self.stored_row(document), self.chunk_shape
        on_disk = f" (row {row:,} on disk)" if row != document else ""
        return self.files.place(self.key((row // rows, position // columns))), f"document {document:,}{on_disk}"
