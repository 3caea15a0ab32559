"""A chunk never takes more memory than its array's metadata declares, whatever the chunk says or decodes to."""

import bz2
import functools
import gzip
import json
import lzma
import shutil
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs
import zarr.codecs.numcodecs

from forgetting_transformer.data import DataError, TokenArray
from forgetting_transformer.data.bounded import decode

SHAPE, CHUNK = (16, 64), (8, 32)
NBYTES = 8 * 32 * 2
BOMB = 24 << 20  # what each of the bombs below decodes to: 50,000 times what is declared
TOKENS = (np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 1000 + 1).astype(np.uint16)

#: name: (compressor of Zarr v2, of v3)
COMPRESSORS = {
    "zstd": (numcodecs.Zstd(), zarr.codecs.ZstdCodec()),
    "gzip": (numcodecs.GZip(), zarr.codecs.GzipCodec()),
    "blosc": (numcodecs.Blosc(), zarr.codecs.BloscCodec()),
    "lz4": (numcodecs.LZ4(), lambda: zarr.codecs.numcodecs.LZ4()),
    "zlib": (numcodecs.Zlib(), lambda: zarr.codecs.numcodecs.Zlib()),
    "bz2": (numcodecs.BZ2(), lambda: zarr.codecs.numcodecs.BZ2()),
    "lzma": (numcodecs.LZMA(), lambda: zarr.codecs.numcodecs.LZMA()),
}


@functools.cache
def bomb(name: str) -> bytes:
    zeros = bytes(BOMB)
    return {
        "zstd": lambda: numcodecs.Zstd().encode(zeros),
        "gzip": lambda: gzip.compress(zeros),
        "blosc": lambda: numcodecs.Blosc().encode(zeros),
        "lz4": lambda: numcodecs.LZ4().encode(zeros),
        "zlib": lambda: zlib.compress(zeros),
        "bz2": lambda: bz2.compress(zeros),
        "lzma": lambda: lzma.compress(zeros, preset=0),
    }[name]()


