"""Fetching an array in LongCrawl64's layout: chosen rows of chunks, in parallel, restartable, each file verified.

A mirror may be partial, and training cannot use a row of chunks with one missing, so only rows with every wanted chunk
are taken. Files keep their names, so the copy is sparse where the mirror is, or where less was wanted: train on it with
datamodule.missing_chunks=skip.

A file goes to `OUT/.download/`, is checked and decoded there, flushed, and renamed into place; then its SHA-256 is
added to `OUT/<split>.sha256` (the format of sha256sum). The array's metadata comes last: an array that can be opened
was once complete. After a kill the same command fetches what is not yet in the list.
"""

import itertools
import json
import math
import os
import shlex
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.errors import DataError, cannot_write
from forgetting_transformer.data.sparse import documents_in, keys_of, whole_rows
from forgetting_transformer.data.storage.array_files import ARRAY_METADATA
from forgetting_transformer.data.storage.checksums import list_name, read_list, sha256_of, write_sums
from forgetting_transformer.data.storage.remote import RemoteFile, is_url, join
from forgetting_transformer.data.storage.remote_cache import CacheSettings
from forgetting_transformer.data.token_array import Chunk, TokenArray
from forgetting_transformer.data.tools.progress import progress
from forgetting_transformer.data.vocabulary import download_note
from forgetting_transformer.files import flush, locked, write_atomically

#: The public mirror, at a revision that others have used. Its train.zarr holds about a tenth of the row-chunks.
MIRROR = "hf://datasets/clankur/longcrawl64@5e2f38e601ca7c16fa304f30536d9e2945bb2a32"
SPLITS = ("heldout", "train")
#: Bytes to keep free on the disk.
SPACE_MARGIN = 256 << 20


def download(
    source: str,
    split: str,
    out: str | Path,
    documents: int | float | None = None,
    tokens: int | None = None,
    workers: int = 16,
    dry_run: bool = False,
) -> list[int]:
    """Fetches `<split>.zarr` from `source` into `out`, or continues to.

    Args:
        source: a URL that storage.remote.RemoteFolder knows; the array is at `<source>/<split>.zarr`.
        documents: at least so many, or as a float in (0, 1] this share of those that the source has; None for all.
            Whole rows of chunks are taken, in order.
        tokens: only the first so many of each document; None for all. Must be whole chunks.
        workers: files fetched at a time; each is held in memory (8 MiB for LongCrawl64).
        dry_run: print the plan, and fetch only the metadata.

    Returns:
        Rows of chunks that were asked for.

    Raises:
        DataError: the selection cannot be met, there is too little space, or a file could not be fetched; files that
            were fetched and verified stay.
    """
    out = Path(out).absolute()
    work = out / ".download"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".download.lock", wait=False):
            shutil.rmtree(work, ignore_errors=True)  # half-written files of a run that was killed
            try:
                return _Download(source, split, out, tokens, work).run(documents, workers, dry_run)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except BlockingIOError as error:
        raise DataError(f"another run is downloading into {out}; wait for it, or choose another --out") from error
    except OSError as error:
        raise cannot_write(error, out) from error


