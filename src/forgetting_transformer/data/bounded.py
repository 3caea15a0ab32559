"""Decoders that stop at the size which an array's metadata declares, whatever a chunk says about itself.

A zstd frame of 65 kB may decode to gigabytes, and its header may ask for any amount of memory before the first byte is
decoded. How many bytes a chunk of tokens decodes to is known before: documents times tokens times the bytes of an id.
So each decoder gets a buffer of exactly that size, or is asked for at most one byte more, and everything that differs
is an error.

That holds for one compressor per chunk. What a second one around it would decode to is not known, and no corpus needs
one, so such arrays are refused.
"""

import asyncio
import bz2
import dataclasses
import lzma
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numcodecs
import numpy as np
import zarr
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer

#: Most memory that LZMA's dictionary may take; `xz -9` makes files that need 64 MiB.
LZMA_MEMORY = 128 << 20
_CRC_BYTES = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class UnboundedCodecError(ValueError):
    """What an array's chunks decode to cannot be known before."""


def bounded(array: zarr.Array) -> zarr.Array:
    """The same array, with decoders that stop at the declared size.

    Raises:
        UnboundedCodecError: a chunk goes through more than one compressor, or a shard or its index through any.
    """
    metadata = array.metadata
    if metadata.zarr_format == 2:
        metadata = _bounded_v2(metadata)
    else:
        metadata = dataclasses.replace(metadata, codecs=_bounded_v3(metadata.codecs))
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=array.store_path, config=array.async_array.config))


