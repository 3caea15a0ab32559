"""From files, folders and data sets to texts, and from texts to pieces that fit into memory.

Order is part of the result: inputs in the order given, folders in path order, records in file order. One pass
needs memory for the largest record, and 16 bytes of hash (about a hundred with Python's overhead) per distinct text.
"""

import codecs
import errno
import fnmatch
import gzip
import hashlib
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
from forgetting_transformer.files import parse_json
from forgetting_transformer.hub_connection import use_cached_datasets

ALWAYS_EXCLUDED = ("__pycache__",)
# A file up to this size is read at once; a longer one is read twice (check and hash, then cut), never as a whole.
WHOLE_FILE_BYTES = 16 << 20
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
class Tally:
    """Counts of one pass over the input.

    Attributes:
        texts, bytes: texts kept, and their UTF-8 bytes.
        dropped: reason -> number of files, folders or texts left out.
        stopped_early: True if `max_bytes` ended the pass.
    """

    texts: int = 0
    bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stopped_early: bool = False


def distinct_texts(settings: CorpusSettings, out: Path, tally: Tally) -> Iterator[Text]:
    """Yield every text in order, each once unless `keep_duplicates`; count what is left out into `tally`.

    `out` is where the corpus is written: it is left out if it lies inside an input folder, and so is any other corpus.
    """
    seen: set[bytes] = set()
    for text in _read_texts(settings, out, tally):
        if not settings.keep_duplicates:
            if text.digest in seen:
                tally.dropped["duplicate of an earlier text"] += 1
                continue
            seen.add(text.digest)
        yield text


def read_pieces(
    settings: CorpusSettings, out: Path, tally: Tally, near_duplicates: Collection[bytes] = ()
) -> Iterator[Piece]:
    """Yield every kept text in order, cut into pieces; count into `tally`. Texts of these digests are left out."""
    for text in distinct_texts(settings, out, tally):
        if text.digest in near_duplicates:
            tally.dropped[NEAR_DUPLICATE] += 1
            continue
        tally.texts += 1
        for piece, is_last in cut(text.body):
            n_bytes = len(piece.encode())
            tally.bytes += n_bytes
            full = settings.max_bytes is not None and tally.bytes >= settings.max_bytes
            yield Piece(text.path, piece, n_bytes, is_last or full)
            if full:
                tally.stopped_early = True
                return


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


# Finding files ------------------------------------------------------------------------------------------------