class _Download:
    """
    Attributes:
        array: at the source, with `work` as its cache.
        tokens: of each document that are asked for.
        verified: file of a chunk -> its SHA-256.
        stated: chunks asked for -> what the source states of their files.
    """

    def __init__(self, source: str, split: str, out: Path, tokens: int | None, work: Path) -> None:
        if not is_url(source):
            raise DataError(f"--source {source} is a folder of this machine; give a URL, as in file://{source}")
        self.split, self.out, self.name = split, out, f"{split}.zarr"
        self.array = TokenArray(join(source, self.name), 1 << 32, CacheSettings(work, 1 << 60), sampled=False)
        self.files, self.source = self.array.files, str(self.array.path).removesuffix(f"/{self.name}")
        width, self.tokens = self.array.chunk_shape[1], tokens or self.array.doc_len
        if self.tokens > self.array.doc_len or (self.tokens % width and self.tokens != self.array.doc_len):
            raise DataError(
                f"--tokens={self.tokens} must be a multiple of {width:,}, the tokens in a chunk, up to "
                f"{self.array.doc_len:,}, the tokens of a document"
            )
        self.target = out / self.name
        self.note, self.sums = out / f"{split}.download.json", out / list_name(self.name)
        self.verified = read_list(self.target) or {}
        self.lock = threading.Lock()
        self.stated: dict[Chunk, RemoteFile] = {}

    def run(self, documents: int | float | None, workers: int, dry_run: bool) -> list[int]:
        offered, rows = self._choose(documents)
        left = [chunk for chunk, stated in self.stated.items() if not self._is_there(self.array.key(chunk), stated)]
        total, to_fetch = (sum(map(self._nbytes, chunks)) for chunks in (self.stated, left))
        print(
            f"{self.name} from {self.source}\n"
            f"  the source has: {self._amount(offered)}\n"
            f"  asked for: {self._amount(rows)}\n"
            f"  {len(self.stated):,} files, {total / 1e9:,.2f} GB; to fetch {len(left):,}, {to_fetch / 1e9:,.2f} GB"
        )
        if dry_run:
            return rows
        free = shutil.disk_usage(self.out).free
        if to_fetch + SPACE_MARGIN > free:
            raise DataError(
                f"{to_fetch / 1e9:,.2f} GB are to be fetched and {self.out} has {free / 1e9:,.2f} GB free; make room, "
                "ask for fewer documents or fewer tokens of each, or choose another --out"
            )
        self._begin()
        with progress(f"fetching {self.name}", to_fetch, "B") as bar, ThreadPoolExecutor(workers) as pool:
            for chunk, _ in zip(left, pool.map(self._fetch, left), strict=True):
                bar.update(self._nbytes(chunk))
        write_sums(self.target, self.verified)
        for file in filter(Path.exists, (self.files.folder / name for name in ARRAY_METADATA.values())):
            shape = [self.array.stored_documents, self.tokens]
            metadata = json.loads(file.read_bytes()) | {"shape": shape}
            write_atomically(self.target / file.name, json.dumps(metadata, indent=4))
        holes = len(rows) * self.array.chunk_shape[0] < self.array.documents
        print(
            f"{self.target} is complete and verified"
            + ("; it is sparse, so train on it with datamodule.missing_chunks=skip" if holes else "")
        )
        return rows

    def _choose(self, wanted: int | float | None) -> tuple[list[int], list[int]]:
        """Rows of chunks that the source has completely, and those of them to fetch."""
        array, remote = self.array, self.files.remote
        assert remote is not None  # of a URL
        keys = {at: key for at, key in keys_of(array).items() if at[1] * array.chunk_shape[1] < self.tokens}
        files = remote.files()
        if files is None:  # plain HTTP, which is taken to have all
            files = {key: RemoteFile() for key in keys.values()}
        offered = rows = whole_rows(keys, files)
        if isinstance(wanted, float):
            wanted = round(wanted * documents_in(array, offered))
        if wanted is not None:
            # As many as hold the documents asked for; the last row of the array may hold fewer than the others.
            held = itertools.accumulate(documents_in(array, [row]) for row in offered)
            rows = offered[: next((n for n, documents in enumerate(held, 1) if documents >= wanted), 0)]
        if not rows:
            raise DataError(
                f"{self.source} has {documents_in(array, offered):,} documents of {self.name} with all chunks asked "
                f"for, fewer than {'one row of chunks' if wanted is None else f'the {wanted:,} asked for'}; ask for "
                "fewer documents, or for fewer tokens of each, or name another source"
            )
        self.stated = {chunk: files[key] for chunk, key in keys.items() if chunk[0] in set(rows)}
        return offered, rows

    def _amount(self, rows: list[int]) -> str:
        """The documents and tokens in rows, in words."""
        documents = documents_in(self.array, rows)
        return (
            f"{documents:,} documents of {self.tokens:,} tokens, {documents * self.tokens / 1e9:,.2f} billion tokens "
            f"({len(rows):,} of {-(-self.array.documents // self.array.chunk_shape[0]):,} row-chunks)"
        )

    def _nbytes(self, chunk: Chunk) -> int:
        """Bytes of a chunk as the source states them, else as many as it holds when decoded."""
        stated = self.stated[chunk].size
        return math.prod(self.array.chunk_shape) * self.array.dtype.itemsize if stated is None else stated

    def _is_there(self, key: str, stated: RemoteFile) -> bool:
        """Whether a file was verified, and is in its place with the size that the source states."""
        path = self.target / key
        return key in self.verified and path.exists() and stated.size in (None, path.stat().st_size)

    def _begin(self) -> None:
        """Records the source of the files; refuses to mix files of two sources or two lengths, or with others."""
        now = {"source": self.source, "tokens": self.tokens}
        if before := download_note(self.out, self.split):
            if different := [key for key in now if before.get(key) != now[key]]:
                raise DataError(
                    f"{self.target} was begun with {', '.join(f'{key} {before.get(key)}' for key in different)}, not "
                    f"{', '.join(str(now[key]) for key in different)}; choose another --out, or delete it, "
                    f"{self.note.name} and {self.sums.name} first"
                )
        elif self.target.exists():
            raise DataError(f"{self.target} was not made by this program; choose another --out, or move it away")
        write_atomically(self.note, json.dumps(now, indent=1))
        self.target.mkdir(exist_ok=True)
        write_sums(self.target, self.verified)  # so that nothing is appended to a line that a kill cut short

    def _fetch(self, chunk: Chunk) -> None:
        """One chunk: from the source, verified, into its place."""
        key = self.array.key(chunk)
        part, final = self.files.fetch(key, expected=self.stated[chunk]), self.target / key
        if part is None:
            raise DataError(f"{self.files.place(key)} is not there; name another source")
        self.array.decode(chunk)
        flush(part)
        digest = sha256_of(part)
        final.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, final)
        with self.lock, self.sums.open("a") as sums:
            self.verified[key] = digest
            sums.write(f"{digest}  {self.name}/{key}\n")


def fetching(info: DataInfo, tokens: int) -> str | None:
    """Documents that a run of so many tokens needs, and the command that fetches them.

    None for an array that `download` did not make.
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


def documents_needed(tokens: int, doc_len: int, seq_len: int, batch_size: int) -> int:
    """The fewest documents of which a run of so many tokens reads none twice. Arguments as of ReadingOrder."""
    batches = -(-tokens // (batch_size * seq_len))
    return -(-batches // (doc_len // seq_len)) * batch_size
