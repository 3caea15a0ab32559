"""One Zarr array of token ids, (documents, doc_len) uint16 or uint32, read without ever inventing data.

Zarr answers a chunk that is not on disk with its fill value, zero, and says nothing. A partial copy of a corpus would
then train on documents of zeros. Here a chunk is read from its file, or the file is named in an error. An array may
be sparse on purpose (`missing_chunks="skip"`): then only the documents of which every chunk is there count.
"""

import difflib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from forgetting_transformer.console import redact
from forgetting_transformer.data.array_files import ArrayFiles, MissingChunkError, RemoteArrayFiles, open_array
from forgetting_transformer.data.checksums import ChecksumError
from forgetting_transformer.data.decoded_chunks import Chunk, DecodedChunks
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.remote import is_url
from forgetting_transformer.data.remote_cache import CacheSettings
from forgetting_transformer.data.vocabulary import TOKEN_DTYPES, read_manifest

#: Rows looked at when an array is opened, spread evenly over it: enough to catch a wrong tokenizer or a wrong file.
SAMPLED_ROWS = 16
SAMPLED_TOKENS = 1024
MISSING_CHUNKS = ("error", "skip")
#: Other corpora that a message lists.
_MOST_LISTED = 8


class NoArrayError(DataError):
    """There is no array of that name."""