def _find_files(settings: CorpusSettings, out: Path, tally: Tally) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield (path as a tuple that starts with the input, file) in order, each file once.

    An input that lies inside another one is read in its own turn and skipped in the outer one.
    """
    out = Path(os.path.abspath(out))
    # The corpus of `out` never counts as left out, so that the counts of an earlier and of a later start are the same.
    own_turn = {*settings.inputs, str(out), str(output.OutputFolder(out).work)}
    for name in settings.inputs:
        if os.path.isdir(name):
            yield from _walk((name,), settings, own_turn, tally)
        else:
            yield (name,), Path(name)


def _walk(
    path: tuple[str, ...], settings: CorpusSettings, own_turn: set[str], tally: Tally
) -> Iterator[tuple[tuple[str, ...], Path]]:
    folder = os.path.join(*path)
    with reading(folder), os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    if {"manifest.json", "train.zarr"} <= {entry.name for entry in entries}:
        tally.dropped[MADE_HERE] += 1
        return
    for entry in entries:
        below = (*path, entry.name)
        if entry.path in own_turn:
            continue
        if reason := _reason_to_skip(entry, "/".join(below[1:]), settings):
            tally.dropped[reason] += 1
        elif entry.is_dir():
            yield from _walk(below, settings, own_turn, tally)
        else:
            yield below, Path(entry.path)


def _reason_to_skip(entry: os.DirEntry[str], relative: str, settings: CorpusSettings) -> str | None:
    if entry.name.startswith("."):
        return "hidden file or folder"
    if _matches(entry.name, relative, (*ALWAYS_EXCLUDED, *settings.exclude)):
        return "excluded file or folder"
    if entry.is_symlink() and entry.is_dir():
        return "symbolic link to a folder"  # following it could walk in circles
    if entry.is_dir():
        return None
    if not entry.is_file():
        return "broken link or special file"
    if settings.include and not _matches(entry.name, relative, settings.include):
        return "does not match --glob"
    return None


def _matches(name: str, relative: str, patterns: Iterable[str]) -> bool:
    """A pattern with a slash is matched against the path below the input, one without against the name."""
    return any(fnmatch.fnmatchcase(relative if "/" in pattern else name, pattern) for pattern in patterns)


# Reading texts ------------------------------------------------------------------------------------------------


def _read_texts(settings: CorpusSettings, out: Path, tally: Tally) -> Iterator[Text]:
    if settings.dataset:
        yield from _records(_dataset_rows(settings), (settings.dataset,), tally)
    for path, file in _find_files(settings, out, tally):
        if file.name.endswith(".parquet"):
            yield from _records(_parquet_rows(file, settings.text_field), path, tally)
        elif file.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _records(_json_rows(file, settings.text_field), path, tally)
        elif text := _text_file(path, file, tally):
            yield text


def _text_file(path: tuple[str, ...], file: Path, tally: Tally) -> Text | None:
    """The file as a text, or None with the reason counted. Bytes are kept as they are: no newline translation."""
    hasher = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    blank, n_bytes = True, 0
    try:
        with reading(file), file.open("rb") as stream:
            small = os.fstat(stream.fileno()).st_size <= WHOLE_FILE_BYTES
            while block := stream.read(WHOLE_FILE_BYTES):
                if b"\0" in block:
                    tally.dropped["binary file"] += 1
                    return None
                hasher.update(block)
                n_bytes += len(block)
                decoded = decoder.decode(block)
                blank = blank and (not decoded or decoded.isspace())
        tail = decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        tally.dropped["not UTF-8"] += 1
        return None
    if blank:
        tally.dropped["empty text"] += 1
        return None
    return Text(path, decoded + tail if small else file, hasher.digest(), n_bytes)


def _records(rows: Iterator[Any], path: tuple[str, ...], tally: Tally) -> Iterator[Text]:
    """Number the rows of one file or data set and drop those without text. Each row is a str or None."""
    for number, row in enumerate(rows):
        if row is None or not row.strip():
            tally.dropped["empty text"] += 1
            continue
        try:
            encoded = row.encode()
        except UnicodeEncodeError:  # JSON may contain half of a surrogate pair, which UTF-8 cannot
            tally.dropped["not valid Unicode"] += 1
            continue
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        yield Text((*path, f"record {number}"), row, digest, len(encoded))


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
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"reading {file} needs pyarrow: {how_to_install('data')}.") from error
    with reading(file), pq.ParquetFile(file) as table:
        _text_of(dict.fromkeys(table.schema_arrow.names), text_field, str(file))  # there is such a column
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[text_field]):
            for row in batch.to_pylist():
                yield _text_of(row, text_field, str(file))


def _dataset_rows(settings: CorpusSettings) -> Iterator[str | None]:
    """Stream a data set from the hub, or from the cache where the hub cannot be reached."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"--dataset needs the datasets library: {how_to_install('data')}.") from error
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


# Cutting into pieces ------------------------------------------------------------------------------------------


def cut(body: str | Path) -> Iterator[tuple[str, bool]]:
    """A text in pieces of at most PIECE_CHARS, and whether each is the last; where it is cut depends on the text alone.

    The cut is after the last newline that stands between two visible characters, because GPT-2's pre-tokenizer
    (and the one we train with) splits there whatever surrounds it: the ids are those of the uncut text.
    """
    buffer = ""
    for chunk in _chunks(body):
        buffer += chunk
        start = 0
        while len(buffer) - start > PIECE_CHARS:
            end = _place_to_cut(buffer, start)
            yield buffer[start:end], False
            start = end
        buffer = buffer[start:]
    yield buffer, True


def _chunks(body: str | Path) -> Iterator[str]:
    if isinstance(body, str):
        yield body
        return
    with reading(body), body.open(encoding="utf-8", newline="") as stream:  # line ends stay
        while block := stream.read(WHOLE_FILE_BYTES):
            yield block


def _place_to_cut(buffer: str, start: int) -> int:
    end = start + PIECE_CHARS
    newline = buffer.rfind("\n", start + 1, end)
    while newline >= 0 and (buffer[newline - 1].isspace() or buffer[newline + 1].isspace()):
        newline = buffer.rfind("\n", start + 1, newline)
    return newline + 1 if newline >= 0 else end
