"""The files of a Zarr array, here or elsewhere, and a store over them for which a missing chunk is an error."""

import asyncio
import difflib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.checksums import ChecksumError, check, read_list
from forgetting_transformer.data.storage.remote_cache import Folder

#: Metadata of Zarr v2 and v3.
ARRAY_METADATA = {2: ".zarray", 3: "zarr.json"}
_METADATA = (*ARRAY_METADATA.values(), ".zattrs", ".zgroup", ".zmetadata")
#: Limits on an array's own metadata; damaged metadata could take any amount of time and memory.
LARGEST_CHUNK, LARGEST_FILE_COUNT, LONGEST_DOCUMENT = 1 << 30, 1 << 26, (1 << 31) - 1
#: Codecs that turn bytes into bytes or numbers. Others, such as numcodecs' pickle, run code that a file contains.
SAFE_CODECS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"}) | frozenset(
    {"bytes", "crc32c", "delta", "shuffle", "transpose"}
)


class ArrayFiles(Folder):
    """The files of an array.

    Attributes:
        checksums: SHA-256 of each chunk's file, where that is known.
        holds_blosc: whether each chunk is one Blosc frame.
    """

    checksums: dict[str, str] | None = None
    holds_blosc = False

    def decoded(self, key: str, decode: Callable[[], np.ndarray], document: int) -> np.ndarray:
        """Decodes the chunk in the file `key`; a remote one is fetched once more if its local copy is damaged.

        Args:
            document: its first one, for messages.

        Raises:
            DataError: there is no file for it, or it cannot be decoded.
        """
        fetched_again = False
        while True:
            try:
                return decode()
            except DataError:
                raise
            except FileNotFoundError as error:
                raise DataError(
                    f"missing chunk {self.place(key)}: it holds documents {document:,} and on, which this run needs. "
                    "The copy of the corpus is partial: fetch the chunk again, choose a complete array, or train on "
                    "the documents that are there with datamodule.missing_chunks=skip"
                ) from error
            except Exception as error:  # each codec has its own
                if not fetched_again and self.remote is not None and self.fetch(key, fresh=True):
                    fetched_again = True
                    continue
                fault = f"cannot be decoded ({error}); it is damaged: delete it and fetch or make it again"
                if isinstance(error, ChecksumError):
                    fault = str(error)
                raise DataError(f"{self.place(key)} {fault}") from error


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
            await asyncio.to_thread(self.files.fetch_all, [key])
            value = await super().get(key, prototype, byte_range)
            if value is not None:
                data = value.as_numpy_array()
                if self.files.checksums is not None:
                    check(self.files.checksums, key, data, self.files.path)
                # numcodecs (0.16) decodes a frame that was cut short to whatever lies behind it in memory.
                if self.files.holds_blosc and int.from_bytes(data[12:16].tobytes(), "little") != max(data.size, 16):
                    raise ValueError(f"{data.size:,} bytes that are not a whole Blosc frame: cut short, or not a chunk")
                return value
        raise FileNotFoundError(key)


def open_array(files: ArrayFiles) -> zarr.Array:
    """The array of these files, read-only, of codecs that are safe to run on what a stranger wrote.

    Raises:
        DataError: there is none; or it is not a Zarr array, or one that should not be decoded; or its list of
            checksums is damaged.
    """
    # Metadata may change while chunks do not (an array that grows), so every start fetches it again.
    if not any(files.fetch(name, fresh=True) for name in ARRAY_METADATA.values()):
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
    some = 0 not in array.chunks and 0 not in array.shape[1:]
    n_files = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)) if some else 0
    longest, n_bytes = max(array.shape[1:], default=0), math.prod(array.chunks) * array.dtype.itemsize
    if not some or n_files > LARGEST_FILE_COUNT or longest > LONGEST_DOCUMENT or n_bytes > LARGEST_CHUNK:
        raise DataError(
            f"{files.path} states shape {array.shape} in {n_files:,} files and chunks of {array.chunks}; from 1 to "
            f"{LARGEST_FILE_COUNT:,} files, {LONGEST_DOCUMENT:,} tokens in a row and {LARGEST_CHUNK >> 20} MiB in a "
            "chunk are read: its metadata is damaged, fetch it again"
        )
    files.holds_blosc = names[-1:] == ["blosc"]
    files.checksums = read_list(files.address)
    return array


def _name(codec: object) -> str:
    fields = codec if isinstance(codec, dict) else {"id": codec}
    return str(fields.get("id") or fields.get("name")).removeprefix("numcodecs.")


def _nothing_at(path: str | Path) -> str:
    """Message that there is no array at `path`, with the corpora near it."""
    if isinstance(path, str):  # listing a URL would be a request for every folder
        return f"no token array at {path}: neither .zarray nor zarr.json is there; check the URL"
    name, dataset, data_dir = path.name, path.parent.name or "<dataset>", path.parent.parent
    if others := sorted(folder.parent.name for folder in data_dir.glob(f"*/{name}")):
        [nearest] = difflib.get_close_matches(dataset, others, n=1, cutoff=0.0)
        return (
            f"no token array at {path}. {data_dir} holds {', '.join(others)}: choose one, as in data_dir={data_dir} "
            f"datamodule.dataset={nearest}"
        )
    if (data_dir / name).is_dir():
        return f"no token array at {path}. {data_dir} is a corpus itself: choose it with datamodule.dataset=."
    return (
        f"no token array at {path}. Set data_dir to the folder that holds {dataset}/{name} "
        f"(datamodule.dataset={dataset}), or make one with scripts/prepare_data.py, or fetch LongCrawl64 with "
        "scripts/download_longcrawl64.py"
    )
