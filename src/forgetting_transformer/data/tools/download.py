"""Fetching an array in LongCrawl64's layout: chosen rows of chunks, in parallel, restartable, each file verified.

A mirror may be partial, and a row of chunks of which one chunk is missing is of no use to training, so only rows are
taken that have every chunk asked for. Files keep their names, so the copy is sparse where the mirror is, or where
less was asked for: train on it with datamodule.missing_chunks=skip.

A file goes to `OUT/.download/`, is checked and decoded there, flushed, and renamed into place; then its SHA-256 is
added to `OUT/<split>.sha256` (the format of sha256sum). The array's metadata comes last: an array that can be opened
was once complete. After a kill the same command fetches what is not yet in the list.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import shlex
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.errors import DataError, cannot_write
from forgetting_transformer.data.order import documents_needed
from forgetting_transformer.data.sparse import documents_in, whole_rows
from forgetting_transformer.data.storage.array_files import ARRAY_METADATA
from forgetting_transformer.data.storage.checksums import list_name, read_list
from forgetting_transformer.data.storage.remote import RemoteFile, RemoteFolder
from forgetting_transformer.data.token_array import Chunk, TokenArray
from forgetting_transformer.data.tools.progress import progress
from forgetting_transformer.data.vocabulary import download_note
from forgetting_transformer.files import flush, locked, write_atomically

#: The public mirror, at a revision that others have used. Its train.zarr holds about a tenth of the row-chunks.
MIRROR = "hf://datasets/clankur/longcrawl64@5e2f38e601ca7c16fa304f30536d9e2945bb2a32"
SPLITS = ("heldout", "train")
#: Files that may fail, each after all its attempts, before the rest is not tried any more.
FAILURES_ALLOWED = 8
#: Bytes to leave free on the disk.
SPACE_MARGIN = 256 << 20


@dataclass(frozen=True)
class Selection:
    """Part of an array to take.

    Attributes:
        documents: at least so many (whole rows of chunks are taken, in order); None for all that the source has.
        share: or this share, in (0, 1], of the documents that the source has.
        tokens: only the first so many of each document; None for all. Must be whole chunks.
    """

    documents: int | None = None
    share: float | None = None
    tokens: int | None = None


def download(
    source: str,
    split: str,
    out: str | Path,
    selection: Selection = Selection(),
    workers: int = 16,
    dry_run: bool = False,
) -> list[int]:
    """Fetches `<split>.zarr` from `source` into `out`, or continues to.

    Args:
        source: a URL that storage.remote.RemoteFolder knows; the array is at `<source>/<split>.zarr`.
        workers: files fetched at a time; each is held in memory (8 MiB for LongCrawl64).
        dry_run: print what would be fetched, and fetch only the metadata.

    Returns:
        Rows of chunks that were asked for.

    Raises:
        DataError: the selection cannot be met, there is too little space, or files could not be had; whatever was
            fetched and verified stays.
    """
    out = Path(out).absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".download.lock", wait=False):
            return _Download(RemoteFolder(source), split, out, workers).run(selection, dry_run)
    except BlockingIOError as error:
        raise DataError(f"another run is downloading into {out}; wait for it, or choose another --out") from error
    except OSError as error:
        raise cannot_write(error, out) from error


class _Download:
    """
    Attributes:
        verified: file of a chunk -> its SHA-256.
        array: the array that will be on disk: its metadata, without chunks yet.
        stated: what the source states of the chunks asked for.
    """

    array: TokenArray
    stated: dict[Chunk, RemoteFile]

    def __init__(self, remote: RemoteFolder, split: str, out: Path, workers: int) -> None:
        self.remote, self.split, self.out, self.workers = remote, split, out, workers
        self.name = f"{split}.zarr"
        self.target, self.work = out / self.name, out / ".download" / self.name
        self.note, self.sums = out / f"{split}.download.json", out / list_name(self.name)
        listed = read_list(self.target)
        self.verified = {} if listed is None else listed.sums
        self.lock = threading.Lock()

    def run(self, selection: Selection, dry_run: bool) -> list[int]:
        shutil.rmtree(self.work, ignore_errors=True)  # half-written files of a run that was killed
        self.work.mkdir(parents=True)
        try:
            self.array = self._open(selection.tokens)
            offered, rows = self._choose(selection)
            left = [chunk for chunk in self.stated if not self._is_there(chunk)]
            total, to_fetch = (sum(map(self._nbytes, chunks)) for chunks in (self.stated, left))
            print(
                f"{self.name} from {self.remote.url}\n"
                f"  the source has: {self._amount(offered)}\n"
                f"  asked for: {self._amount(rows)}\n"
                f"  {len(self.stated):,} files, {total / 1e9:,.2f} GB; to fetch {len(left):,}, {to_fetch / 1e9:,.2f} GB"
            )
            if not dry_run:
                free = shutil.disk_usage(self.out).free
                if to_fetch + SPACE_MARGIN > free:
                    raise DataError(
                        f"{to_fetch / 1e9:,.2f} GB are to be fetched and {self.out} has {free / 1e9:,.2f} GB free; "
                        "make room, ask for fewer documents or fewer tokens of each, or choose another --out"
                    )
                self._begin()
                self._fetch_all(left)
                self._finish(rows)
            return rows
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.work.parent.rmdir()

    def _open(self, tokens: int | None) -> TokenArray:
        """The array in the work folder, which gets its metadata alone, of documents cut to `tokens`."""
        place = f"{self.remote.url}/{self.name}"
        found = ((name, self.remote.read(f"{self.name}/{name}")) for name in ARRAY_METADATA.values())
        name, text = next(((name, text) for name, text in found if text is not None), ("", b""))
        if not name:
            raise DataError(f"no array at {place}: neither .zarray nor zarr.json is there; check --source")
        (self.work / name).write_bytes(text)
        try:
            array = TokenArray(self.work, 1 << 32, sampled=False)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        if tokens is None or tokens == array.doc_len:
            return array
        if not 0 < tokens < array.doc_len or tokens % array.chunk_shape[1]:
            raise DataError(
                f"--tokens={tokens} must be a multiple of {array.chunk_shape[1]:,}, the tokens in a chunk, up to "
                f"{array.doc_len:,}, the tokens of a document"
            )
        shape = [array.stored_documents, tokens]
        (self.work / name).write_text(json.dumps(json.loads(text) | {"shape": shape}, indent=4))
        return TokenArray(self.work, 1 << 32, sampled=False)

    def _choose(self, selection: Selection) -> tuple[list[int], list[int]]:
        """Rows of chunks that the source has whole, and those of them to have in the end."""
        array, keys = self.array, self.array.keys()
        files = self.remote.files(self.name)
        if files is None:  # plain HTTP, which is taken to have all
            files = {key: RemoteFile() for key in keys.values()}
        offered = rows = whole_rows(array, files)
        wanted = selection.documents
        if selection.share is not None:
            wanted = round(selection.share * documents_in(array, offered))
        if wanted is not None:
            # As many as hold the documents asked for; the last row of the array may hold fewer than the others.
            held = itertools.accumulate(documents_in(array, [row]) for row in offered)
            rows = offered[: next((n for n, documents in enumerate(held, 1) if documents >= wanted), 0)]
        if not rows:
            raise DataError(
                f"{self.remote.url} has {documents_in(array, offered):,} documents of {self.name} with all chunks "
                "asked for, fewer than "
                f"{'one row of chunks' if wanted is None else f'the {wanted:,} asked for'}; ask for fewer documents, "
                "or for fewer tokens of each, or name another source"
            )
        self.stated = {chunk: files[key] for chunk, key in keys.items() if chunk[0] in set(rows)}
        return offered, rows

    def _amount(self, rows: list[int]) -> str:
        """The documents and tokens in rows, in words."""
        documents, doc_len = documents_in(self.array, rows), self.array.doc_len
        return (
            f"{documents:,} documents of {doc_len:,} tokens, {documents * doc_len / 1e9:,.2f} billion tokens "
            f"({len(rows):,} of {-(-self.array.documents // self.array.chunk_shape[0]):,} row-chunks)"
        )

    def _nbytes(self, chunk: Chunk) -> int:
        """Bytes of a chunk as the source states them, else as many as it holds when decoded."""
        stated = self.stated[chunk].size
        return math.prod(self.array.chunk_shape) * self.array.dtype.itemsize if stated is None else stated

    def _is_there(self, chunk: Chunk) -> bool:
        """Whether a chunk was verified, and lies in its place as large as the source states."""
        key = self.array.key(chunk)
        path = self.target / key
        return key in self.verified and path.exists() and self.stated[chunk].size in (None, path.stat().st_size)

    def _begin(self) -> None:
        """Notes where the files come from; refuses to mix those of two sources or two lengths, or with others."""
        now = {"source": self.remote.url, "tokens": self.array.doc_len}
        if before := download_note(self.out, self.split):
            different = [key for key in now if before.get(key) != now[key]]
            if different:
                raise DataError(
                    f"{self.target} was begun with {', '.join(f'{key} {before.get(key)}' for key in different)}, not "
                    f"{', '.join(str(now[key]) for key in different)}; choose another --out, or delete it, "
                    f"{self.note.name} and {self.sums.name} first"
                )
        elif self.target.exists():
            raise DataError(f"{self.target} was not made by this program; choose another --out, or move it away")
        write_atomically(self.note, json.dumps(now, indent=1))
        self.target.mkdir(exist_ok=True)
        self._write_sums()  # so that nothing is appended to a line that a kill cut short

    def _fetch_all(self, chunks: list[Chunk]) -> None:
        failures: list[str] = []
        pool = ThreadPoolExecutor(self.workers)
        try:
            with progress(f"fetching {self.name}", sum(map(self._nbytes, chunks)), "B") as bar:
                running = {pool.submit(self._fetch, chunk): chunk for chunk in chunks}
                for future in as_completed(running):
                    try:
                        future.result()
                        bar.update(self._nbytes(running[future]))
                    except DataError as error:
                        failures.append(str(error))
                        if len(failures) > FAILURES_ALLOWED:
                            break
        finally:
            pool.shutdown(cancel_futures=True)
        if failures:
            shown = "\n  ".join(failures[:3])
            raise DataError(
                f"{len(failures)} files of {self.name} could not be had:\n  {shown}\n"
                "The others are kept; the same command tries again"
            )

    def _fetch(self, chunk: Chunk) -> None:
        """One chunk: from the source, verified, into its place."""
        key = self.array.key(chunk)
        place = f"{self.remote.url}/{self.name}/{key}"
        data = self.remote.read(f"{self.name}/{key}", self.stated[chunk])
        if data is None:
            raise DataError(f"{place} is not there")
        part, final = self.work / key, self.target / key
        for folder in (part.parent, final.parent):
            folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        try:
            self.array.decode(chunk)
        except DataError as error:
            raise DataError(f"{place} came whole and cannot be decoded: {error}") from error
        flush(part)
        os.replace(part, final)
        digest = hashlib.sha256(data).hexdigest()
        with self.lock, self.sums.open("a") as sums:
            self.verified[key] = digest
            sums.write(f"{digest}  {self.name}/{key}\n")

    def _write_sums(self) -> None:
        lines = (f"{digest}  {self.name}/{key}\n" for key, digest in sorted(self.verified.items()))
        write_atomically(self.sums, "".join(lines))

    def _finish(self, rows: list[int]) -> None:
        for name in ARRAY_METADATA.values():
            if (self.work / name).exists():
                write_atomically(self.target / name, (self.work / name).read_bytes())
        self._write_sums()
        holes = len(rows) * self.array.chunk_shape[0] < self.array.documents
        print(
            f"{self.target} is complete and verified"
            + ("; it is sparse, so train on it with datamodule.missing_chunks=skip" if holes else "")
        )


def fetching(info: DataInfo, tokens: int) -> str | None:
    """How many documents a run of so many tokens needs, and the command that fetches them.

    None of an array that `download` did not make.
    """
    array = Path(info.path)
    source = download_note(array.parent, array.stem).get("source")
    if source is None:
        return None
    documents = documents_needed(tokens, info.doc_len, info.seq_len, info.global_batch_size)
    words = ["scripts/download_longcrawl64.py", array.stem, "--documents", str(documents)]
    words += ["--tokens", str(info.doc_len), "--out", str(array.parent)]
    words += [] if source == MIRROR else ["--source", source]
    return f"the {documents:,} documents that it needs: {shlex.join(words)}"
