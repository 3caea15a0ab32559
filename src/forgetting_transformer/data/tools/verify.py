"""Looking through an array before it is trained on: is every chunk there, can it be decoded, does it hold tokens?"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path

import numpy as np

from forgetting_transformer.data import checksums
from forgetting_transformer.data.array_files import ArrayFiles, open_array
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.writing import read_back
from forgetting_transformer.data.token_array import read_manifest
from forgetting_transformer.data.tools.progress import Progress
from forgetting_transformer.data.vocabulary import TOKEN_DTYPES

#: Problems of one kind that are spelled out; the rest is counted.
SHOWN = 5


@dataclass
class Report:
    """What was found in one array. `problems` is empty if it can be trained on."""

    path: Path
    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, check: str, result: str, problems: list[str] | None = None) -> None:
        """One line of the table; if there are problems, that it failed, and the first few by name."""
        problems = sorted(problems or [])
        self.lines.append((check, f"FAILED: {len(problems):,}" if problems else result))
        self.problems += [f"{check}: {problem}" for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            self.problems.append(f"{check}: and {len(problems) - SHOWN:,} more")

    def table(self) -> str:
        width = max(len(check) for check, _ in self.lines)
        rows = [f"{self.path}", *(f"  {check:<{width}}  {result}" for check, result in self.lines)]
        return "\n".join([*rows, *(f"  ! {problem}" for problem in self.problems)])


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
    report, files = Report(path), ArrayFiles(path)
    try:
        if not files.has_array():
            raise DataError(f"no array at {path}")
        array = open_array(files)
        files.read_checksums()
        if array.ndim != 2 or array.dtype not in TOKEN_DTYPES:
            raise DataError(
                f"shape {array.shape} and dtype {array.dtype}; expected (documents, doc_len) of uint16 or uint32"
            )
    except DataError as error:
        report.add("metadata", "", [str(error)])
        return report
    documents, doc_len = array.shape
    height, width = array.shards or array.chunks
    report.add(
        "metadata",
        f"Zarr v{array.metadata.zarr_format}, {documents:,} documents x {doc_len:,} tokens, {array.dtype}, "
        f"{'shards' if array.shards else 'chunks'} of {height:,} x {width:,}",
    )

    # Which files are there
    rows, columns = range(-(-documents // height)), range(-(-doc_len // width))
    keys = {file: array.metadata.encode_chunk_key(file) for file in product(rows, columns)}
    there = files.names(keys.values())
    present = [file for file, key in keys.items() if key in there]
    broken = sorted({row for (row, _), key in keys.items() if key not in there})
    whole = len(rows) - len(broken)
    report.add("presence", f"{len(present):,} of {len(keys):,} files; {whole:,} of {len(rows):,} row-chunks whole")
    held = documents - sum(min((row + 1) * height, documents) - row * height for row in broken)
    report.add("whole documents", f"{held:,} of {documents:,} ({held * doc_len:,} tokens)")
    if broken:
        report.add("row-chunks not whole", _ranges(broken))
        if missing_chunks == "error":
            report.add("missing files", "", [files.place(key) for key in keys.values() if key not in there])
            report.problems.append(
                "fetch the missing files again, or train on the whole documents with datamodule.missing_chunks=skip "
                "(and check this copy with --missing_chunks skip)"
            )
        elif not whole:
            report.add("presence", "", ["no row of chunks is whole: nothing can be trained on"])

    # What is in them. Evenly spread: a damaged region shows in a sample too.
    chosen = [present[i] for i in _spread(len(present), share)]
    found: dict[str, list[str]] = {"decodable": [], "token range": [], "all-zero rows": [], "checksums": []}

    def inspect(file: tuple[int, int]) -> int:
        """The largest id in a file; what is wrong with it goes into `found`."""
        (row, column), place = file, files.place(keys[file])
        try:
            tokens = np.asarray(array[row * height : (row + 1) * height, column * width : (column + 1) * width])
        except checksums.ChecksumError:
            found["checksums"].append(f"{place} is not the file that was downloaded or made")
            return 0
        except Exception as error:  # each codec has its own
            found["decodable"].append(f"{place}: {error}")
            return 0
        largest, zeros = int(tokens.max()), np.flatnonzero(~tokens.any(axis=1)) + row * height
        if largest >= vocab_size:
            found["token range"].append(f"{place} holds id {largest}, not below vocab_size={vocab_size}")
        if zeros.size:
            found["all-zero rows"].append(
                f"{place}: {zeros.size:,} documents are all zeros in tokens {column * width:,} and on, the first is "
                f"document {zeros[0]:,}"
            )
        return largest

    largest = 0
    with ThreadPoolExecutor(workers) as pool, Progress(f"decoding {path.name}", len(chosen), "files") as progress:
        for one in pool.map(inspect, chosen):
            largest = max(largest, one)
            progress.advance(1)
    listed = files.checksums
    said = {
        "decodable": f"yes, {len(chosen):,} files",
        "token range": f"0 to {largest:,} of {vocab_size:,}",
        "all-zero rows": "none",
    }
    if listed is not None:
        n_listed = sum(keys[file] in listed.sums for file in chosen)
        others = f", {len(chosen) - n_listed:,} not listed" if n_listed < len(chosen) else ""
        said["checksums"] = f"{n_listed:,} files are as {listed.name} says{others}"
    for check, result in said.items():
        report.add(check, result, found[check])

    if share == 1.0 and not report.problems:
        if not broken:
            _check_manifest(report, vocab_size, height)
        if listed is None and not report.problems:
            _list_sums(report, [keys[file] for file in chosen], workers)
    return report


def _check_manifest(report: Report, vocab_size: int, chunk_docs: int) -> None:
    """Compares the array with the hash of all tokens that scripts/prepare_data.py wrote into manifest.json."""
    path = report.path
    stated = read_manifest(path.parent).get("arrays", {}).get(path.stem, {}).get("content_hash")
    if stated is None:
        return
    with Progress(f"hashing {path.name}", None, "rows") as progress:
        found = read_back(path, vocab_size, chunk_docs, progress).content_hash
    problems = [] if found == stated else [f"{found}, manifest.json says {stated}: make the corpus again"]
    report.add("content hash", "as manifest.json says", problems)


def _list_sums(report: Report, keys: list[str], workers: int) -> None:
    """From now on whatever reads these files holds them to what they are now."""
    name = checksums.list_name(report.path.name)
    try:
        checksums.write_list(report.path, keys, workers)
    except OSError as error:
        said = f"cannot write {name} ({error.strerror}), so nothing holds files to what they are now"
    else:
        said = f"written to {name}, {len(keys):,} files: readers compare each chunk with it"
    report.add("checksums", said)


def _spread(count: int, share: float) -> list[int]:
    return np.unique(np.linspace(0, count - 1, max(1, round(count * share))).astype(int)).tolist() if count else []


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7", shortened where it is long."""
    runs = [list(group) for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0][1]}" if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return ", ".join(names[:12]) + (f", … ({len(numbers):,} in all)" if len(names) > 12 else "")
