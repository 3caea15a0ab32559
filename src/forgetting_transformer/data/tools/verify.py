"""Looking through an array before it is trained on: is every chunk there, can it be decoded, does it hold tokens?"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.writing import read_back
from forgetting_transformer.data.sparse import documents_in, whole_rows
from forgetting_transformer.data.storage import checksums
from forgetting_transformer.data.token_array import Chunk, TokenArray
from forgetting_transformer.data.tools.progress import progress

#: Problems of one kind that are spelled out; the rest is counted.
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
        A table of what was checked, the first few problems by name below it; and whether there are none.
    """
    path = Path(path)
    lines: list[tuple[str, str]] = []
    problems: list[str] = []

    def add(check: str, result: str, found: list[str] | None = None) -> None:
        found = sorted(found or [])
        lines.append((check, f"FAILED: {len(found):,}" if found else result))
        problems.extend(f"{check}: {problem}" for problem in found[:SHOWN])
        if len(found) > SHOWN:
            problems.append(f"{check}: and {len(found) - SHOWN:,} more")

    def table() -> str:
        width = max(len(check) for check, _ in lines)
        rows = [f"  {check:<{width}}  {result}" for check, result in lines]
        return "\n".join([str(path), *rows, *(f"  ! {problem}" for problem in problems)])

    try:
        array = TokenArray(path, vocab_size, sampled=False)
    except DataError as error:
        add("metadata", "", [str(error)])
        return table(), False
    documents, doc_len = array.documents, array.doc_len
    height, width = array.chunk_shape
    add("metadata", f"{documents:,} documents x {doc_len:,} tokens, {array.dtype}, chunks of {height:,} x {width:,}")

    keys = array.keys()
    there = array.files.names(keys.values())
    present = [chunk for chunk, key in keys.items() if key in there]
    whole, n_rows = whole_rows(array, there), len({row for row, _ in keys})
    add("presence", f"{len(present):,} of {len(keys):,} chunks; {len(whole):,} of {n_rows:,} row-chunks whole")
    held = documents_in(array, whole)
    add("whole documents", f"{held:,} of {documents:,} ({held * doc_len:,} tokens)")
    if missing_chunks == "error" and len(whole) < n_rows:
        add("missing chunks", "", [array.files.place(key) for key in keys.values() if key not in there])
        problems.append(
            "fetch the missing chunks again, or train on the whole documents with datamodule.missing_chunks=skip "
            "(and check this copy with --missing_chunks skip)"
        )
    elif not whole:
        add("presence", "", ["no row of chunks is whole: nothing can be trained on"])

    # Evenly spread: a damaged region shows in a sample too.
    spread = np.linspace(0, len(present) - 1, max(1, round(len(present) * share))).astype(int)
    chosen = [present[i] for i in np.unique(spread)] if present else []
    found: list[str] = []

    def inspect(chunk: Chunk) -> None:
        row, column = chunk[0] * height, chunk[1] * width
        try:
            array.read(row, min(row + height, documents), column, min(column + width, doc_len))
        except DataError as error:
            found.append(str(error))

    with ThreadPoolExecutor(workers) as pool, progress(f"decoding {path.name}", len(chosen), "chunks") as bar:
        for _ in pool.map(inspect, chosen):
            bar.update()
    add("contents", f"{len(chosen):,} chunks decode to ids below {vocab_size:,}", found)
    listed = array.files.checksums
    if listed is not None:
        n_listed = sum(keys[chunk] in listed.sums for chunk in chosen)
        others = f", {len(chosen) - n_listed:,} not listed" if n_listed < len(chosen) else ""
        add("checksums", f"{n_listed:,} chunks compared with {listed.name}{others}")

    if share == 1.0 and not problems:
        stated = array.manifest.get("arrays", {}).get(path.stem, {}).get("content_hash")
        if stated is not None and len(whole) == n_rows:
            with progress(f"hashing {path.name}", documents, "documents") as bar:
                actual = read_back(path, vocab_size, bar)[0]
            other = [] if actual == stated else [f"{actual}, manifest.json says {stated}: make the corpus again"]
            add("content hash", "as manifest.json says", other)
        if listed is None and not problems:
            name = checksums.list_name(path.name)
            try:
                checksums.write_list(path, [keys[chunk] for chunk in chosen], workers)
                said = f"written to {name}, {len(chosen):,} chunks: readers compare each with it"
            except OSError as error:
                said = f"cannot write {name} ({error.strerror}), so nothing holds chunks to what they are now"
            add("checksums", said)
    return table(), not problems
