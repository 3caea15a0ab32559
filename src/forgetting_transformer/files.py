"""Atomic writes of files, readers of files that people write, and locks that end with their process."""

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where corpora can be prepared and read but there are no locks
    fcntl = None  # type: ignore[assignment]

#: Names of files that `replacing` left when its process was killed.
TEMPORARY = re.compile(r"\..+\.\d+-\d+")


#: Fix for a folder with a name that is not UTF-8; Linux allows any bytes, and libraries in Rust open none of them.
LINK_TO_IT = "make a link to the folder (ln -s) and name that"


class UnreadableError(ValueError):
    """A file with invalid contents; the message is one line with file, line and column."""


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Names `path` in errors of the operating system that name no file, as on a full disk, or its temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, temporary and str(temporary)):
            error.filename = str(path)
        raise


def explain(error: OSError) -> str:
    """An error of the operating system in words: the file that it names, if it does, and the reason."""
    if error.strerror is None:
        return str(error)
    if error.errno == errno.EMFILE:  # not the fault of the file that could not be opened
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{error.strerror}: this process may have {limit:,} (`ulimit -n`)"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A stream whose contents replace `path` at the end of the block; a reader or a crash sees the old or the new file.

    An error leaves `path` as it was, and nothing beside it. A killed process may leave a
    file beside it whose name matches TEMPORARY.

    Args:
        path: in a folder that exists.
        durable: return only when the contents and the name are on the disk. Without it, a machine that loses power may
            keep neither; a killed process always leaves a whole file.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}-{threading.get_native_id()}"
    with naming(path, temporary):
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
    """Appends, and returns when the data is on the disk."""
    with naming(path), path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replaces a file's contents by a text (UTF-8) or bytes; see `replacing`.

    A byte of a file's name that is not UTF-8 becomes `\\udcXX`, which JSON reads as that byte.
    """
    with replacing(path, durable=durable) as stream:
        stream.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Writes a value as indented JSON with a final newline; see `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable=durable)


def decode(data: bytes, place: object, first_line: int = 1) -> str:
    """The text of bytes in UTF-8, without the byte-order mark that some editors put before it.

    Args:
        place: what messages call the file.
        first_line: number of the first line in that file.

    Raises:
        UnreadableError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before, byte = error.object[: error.start].decode(), error.object[error.start]
        raise UnreadableError(
            f"{_at(place, before, first_line)}: the byte {byte:#x} is not UTF-8; save the file as UTF-8"
        ) from error


def parse_yaml(text: str, place: object, load: Callable[[str], Any] | None = None) -> Any:
    """The value of a YAML text.

    Args:
        place: what messages call the file.
        load: parses the text with PyYAML, if not as `yaml.safe_load` does.

    Raises:
        UnreadableError: it is not YAML.
    """
    import yaml

    try:
        return (load or yaml.safe_load)(text)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        where, reason = str(place), f"{type(error).__name__}: {error}".partition("\n")[0]  # of a value, as !!int x
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
            where, reason = f"{place}, line {mark.line + 1}, column {mark.column + 1}", str(error.problem)
        elif isinstance(error, yaml.reader.ReaderError):
            where, reason = _at(place, text[: error.position]), error.reason
        raise UnreadableError(f"{where}: not valid YAML: {reason}") from error


def read_yaml(path: Path, load: Callable[[str], Any] | None = None) -> Any:
    """The value of a YAML file.

    Raises:
        UnreadableError: it is not YAML in UTF-8.
    """
    return parse_yaml(decode(path.read_bytes(), path), path, load)


def parse_json(data: bytes, place: object, first_line: int = 1) -> Any:
    """The value of JSON in UTF-8; the arguments are those of `decode`.

    Raises:
        UnreadableError: it is anything else.
    """
    text = decode(data, place, first_line)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists in lists
        where = _at(place, text[: getattr(error, "pos", 0)], first_line)
        raise UnreadableError(f"{where}: not valid JSON: {getattr(error, 'msg', error)}") from error


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        UnreadableError: it is not JSON in UTF-8.
    """
    return parse_json(path.read_bytes(), path)


def parse_json_lines(data: bytes, place: object) -> Iterator[Any]:
    """The values of JSON Lines, without empty lines.

    Raises:
        UnreadableError: a line is not JSON in UTF-8.
    """
    # A line ends with a newline alone: JSON allows U+2028 and the like inside of a text.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield parse_json(line, place, number)


def _at(place: object, before: str, first_line: int = 1) -> str:
    """The position after a text, for a message."""
    return f"{place}, line {first_line + before.count(chr(10))}, column {len(before) - before.rfind(chr(10))}"


def is_utf8(name: str) -> bool:
    """Whether a name that Python decoded from the system's bytes is UTF-8."""
    return name == name.encode(errors="replace").decode()


def size_in_words(count: float) -> str:
    """2.5e9 -> "2.50 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Holds the lock of a folder, or of a file that is made if it does not exist. Yields its descriptor.

    The lock is free when its process ends, however that happens. Threads of one process exclude each other too.

    Raises:
        BlockingIOError: something else holds it, and `wait` is False.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)


def flush(path: Path) -> None:
    """Forces a file's contents, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys with dots between them: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
