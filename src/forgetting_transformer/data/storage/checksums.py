"""Checksums of an array's files: `train.sha256` beside `train.zarr`, in the format of sha256sum.

    <64 hexadecimal digits>  train.zarr/0.0

SHA-256 and not a CRC: the list then also identifies the contents that were trained on, and is the one that the
downloader writes. It costs about 1 ns per token that is read. Lines without a file are allowed, since a copy may be
partial.
"""

import functools
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from forgetting_transformer.console import redact
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.remote import join, read_file
from forgetting_transformer.files import write_atomically

log = logging.getLogger(__name__)

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class ChecksumError(ValueError):
    """A file differs from the listed one. The message continues after the file's name."""


def identity(sums: Mapping[str, str]) -> str:
    """A short hash of the listed files and their contents."""
    return hashlib.sha256(_lines(sums).encode()).hexdigest()[:16]


def check(sums: Mapping[str, str], key: str, data: np.ndarray, array: object) -> None:
    """Compares all bytes of the file `key` of an array, (n_bytes,) uint8, with its line.

    Raises:
        ChecksumError: they differ.
    """
    name = list_name(array)
    if key not in sums:
        _warn_of_unlisted(name, array)
    elif (found := hashlib.sha256(data.data).hexdigest()) != sums[key]:
        raise ChecksumError(
            f"is not the file that {name} lists: it was changed or is damaged (its SHA-256 is {found}). Fetch or make "
            f"it again. If the change is intended, this is another corpus: delete {name}, and scripts/verify_data.py "
            "makes a new one"
        )


@functools.cache
def _warn_of_unlisted(name: str, array: object) -> None:
    log.warning("some files of %s are not listed in %s, and are read without a check", array, name)


def list_name(array: object) -> str:
    """ "data/train.zarr" -> "train.sha256"."""
    return PurePosixPath(str(array)).with_suffix(".sha256").name


def read_list(array: str | Path) -> dict[str, str] | None:
    """The list beside an array, a folder or a URL: file of the array, such as "0.0" or "c/0/0" -> SHA-256.

    None if there is none. A last line cut short by a kill is left out.

    Raises:
        DataError: naming a line that is damaged.
    """
    folder, _, name = str(array).rpartition("/")
    text = read_file(folder, list_name(name))
    if text is None:
        return None
    sums: dict[str, str] = {}
    lines = text.decode("utf-8-sig", errors="replace").split("\n")  # as an editor of Windows may leave it
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None:
            if number < len(lines):
                raise DataError(
                    f"{redact(join(folder, list_name(name)))}, line {number}, is not of the form "
                    f"'<sha256>  {name}/<file>'. Bring back a copy of the list; or delete it, and "
                    "scripts/verify_data.py makes one of the files as they are"
                )
        elif match[2].startswith(f"{name}/"):
            sums[match[2].removeprefix(f"{name}/")] = match[1]
    return sums


def write_list(array: Path, keys: Iterable[str], workers: int = 1) -> Path:
    """Lists the files `keys` of an array on disk as they are, and returns where.

    Raises:
        OSError: a file cannot be read, or the list not be written.
    """
    names = list(keys)
    with ThreadPoolExecutor(workers) as pool:
        sums = pool.map(lambda key: sha256_of(array / key), names)
        return write_sums(array, dict(zip(names, sums, strict=True)))


def write_sums(array: Path, sums: Mapping[str, str]) -> Path:
    """Writes the list of an array, and returns where."""
    place = array.with_name(list_name(array))
    write_atomically(place, _lines(sums, f"{array.name}/"))
    return place


def _lines(sums: Mapping[str, str], before: str = "") -> str:
    return "".join(f"{sums[key]}  {before}{key}\n" for key in sorted(sums))


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