class TokenArray:
    """A Zarr v2 or v3 array (chunked or sharded) of uint16 or uint32 token ids, one document per row.

    Args:
        path: the array's folder, such as `data/longcrawl64/train.zarr`, or a URL such as s3://bucket/train.zarr.
        vocab_size: ids must lie in [0, vocab_size). Or what gives it for the length of the documents.
        missing_chunks: "error", or "skip": documents of which a chunk is missing do not count, and the others are
            renumbered in order.
        cache: where the files of a URL are kept, and how many; None is the default of CacheSettings.
        sampled: whether some rows are looked at now.

    Attributes:
        documents, doc_len: the shape of what can be read.
        dtype: of the ids, one of TOKEN_DTYPES, whatever the vocabulary needs.
        chunk_shape: documents and tokens that are decoded together.
        file_shape: documents and tokens in one file: a shard where the array is sharded, else a chunk.

    Raises:
        DataError: no array there, or one of another shape or dtype, with ids out of range or with missing chunks
            among the sampled rows.
    """

    def __init__(
        self,
        path: str | Path,
        vocab_size: int | Callable[[int], int],
        missing_chunks: str = "error",
        cache: CacheSettings | None = None,
        sampled: bool = True,
    ) -> None:
        if missing_chunks not in MISSING_CHUNKS:
            raise DataError(f"missing_chunks={missing_chunks!r} is unknown; use 'error' or 'skip'")
        #: Where the array is; of a URL as it may be shown, without a password.
        self.path: str | Path = redact(str(path).rstrip("/")) if is_url(path) else Path(path)
        self._manifest_folder = str(path).rstrip("/").rpartition("/")[0] if is_url(path) else Path(path).parent
        if isinstance(self.path, str):
            self.files: ArrayFiles = RemoteArrayFiles(str(path).rstrip("/"), cache or CacheSettings())
        else:
            self.files = ArrayFiles(self.path)
        if not self.files.has_array():
            raise NoArrayError(_nothing_at(self.path))
        array = open_array(self.files)
        self.files.read_checksums()
        if array.ndim != 2 or array.dtype not in TOKEN_DTYPES:
            raise DataError(
                f"{self.path} has shape {array.shape} and dtype {array.dtype}; expected (documents, doc_len) of "
                "uint16 or uint32. scripts/prepare_data.py writes arrays in this format"
            )
        self._array, self.dtype = array, np.dtype(array.dtype)
        self.stored_documents, self.doc_len = (int(size) for size in array.shape)
        self.vocab_size = vocab_size(self.doc_len) if callable(vocab_size) else vocab_size
        self.chunk_shape = (int(array.chunks[0]), int(array.chunks[1]))
        files = array.shards or array.chunks
        self.file_shape = (int(files[0]), int(files[1]))
        #: Rows of files of which every file is there, or None for all.
        self.present_rows = self._present_rows() if missing_chunks == "skip" else None
        self.documents = self.stored_documents if self.present_rows is None else int(self._firsts[-1])
        if self.documents == 0:
            raise DataError(f"{self.path} holds no documents")
        if sampled:
            _ = self._sample

    def read(self, first: int, last: int, begin: int, end: int, kept: DecodedChunks | None = None) -> np.ndarray:
        """Tokens [begin, end) of documents [first, last), shape (last - first, end - begin), dtype `self.dtype`.

        Args:
            kept: decoded chunks of this array to take from and to add to. Without it every chunk that the slice touches
                is decoded for this call.

        Raises:
            DataError: a chunk is missing or cannot be decoded, an id is out of range or a document is all zeros.
        """
        pieces = list(self._pieces(first, last, begin, end))
        chunks = [chunk for chunk, _, _ in pieces]
        self.files.fetch_all(self._file_names(chunks if kept is None else kept.lacking(chunks)))
        tokens = np.empty((last - first, end - begin), dtype=self.dtype)
        for chunk, source, target in pieces:
            decoded = self.decode(chunk) if kept is None else kept.get(chunk, self.decode)
            tokens[target] = decoded[source]
        self._check_tokens(tokens, first, begin)
        return tokens

    def decode(self, chunk: Chunk) -> np.ndarray:
        """One chunk by its row and column among the chunks of the array on disk; smaller at the array's edges.

        Raises:
            MissingChunkError: there is no file for it.
            DataError: it cannot be decoded.
        """
        rows, columns = self.chunk_shape
        window = (
            slice(chunk[0] * rows, min((chunk[0] + 1) * rows, self.stored_documents)),
            slice(chunk[1] * columns, min((chunk[1] + 1) * columns, self.doc_len)),
        )
        name = self._file_names([chunk])[0]
        again = False
        while True:
            try:
                return np.asarray(self._array[window])
            except MissingChunkError as error:
                raise MissingChunkError(
                    f"{error}: it holds documents {window[0].start:,} and on, which this run needs. The copy of the "
                    "corpus is partial: fetch the chunk again, choose a complete array, or train on the documents "
                    "that are there with datamodule.missing_chunks=skip"
                ) from error
            except DataError:
                raise
            except Exception as error:  # each codec has its own
                if again or not self.files.fetch_again(name):
                    if isinstance(error, ChecksumError) and self.files.checksums is not None:
                        listed = self.files.checksums.name
                        raise DataError(
                            f"{self.files.place(name)} is not the file that {listed} lists: it was changed or is "
                            f"damaged ({error}). Fetch or make it again. If the change is meant, this is another "
                            f"corpus: delete {listed}, and scripts/verify_data.py makes a new one"
                        ) from error
                    raise DataError(
                        f"{self.files.place(name)} cannot be decoded ({error}); it is damaged: "
                        "delete it and fetch or make it again"
                    ) from error
                again = True

    def decode_file(self, file: tuple[int, int]) -> None:
        """Decodes all chunks of a file, by its row and column.

        Raises:
            DataError: as `decode`.
        """
        (row, column), (height, width), (rows, columns) = file, self.file_shape, self.chunk_shape
        last_row, last_column = min((row + 1) * height, self.stored_documents), min((column + 1) * width, self.doc_len)
        downward = range(row * height // rows, -(-last_row // rows))
        for chunk in product(downward, range(column * width // columns, -(-last_column // columns))):
            self.decode(chunk)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash that identifies the contents: two copies of a corpus agree, another corpus does not.

        It covers the shape and, where the corpus was made by scripts/prepare_data.py, the hash of every token that
        its manifest states; otherwise the sampled rows. Of a sparse array it covers which documents are there.
        """
        digest = hashlib.sha256(f"{self.documents}x{self.doc_len}".encode())
        if self.present_rows is not None:
            digest.update(f"present {self.file_shape[0]}-row blocks {self.present_rows.tolist()}".encode())
        recorded = (
            read_manifest(self._manifest_folder).get("arrays", {}).get(Path(self.path).stem, {}).get("content_hash")
        )
        digest.update(str(recorded).encode() if recorded else self._sample.tobytes())
        return digest.hexdigest()[:16]

    @property
    def checksums(self) -> str | None:
        """A short hash of the list of checksums beside the array (checksums.py); None where there is none."""
        return self.files.checksums.identity if self.files.checksums is not None else None

    def stored_row(self, document: int) -> int:
        """The row on disk of a document: the same number, unless documents before it are missing."""
        if self.present_rows is None:
            return document
        block = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return int(self.present_rows[block]) * self.file_shape[0] + document - int(self._firsts[block])

    def key(self, file: tuple[int, int]) -> str:
        """The name of a file of chunks by its row and column."""
        return self._array.metadata.encode_chunk_key(file)

    def _file_names(self, chunks: list[Chunk]) -> list[str]:
        """The files of these chunks, each once."""
        down, across = (self.file_shape[0] // self.chunk_shape[0], self.file_shape[1] // self.chunk_shape[1])
        files = dict.fromkeys((row // down, column // across) for row, column in chunks)
        return [self.key(file) for file in files]

    def _pieces(
        self, first: int, last: int, begin: int, end: int
    ) -> Iterator[tuple[Chunk, tuple[slice, slice], tuple[slice, slice]]]:
        """The parts of chunks that make up a slice: chunk, place in the chunk, place in the slice."""
        rows, columns = self.chunk_shape
        start = first
        while first < last:
            row = self.stored_row(first)
            # As far as documents follow each other on disk within one chunk; files hold whole chunks.
            n_rows = min(last - first, rows - row % rows, self.stored_documents - row)
            for column in range(begin // columns, (end - 1) // columns + 1):
                from_token, to_token = max(begin, column * columns), min(end, (column + 1) * columns)
                yield (
                    (row // rows, column),
                    (
                        slice(row % rows, row % rows + n_rows),
                        slice(from_token - column * columns, to_token - column * columns),
                    ),
                    (
                        slice(first - start, first - start + n_rows),
                        slice(from_token - begin, to_token - begin),
                    ),
                )
            first += n_rows

    def _present_rows(self) -> np.ndarray | None:
        """Rows of files that are complete, None if all are."""
        keys = self.keys()
        whole = self.whole_rows(self.files.names(keys.values()))
        if not whole:
            raise DataError(
                f"{self.path} has no row of chunks with all its files, so missing_chunks=skip leaves no document. "
                "scripts/verify_data.py shows what is there"
            )
        if len(whole) == len({row for row, _ in keys}):
            return None
        #: The first document of each present row of files, and the number of all documents at the end.
        self._firsts = np.cumsum([0, *(self.documents_in([row]) for row in whole)])
        return np.array(whole)

    def keys(self) -> dict[tuple[int, int], str]:
        """The names of all files of chunks, by row and column."""
        rows, columns = (-(-self.stored_documents // self.file_shape[0]), -(-self.doc_len // self.file_shape[1]))
        return {file: self.key(file) for file in product(range(rows), range(columns))}

    def whole_rows(self, there: Collection[str]) -> list[int]:
        """Rows whose files are all in `there`."""
        broken = {row for (row, _), key in self.keys().items() if key not in there}
        return sorted({row for row, _ in self.keys()} - broken)

    def documents_in(self, rows: Iterable[int]) -> int:
        """Documents in rows of files."""
        height = self.file_shape[0]
        return sum(min((row + 1) * height, self.stored_documents) - row * height for row in rows)

    @cached_property
    def _sample(self) -> np.ndarray:
        rows = np.unique(np.linspace(0, self.documents - 1, SAMPLED_ROWS, dtype=np.int64)).tolist()
        end = min(self.doc_len, SAMPLED_TOKENS)
        chunks = [chunk for row in rows for chunk, _, _ in self._pieces(row, row + 1, 0, end)]
        self.files.fetch_all(self._file_names(chunks))
        return np.concatenate([self.read(row, row + 1, 0, end) for row in rows])

    def _check_tokens(self, tokens: np.ndarray, first: int, begin: int) -> None:
        if int(tokens.max()) >= self.vocab_size:
            row, column = np.argwhere(tokens >= self.vocab_size)[0]
            raise DataError(
                f"{self.path}: token id {tokens[row, column]} in {self._named(first + row)} at position "
                f"{begin + column:,} is not below vocab_size={self.vocab_size}. Set datamodule.vocab_size to the "
                "vocabulary of the tokenizer that made the corpus"
            )
        zero_rows = np.flatnonzero(~tokens.any(axis=1))
        if zero_rows.size:
            # A chunk missing *inside* a shard leaves no missing file, only zeros.
            raise DataError(
                f"{self.path}: {self._named(first + int(zero_rows[0]))} is all zeros from position {begin:,}; the "
                "array was not filled completely. Make or fetch it again"
            )

    def _named(self, document: int) -> str:
        row = self.stored_row(document)
        return f"document {document:,}" + (f" (row {row:,} on disk)" if row != document else "")


def _nothing_at(path: str | Path) -> str:
    """That there is no array, and what is there in its place."""
    name, dataset, data_dir = Path(path).name, Path(path).parent.name or "<dataset>", Path(path).parent.parent
    if isinstance(path, Path):  # listing a URL would be a request for every folder
        others = sorted(folder.parent.name for folder in data_dir.glob(f"*/{name}"))
        if others:
            nearest = difflib.get_close_matches(dataset, others, n=1, cutoff=0.0)
            shown = ", ".join(others[:_MOST_LISTED]) + (", …" if len(others) > _MOST_LISTED else "")
            return (
                f"no token array at {path}. {data_dir} holds {shown}: choose one, as in data_dir={data_dir} "
                f"datamodule.dataset={nearest[0]}"
            )
        if (data_dir / name).is_dir():
            return f"no token array at {path}. {data_dir} is a corpus itself: choose it with datamodule.dataset=."
    return (
        f"no token array at {path}. Set data_dir to the folder that holds {dataset}/{name} "
        f"(datamodule.dataset={dataset}), or make one with scripts/prepare_data.py, or fetch LongCrawl64 with "
        "scripts/download_longcrawl64.py"
    )
