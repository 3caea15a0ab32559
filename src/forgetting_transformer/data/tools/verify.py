"""Looking through an array before it is trained on: is every chunk there, can it be decoded, does it hold tokens?"""

from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path

import numpy as np
import zarr

from forgetting_transformer.data import checksums
from forgetting_transformer.data.array_files import ArrayFiles, open_array
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.writing import read_back
from forgetting_transformer.data.regular import check_regular
from forgetting_transformer.data.token_array import MISSING_CHUNKS, read_manifest
from forgetting_transformer.data.vocabulary import TOKEN_DTYPES
from forgetting_transformer.progress import Progress

#: Problems of one kind that are spelled out; the rest is counted.
SHOWN = 5


@dataclass
class Report:
    """What was found in one array. `problems` is empty if it can be trained on."""

    path: Path
    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, check: str, result: str) -> None:
        self.lines.append((check, result))

    def blame(self, check: str, problems: list[str]) -> None:
        """Notes one line in the table, and the first few problems by name."""
        if problems:
            self.add(check, f"FAILED: {len(problems):,}")
            self.problems += [f"{check}: {problem}" for problem in problems[:SHOWN]]
            if len(problems) > SHOWN:
                self.problems.append(f"{check}: and {len(problems) - SHOWN:,} more")

    def table(self) -> str:
        width = max(len(check) for check, _ in self.lines)
        rows = [f"{self.path}", *(f"  {check:<{width}}  {result}" for check, result in self.lines)]
        return "\n".join([*rows, *(f"  ! {problem}" for problem in self.problems)])


@dataclass(frozen=True)
class _ChunkFacts:
    largest: int
    zero_rows: list[int]  # rows of the array that are all zeros within the chunk


