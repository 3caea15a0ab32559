"""From files, folders and data sets to texts, and from texts to pieces that fit into memory.

Order is part of the result: inputs in the order given, folders in path order, records in file order. One pass
needs memory for the largest record, and 16 bytes of hash (about a hundred with Python's overhead) per distinct text.
"""

import errno
import fnmatch
import gzip
import hashlib
import importlib
import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgetting_transformer.console import how_to_install
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare import output
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.data.storage.hub import use_cached_datasets
from forgetting_transformer.files import parse_json

ALWAYS_EXCLUDED = ("__pycache__",)
# A file up to this size is read at once; a longer one is read twice (check and hash, then cut), never as a whole.
WHOLE_FILE = 16 << 20
PIECE_CHARS = 1 << 20
PARQUET_ROWS = 256
NEAR_DUPLICATE = "near-duplicate of an earlier text"
MADE_HERE = "corpus that this program made"


@dataclass(frozen=True, slots=True)
class Text:
    """One text and its origin.

    Attributes:
        path: input, folders, file, and the record number in JSONL, Parquet and data sets. Unique per text.
        body: the text, or its UTF-8 file where that is too large to read at once.
        digest: 16-byte hash of the UTF-8 bytes.
        n_bytes: how many there are.
    """

    path: tuple[str, ...]
    body: str | Path
    digest: bytes
    n_bytes: int

    def identity(self) -> bytes:
        return self.digest


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive characters of one text, at most `PIECE_CHARS`; `ends_text` on its last piece."""

    path: tuple[str, ...]
    text: str
    n_bytes: int
    ends_text: bool

    def identity(self) -> bytes:
        place = f"{self.path}{self.n_bytes}{self.ends_text}".encode(errors="surrogateescape")
        return place + self.text.encode()


@dataclass
class InputPass:
    """One pass over the input, and what was counted so far.

    Args:
        out: where the corpus is written: left out if it lies inside an input folder, and so is any other corpus.
        near_duplicates: digests of texts that `pieces` leaves out.

    Attributes:
        texts, bytes: texts kept, and their UTF-8 bytes.
        dropped: reason -> number of files, folders or texts left out.
        stopped_early: True if `max_bytes` ended the pass.
    """

    settings: CorpusSettings
    out: Path
    near_duplicates: Collection[bytes] = ()
    texts: int = 0
    bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stopped_early: bool = False

    def distinct_texts(self) -> Iterator[Text]:
        """Yields every text in order, each once unless `keep_duplicates`."""
        seen: set[bytes] = set()
        for text in self._all_texts():
            if text.digest in seen:
                self.dropped["duplicate of an earlier text"] += 1
                continue
            if not self.settings.keep_duplicates:
                seen.add(text.digest)
            yield text

    def pieces(self) -> Iterator[Piece]:
        """Yields every kept text in order, cut into pieces."""
        for text in self.distinct_texts():
            if text.digest in self.near_duplicates:
                self.dropped[NEAR_DUPLICATE] += 1
                continue
            self.texts += 1
            for piece, is_last in cut(text.body):
                n_bytes = len(piece.encode())
                self.bytes += n_bytes
                self.stopped_early = self.settings.max_bytes is not None and self.bytes >= self.settings.max_bytes
                yield Piece(text.path, piece, n_bytes, is_last or self.stopped_early)
                if self.stopped_early:
                    return

    def _all_texts(self) -> Iterator[Text]:
        settings = self.settings
        if settings.dataset:
            yield from self._records(_dataset_rows(settings), (settings.dataset,))
        # An input inside another one is read in its own turn and skipped in the outer one. The corpus of `out` never
        # counts as left out, so that the counts of an earlier and of a later start are the same.
        own_turn = {*settings.inputs, str(self.out), str(output.OutputFolder(self.out).work)}
        for name in settings.inputs:
            for path in self._walk((name,), own_turn) if os.path.isdir(name) else [(name,)]:
                file = Path(*path)
                if file.name.endswith(".parquet"):
                    yield from self._records(_parquet_rows(file, settings.text_field), path)
                elif file.name.endswith((".jsonl", ".jsonl.gz")):
                    yield from self._records(_json_rows(file, settings.text_field), path)
                elif text := self._text_file(path, file):
                    yield text

    def _walk(self, path: tuple[str, ...], own_turn: set[str]) -> Iterator[tuple[str, ...]]:
        """Yields the paths of files in a folder in order, each as a tuple that starts with the input."""
        folder = os.path.join(*path)
        with reading(folder), os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        if {"manifest.json", "train.zarr"} <= {entry.name for entry in entries}:
            self.dropped[MADE_HERE] += 1
            return
        for entry in entries:
            below = (*path, entry.name)
            if entry.path in own_turn:
                continue
            if reason := self._reason_to_skip(entry, "/".join(below[1:])):
                self.dropped[reason] += 1
            elif entry.is_dir():
                yield from self._walk(below, own_turn)
            else:
                yield below

    def _reason_to_skip(self, entry: os.DirEntry[str], relative: str) -> str | None:
        def matches(patterns: Iterable[str]) -> bool:
            """A pattern with a slash is matched against the path below the input, one without against the name."""
            return any(fnmatch.fnmatchcase(relative if "/" in one else entry.name, one) for one in patterns)

        if entry.name.startswith("."):
            return "hidden file or folder"
        if matches((*ALWAYS_EXCLUDED, *self.settings.exclude)):
            return "excluded file or folder"
        if entry.is_dir():  # following a link could walk in circles
            return "symbolic link to a folder" if entry.is_symlink() else None
        if not entry.is_file():
            return "broken link or special file"
        return "does not match --glob" if self.settings.include and not matches(self.settings.include) else None

    def _text_file(self, path: tuple[str, ...], file: Path) -> Text | None:
        """The file as a text, or None with the reason counted."""
        hasher, n_bytes, block = hashlib.blake2b(digest_size=16), 0, ""
        reason: str | None = "empty text"
        try:
            for block in _blocks(file):
                if "\0" in block:
                    reason = "binary file"
                    break
                encoded = block.encode()
                hasher.update(encoded)
                n_bytes += len(encoded)
                reason = reason if block.isspace() else None
        except UnicodeDecodeError as error:
            reason = "binary file" if b"\0" in error.object else "not UTF-8"
        if reason is not None:
            self.dropped[reason] += 1
            return None
        return Text(path, block if n_bytes <= WHOLE_FILE else file, hasher.digest(), n_bytes)

    def _records(self, rows: Iterator[str | None], path: tuple[str, ...]) -> Iterator[Text]:
        """Numbers the rows of one file or data set and drops those without text."""
        for number, row in enumerate(rows):
            if row is None or not row.strip():
                self.dropped["empty text"] += 1
                continue
            try:
                encoded = row.encode()
            except UnicodeEncodeError:  # JSON may hold half of a surrogate pair, which no UTF-8 text can
                self.dropped["not valid Unicode"] += 1
                continue
            digest = hashlib.blake2b(encoded, digest_size=16).digest()
            yield Text((*path, f"record {number}"), row, digest, len(encoded))


# Records ------------------------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Names `path` in any failure to read it. An input that cannot be read is an error, never a shorter corpus."""
    try:
        yield
    except (DataError, UnicodeDecodeError):  # a file that is not text is no failure
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:  # Arrow's errors are among them
        if getattr(error, "errno", None) == errno.EMFILE:  # no file's fault
            raise
        raise DataError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}. Mend it or fetch it again, or leave it "
            "out with --exclude."
        ) from error


