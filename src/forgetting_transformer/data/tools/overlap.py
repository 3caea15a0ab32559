"""How much of the held-out text a model has met in training: pieces of N tokens that occur anywhere in train.zarr."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from forgetting_transformer.data.array_files import ArrayFiles, open_array
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.progress import Progress

#: Tokens that are hashed at once: some 50 MB of memory.
_BLOCK = 1 << 20
#: Upper bits of a hash by which most positions of train are ruled out without a search.
_SIEVE_BITS = 24


@dataclass(frozen=True)
class Overlap:
    """Held-out pieces that occur in train.

    Attributes:
        length: tokens of a piece.
        found_ND: bool, (held-out documents, pieces of each): whether the piece occurs.
    """

    length: int
    found_ND: np.ndarray

    @property
    def share(self) -> float:
        return float(self.found_ND.mean())

    def text(self) -> str:
        return (
            f"overlap: {self.found_ND.sum():,} of {self.found_ND.size:,} held-out pieces of {self.length} tokens "
            f"({self.share:.1%}) also occur in train.zarr"
        )


def measure_overlap(corpus: Path, length: int) -> Overlap:
    """Cut every held-out document into pieces of `length` tokens and look each up at all positions of train.zarr.

    Pieces are compared by 64-bit hashes. Memory: 8 bytes per held-out piece, and a block of each array.

    Raises:
        DataError: an array is missing, or its documents are shorter than a piece.
    """
    train, heldout = (_open(corpus / f"{name}.zarr", length) for name in ("train", "heldout"))
    # A random number for each id, so that the hash of a piece is a sum of products of random numbers.
    codes = np.random.default_rng(0).integers(0, 1 << 64, 1 << 8 * min(train.dtype.itemsize, 2), dtype=np.uint64)
    wanted_ND = np.concatenate([hash_windows(rows, length, codes)[:, ::length] for rows in _blocks(heldout)])
    wanted = np.unique(wanted_ND)
    met = np.zeros(len(wanted), dtype=bool)
    sieve = np.zeros(1 << _SIEVE_BITS, dtype=bool)
    sieve[wanted >> np.uint64(64 - _SIEVE_BITS)] = True
    with Progress("looking for held-out pieces in train.zarr", train.shape[0], "documents") as progress:
        for rows in _blocks(train):
            hashes = hash_windows(rows, length, codes).ravel()
            hashes = hashes[sieve[hashes >> np.uint64(64 - _SIEVE_BITS)]]
            places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
            met[places[wanted[places] == hashes]] = True
            progress.advance(len(rows))
    return Overlap(length, met[np.searchsorted(wanted, wanted_ND)])


def hash_windows(rows: np.ndarray, length: int, codes: np.ndarray) -> np.ndarray:
    """Hashes of all runs of `length` ids in each row `(N, T)`: uint64 `(N, T - length + 1)`.

    Polynomials over the ids' codes modulo 2^64, from hashes of half the length: h(ab) = h(a) B^|b| + h(b).

    Args:
        codes: a random number for each value of 16 bits; of a longer id, the upper bits are multiplied in.
    """
    base = 0x9E3779B97F4A7C15
    ids = rows.astype(np.uint32)
    one = codes[ids & np.uint32(len(codes) - 1)] * (2 * (ids >> np.uint32(16)).astype(np.uint64) + np.uint64(1))
    power, total, covered = one, one, 0  # `power` has hashes of runs of `size`, a power of two
    for size in (1 << bit for bit in range(length.bit_length())):
        if size > 1:
            power = _joined(power, size // 2, power, size // 2, base)
        if length & size:
            total = _joined(total, covered, power, size, base) if covered else power
            covered += size
    return total


def _joined(left: np.ndarray, n_left: int, right: np.ndarray, n_right: int, base: int) -> np.ndarray:
    """Hashes of runs of n_left + n_right ids, from those of both lengths at all positions."""
    width = left.shape[1] - n_right
    return left[:, :width] * np.uint64(pow(base, n_right, 1 << 64)) + right[:, n_left : n_left + width]


def _open(path: Path, length: int) -> zarr.Array:
    files = ArrayFiles(path)
    if not files.has_array():
        raise DataError(f"no array at {path}, and the overlap is that of heldout.zarr with train.zarr")
    array = open_array(files)
    if length > array.shape[1]:
        raise DataError(
            f"--overlap {length}: the documents of {path} have {array.shape[1]:,} tokens; choose at most that"
        )
    return array


def _blocks(array: zarr.Array) -> Iterator[np.ndarray]:
    height = (array.shards or array.chunks)[0]
    step = max(1, min(height, _BLOCK // array.shape[1]))
    for first in range(0, array.shape[0], step):
        yield np.asarray(array[first : first + step])
