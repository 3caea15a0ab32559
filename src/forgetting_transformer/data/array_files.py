"""The files of a Zarr array, here or elsewhere, and a store over them for which a missing chunk is an error."""

import asyncio
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from forgetting_transformer.data.checksums import Checksums, list_name, parse_list, read_list
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.remote import RemoteFolder, join
from forgetting_transformer.data.remote_cache import CacheSettings, RemoteCache

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
#: A chunk that decodes to more is no chunk of tokens; metadata from elsewhere could ask for any amount of memory.
LARGEST_CHUNK = 1 << 30
#: What an array may state about itself. Each file and each length is gone through somewhere, so damaged metadata that
#: states 10^18 of them would never come to an end.
LARGEST_FILE_COUNT, LONGEST_DOCUMENT = 1 << 26, (1 << 31) - 1
#: Codecs that turn bytes into bytes or numbers. Others exist, such as numcodecs' pickle, which runs what a file says.
SAFE_CODECS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"}) | frozenset(
    {"bytes", "crc32c", "delta", "sharding_indexed", "shuffle", "transpose"}
)


class MissingChunkError(DataError):
    """A file that holds chunks of the array is not there."""


class ArrayFiles:
    """The files of an array in a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: What the contents of files must be, where that is known.
        self.checksums: Checksums | None = None
        #: Whether each file of chunks is one Blosc frame.
        self.holds_blosc = False

    def place(self, key: str) -> str:
        """Where a file is, or would be, in the words of an error message."""
        return str(self.folder / key)

    def has_array(self) -> bool:
        return self.folder.is_dir()

    def read_checksums(self) -> None:
        """Has every file of chunks that is read from now on compared with the list beside the array, if there is one.

        Raises:
            DataError: the list is damaged.
        """
        self.checksums = read_list(self.folder)

    def check(self, key: str, value: Buffer, whole: bool) -> None:
        """Compares a file of chunks that was read, or a part of it, with the list.

        Raises:
            ChecksumError: it is not the file that is listed.
        """
        if self.checksums is not None:
            if whole:
                self.checksums.check(key, value.as_numpy_array())
            else:
                self.checksums.check_file(key, self.folder / key)

    def names(self, expected: Iterable[str]) -> set[str]:
        """Which of the files of chunks `expected` are there."""
        found = set()
        for folder, _, files in os.walk(self.folder):
            below = os.path.relpath(folder, self.folder)
            found |= {file if below == "." else f"{below}/{file}".replace(os.sep, "/") for file in files}
        return found.intersection(expected)

    def fetch(self, key: str) -> None:
        """Makes sure that a file is in `folder` if the source has it. Called before each reading of a file."""

    def fetch_all(self, keys: list[str]) -> None:
        """The same for several files, so that they can come at the same time."""

    def fetch_again(self, key: str) -> bool:
        """Replaces a file that cannot be decoded; False if there is no other copy to be had."""
        return False


class RemoteArrayFiles(ArrayFiles):
    """The files of an array at a URL, kept in a cache on disk; `folder` is the array's place in the cache."""

    def __init__(self, url: str, settings: CacheSettings) -> None:
        remote = RemoteFolder(url)
        self.url = remote.url  # without a password, for messages
        self.cache = RemoteCache(remote, settings)
        super().__init__(self.cache.folder)

    def place(self, key: str) -> str:
        return join(self.url, key)

    def read_checksums(self) -> None:
        folder, _, array = self.cache.remote.address.rpartition("/")
        remote, name = RemoteFolder(folder), list_name(array)
        text = remote.read(name)
        self.checksums = None if text is None else parse_list(text, array, join(remote.url, name))

    def has_array(self) -> bool:
        # Metadata may change while chunks do not (an array that grows), so every start fetches it again.
        found = [self.cache.fetch(name, fresh=True) for name in ("zarr.json", ".zarray")]
        return any(found)

    def names(self, expected: Iterable[str]) -> set[str]:
        return set(self.cache.remote.find("", expected))

    def fetch(self, key: str) -> None:
        if key not in METADATA:
            self.cache.fetch(key)

    def fetch_all(self, keys: list[str]) -> None:
        self.cache.fetch_all(keys)

    def fetch_again(self, key: str) -> bool:
        return self.cache.fetch(key, fresh=True) is not None