def verify(
    path: str | Path,
    vocab_size: int,
    missing_chunks: str = "error",
    share: float = 1.0,
    workers: int = 4,
) -> Report:
    """Checks one array on disk, and lists the checksums of its files if it is sound and has no list.

    Args:
        path: the array's folder, such as data/longcrawl64/train.zarr.
        missing_chunks: "skip" if the array is sparse on purpose: then holes are counted, and are no problem as long
            as some row of chunks is whole.
        share: of the files that are there, in (0, 1], spread evenly: these are read and decoded.
        workers: threads that decode.
    """
    path = Path(path)
    report = Report(path)
    if missing_chunks not in MISSING_CHUNKS:
        raise DataError(f"missing_chunks={missing_chunks!r} is unknown; use 'error' or 'skip'")
    try:
        files = ArrayFiles(path)
        if not files.has_array():
            raise DataError(f"no array at {path}")
        array = open_array(files)
        if array.ndim != 2 or array.dtype not in TOKEN_DTYPES:
            raise DataError(
                f"shape {array.shape} and dtype {array.dtype}; expected (documents, doc_len) of uint16 or uint32"
            )
    except DataError as error:
        report.blame("metadata", [str(error)])
        return report
    documents, doc_len = array.shape
    height, width = array.shards or array.chunks
    unit = "shards" if array.shards else "chunks"
    report.add(
        "metadata",
        f"Zarr v{array.metadata.zarr_format}, {documents:,} documents x {doc_len:,} tokens, {array.dtype}, "
        f"{unit} of {height:,} x {width:,}",
    )

    rows, columns = range(-(-documents // height)), range(-(-doc_len // width))
    keys = {file: array.metadata.encode_chunk_key(file) for file in product(rows, columns)}
    there = files.names(keys.values())
    present = {file: key for file, key in keys.items() if key in there}
    whole = [row for row in rows if all((row, column) in present for column in columns)]
    held = sum(min((row + 1) * height, documents) - row * height for row in whole)
    report.add("presence", f"{len(present):,} of {len(keys):,} files; {len(whole):,} of {len(rows):,} row-chunks whole")
    report.add("whole documents", f"{held:,} of {documents:,} ({held * doc_len:,} tokens)")
    if len(whole) < len(rows):
        broken = [row for row in rows if row not in set(whole)]
        report.add("row-chunks not whole", _ranges(broken))
        if missing_chunks == "error":
            gone = [files.place(key) for file, key in keys.items() if file not in present]
            report.blame("missing files", gone)
            report.problems.append(
                "fetch the missing files again, or train on the whole documents with datamodule.missing_chunks=skip "
                "(and check this copy with --missing_chunks skip)"
            )
        elif not whole:
            report.blame("presence", ["no row of chunks is whole: nothing can be trained on"])

    # Evenly spread: a damaged region shows in a sample too.
    chosen = [list(present.items())[i] for i in _spread(len(present), share)]
    _check_contents(report, array, files, chosen, vocab_size, workers)
    decodable = not report.problems
    _check_sums(report, path, files, chosen, workers)
    if len(whole) == len(rows) and share == 1.0 and decodable:
        _check_manifest(report, path, vocab_size, height)
    if share == 1.0 and not report.problems and not path.with_name(checksums.list_name(path.name)).exists():
        _list_sums(report, path, [key for _, key in chosen], workers)
    return report


def _check_contents(
    report: Report,
    array: zarr.Array,
    files: ArrayFiles,
    chosen: list[tuple[tuple[int, int], str]],
    vocab_size: int,
    workers: int,
) -> None:
    """Decodes the chosen files, given as row, column and key."""
    height, width = array.shards or array.chunks

    def inspect(file: tuple[int, int]) -> _ChunkFacts:
        window = array[file[0] * height : (file[0] + 1) * height, file[1] * width : (file[1] + 1) * width]
        tokens = np.asarray(window)
        zero_rows = (np.flatnonzero(~tokens.any(axis=1)) + file[0] * height).tolist()
        return _ChunkFacts(int(tokens.max()), zero_rows)

    broken: list[str] = []
    wrong: list[str] = []
    zeros: list[str] = []
    largest = 0
    with (
        ThreadPoolExecutor(workers) as pool,
        Progress(f"decoding {report.path.name}", len(chosen), "files") as progress,
    ):
        running = {pool.submit(inspect, file): (file, files.place(key)) for file, key in chosen}
        for future in as_completed(running):
            file, place = running[future]
            progress.advance(1)
            try:
                facts = future.result()
            except Exception as error:  # each codec has its own
                broken.append(f"{place}: {error}")
                continue
            largest = max(largest, facts.largest)
            if facts.largest >= vocab_size:
                wrong.append(f"{place} holds id {facts.largest}, not below vocab_size={vocab_size}")
            if facts.zero_rows:
                zeros.append(
                    f"{place}: {len(facts.zero_rows):,} documents are all zeros in tokens {file[1] * width:,} and on, "
                    f"the first is document {facts.zero_rows[0]:,}"
                )
    for check, problems, result in (
        ("decodable", broken, f"yes, {len(chosen):,} files"),
        ("token range", wrong, f"0 to {largest:,} of {vocab_size:,}"),
        ("all-zero rows", zeros, "none"),
    ):
        if problems:
            report.blame(check, sorted(problems))
        else:
            report.add(check, result)


def _check_sums(
    report: Report, path: Path, files: ArrayFiles, chosen: list[tuple[tuple[int, int], str]], workers: int
) -> None:
    """Against the list beside the array."""
    try:
        listed = checksums.read_list(path)
    except DataError as error:
        report.blame("checksums", [str(error)])
        return
    if listed is None:
        return
    keys = [key for _, key in chosen if key in listed.sums]

    def differs(key: str) -> str | None:
        try:
            check_regular(path / key, files.largest_file)
        except DataError as error:
            return str(error)
        same = checksums.sha256_of(path / key) == listed.sums[key]
        return None if same else f"{path / key} is not the file that was downloaded or made"

    with ThreadPoolExecutor(workers) as pool:
        problems = [problem for problem in pool.map(differs, keys) if problem]
    report.blame("checksums", problems)
    if not problems:
        left = len(chosen) - len(keys)
        others = f", {left:,} {'is' if left == 1 else 'are'} not listed" if left else ""
        report.add("checksums", f"{len(keys):,} files are as {listed.name} says{others}")


def _list_sums(report: Report, path: Path, keys: list[str], workers: int) -> None:
    """From now on whatever reads these files holds them to what they are now."""
    name = checksums.list_name(path.name)
    try:
        checksums.write_list(path, keys, workers)
    except OSError as error:
        report.add("checksums", f"cannot write {name} ({error.strerror}), so nothing holds files to what they are now")
    else:
        report.add("checksums", f"written to {name}, {len(keys):,} files: readers compare each chunk with it")


def _check_manifest(report: Report, path: Path, vocab_size: int, chunk_docs: int) -> None:
    """Against the hash of all tokens that scripts/prepare_data.py wrote into manifest.json."""
    stated = read_manifest(path.parent).get("arrays", {}).get(path.stem, {}).get("content_hash")
    if stated is None:
        return
    with Progress(f"hashing {path.name}", None, "rows") as progress:
        found = read_back(path, vocab_size, chunk_docs, progress).content_hash
    if found == stated:
        report.add("content hash", "as manifest.json says")
    else:
        report.blame("content hash", [f"{found}, manifest.json says {stated}: make the corpus again"])


def _spread(count: int, share: float) -> list[int]:
    return np.unique(np.linspace(0, count - 1, max(1, round(count * share))).astype(int)).tolist() if count else []


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7", shortened where it is long."""
    runs = [list(group) for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0][1]}" if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return ", ".join(names[:12]) + (f", … ({len(numbers):,} in all)" if len(names) > 12 else "")
