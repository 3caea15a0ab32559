"""Writes rows as Zarr chunks, in parallel and restartable, and reads the finished array back.

An array is written in blocks of `chunk_docs` rows, so that no two workers touch one chunk. Zarr renames each chunk's
file into its place; after a kill only the blocks are written that lack one.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr

from forgetting_transformer.data.prepare.layout import Layout
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.data.prepare.shards import ahead

# LongCrawl64's chunk, 8 MiB, is the largest chosen; a corpus of fewer rows gets chunks of fewer rows, so that a
# reader decodes little more than it uses, but not so few that the array becomes a heap of tiny files.
PAPER_CHUNK_DOCS = 2048
PAPER_CHUNK_TOKENS = 2048
SMALLEST_CHUNK_DOCS = 16
BLOCKS_WANTED = 64
#: NumPy counts ids in a copy of 8 bytes each: of a block of LongCrawl64's size that would be another GB.
COUNTED_AT_ONCE = 1 << 20


def create_array(path: Path, layout: Layout, settings: CorpusSettings, dtype: np.dtype) -> zarr.Array:
    """The array at `path`, made if it is not there: empty, in LongCrawl64's order and compression."""
    if not (path / ".zarray").exists():
        # A power of two that makes about 64 blocks of rows.
        fitting = 1 << (max(1, layout.n_documents // BLOCKS_WANTED) - 1).bit_length()
        height = settings.chunk_docs or min(PAPER_CHUNK_DOCS, max(SMALLEST_CHUNK_DOCS, fitting))
        width = settings.chunk_tokens or min(PAPER_CHUNK_TOKENS, settings.doc_len)
        zarr.create_array(
            path,
            shape=(layout.n_documents, layout.doc_len),
            chunks=(min(height, layout.n_documents), width),
            dtype=dtype.newbyteorder("<"),
            fill_value=0,
            compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
            chunk_key_encoding={"name": "v2", "separator": "."},
            zarr_format=2,
            overwrite=True,
        )
    return zarr.open_array(path, mode="r")


def write_block(path: Path, tokens_path: Path, first: int, rows: list[list[tuple[int, int]]]) -> None:
    """Writes rows of the array at `path`, each of these stretches of the stream; runs in a worker process."""
    # Every chunk must be a file: a reader takes a missing one for damage, never for zeros. The `config` argument of
    # open_array would set this, but Zarr ignores it when it opens an existing array (3.1.6).
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.open_array(path, mode="r+")
    tokens = np.memmap(tokens_path, dtype=array.dtype, mode="r")
    block = np.empty((len(rows), array.shape[1]), dtype=array.dtype)
    for row, stretches in zip(block, rows, strict=True):
        np.concatenate([tokens[start:stop] for start, stop in stretches], out=row)
    array[first : first + len(rows)] = block


def write_array(
    array: zarr.Array, path: Path, layout: Layout, tokens_path: Path, pool: Executor, workers: int, bar: Any
) -> None:
    """Writes all rows of one array, except the blocks that an interrupted run has written."""
    height, missing = array.chunks[0], []
    for row, first in enumerate(range(0, layout.n_documents, height)):
        if all((path / key).exists() for key in chunks_of(array, [row])):
            bar.update(min(height, layout.n_documents - first))
        else:
            missing.append(first)
    begun = (
        (len(rows), pool.submit(write_block, path, tokens_path, first, rows))
        for first in missing
        for rows in [layout.stretches(first, first + height)]
    )
    for n_rows, future in ahead(begun, workers):
        future.result()
        bar.update(n_rows)


def chunks_of(array: zarr.Array, rows: Iterable[int] | None = None) -> list[str]:
    """The files of rows of chunks, of all by default."""
    down, across = (range(-(-length // size)) for length, size in zip(array.shape, array.chunks, strict=True))
    return [array.metadata.encode_chunk_key((row, column)) for row in rows or down for column in across]


def read_back(path: Path, vocab_size: int, bar: Any) -> tuple[str, np.ndarray]:
    """Reads an array from disk.

    Returns:
        The hash of all rows in order, and how often each id occurs, int64 `(vocab_size,)`.
    """
    array = zarr.open_array(path, mode="r")
    height = array.chunks[0]
    hasher = hashlib.blake2b(digest_size=16)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, array.shape[0], height):
        rows = np.asarray(array[first : first + height])
        hasher.update(np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<")).data)
        ids = rows.reshape(-1)
        for begin in range(0, len(ids), COUNTED_AT_ONCE):
            counts += np.bincount(ids[begin : begin + COUNTED_AT_ONCE], minlength=vocab_size)
        bar.update(len(rows))
    return f"blake2b:{hasher.hexdigest()}", counts
