"""Rows -> Zarr chunks, in parallel and restartable; and reading the finished array back.

An array is written in blocks of `chunk_docs` rows, so that no two workers touch one chunk. Zarr renames each chunk's
file into its place; after a kill only the blocks are written that lack one.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec

from forgetting_transformer.data import checksums
from forgetting_transformer.data.prepare.packing import Layout
from forgetting_transformer.progress import Progress

# LongCrawl64's chunk, 8 MiB, is the largest chosen; a corpus of fewer rows gets chunks of fewer rows, so that a
# reader decodes little more than it uses, but not so few that the array becomes a heap of tiny files.
PAPER_CHUNK_DOCS = 2048
PAPER_CHUNK_TOKENS = 2048
SMALLEST_CHUNK_DOCS = 16
BLOCKS_WANTED = 64


@dataclass(frozen=True)
class ArrayFormat:
    zarr_format: Literal[2, 3]
    chunk_docs: int
    chunk_tokens: int
    dtype: np.dtype


@dataclass(frozen=True)
class ArrayFacts:
    """What reading a finished array back shows."""

    content_hash: str  # of all rows in order, little-endian
    counts: np.ndarray  # int64, (vocab_size,): how often each id occurs

    @property
    def max_token_id(self) -> int:
        return int(np.flatnonzero(self.counts)[-1])


def choose_chunk_docs(n_documents: int) -> int:
    """Rows per chunk: a power of two between 16 and 2048 that makes about 64 blocks of rows."""
    wanted = max(1, n_documents // BLOCKS_WANTED)
    return min(PAPER_CHUNK_DOCS, max(SMALLEST_CHUNK_DOCS, 1 << (wanted - 1).bit_length()))


def create_array(path: Path, layout: Layout, form: ArrayFormat) -> None:
    """Create the empty array, with LongCrawl64's order and compression, and its data type if that suffices."""
    if form.zarr_format == 2:
        compressor = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE)
        keys: Any = {"name": "v2", "separator": "."}
    else:
        compressor = BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=form.dtype.itemsize)
        keys = {"name": "default", "separator": "/"}
    zarr.create_array(
        path,
        shape=(layout.n_documents, layout.doc_len),
        chunks=(min(form.chunk_docs, layout.n_documents), form.chunk_tokens),
        dtype=form.dtype.newbyteorder("<"),
        fill_value=0,
        compressors=compressor,
        chunk_key_encoding=keys,
        zarr_format=form.zarr_format,
        overwrite=True,
    )


# In the workers -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def load_layout(path: Path) -> Layout:
    return Layout.load(path)


def write_block(path: Path, layout_path: Path, tokens_path: Path, first: int, last: int) -> None:
    """Write rows [first, last) of the array at `path`; runs in a worker process."""
    # Every chunk must be a file: a reader takes a missing one for damage, never for zeros. The `config` argument of
    # open_array would be the place to say so, but Zarr ignores it when it opens an existing array (3.1.6).
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.open_array(path, mode="r+")
    tokens = np.memmap(tokens_path, dtype=array.dtype, mode="r")
    array[first:last] = load_layout(layout_path).gather(tokens, first, last)


# In the parent ------------------------------------------------------------------------------------------------


def write_array(
    path: Path,
    layout_path: Path,
    tokens_path: Path,
    form: ArrayFormat,
    pool: Executor,
    workers: int,
    progress: Progress,
) -> None:
    """Write all rows of one array, except the blocks that an interrupted run has written."""
    layout = Layout.load(layout_path)
    if not any((path / name).exists() for name in (".zarray", "zarr.json")):
        create_array(path, layout, form)
    array = zarr.open_array(path, mode="r")
    missing = []
    for row, first in enumerate(range(0, layout.n_documents, form.chunk_docs)):
        last = min(first + form.chunk_docs, layout.n_documents)
        if all((path / key).exists() for key in _keys(array, [row])):
            progress.advance(last - first)
        else:
            missing.append((first, last))
    running: deque[tuple[int, Future[None]]] = deque()
    for first, last in missing:
        running.append((last - first, pool.submit(write_block, path, layout_path, tokens_path, first, last)))
        if len(running) >= 2 * workers:
            _take(running, progress)
    while running:
        _take(running, progress)


def _take(running: "deque[tuple[int, Future[None]]]", progress: Progress) -> None:
    n_rows, future = running.popleft()
    future.result()
    progress.advance(n_rows)


def _keys(array: zarr.Array, rows: Iterable[int]) -> list[str]:
    """The files of rows of chunks."""
    columns = range(-(-array.shape[1] // array.chunks[1]))
    return [array.metadata.encode_chunk_key((row, column)) for row in rows for column in columns]


def read_back(path: Path, vocab_size: int, chunk_docs: int, progress: Progress) -> ArrayFacts:
    """Read the array from disk, hash it and count its ids. What the manifest says is what is there."""
    hasher = hashlib.blake2b(digest_size=16)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for rows in _blocks(path, chunk_docs):
        hasher.update(np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<")).data)
        counts += np.bincount(rows.reshape(-1), minlength=vocab_size)
        progress.advance(len(rows))
    return ArrayFacts(f"blake2b:{hasher.hexdigest()}", counts)


def list_checksums(path: Path, workers: int) -> None:
    """Lists the checksums of the array's files beside it; readers compare every chunk with them."""
    array = zarr.open_array(path, mode="r")
    checksums.write_list(path, _keys(array, range(-(-array.shape[0] // array.chunks[0]))), workers)


def _blocks(path: Path, chunk_docs: int) -> Iterator[np.ndarray]:
    array = zarr.open_array(path, mode="r")
    for first in range(0, array.shape[0], chunk_docs):
        yield np.asarray(array[first : first + chunk_docs])