def decode(name: str, settings: dict[str, Any], data: bytes, nbytes: int) -> np.ndarray:
    """`data` decoded by the codec `name` into `nbytes` bytes, (nbytes,) uint8.

    Args:
        settings: of the codec, as numcodecs takes them.

    Raises:
        ValueError: it decodes to another number of bytes, or not at all.
    """
    stated = _HEADERS[name](data) if name in _HEADERS else nbytes
    if stated is not None and stated != nbytes:
        raise ValueError(f"a chunk of {nbytes:,} bytes states that it decodes to {stated:,}: damaged, or not a chunk")
    try:
        if name in _STREAMS:
            return np.frombuffer(_stream(lambda: _STREAMS[name](settings), data, nbytes), np.uint8)
        out = np.empty(nbytes, np.uint8)
        numcodecs.get_codec({**settings, "id": name}).decode(data, out=out)
        return out
    except (RuntimeError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{name}: {error}") from error


# What a compressed chunk says about its own size: it decides how much memory the decoder asks for.
# -----------------------


def _zstd_size(data: bytes) -> int | None:
    """Content size in the header of a zstd frame (RFC 8878, 3.1.1.1); None where the writer left it out."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 6:
        raise ValueError("not a zstd frame")
    descriptor = data[4]
    single_segment, flag = descriptor >> 5 & 1, descriptor >> 6
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    width = (1 if single_segment else 0, 2, 4, 8)[flag]
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0) if width else None


def _lz4_size(data: bytes) -> int:
    """numcodecs puts the size before the block."""
    if len(data) < 4:
        raise ValueError("not an lz4 block")
    return int.from_bytes(data[:4], "little")


def _blosc_size(data: bytes) -> int:
    """numcodecs (0.16) does not compare the size of the frame with what is there: it decodes a file that was cut short
    to whatever lies behind it in memory, and raises only sometimes."""
    if len(data) < 16 or int.from_bytes(data[12:16], "little") != len(data):
        raise ValueError(f"{len(data):,} bytes that are not a whole Blosc frame: cut short, or not a chunk")
    return int.from_bytes(data[4:8], "little")


_HEADERS: dict[str, Callable[[bytes], int | None]] = {"zstd": _zstd_size, "lz4": _lz4_size, "blosc": _blosc_size}

# Formats without a size: decoded piece by piece.
# --------------------------------------------------------------------------


def _lzma(settings: dict[str, Any]) -> Any:
    form = settings.get("format", lzma.FORMAT_XZ)
    if form == lzma.FORMAT_RAW:
        raise ValueError("raw LZMA states no bound on its memory; store the array with format 1 (xz)")
    return lzma.LZMADecompressor(form, memlimit=LZMA_MEMORY)


_STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gzip": lambda _: zlib.decompressobj(wbits=31),
    "zlib": lambda _: zlib.decompressobj(),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": _lzma,
}
COMPRESSORS = frozenset([*_HEADERS, *_STREAMS])


def _stream(start: Callable[[], Any], data: bytes, nbytes: int) -> bytes:
    found = bytearray()
    while data:  # a file may hold several streams, one after another
        decompressor = start()
        found += decompressor.decompress(data, nbytes + 1 - len(found))
        if len(found) > nbytes:
            raise ValueError(f"a chunk of {nbytes:,} bytes decodes to more: damaged, or not a chunk")
        if not decompressor.eof:
            raise ValueError("the chunk ends early")
        data = decompressor.unused_data
    if len(found) != nbytes:
        raise ValueError(f"a chunk of {nbytes:,} bytes decodes to {len(found):,}: damaged, or not a chunk")
    return bytes(found)


# Zarr v2
# ----------------------------------------------------------------------------------------------------------------


class _BoundedCompressor(Codec):
    """A codec of numcodecs that decodes to `nbytes` bytes or not at all."""

    codec_id = "bounded"  # Zarr asks for one

    def __init__(self, codec: Codec, nbytes: int) -> None:
        self.codec, self.nbytes = codec, nbytes

    def encode(self, buf: Any) -> Any:
        return self.codec.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> np.ndarray:
        return decode(self.codec.codec_id, self.codec.get_config(), bytes(buf), self.nbytes)

    def get_config(self) -> dict[str, Any]:
        return self.codec.get_config()


def _bounded_v2(metadata: Any) -> Any:
    count = math.prod(metadata.chunks)
    nbytes = count * metadata.dtype.to_native_dtype().itemsize
    filters = []
    names = [codec.codec_id for codec in (*(metadata.filters or ()), metadata.compressor) if codec is not None]
    _check_one_compressor(names)
    for codec in metadata.filters or ():
        filters.append(_BoundedCompressor(codec, nbytes) if codec.codec_id in COMPRESSORS else codec)
        if codec.codec_id == "delta":
            nbytes = count * np.dtype(codec.get_config().get("astype", codec.get_config()["dtype"])).itemsize
        elif codec.codec_id == "crc32c":
            nbytes += _CRC_BYTES
    compressor = metadata.compressor
    if compressor is not None and compressor.codec_id in COMPRESSORS:
        compressor = _BoundedCompressor(compressor, nbytes)
    return dataclasses.replace(metadata, filters=tuple(filters) or None, compressor=compressor)


# Zarr v3
# ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _BoundedCodec(BytesBytesCodec):
    """A codec of Zarr v3 that decodes to the chunk it is part of, and `extra` bytes of checksums, or not at all."""

    codec: BytesBytesCodec
    name: str
    extra: int
    is_fixed_size = False

    def to_dict(self) -> dict[str, Any]:
        return self.codec.to_dict()

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        nbytes = math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize + self.extra
        settings = self.to_dict().get("configuration") or {}
        found = await asyncio.to_thread(decode, self.name, settings, chunk_bytes.to_bytes(), nbytes)
        return chunk_spec.prototype.buffer.from_bytes(found.data)

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        raise NotImplementedError("arrays are opened for reading")

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError


def _bounded_v3(codecs: Iterable[Any], extra: int = 0) -> tuple[Any, ...]:
    codecs = tuple(codecs)
    _check_one_compressor([_name(codec) for codec in codecs])
    made = []
    for codec in codecs:
        name = _name(codec)
        if name == "sharding_indexed":
            inside = {"codecs": _bounded_v3(codec.codecs), "index_codecs": codec.index_codecs}
            if COMPRESSORS.intersection(map(_name, codec.index_codecs)):
                raise UnboundedCodecError("the index of its shards is compressed")
            codec = dataclasses.replace(codec, **inside)
        elif name in COMPRESSORS:
            codec = _BoundedCodec(codec, name, extra)
        elif name == "crc32c":
            extra += _CRC_BYTES
        made.append(codec)
    return tuple(made)


def _name(codec: Any) -> str:
    return codec.to_dict()["name"].removeprefix("numcodecs.")


def _check_one_compressor(names: list[str]) -> None:
    compressors = [name for name in names if name in COMPRESSORS]
    if len(compressors) > 1:
        raise UnboundedCodecError(f"its chunks are compressed {len(compressors)} times ({', '.join(compressors)})")
    if compressors and "sharding_indexed" in names:
        raise UnboundedCodecError(f"its shards are compressed as a whole ({compressors[0]})")