class _Store(WrapperStore[LocalStore]):
    """Reads from `files.folder`; a file of chunks that is not there is an error, where Zarr would go on with zeros."""

    def __init__(self, store: LocalStore, files: ArrayFiles) -> None:
        super().__init__(store)
        self.files = files

    def _with_store(self, store: LocalStore) -> "_Store":
        return type(self)(store, self.files)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        # Twice, because another process may push a file out of a small cache between its coming and its reading.
        for _ in range(2):
            await asyncio.to_thread(self.files.fetch, key)
            value = await super().get(key, prototype, byte_range)
            if value is not None and key not in METADATA:
                self.files.check(key, value, whole=byte_range is None)
                if self.files.holds_blosc and byte_range is None:
                    _check_blosc(value.as_numpy_array())
            if value is not None or key in METADATA:
                return value
        raise MissingChunkError(f"missing chunk {self.files.place(key)}")


def open_array(files: ArrayFiles) -> zarr.Array:
    """The array of these files, read-only, of codecs that are safe to run on what a stranger wrote.

    Raises:
        DataError: it is not a Zarr array, or one that should not be decoded.
    """
    place = files.place("").rstrip("/")
    try:
        array = zarr.open_array(_Store(LocalStore(files.folder, read_only=True), files), mode="r")
    except DataError:
        raise
    except Exception as error:  # zarr raises many kinds for a folder that is not an array
        raise DataError(f"{place} is not a readable Zarr array: {' '.join(str(error).split())}") from error
    stated: dict[str, Any] = array.metadata.to_dict()  # `compressor` and `filters` in v2, `codecs` in v3
    used = _codecs(stated.get("compressor"), *(stated.get("filters") or ()), *(stated.get("codecs") or ()))
    unsafe = sorted(used - SAFE_CODECS)
    if unsafe:
        raise DataError(
            f"{place} is stored with the codec {', '.join(unsafe)}; accepted are {', '.join(sorted(SAFE_CODECS))}"
        )
    _check_shape(place, array)
    files.holds_blosc = array.shards is None and [_codecs(codec) for codec in array.compressors] == [{"blosc"}]
    return array


def _check_blosc(data: np.ndarray) -> None:
    """Refuses a frame that was cut short: numcodecs (0.16) decodes it to whatever lies behind it in memory."""
    if data.size < 16 or int.from_bytes(data[12:16].tobytes(), "little") != data.size:
        raise ValueError(f"{data.size:,} bytes that are not a whole Blosc frame: cut short, or not a chunk")


def _check_shape(place: str, array: zarr.Array) -> None:
    """
    Raises:
        DataError: the array states rows or chunks of nothing, or more than any corpus has.
    """
    sizes = array.shards or array.chunks
    if 0 in sizes or 0 in array.shape[1:]:
        raise DataError(
            f"{place} states shape {array.shape} in chunks of {sizes}: rows of nothing; make or fetch it again"
        )
    files = math.prod(-(-length // size) for length, size in zip(array.shape, sizes, strict=True))
    chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
    if files > LARGEST_FILE_COUNT or max(array.shape[1:], default=0) > LONGEST_DOCUMENT or chunk_bytes > LARGEST_CHUNK:
        raise DataError(
            f"{place} states shape {array.shape} in {files:,} files and chunks of {array.chunks}; up to "
            f"{LARGEST_FILE_COUNT:,} files, {LONGEST_DOCUMENT:,} tokens in a row and {LARGEST_CHUNK >> 20} MiB in a "
            "chunk are read: its metadata is damaged, fetch it again"
        )


def _codecs(*parts: Any) -> set[str]:
    """Names of these codecs and of those inside them, as zarr or numcodecs has them or as metadata states them."""
    found: set[str] = set()
    for part in filter(None, parts):
        fields = part.get_config() if hasattr(part, "get_config") else part
        fields = fields if isinstance(fields, dict) else fields.to_dict()
        found.add(str(fields.get("id") or fields.get("name")).removeprefix("numcodecs."))
        inside = fields.get("configuration") or {}
        found |= _codecs(*(inside.get("codecs") or ()), *(inside.get("index_codecs") or ()))
    return found
