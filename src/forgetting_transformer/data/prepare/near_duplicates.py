"""Which texts are near-duplicates of an earlier one: MinHash sketches in parallel, one decision after another.

A text is the set of its runs of `dedup_words` consecutive words. Two texts are near-duplicates if their sets have an
estimated Jaccard similarity (shared runs / all runs) of at least `dedup`: the share of equal values in two sketches of
`SKETCH` values (Broder 1997), whose standard error is at most 0.045. Only pairs that locality-sensitive hashing
proposes are compared. The first text in reading order stays.

Workers make the sketches, which are kept on disk and survive a kill. The parent compares, in reading order, and holds
the hash tables, about 4.5 kB of memory per text that stays.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.data.prepare import shards, sources
from forgetting_transformer.data.prepare.errors import CorpusError
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.progress import Progress
from forgetting_transformer.versions import how_to_install

SKETCH = 128
#: Of false candidates and missed pairs: a false candidate costs one comparison, a missed pair is a duplicate kept.
_WEIGHTS = (0.1, 0.9)
# The permutations of a sketch are a function of these, in every release of datasketch 2.
_SCHEME = "affine32"
_WORD = re.compile(r"\w+")
#: Runs of words that are hashed at once.
_BATCH = 4096


@dataclass(frozen=True)
class NearDuplicates:
    """What a search found.

    Attributes:
        digests: of the near-duplicates, without the texts that are equal to an earlier one.
        kept: hash of the digests of all texts that stay, in order.
    """

    digests: frozenset[bytes]
    kept: str

    def as_json(self) -> dict[str, Any]:
        return {"near_duplicates": sorted(digest.hex() for digest in self.digests), "kept": self.kept}

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> "NearDuplicates":
        return cls(frozenset(map(bytes.fromhex, written["near_duplicates"])), written["kept"])


def check_installed() -> None:
    """
    Raises:
        CorpusError: datasketch is missing, or of a version with other sketches.
    """
    try:
        version = metadata.version("datasketch")
    except metadata.PackageNotFoundError:
        version = "none"
    if version.partition(".")[0] != "2":
        raise CorpusError(f"--dedup needs datasketch 2, and {version} is installed: {how_to_install('data')}.")


# In the workers -----------------------------------------------------------------------------------------------


def sketch_texts(bodies: list[str | Path], words: int) -> shards.Result:
    """Sketches of texts, uint32 `(texts, SKETCH)`; runs in a worker process."""
    from datasketch import MinHash

    empty = MinHash(SKETCH, scheme=_SCHEME, hashfunc=_hash)
    sketches = np.empty((len(bodies), SKETCH), dtype="<u4")
    for row, body in zip(sketches, bodies, strict=True):
        sketch = empty.copy()
        for piece in sources.cut_body(body):
            runs = iter(_runs(piece, words))
            while batch := list(itertools.islice(runs, _BATCH)):
                sketch.update_batch(batch)
        row[:] = sketch.hashvalues
    return {"sketches": sketches}, {}


def _runs(text: str, n: int) -> set[str]:
    """All runs of `n` consecutive words; of a text with fewer words, the text itself."""
    words = _WORD.findall(text)
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)} or {text}


def _hash(run: str) -> int:
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "little")


# In the parent ------------------------------------------------------------------------------------------------


class _Search:
    """Takes texts in reading order and decides about each."""

    def __init__(self, threshold: float, max_bytes: int | None, sketches: shards.ShardLog) -> None:
        from datasketch import MinHash, MinHashLSH

        self.threshold, self.max_bytes, self.sketches = threshold, max_bytes, sketches
        # Its values are replaced by each text's: the tables take a MinHash and keep hashes of parts of its values.
        self.probe = MinHash(SKETCH, scheme=_SCHEME)
        self.tables = MinHashLSH(threshold, SKETCH, weights=_WEIGHTS, hashfunc=_short)
        self.near: set[bytes] = set()
        self.kept = hashlib.blake2b(digest_size=16)
        self.n_texts = self.n_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the texts that stay reach `max_bytes`, so that no other is needed."""
        return self.max_bytes is not None and self.n_bytes >= self.max_bytes

    def add(self, batch: list[sources.Text], sketches: np.ndarray) -> None:
        for text, sketch in zip(batch, sketches, strict=True):
            if self.is_full:
                return
            self.probe.hashvalues = sketch
            candidates = self.tables.query(self.probe)
            if any(self._alike(sketch, self.sketches.rows("sketches", number, 1)[0]) for number in candidates):
                self.near.add(text.digest)
            else:
                self.tables.insert(self.n_texts, self.probe, check_duplication=False)
                self.kept.update(text.digest)
                self.n_bytes += text.n_bytes
            self.n_texts += 1

    def _alike(self, one: np.ndarray, other: np.ndarray) -> bool:
        return float(np.mean(one == other)) >= self.threshold


def _short(values: bytes) -> bytes:
    return hashlib.blake2b(values, digest_size=8).digest()


@dataclass(frozen=True)
class _Batch:
    """Consecutive texts of about a shard."""

    texts: list[sources.Text]

    @property
    def digest(self) -> str:
        return hashlib.blake2b(b"".join(text.digest for text in self.texts), digest_size=16).hexdigest()

    @property
    def n_bytes(self) -> int:
        return sum(text.n_bytes for text in self.texts)


def find(
    settings: CorpusSettings, out: Path, folder: Path, pool: Executor, workers: int, progress: Progress
) -> NearDuplicates:
    """Reads the input once, up to `max_bytes` of text that stays, and finds the near-duplicates in it.

    Args:
        folder: for the sketches; those of an interrupted run are used again where the texts are the same.
    """
    assert settings.dedup is not None and settings.dedup_words is not None
    sketches = shards.ShardLog(folder, {"sketches": np.dtype(np.uint32)}, SKETCH)
    search = _Search(settings.dedup, settings.max_bytes, sketches)
    words = settings.dedup_words
    batches = itertools.takewhile(lambda _: not search.is_full, _batches(settings, out))
    for number, batch in shards.work_through(
        batches, sketches, lambda batch: pool.submit(sketch_texts, [text.body for text in batch.texts], words), workers
    ):
        search.add(batch.texts, sketches.read(number, "sketches"))
        progress.advance(batch.n_bytes)
    return NearDuplicates(frozenset(search.near), search.kept.hexdigest())


def _batches(settings: CorpusSettings, out: Path) -> Iterator[_Batch]:
    texts: list[sources.Text] = []
    n_bytes = 0
    for text in sources.distinct_texts(settings, out, sources.Tally()):
        texts.append(text)
        n_bytes += text.n_bytes
        if n_bytes >= shards.SHARD_BYTES:
            yield _Batch(texts)
            texts, n_bytes = [], 0
    if texts:
        yield _Batch(texts)
