"""Checksums of an array's files: `train.sha256` beside `train.zarr`, in the format of sha256sum.

    <64 hexadecimal digits>  train.zarr/0.0

SHA-256 and not a CRC: the list then also identifies the contents that were trained on, and is the one that the
downloader writes. It costs about 1 ns per token that is read. Lines without a file are allowed, since a copy may be
partial.
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass
class Checksums:
    """The list of one array.

    Attributes:
        place: where the list is, for messages.
        sums: file of the array, such as "0.0" or "c/0/0" -> SHA-256 as 64 hexadecimal digits.
    """

    place: str
    sums: dict[str, str]
    _warned: bool = False

    @property
    def name(self) -> str:
        return PurePosixPath(self.place).name

    @property
    def identity(self) -> str:
        """A short hash of the listed files and their contents."""
        digest = hashlib.sha256("".join(f"{self.sums[key]}  {key}\n" for key in sorted(self.sums)).encode())
        return digest.hexdigest()[:16]

    def check(self, key: str, data: np.ndarray) -> None:
        """Compares all bytes of a file, (n_bytes,) uint8, with its line.

        Raises:
            ChecksumError: they differ.
        """
        if key in self.sums:
            if (found := hashlib.sha256(data.data).hexdigest()) != self.sums[key]:
                raise ChecksumError(
                    f"is not the file that {self.name} lists: it was changed or is damaged (its SHA-256 is {found}). "
                    "Fetch or make it again. If the change is intended, this is another corpus: delete "
                    f"{self.name}, and scripts/verify_data.py makes a new one"
                )
        elif not self._warned:
            log.warning("%s and perhaps others are not listed in %s, and are read without a check", key, self.place)
            self._warned = True


def list_name(array: str) -> str:
    """ "train.zarr" -> "train.sha256"."""
    return PurePosixPath(array).with_suffix(".sha256").name


def read_list(array: str | Path) -> Checksums | None:
    """The list beside an array, a folder or a URL; None if there is none. A last line cut short by a kill is left out.

    Raises:
        DataError: naming a line that is damaged.
    """
    folder, _, name = str(array).rpartition("/")
    text = read_file(folder, list_name(name))
    if text is None:
        return None
    place = redact(join(folder, list_name(name)))
    sums: dict[str, str] = {}
    lines = text.decode("utf-8-sig", errors="replace").split("\n")  # as an editor of Windows may leave it
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None:
            if number < len(lines):
                raise DataError(
                    f"{place}, line {number}, is not of the form '<sha256>  {name}/<file>'. Bring back a copy of the "
                    "list; or delete it, and scripts/verify_data.py makes one of the files as they are"
                )
        elif match[2].startswith(f"{name}/"):
            sums[match[2].removeprefix(f"{name}/")] = match[1]
    return Checksums(place, sums)


def write_list(array: Path, keys: Iterable[str], workers: int = 1) -> Path:
    """Lists the files `keys` of an array on disk as they are, and returns where.

    Raises:
        OSError: a file cannot be read, or the list not be written.
    """
    names = sorted(keys)
    with ThreadPoolExecutor(workers) as pool:
        sums = list(pool.map(lambda key: sha256_of(array / key), names))
    lines = (f"{found}  {array.name}/{key}\n" for key, found in zip(names, sums, strict=True))
    place = array.with_name(list_name(array.name))
    write_atomically(place, "".join(lines))
    return place


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
