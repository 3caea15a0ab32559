"""Writes rows as Zarr chunks, in parallel and restartable, and reads the finished array back.

An array is written in blocks of `chunk_docs` rows, so that no two workers touch one chunk. Zarr renames each chunk's
file into its place; after a kill only the blocks are written that lack one.
"""

import hashlib
import itertools
from concurrent.futures import Executor
from pathlib import Path

import numcodecs
import numpy as np
import zarr

from forgetting_transformer.data.prepare.layout import Layout
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.data.prepare.shards import ahead
from forgetting_transformer.data.storage import checksums
from forgetting_transformer.data.tools.progress import progress

# LongCrawl64's chunk, 8 MiB, is the largest chosen; a corpus of fewer rows gets chunks of fewer rows, so that a
# reader decodes little more than it uses, but not so few that the array becomes a heap of tiny files.
PAPER_CHUNK_DOCS = 2048
PAPER_CHUNK_TOKENS = 2048
SMALLEST_CHUNK_DOCS = 16
BLOCKS_WANTED = 64
#: NumPy counts ids in a copy of 8 bytes each: of a block of LongCrawl64's size that would be another GB.
COUNTED_AT_ONCE = 1 << 20


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
    path: Path, layout: Layout, settings: CorpusSettings, dtype: np.dtype, tokens: Path, pool: Executor, workers: int
) -> None:
    """Writes the array at `path`, except the blocks that an interrupted run has written, and its list of checksums.

    In LongCrawl64's order and compression.

    Args:
        tokens: file of the stream.
    """
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
    array = zarr.open_array(path, mode="r")
    height, columns = array.chunks[0], range(-(-layout.doc_len // array.chunks[1]))
    keys = {
        first: [array.metadata.encode_chunk_key((first // height, column)) for column in columns]
        for first in range(0, layout.n_documents, height)
    }
    begun = (
        (len(rows), pool.submit(write_block, path, tokens, first, rows))
        for first, chunks in keys.items()
        if not all((path / key).exists() for key in chunks)
        for rows in [layout.stretches(first, first + height)]
    )
    with progress(f"writing {path.name}", layout.n_documents, "documents") as bar:
        for n_rows, future in ahead(begun, workers):
            future.result()
            bar.update(n_rows)
    checksums.write_list(path, itertools.chain.from_iterable(keys.values()), workers)


def read_back(path: Path, vocab_size: int, title: str) -> tuple[str, float]:
    """Reads an array from disk.

    Args:
        title: of the bar that shows it.

    Returns:
        The hash of all rows in order, and the entropy of the frequencies of ids in nats per token: the loss of a model
        that knows only these.
    """
    array = zarr.open_array(path, mode="r")
    height = array.chunks[0]
    hasher = hashlib.blake2b(digest_size=16)
    counts = np.zeros(vocab_size, dtype=np.int64)
    with progress(title, array.shape[0], "documents") as bar:
        for first in range(0, array.shape[0], height):
            rows = np.asarray(array[first : first + height])
            hasher.update(np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<")).data)
            ids = rows.reshape(-1)
            for begin in range(0, len(ids), COUNTED_AT_ONCE):
                counts += np.bincount(ids[begin : begin + COUNTED_AT_ONCE], minlength=vocab_size)
            bar.update(len(rows))
    share = counts[counts > 0] / counts.sum()
    return f"blake2b:{hasher.hexdigest()}", float(-(share * np.log(share)).sum())
