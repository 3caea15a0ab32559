"""Search for near-duplicates of earlier texts: MinHash sketches in parallel, one decision after another.

Two texts are near-duplicates if the sets of their runs of `dedup_words` consecutive words have an estimated Jaccard
similarity (shared runs / all runs) of at least `dedup`: the share of equal values in two sketches of `SKETCH` values
(Broder 1997). Only pairs that locality-sensitive hashing proposes are compared, in reading order; the first text stays.
The sketches are kept on disk for a next start, and with hash tables in the parent's memory, 5 kB per text that stays.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np

from forgetting_transformer.data.prepare import shards, sources
from forgetting_transformer.data.prepare.settings import CorpusSettings

SKETCH = 128
#: Weights of false candidates, which cost a comparison, and of missed pairs, which leave a duplicate.
_WEIGHTS = (0.1, 0.9)
# The permutations of a sketch are a function of these, in every release of datasketch 2.
_SCHEME = "affine32"
_WORD = re.compile(r"\w+")
#: Runs of words that are hashed at once: the 128 values of each then lie in a core's cache, which halves the time.
_BATCH = 512


def sketch_texts(texts: list[sources.Text], words: int) -> shards.Result:
    """Sketches of texts, uint32 `(texts, SKETCH)`; runs in a worker process."""
    from datasketch import MinHash

    empty = MinHash(SKETCH, scheme=_SCHEME, hashfunc=_hash)
    sketches = np.empty((len(texts), SKETCH), dtype="<u4")
    for row, text in zip(sketches, texts, strict=True):
        sketch = empty.copy()
        for piece, _ in sources.cut(text.body):
            runs = _runs(piece, words)
            while batch := list(itertools.islice(runs, _BATCH)):
                sketch.update_batch(batch)
        row[:] = sketch.hashvalues
    return {"sketches": sketches}


def _runs(text: str, n: int) -> Iterator[str]:
    """All runs of `n` consecutive words; of a text with fewer words, the text itself."""
    words = _WORD.findall(text)
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1)) if len(words) >= n else iter([text])


def _hash(run: str) -> int:
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "little")


def _short(values: bytes) -> bytes:
    return hashlib.blake2b(values, digest_size=8).digest()


def find(
    texts: Iterable[sources.Text], settings: CorpusSettings, folder: Path, pool: Executor, workers: int
) -> set[bytes]:
    """Finds the near-duplicates among texts, up to `max_bytes` of text that stays.

    Args:
        texts: without those that are equal to an earlier one.
        folder: for the sketches; those of an interrupted run are used again where the texts are the same.

    Returns:
        Digests of the near-duplicates.

    Raises:
        DataError: datasketch is missing.
    """
    assert settings.dedup is not None and settings.dedup_words is not None
    datasketch = sources.library("datasketch", "--dedup")
    threshold, words = settings.dedup, settings.dedup_words
    limit = float("inf") if settings.max_bytes is None else settings.max_bytes
    sketches = shards.ShardLog(folder, sketches=("<u4", SKETCH))
    # Its values are replaced by each text's: the tables take a MinHash and keep hashes of parts of its values.
    probe = datasketch.MinHash(SKETCH, scheme=_SCHEME)
    tables = datasketch.MinHashLSH(threshold, SKETCH, weights=_WEIGHTS, hashfunc=_short)
    near: set[bytes] = set()
    kept_bytes = 0

    def start(batch: list[sources.Text]) -> "Future[shards.Result]":
        return pool.submit(sketch_texts, batch, words)

    wanted = itertools.takewhile(lambda _: kept_bytes < limit, texts)
    for shard, batch in shards.work_through(wanted, sketches, start, workers):
        for text, sketch in zip(batch, sketches.read(shard, "sketches"), strict=True):
            if kept_bytes >= limit:
                break
            probe.hashvalues = sketch
            candidates = (np.frombuffer(other, "<u4") for other in tables.query(probe))
            if any(np.mean(sketch == other) >= threshold for other in candidates):
                near.add(text.digest)
            else:
                tables.insert(sketch.tobytes(), probe, check_duplication=False)
                kept_bytes += text.n_bytes
    return near
