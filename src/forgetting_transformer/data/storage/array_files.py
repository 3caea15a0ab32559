"""The files of a Zarr array, here or elsewhere, and a store over them for which a missing chunk is an error."""

import asyncio
import difflib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import zarr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from forgetting_transformer.console import redact
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.checksums import ChecksumError, Checksums, list_name, parse_list, read_list
from forgetting_transformer.data.storage.remote import RemoteFolder, is_url, join
from forgetting_transformer.data.storage.remote_cache import CacheSettings, RemoteCache

#: Metadata of Zarr v2 and v3.
ARRAY_METADATA = {2: ".zarray", 3: "zarr.json"}
_METADATA = (*ARRAY_METADATA.values(), ".zattrs", ".zgroup", ".zmetadata")
#: Limits on an array's own metadata; damaged metadata could ask for any amount of time and memory.
LARGEST_CHUNK, LARGEST_FILE_COUNT, LONGEST_DOCUMENT = 1 << 30, 1 << 26, (1 << 31) - 1
#: Codecs that turn bytes into bytes or numbers. Others exist, such as numcodecs' pickle, which runs what a file says.
SAFE_CODECS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"}) | frozenset(
    {"bytes", "crc32c", "delta", "shuffle", "transpose"}
)


#: Other corpora that a message lists.
_MOST_LISTED = 8


class MissingChunkError(DataError):
    """A chunk of the array has no file."""


