"""Fetching an array in LongCrawl64's layout: chosen rows of chunks, in parallel, restartable, each file verified.

A mirror may be partial, and a row of chunks of which one chunk is missing is of no use to training, so only rows are
taken that have every chunk asked for. Files keep their names, so the copy is sparse where the mirror is, or where
less was asked for: train on it with datamodule.missing_chunks=skip.

A file goes to `OUT/.download/`, is checked and decoded there, flushed, and renamed into place; then its SHA-256 is
added to `OUT/<split>.sha256` (the format of sha256sum). The array's metadata comes last: an array that can be opened
was once complete. After a kill the same command fetches what is not yet in place.
"""

import contextlib
import errno
import hashlib
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from forgetting_transformer.data.array_files import LARGEST_METADATA, PROBES, ArrayFiles, open_array
from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.order import documents_needed
from forgetting_transformer.data.remote import RemoteError, RemoteFile, RemoteFolder, open_remote
from forgetting_transformer.files import explain, locked, write_atomically
from forgetting_transformer.progress import Progress
from forgetting_transformer.redaction import redact, redact_tree

#: The public mirror, at a revision that others have used. Its train.zarr holds about a tenth of the row-chunks.
MIRROR = "hf://datasets/clankur/longcrawl64@5e2f38e601ca7c16fa304f30536d9e2945bb2a32"
SPLITS = ("heldout", "train")
#: Files that may fail, each after all its attempts, before the rest is not tried any more.
FAILURES_ALLOWED = 8
#: Bytes to leave free on the disk.
SPACE_MARGIN = 256 << 20

Say = Callable[[str], None]
File = tuple[int, int]