def written(folder: Path, version: int, name: str, sharded: bool = False, **options) -> Path:
    compressor = COMPRESSORS[name][version - 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Zarr says that some of these are not in its specification
        array = zarr.create_array(
            folder, shape=SHAPE, chunks=CHUNK, dtype="<u2", zarr_format=version,
            shards=SHAPE if sharded else None, compressors=[compressor() if callable(compressor) else compressor],
            **options,
        )  # fmt: skip
        array[:] = TOKENS
    return folder


def opened(folder: Path) -> TokenArray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TokenArray(folder, 1001)


@pytest.mark.parametrize(("version", "sharded"), [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_was_written_is_read(tmp_path, name, version, sharded):
    array = opened(written(tmp_path / "a.zarr", version, name, sharded))
    assert np.array_equal(array.read(0, 16, 0, 64), TOKENS)


@pytest.mark.parametrize(
    "options", [{"filters": [numcodecs.Delta("<u2", "<i4"), numcodecs.Shuffle(4)]}, {"order": "F"}]
)
def test_filters_that_change_the_size_are_reckoned_with(tmp_path, options):
    array = opened(written(tmp_path / "a.zarr", 2, "zstd", **options))
    assert np.array_equal(array.read(0, 16, 0, 64), TOKENS)


def test_checksums_inside_the_compressor_are_reckoned_with(tmp_path):
    codecs = [zarr.codecs.BytesCodec(), zarr.codecs.Crc32cCodec(), zarr.codecs.ZstdCodec()]
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=SHAPE, chunks=CHUNK, dtype="<u2", serializer=codecs[0], compressors=codecs[1:]
    )
    array[:] = TOKENS
    assert np.array_equal(opened(tmp_path / "a.zarr").read(0, 16, 0, 64), TOKENS)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_bomb_is_an_error_and_takes_no_memory(tmp_path, name, version):
    folder, data = written(tmp_path / "a.zarr", version, name), bomb(name)
    array = opened(folder)
    (folder / ("0.0" if version == 2 else "c/0/0")).write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"(0\.0|c/0/0) cannot be decoded .*(decodes to|bytes)"):
            array.read(0, 1, 0, 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak:,} bytes for a chunk of {NBYTES}"


def test_a_bomb_inside_a_shard_is_an_error_and_takes_no_memory(tmp_path):
    folder = written(tmp_path / "a.zarr", 3, "zstd", sharded=True)
    array, shard = opened(folder), folder / "c/0/0"
    # The index of four chunks and its checksum stay; the first chunk now lies after the others.
    data, index = shard.read_bytes()[: -(4 * 16 + 4)], bytearray(shard.read_bytes()[-(4 * 16 + 4) : -4])
    index[:16] = struct.pack("<QQ", len(data), len(bomb("zstd")))
    checked = numcodecs.checksum32.CRC32C(location="end").encode(bytes(index))
    shard.write_bytes(data + bomb("zstd") + bytes(checked))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"cannot be decoded .*decodes to"):
            array.read(0, 1, 0, 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("damage", ["cut", "less", "empty", "noise"])
def test_what_is_not_the_chunk_is_an_error(name, damage):
    codec = numcodecs.get_codec({"id": name})
    whole = bytes(codec.encode(TOKENS[:8, :32].copy()))
    assert decode(name, {}, whole, NBYTES).tobytes() == TOKENS[:8, :32].tobytes()
    data = {
        "cut": whole[:-5],
        "less": bytes(codec.encode(TOKENS[:4, :32].copy())),
        "empty": b"",
        "noise": bytes(range(7, 207)),
    }[damage]
    with pytest.raises(ValueError):
        decode(name, {}, data, NBYTES)


def test_a_zstd_frame_that_does_not_state_its_size_gets_the_declared_one():
    # What a streaming writer makes, as tensorstore does: no size in the header. One raw block of 512 bytes, which is
    # the last.
    contents = TOKENS[:8, :32].tobytes()
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + (NBYTES << 3 | 1).to_bytes(3, "little") + contents
    assert decode("zstd", {}, frame, NBYTES).tobytes() == contents
    # And one block of 128 KiB of a single repeated byte, five hundred times.
    block = ((128 << 10) << 3 | 2).to_bytes(3, "little") + b"\0"
    last = ((128 << 10) << 3 | 3).to_bytes(3, "little") + b"\0"
    with pytest.raises(ValueError):
        decode("zstd", {}, b"\x28\xb5\x2f\xfd\x00\x58" + block * 499 + last, NBYTES)


def test_several_gzip_members_are_one_chunk():
    contents = TOKENS[:8, :32].tobytes()
    assert decode("gzip", {}, gzip.compress(contents[:99]) + gzip.compress(contents[99:]), NBYTES).tobytes() == contents


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v2: v2 | {"filters": [{"id": "zlib", "level": 1}]}, r"compressed 2 times \(zlib, zstd\)"),
        (lambda v2: v2 | {"compressor": {"id": "lzma", "format": 3}}, "raw LZMA"),
    ],
)
def test_what_cannot_be_bounded_is_refused(tmp_path, change, message):
    metadata = written(tmp_path / "a.zarr", 2, "zstd") / ".zarray"
    metadata.write_text(json.dumps(change(json.loads(metadata.read_text()))))
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "a.zarr").read(0, 1, 0, 32)


def test_a_shard_that_is_compressed_as_a_whole_is_refused(tmp_path):
    metadata = written(tmp_path / "a.zarr", 3, "zstd", sharded=True) / "zarr.json"
    read = json.loads(metadata.read_text())
    read["codecs"].append({"name": "gzip", "configuration": {"level": 1}})
    metadata.write_text(json.dumps(read))
    with pytest.raises(DataError, match="its shards are compressed as a whole"):
        opened(tmp_path / "a.zarr")
    shutil.rmtree(tmp_path / "a.zarr")
