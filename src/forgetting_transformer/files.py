"""Files that are whole or not there, and locks that a killed process does not keep. Standard library only."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where corpora can be prepared and read but two processes are not kept apart
    fcntl = None  # type: ignore[assignment]

#: Names of files that `replacing` left when its process was killed.
TEMPORARY = re.compile(r"\..+\.\d+-\d+")


class LocksUnsupportedError(OSError):
    """The file system has no locks."""


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A stream whose contents replace `path` at the end of the block; a reader or a crash sees the old or the new file.

    An error leaves `path` as it was, and nothing beside it. A killed process may leave a
    file beside it whose name matches TEMPORARY.

    Args:
        path: in a folder that exists.
        durable: return only when the contents and the name are on the disk. Without it, a machine that loses power may
            keep neither; a killed process always leaves a whole file.
        beside: the folder of the temporary file, on the same file system, if not that of `path`.
    """
    temporary = (beside or path.parent) / f".{path.name}.{os.getpid()}-{threading.get_native_id()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable and os.name != "nt":  # Windows opens no folders
        flush(path.parent)


def append_durably(path: Path, data: bytes) -> None:
    """Appends, and returns when the disk has it."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replaces a file's contents by a text (UTF-8) or bytes; see `replacing`."""
    with replacing(path, durable=durable) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """The same with a value as JSON, indented, and with a line end."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable=durable)


def size_in_words(count: float) -> str:
    """2.5e9 -> "2.50 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Holds the lock of a folder, or of a file that is made if it is not there. Gives a descriptor of it.

    It is free at once when its process ends, however that happens. Threads of one process keep each other out too.

    Raises:
        BlockingIOError: something else holds it, and `wait` is False.
        LocksUnsupportedError: the file system has no locks.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError as error:
                raise LocksUnsupportedError(error.errno, error.strerror) from error
        yield descriptor
    finally:
        os.close(descriptor)


def flush(path: Path) -> None:
    """Forces a file's contents, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
