"""One Zarr array of token ids, (documents, doc_len) uint16, read without ever inventing data.

Zarr answers a chunk that is not on disk with its fill value, zero, and says nothing. A partial copy of a corpus would
then train on documents of zeros. `TokenArray.read` looks for every chunk first and refuses to go on without it.
"""

import hashlib
import json
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import zarr

#: Rows looked at when an array is opened, spread evenly over it: enough to catch a wrong tokenizer or a wrong file.
SAMPLED_ROWS = 16
SAMPLED_TOKENS = 1024


class DataError(ValueError):
    """The data on disk cannot be trained on; the message names the file and the fix."""


class TokenArray:
    """A Zarr v2 or v3 array (chunked or sharded) of uint16 token ids, one document per row.

    Args:
        path: the array's folder, such as `data/longcrawl64/train.zarr`.
        vocab_size: ids must lie in [0, vocab_size).

    Raises:
        DataError: no array there, or one of another shape or dtype, with ids out of range or with missing chunks
            among the sampled rows.
    """

    def __init__(self, path: str | Path, vocab_size: int) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        if not self.path.is_dir():
            raise DataError(
                f"no token array at {self.path}. Set data_dir to the folder that holds "
                f"{self.path.parent.name}/{self.path.name}, or make one with scripts/prepare_data.py"
            )
        try:
            array = zarr.open_array(self.path, mode="r")
        except Exception as error:  # zarr raises many kinds for a folder that is not an array
            raise DataError(f"{self.path} is not a readable Zarr array: {error}") from error
        if array.ndim != 2 or array.dtype != np.uint16:
            raise DataError(
                f"{self.path} has shape {array.shape} and dtype {array.dtype}; expected (documents, doc_len) of "
                "uint16. scripts/prepare_data.py writes arrays in this format"
            )
        self._array = array
        self.documents, self.doc_len = (int(size) for size in array.shape)
        # Files on disk are shards where the array is sharded, chunks otherwise.
        self._file_shape = array.shards or array.chunks
        self._check_sample()

    def read(self, first: int, last: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of documents [first, last), shape (last - first, end - begin), dtype uint16.

        Raises:
            DataError: a chunk is missing on disk, an id is out of range or a document is all zeros.
        """
        self._require_files(first, last, begin, end)
        tokens = np.asarray(self._array[first:last, begin:end])
        self._check_tokens(tokens, first, begin)
        return tokens

    @cached_property
    def fingerprint(self) -> str:
        """A short hash that identifies the contents: two copies of a corpus agree, another corpus does not.

        It covers the shape and, where the corpus was made by scripts/prepare_data.py, the hash of every token that
        its manifest states; otherwise the sampled rows.
        """
        digest = hashlib.sha256(f"{self.documents}x{self.doc_len}".encode())
        manifest = read_manifest(self.path.parent)
        recorded = manifest.get("arrays", {}).get(self.path.stem, {}).get("content_hash")
        digest.update(str(recorded).encode() if recorded else self._sample().tobytes())
        return digest.hexdigest()[:16]

    def _sample(self) -> np.ndarray:
        rows = np.unique(np.linspace(0, self.documents - 1, SAMPLED_ROWS, dtype=np.int64))
        end = min(self.doc_len, SAMPLED_TOKENS)
        return np.concatenate([self.read(int(row), int(row) + 1, 0, end) for row in rows])

    def _check_sample(self) -> None:
        if self.documents == 0:
            raise DataError(f"{self.path} holds no documents")
        self._sample()

    def _require_files(self, first: int, last: int, begin: int, end: int) -> None:
        rows, columns = self._file_shape
        for coordinates in product(
            range(first // rows, (last - 1) // rows + 1), range(begin // columns, (end - 1) // columns + 1)
        ):
            file = self.path / self._array.metadata.encode_chunk_key(coordinates)
            if not file.is_file():
                raise DataError(
                    f"missing chunk {file}: it holds documents {coordinates[0] * rows:,} and on, which this run "
                    "needs. The copy of the corpus is partial: fetch the chunk again, or choose a complete array"
                )

    def _check_tokens(self, tokens: np.ndarray, first: int, begin: int) -> None:
        if int(tokens.max()) >= self.vocab_size:
            row, column = np.argwhere(tokens >= self.vocab_size)[0]
            raise DataError(
                f"{self.path}: token id {tokens[row, column]} in document {first + row:,} at position "
                f"{begin + column:,} is not below vocab_size={self.vocab_size}. Set datamodule.vocab_size to the "
                "vocabulary of the tokenizer that made the corpus"
            )
        zero_rows = np.flatnonzero(~tokens.any(axis=1))
        if zero_rows.size:
            # A chunk missing *inside* a shard leaves no missing file, only zeros.
            raise DataError(
                f"{self.path}: document {first + int(zero_rows[0]):,} is all zeros from position {begin:,}; the "
                "array was not filled completely. Make or fetch it again"
            )


def read_manifest(folder: str | Path) -> dict:
    """The manifest that scripts/prepare_data.py leaves beside its arrays; {} where there is none (LongCrawl64)."""
    file = Path(folder) / "manifest.json"
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not valid JSON ({error}); run scripts/prepare_data.py again") from error
