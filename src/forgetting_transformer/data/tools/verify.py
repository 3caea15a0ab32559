"""Checks of an array before training: every chunk is there, can be decoded and contains tokens."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.writing import read_back
from forgetting_transformer.data.sparse import documents_in, keys_of, whole_rows
from forgetting_transformer.data.storage import checksums
from forgetting_transformer.data.token_array import Chunk, TokenArray
from forgetting_transformer.data.tools.progress import progress

#: Problems of one kind that are listed; the rest is counted.
SHOWN = 5


def verify(
    path: str | Path, vocab_size: int, missing_chunks: str = "error", share: float = 1.0, workers: int = 4
) -> tuple[str, bool]:
    """Checks one array on disk, and lists the checksums of its files if it is sound and has no list.

    Args:
        path: the array's folder, such as data/longcrawl64/train.zarr.
        missing_chunks: "skip" if the array is sparse on purpose: then holes are counted, and are no problem as long
            as some row of chunks is whole.
        share: of the files that are there, in (0, 1], spread evenly: these are read and decoded.
        workers: threads that decode.

    Returns:
        A table of the checks with the first few problems by name below it; and whether there are none.
    """
    rows, faults = [str(path)], []
    for check, result, problems in _checks(Path(path), vocab_size, missing_chunks, share, workers):
        rows.append(f"  {check:<15}  " + (f"FAILED: {len(problems):,} {result}".rstrip() if problems else result))
        more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        faults += [f"  ! {check}: {problem}" for problem in [*sorted(problems)[:SHOWN], *more]]
    return "\n".join(rows + faults), not faults


def _checks(
    path: Path, vocab_size: int, missing_chunks: str, share: float, workers: int
) -> Iterator[tuple[str, str, list[str]]]:
    """Checks: name, result (of a failed one, what to do) and problems. At the end the list of checksums is written."""
    try:
        array = TokenArray(path, vocab_size, sampled=False)
    except DataError as error:
        yield "metadata", "", [str(error)]
        return
    documents, doc_len, (height, width) = array.documents, array.doc_len, array.chunk_shape
    shape = f"{documents:,} documents x {doc_len:,} tokens, {array.dtype}, chunks of {height:,} x {width:,}"
    yield "metadata", shape, []

    keys = keys_of(array)
    there = array.files.names()
    present = [chunk for chunk, key in keys.items() if key in there]
    whole, n_rows = whole_rows(keys, there), len({row for row, _ in keys})
    none = [] if whole else ["no row of chunks is whole: nothing can be trained on"]
    yield "presence", f"{len(present):,} of {len(keys):,} chunks; {len(whole):,} of {n_rows:,} row-chunks whole", none
    held = documents_in(array, whole)
    yield "whole documents", f"{held:,} of {documents:,} ({held * doc_len:,} tokens)", []
    if missing_chunks == "error" and len(whole) < n_rows:
        cure = "(fetch them again, or check and train with missing_chunks=skip on the whole documents)"
        yield "missing chunks", cure, [array.files.place(key) for key in keys.values() if key not in there]

    # Evenly spread: a damaged region shows in a sample too.
    spread = np.linspace(0, len(present) - 1, max(1, round(len(present) * share))).astype(int)
    chosen = [present[i] for i in np.unique(spread)] if present else []
    damaged: list[str] = []

    def inspect(chunk: Chunk) -> None:
        row, column = chunk[0] * height, chunk[1] * width
        try:
            array.read(row, min(row + height, documents), column, min(column + width, doc_len))
        except DataError as error:
            damaged.append(str(error))

    with ThreadPoolExecutor(workers) as pool, progress(f"decoding {path.name}", len(chosen), "chunks") as bar:
        for _ in pool.map(inspect, chosen):
            bar.update()
    yield "contents", "" if damaged else f"{len(chosen):,} chunks decode to ids below {vocab_size:,}", damaged

    listed, name = array.files.checksums, checksums.list_name(path)
    if listed is not None:
        n_listed = sum(keys[chunk] in listed for chunk in chosen)
        others = f", {len(chosen) - n_listed:,} not listed" if n_listed < len(chosen) else ""
        yield "checksums", f"{n_listed:,} chunks compared with {name}{others}", []
    if share < 1 or damaged or not whole or (missing_chunks == "error" and len(whole) < n_rows):
        return
    stated = array.manifest.get("arrays", {}).get(path.stem, {}).get("content_hash")
    if stated is not None and len(whole) == n_rows:
        actual, _ = read_back(path, vocab_size, f"hashing {path.name}")
        other = [] if actual == stated else [f"{actual}, manifest.json says {stated}: make the corpus again"]
        yield "content hash", "" if other else "as manifest.json says", other
        if other:
            return
    if listed is None:
        try:
            checksums.write_list(path, [keys[chunk] for chunk in chosen], workers)
            yield "checksums", f"written to {name}, {len(chosen):,} chunks: readers compare each with it", []
        except OSError as error:
            yield "checksums", f"cannot write {name} ({error.strerror}): later damage to chunks will not be noticed", []