class ArrayFiles:
    """The files of an array: in a local folder, or at a URL and kept in a cache on disk.

    Attributes:
        path: where the array is; of a URL as it may be shown, without a password.
        folder: the local folder, or the array's place in the cache.
        checksums: what the contents of chunks must be, where that is known.
        holds_blosc: whether each chunk is one Blosc frame.
    """

    def __init__(self, path: str | Path, settings: CacheSettings) -> None:
        address = str(path).rstrip("/")
        self.cache = RemoteCache(RemoteFolder(address), settings) if is_url(path) else None
        self.path: str | Path = redact(address) if self.cache else Path(path)
        self.folder = self.cache.folder if self.cache else Path(path)
        self.checksums: Checksums | None = None
        self.holds_blosc = False

    def place(self, key: str) -> str:
        """Path or URL of a chunk, for error messages."""
        return str(self.path / key) if isinstance(self.path, Path) else join(self.path, key)

    def has_array(self) -> bool:
        if self.cache is None:
            return self.folder.is_dir()
        # Metadata may change while chunks do not (an array that grows), so every start fetches it again.
        return any([self.cache.fetch(name, fresh=True) for name in ARRAY_METADATA.values()])

    def read_checksums(self) -> None:
        """Has every chunk that is read from now on compared with the list beside the array, if there is one.

        Raises:
            DataError: the list is damaged.
        """
        if self.cache is None:
            self.checksums = read_list(self.folder)
            return
        folder, _, array = self.cache.remote.address.rpartition("/")
        remote, name = RemoteFolder(folder), list_name(array)
        text = remote.read(name)
        self.checksums = None if text is None else parse_list(text, array, join(remote.url, name))

    def names(self, expected: Iterable[str]) -> set[str]:
        """Which of the chunks `expected` are there.

        Raises:
            DataError: the source cannot be listed.
        """
        if self.cache is not None:
            listed = self.cache.remote.files("")
            if listed is None:
                raise DataError(
                    f"{self.path} cannot be listed, so its chunks are unknown; set "
                    "datamodule.missing_chunks=error, or use hf://, s3://, gs:// or a local copy"
                )
            return set(listed).intersection(expected)
        return {file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*")}.intersection(expected)

    def fetch(self, keys: list[str]) -> None:
        """Makes sure that chunks are in `folder` if the source has them; several come at the same time."""
        if self.cache is not None:
            self.cache.fetch_all(keys)

    def check_room(self, nbytes: int) -> None:
        """
        Raises:
            DataError: the cache of a remote array has no room for the chunks of a batch, `nbytes`.
        """
        if self.cache is not None and self.cache.settings.limit_bytes < nbytes:
            raise DataError(
                f"datamodule.cache_gb={self.cache.settings.limit_bytes / 1e9:g} is less than the {nbytes / 1e9:.3g} GB "
                f"that a batch needs of {self.path}; raise it"
            )

    def decoded(self, key: str, decode: Callable[[], np.ndarray], document: int) -> np.ndarray:
        """A chunk, of which `decode` reads the file `key`; from elsewhere once more, if its copy here is damaged.

        Args:
            document: the first that it holds, for messages.

        Raises:
            MissingChunkError: there is no file for it.
            DataError: it cannot be decoded.
        """
        fetched_again = False
        while True:
            try:
                return decode()
            except MissingChunkError as error:
                raise MissingChunkError(
                    f"{error}: it holds documents {document:,} and on, which this run needs. The copy of the "
                    "corpus is partial: fetch the chunk again, choose a complete array, or train on the documents "
                    "that are there with datamodule.missing_chunks=skip"
                ) from error
            except DataError:
                raise
            except Exception as error:  # each codec has its own
                if fetched_again or self.cache is None or self.cache.fetch(key, fresh=True) is None:
                    raise DataError(f"{self.place(key)} {self._fault(error)}") from error
                fetched_again = True

    def _fault(self, error: Exception) -> str:
        if isinstance(error, ChecksumError) and self.checksums is not None:
            listed = self.checksums.name
            return (
                f"is not the file that {listed} lists: it was changed or is damaged ({error}). Fetch or make it again. "
                f"If the change is meant, this is another corpus: delete {listed}, and scripts/verify_data.py makes a "
                "new one"
            )
        return f"cannot be decoded ({error}); it is damaged: delete it and fetch or make it again"


class _Store(WrapperStore[LocalStore]):
    """Reads from `files.folder`; a chunk that has no file is an error, where Zarr would go on with zeros."""

    def __init__(self, store: LocalStore, files: ArrayFiles) -> None:
        super().__init__(store)
        self.files = files

    def _with_store(self, store: LocalStore) -> "_Store":
        return type(self)(store, self.files)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if key in _METADATA:
            return await super().get(key, prototype, byte_range)
        # Twice, because another process may push a file out of a small cache between its coming and its reading.
        for _ in range(2):
            await asyncio.to_thread(self.files.fetch, [key])
            value = await super().get(key, prototype, byte_range)
            if value is not None:
                data = value.as_numpy_array()
                if self.files.checksums is not None:
                    self.files.checksums.check(key, data)
                if self.files.holds_blosc:
                    _check_blosc(data)
                return value
        raise MissingChunkError(f"missing chunk {self.files.place(key)}")


def open_array(files: ArrayFiles) -> zarr.Array:
    """The array of these files, read-only, of codecs that are safe to run on what a stranger wrote.

    Raises:
        DataError: there is none; or it is not a Zarr array, or one that should not be decoded; or its list of
            checksums is damaged.
    """
    if not files.has_array():
        raise DataError(_nothing_at(files.path))
    try:
        array = zarr.open_array(_Store(LocalStore(files.folder, read_only=True), files), mode="r")
        stated = json.loads((files.folder / ARRAY_METADATA[array.metadata.zarr_format]).read_bytes())
    except Exception as error:  # zarr raises many kinds for a folder that is not an array
        raise DataError(
            f"{files.path} is not a readable Zarr array: {' '.join(str(error).split())}; run the command that makes or "
            "fetches it again"
        ) from error
    codecs = [*(stated.get("filters") or ()), stated.get("compressor"), *(stated.get("codecs") or ())]  # v2's, v3's
    names = [_name(codec) for codec in codecs if codec]
    if unsafe := sorted(set(names) - SAFE_CODECS):
        raise DataError(
            f"{files.path} is stored with the codec {', '.join(unsafe)}; accepted are {', '.join(sorted(SAFE_CODECS))}"
        )
    _check_shape(files.path, array)
    files.holds_blosc = names[-1:] == ["blosc"]
    files.read_checksums()
    return array


def _name(codec: object) -> str:
    fields = codec if isinstance(codec, dict) else {"id": codec}
    return str(fields.get("id") or fields.get("name")).removeprefix("numcodecs.")


def _check_blosc(data: np.ndarray) -> None:
    """Refuses a frame that was cut short: numcodecs (0.16) decodes it to whatever lies behind it in memory."""
    if data.size < 16 or int.from_bytes(data[12:16].tobytes(), "little") != data.size:
        raise ValueError(f"{data.size:,} bytes that are not a whole Blosc frame: cut short, or not a chunk")


def _check_shape(place: str | Path, array: zarr.Array) -> None:
    """
    Raises:
        DataError: the array states rows or chunks of nothing, or more than any corpus has.
    """
    if 0 in array.chunks or 0 in array.shape[1:]:
        raise DataError(
            f"{place} states shape {array.shape} in chunks of {array.chunks}: rows of nothing; make or fetch it again"
        )
    files = math.prod(-(-length // size) for length, size in zip(array.shape, array.chunks, strict=True))
    chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
    if files > LARGEST_FILE_COUNT or max(array.shape[1:], default=0) > LONGEST_DOCUMENT or chunk_bytes > LARGEST_CHUNK:
        raise DataError(
            f"{place} states shape {array.shape} in {files:,} files and chunks of {array.chunks}; up to "
            f"{LARGEST_FILE_COUNT:,} files, {LONGEST_DOCUMENT:,} tokens in a row and {LARGEST_CHUNK >> 20} MiB in a "
            "chunk are read: its metadata is damaged, fetch it again"
        )


def _nothing_at(path: str | Path) -> str:
    """Message that there is no array at `path`, and which corpora are near it."""
    name, dataset, data_dir = Path(path).name, Path(path).parent.name or "<dataset>", Path(path).parent.parent
    if isinstance(path, Path):  # listing a URL would be a request for every folder
        others = sorted(folder.parent.name for folder in data_dir.glob(f"*/{name}"))
        if others:
            nearest = difflib.get_close_matches(dataset, others, n=1, cutoff=0.0)
            shown = ", ".join(others[:_MOST_LISTED]) + (", …" if len(others) > _MOST_LISTED else "")
            return (
                f"no token array at {path}. {data_dir} holds {shown}: choose one, as in data_dir={data_dir} "
                f"datamodule.dataset={nearest[0]}"
            )
        if (data_dir / name).is_dir():
            return f"no token array at {path}. {data_dir} is a corpus itself: choose it with datamodule.dataset=."
    return (
        f"no token array at {path}. Set data_dir to the folder that holds {dataset}/{name} "
        f"(datamodule.dataset={dataset}), or make one with scripts/prepare_data.py, or fetch LongCrawl64 with "
        "scripts/download_longcrawl64.py"
    )