def _json_rows(file: Path, text_field: str) -> Iterator[str | None]:
    opener = gzip.open if file.name.endswith(".gz") else open
    with reading(file), opener(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _text_of(parse_json(line.rstrip(b"\n"), file.name, number), text_field, f"{file}, line {number}")


def _text_of(record: Any, text_field: str, where: str) -> str | None:
    keys = sorted(record) if isinstance(record, dict) else None
    if keys is None or text_field not in record:
        found = f"its keys are {', '.join(keys)}" if keys is not None else "it is not a JSON object"
        raise DataError(f"{where}: no text under {text_field!r}; {found}. Name the right key with --text_field.")
    value = record[text_field]
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"{where}: {text_field!r} holds {kind}, not text. Name the right key with --text_field.")
    return value


def _parquet_rows(file: Path, text_field: str) -> Iterator[str | None]:
    pq = library("pyarrow.parquet", f"reading {file}")
    with reading(file), pq.ParquetFile(file) as table:
        _text_of(dict.fromkeys(table.schema_arrow.names), text_field, str(file))  # there is such a column
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[text_field]):
            for row in batch.to_pylist():
                yield _text_of(row, text_field, str(file))


def _dataset_rows(settings: CorpusSettings) -> Iterator[str | None]:
    """Stream a data set from the hub, or from the cache where the hub cannot be reached."""
    datasets = library("datasets", "--dataset")
    where = f"data set {settings.dataset}, split {settings.dataset_split}"
    try:
        if not os.path.exists(str(settings.dataset)):
            use_cached_datasets()
        rows = datasets.load_dataset(
            settings.dataset, settings.dataset_config, split=settings.dataset_split, streaming=True
        )
        for number, row in enumerate(rows):
            yield _text_of(row, settings.text_field, f"{where}, row {number}")
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        raise DataError(
            f"cannot read {where}: {type(error).__name__}: {error}. Check the name, --dataset_config, --split and "
            "the network; or download the files and give them as inputs."
        ) from error


def library(name: str, use: str) -> Any:
    """A package of the extra `data`.

    Raises:
        DataError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{use} needs {name.partition('.')[0]}: {how_to_install('data')}.") from error


# Cutting into pieces ------------------------------------------------------------------------------------------


def cut(body: str | Path) -> Iterator[tuple[str, bool]]:
    """A text in pieces of at most PIECE_CHARS, and whether each is the last; where it is cut depends on the text alone.

    The cut is after the last newline that stands between two visible characters, because GPT-2's pre-tokenizer
    (and the one we train with) splits there whatever surrounds it: the ids are those of the uncut text.
    """
    buffer = ""
    for block in [body] if isinstance(body, str) else _blocks(body):
        buffer += block
        start = 0
        while len(buffer) - start > PIECE_CHARS:
            end = _place_to_cut(buffer, start)
            yield buffer[start:end], False
            start = end
        buffer = buffer[start:]
    yield buffer, True


def _blocks(file: Path) -> Iterator[str]:
    with reading(file), file.open(encoding="utf-8", newline="") as stream:  # line ends stay
        while block := stream.read(WHOLE_FILE):
            yield block


def _place_to_cut(buffer: str, start: int) -> int:
    end = start + PIECE_CHARS
    newline = buffer.rfind("\n", start + 1, end)
    while newline >= 0 and (buffer[newline - 1].isspace() or buffer[newline + 1].isspace()):
        newline = buffer.rfind("\n", start + 1, newline)
    return newline + 1 if newline >= 0 else end