@dataclass(frozen=True)
class Selection:
    """What to take of an array.

    Attributes:
        documents: at least so many (whole rows of chunks are taken, in order); None for all that the source has.
        share: or this share, in (0, 1], of the documents that the source has.
        tokens: only the first so many of each document; None for all. Must be whole chunks.
    """

    documents: int | None = None
    share: float | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a source has, and what of it is asked for.

    Attributes:
        array: the array that will be on disk: its metadata, without chunks yet.
        rows: rows of files to have in the end.
        rows_offered: those that are complete at the source, of `rows_in_all`; None where the source was only asked as
            far as needed.
        files: the files of `rows` by row and column, with what the source states about each.
    """

    array: zarr.Array
    metadata: dict[str, bytes]
    rows: list[int]
    rows_offered: list[int] | None
    rows_in_all: int
    files: dict[File, RemoteFile]

    @property
    def file_shape(self) -> tuple[int, int]:
        height, width = self.array.shards or self.array.chunks
        return height, width

    @property
    def documents(self) -> int:
        return self._documents_in(self.rows)

    def _documents_in(self, rows: list[int]) -> int:
        height, documents = self.file_shape[0], self.array.shape[0]
        return sum(min((row + 1) * height, documents) - row * height for row in rows)

    def amount(self, rows: list[int]) -> str:
        """The documents and tokens in rows."""
        documents, doc_len = self._documents_in(rows), self.array.shape[1]
        return f"{documents:,} documents of {doc_len:,} tokens, {documents * doc_len / 1e9:,.2f} billion tokens"

    def key(self, file: File) -> str:
        return self.array.metadata.encode_chunk_key(file)

    def nbytes(self, file: File) -> int:
        """Bytes of a file as the source states them, else as many as it holds when decoded."""
        stated = self.files[file].size
        return stated if stated is not None else int(np.prod(self.file_shape)) * self.array.dtype.itemsize


def download(
    source: str,
    split: str,
    out: str | Path,
    selection: Selection | None = None,
    workers: int = 16,
    dry_run: bool = False,
    say: Say = print,
    **connection: Any,
) -> Plan:
    """Fetches `<split>.zarr` from `source` into `out`, or continues to.

    Args:
        source: a URL that data.remote.open_remote knows; the array is at `<source>/<split>.zarr`.
        workers: files fetched at a time; each is held in memory (8 MiB for LongCrawl64).
        dry_run: say what would be fetched, and fetch only the metadata.
        say: called with each message for the user.
        connection: `attempts` and `first_wait` of data.remote.RemoteFolder.

    Raises:
        DataError: the selection cannot be met, there is too little space, or files could not be had; whatever was
            fetched and verified stays.
    """
    out = Path(out).absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _only_run(out):
            return _Download(open_remote(source, **connection), split, out, workers, say).run(
                selection or Selection(), dry_run
            )
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"cannot write to {out}: {'the disk is full' if full else explain(error)}. "
            f"{'Make room' if full else 'Mend this'} and start the same command again: it continues"
        ) from error


class _Download:
    def __init__(self, remote: RemoteFolder, split: str, out: Path, workers: int, say: Say) -> None:
        self.remote, self.split, self.out, self.workers, self.say = remote, split, out, workers, say
        self.name = f"{split}.zarr"
        self.target, self.work = out / self.name, out / ".download" / self.name
        self.sums = out / f"{split}.sha256"
        self.ledger_lock = threading.Lock()

    def run(self, selection: Selection, dry_run: bool) -> Plan:
        shutil.rmtree(self.work, ignore_errors=True)  # half-written files of a run that was killed
        self.work.mkdir(parents=True)
        try:
            plan = self._plan(selection)
            missing, unproven = self._what_is_left(plan)
            self._describe(plan, missing, unproven)
            if dry_run:
                return plan
            self._require_space(sum(plan.nbytes(file) for file in missing))
            self._begin(plan)
            self._take(plan, unproven, "checking files that are there", self._adopt)
            self._take(plan, missing, f"fetching {self.name}", self._fetch)
            self._finish(plan)
            return plan
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.work.parent.rmdir()

    # What to fetch ----------------------------------------------------------------------------------------------

    def _plan(self, selection: Selection) -> Plan:
        metadata = self._metadata(selection.tokens)
        for name, text in metadata.items():
            (self.work / name).write_bytes(text)
        array = open_array(ArrayFiles(self.work))
        if array.ndim != 2 or array.dtype != np.uint16:
            raise DataError(
                f"{self.remote.url}/{self.name} has shape {array.shape} and dtype {array.dtype}; expected "
                "(documents, doc_len) of uint16"
            )
        height, width = array.shards or array.chunks
        in_all, columns = -(-array.shape[0] // height), range(-(-array.shape[1] // width))
        key = array.metadata.encode_chunk_key
        wanted = selection.documents
        listed = self.remote.files(self.name)
        if listed is not None:
            offered = [row for row in range(in_all) if all(key((row, column)) in listed for column in columns)]
            files = {(row, column): listed[key((row, column))] for row in offered for column in columns}
        else:
            files = self._ask(array, range(in_all), columns, wanted)
            offered = sorted({row for row, _ in files})
        # As many rows as hold the documents asked for; the last row of the array may hold fewer than the others.
        sizes = [min(array.shape[0] - row * height, height) for row in offered]
        if selection.share is not None:
            wanted = round(selection.share * sum(sizes))
        rows: list[int] = []
        documents = 0
        for row, size in zip(offered, sizes, strict=True):
            if wanted is not None and documents >= wanted:
                break
            rows.append(row)
            documents += size
        if not rows or documents < (wanted or 0):
            raise DataError(
                f"{self.remote.url} has {documents:,} documents of {self.name} with all {len(columns)} chunks asked "
                f"for, fewer than {'one row of chunks' if wanted is None else f'the {wanted:,} asked for'}; ask for "
                "fewer documents, or for fewer tokens of each, or name another source"
            )
        whole = listed is not None or wanted is None
        chosen = {(row, column): files[row, column] for row in rows for column in columns}
        return Plan(array, metadata, rows, offered if whole else None, in_all, chosen)

    def _metadata(self, tokens: int | None) -> dict[str, bytes]:
        """The array's metadata files, of documents cut to `tokens`."""
        for name in (".zarray", "zarr.json"):
            text = self.remote.read(f"{self.name}/{name}", LARGEST_METADATA)
            if text is not None:
                break
        else:
            raise DataError(f"no array at {self.remote.url}/{self.name}: neither .zarray nor zarr.json is there")
        try:
            fields = json.loads(text)
            n_documents, doc_len = fields["shape"]
            width = (
                fields["chunks"][1] if name == ".zarray" else fields["chunk_grid"]["configuration"]["chunk_shape"][1]
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{self.remote.url}/{self.name}/{name} does not describe an array of two dimensions"
            ) from error
        if tokens is not None and tokens != doc_len:
            if not 0 < tokens < doc_len or tokens % width:
                raise DataError(
                    f"--tokens={tokens} must be a multiple of {width:,}, the tokens in a chunk, up to {doc_len:,}, the "
                    "tokens of a document"
                )
            fields["shape"] = [n_documents, tokens]
            text = json.dumps(fields, indent=4).encode()
        return {name: text}

    def _ask(self, array: zarr.Array, rows: range, columns: range, wanted: int | None) -> dict[File, RemoteFile]:
        """The files of complete rows, of a source that cannot list them, until they hold `wanted` documents."""
        found: dict[File, RemoteFile] = {}
        documents = 0
        with ThreadPoolExecutor(PROBES) as pool:

            def stat(files: list[File]) -> dict[File, RemoteFile]:
                names = [f"{self.name}/{array.metadata.encode_chunk_key(file)}" for file in files]
                answers = zip(files, pool.map(self.remote.stat, names), strict=True)
                return {file: answer for file, answer in answers if answer is not None}

            for first in range(0, len(rows), PROBES):
                if wanted is not None and documents >= wanted:
                    break
                # In a sparse mirror most rows are known to be incomplete from one question.
                begun = stat([(row, columns[0]) for row in rows[first : first + PROBES]])
                found_here = begun | stat([(row, column) for row, _ in begun for column in columns[1:]])
                for row, _ in begun:
                    files = {(row, c): found_here[row, c] for c in columns if (row, c) in found_here}
                    if len(files) == len(columns):
                        found |= files
                        documents += (array.shards or array.chunks)[0]
        return found

    def _what_is_left(self, plan: Plan) -> tuple[list[File], list[File]]:
        """Files that are not in place, and files that are but that no run has verified (or that differ in size)."""
        proven = self._ledger()
        missing, unproven = [], []
        for file, stated in plan.files.items():
            key = plan.key(file)
            try:
                size = (self.target / key).stat().st_size
            except FileNotFoundError:
                missing.append(file)
                continue
            if f"{self.name}/{key}" not in proven or (stated.size is not None and size != stated.size):
                unproven.append(file)
        return missing, unproven

    def _describe(self, plan: Plan, missing: list[File], unproven: list[File]) -> None:
        total = sum(plan.nbytes(file) for file in plan.files)
        left = sum(plan.nbytes(file) for file in missing)
        lines = [f"{self.name} from {self.remote.url}"]
        for title, rows in (("the source has", plan.rows_offered), ("asked for", plan.rows)):
            if rows is not None:
                lines.append(f"{title}: {plan.amount(rows)} ({len(rows):,} of {plan.rows_in_all:,} row-chunks)")
        lines.append(
            f"{len(plan.files):,} files, {total / 1e9:,.2f} GB; to fetch {len(missing):,}, {left / 1e9:,.2f} GB"
            + (f"; to check {len(unproven):,} that are there" if unproven else "")
        )
        self.say("\n  ".join(lines))

    def _require_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.out).free
        if needed + SPACE_MARGIN > free:
            raise DataError(
                f"{needed / 1e9:,.2f} GB are to be fetched and {self.out} has {free / 1e9:,.2f} GB free; make room, "
                "ask for fewer documents or fewer tokens of each, or choose another --out"
            )

    # Fetching ---------------------------------------------------------------------------------------------------

    def _begin(self, plan: Plan) -> None:
        """Notes where the files come from; refuses to mix those of two sources or two lengths."""
        note = self.out / f"{self.split}.download.json"
        now = {"source": self.remote.url, "tokens": int(plan.array.shape[1])}
        if note.exists():
            before = redact_tree(json.loads(note.read_text()))
            different = [key for key in now if before.get(key) != now[key]]
            if different:
                raise DataError(
                    f"{self.target} was begun with {', '.join(f'{key} {before.get(key)}' for key in different)}, not "
                    f"{', '.join(str(now[key]) for key in different)}; choose another --out, or delete it, "
                    f"{note.name} and {self.sums.name} first"
                )
        for name, text in plan.metadata.items():
            if (self.target / name).exists() and json.loads((self.target / name).read_bytes()) != json.loads(text):
                raise DataError(f"{self.target / name} describes another array than the source's; choose another --out")
        self.target.mkdir(exist_ok=True)
        self._write_ledger(self._ledger())  # so that nothing is appended to a line that a kill cut short
        write_atomically(note, json.dumps(now, indent=1))

    def _take(self, plan: Plan, files: list[File], title: str, action: Callable[[Plan, File], None]) -> None:
        """Does `action` for each of the files, several at a time."""
        if not files:
            return
        failures: list[str] = []
        pool = ThreadPoolExecutor(self.workers)
        try:
            with Progress(title, sum(plan.nbytes(file) for file in files), "B") as progress:
                running = {pool.submit(action, plan, file): file for file in files}
                for future in as_completed(running):
                    try:
                        future.result()
                    except DataError as error:
                        failures.append(str(error))
                        if len(failures) > FAILURES_ALLOWED:
                            break
                    else:
                        progress.advance(plan.nbytes(running[future]))
        finally:
            pool.shutdown(cancel_futures=True)
        if failures:
            shown = "\n  ".join(failures[:3])
            raise DataError(
                f"{len(failures)} files of {self.name} could not be had:\n  {shown}\n"
                "The others are kept; the same command tries again"
            )

    def _fetch(self, plan: Plan, file: File) -> None:
        """One file: from the source, verified, into its place."""
        key, stated = plan.key(file), plan.files[file]
        data = self.remote.read(f"{self.name}/{key}", self._at_most(plan), stated)
        if data is None:
            raise RemoteError(f"{self.remote.url}/{self.name}/{key} is not there, although the source said so")
        part = self.work / key
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            self._require_decodable(plan, file)
            final = self.target / key
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, final)
        finally:
            part.unlink(missing_ok=True)
        self._note(key, data)

    def _adopt(self, plan: Plan, file: File) -> None:
        """A file that is already in place, from a killed run or from elsewhere: verified, or fetched again."""
        key = plan.key(file)
        data = (self.target / key).read_bytes()
        part = self.work / key
        part.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(DataError):
            if plan.files[file].mismatch(data) is None:
                part.write_bytes(data)
                self._require_decodable(plan, file)
                self._note(key, data)
                return
        self._fetch(plan, file)

    def _require_decodable(self, plan: Plan, file: File) -> None:
        (row, column), (height, width) = file, plan.file_shape
        place = f"{self.remote.url}/{self.name}/{plan.key(file)}"
        try:
            np.asarray(plan.array[row * height : (row + 1) * height, column * width : (column + 1) * width])
        except Exception as error:  # each codec has its own
            raise DataError(f"{place} came whole and cannot be decoded: {error}") from error

    @staticmethod
    def _at_most(plan: Plan) -> int:
        decoded = int(np.prod(plan.file_shape)) * plan.array.dtype.itemsize
        return decoded + decoded // 8 + LARGEST_METADATA

    def _note(self, key: str, data: bytes) -> None:
        line = f"{hashlib.sha256(data).hexdigest()}  {self.name}/{key}\n"
        with self.ledger_lock, self.sums.open("a") as ledger:
            ledger.write(line)

    def _ledger(self) -> dict[str, str]:
        """SHA-256 of every file that was verified, by its path below OUT."""
        text = self.sums.read_text() if self.sums.exists() else ""
        # A line without its end was cut by a kill.
        lines = [line.rstrip("\n").partition("  ") for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {name: digest for digest, _, name in lines}

    def _write_ledger(self, ledger: dict[str, str]) -> None:
        write_atomically(self.sums, "".join(f"{digest}  {name}\n" for name, digest in sorted(ledger.items())))

    def _finish(self, plan: Plan) -> None:
        for name, text in plan.metadata.items():
            write_atomically(self.target / name, text)
        self._write_ledger(self._ledger())
        holes = len(plan.rows) < plan.rows_in_all
        self.say(
            f"{self.target} is complete and verified"
            + ("; it is sparse, so train on it with datamodule.missing_chunks=skip" if holes else "")
        )


def fetching(info: DataInfo, tokens: int) -> str | None:
    """How many documents a run of so many tokens needs, and the command that fetches them.

    None of an array that `download` did not make.
    """
    array = Path(info.path)
    try:
        note = json.loads(array.with_name(f"{array.stem}.download.json").read_text(encoding="utf-8"))
        source = note["source"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    documents = documents_needed(tokens, info.doc_len, info.seq_len, info.global_batch_size)
    words = ["scripts/download_longcrawl64.py", array.stem, "--documents", str(documents)]
    words += ["--tokens", str(info.doc_len), "--out", str(array.parent)]
    words += [] if source == MIRROR else ["--source", redact(source)]
    return f"the {documents:,} documents that it needs: {shlex.join(words)}"


@contextlib.contextmanager
def _only_run(out: Path) -> Iterator[None]:
    """Two runs in one folder would delete each other's parts; the second is refused. A kill releases the lock."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(out / ".download.lock", wait=False))
        except BlockingIOError as error:
            raise DataError(f"another run is downloading into {out}; wait for it, or choose another --out") from error
        yield
