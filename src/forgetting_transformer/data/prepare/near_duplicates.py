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
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.console import how_to_install
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare import shards, sources
from forgetting_transformer.data.prepare.settings import CorpusSettings

SKETCH = 128
#: Weights of false candidates, which cost a comparison, and of missed pairs, which leave a duplicate.
_WEIGHTS = (0.1, 0.9)
# The permutations of a sketch are a function of these, in every release of datasketch 2.
_SCHEME = "affine32"
_WORD = re.compile(r"\w+")
#: Runs of words that are hashed at once.
_BATCH = 4096


def sketch_texts(bodies: list[str | Path], words: int) -> shards.Result:
    """Sketches of texts, uint32 `(texts, SKETCH)`; runs in a worker process."""
    from datasketch import MinHash

    empty = MinHash(SKETCH, scheme=_SCHEME, hashfunc=_hash)
    sketches = np.empty((len(bodies), SKETCH), dtype="<u4")
    for row, body in zip(sketches, bodies, strict=True):
        sketch = empty.copy()
        for piece, _ in sources.cut(body):
            runs = iter(_runs(piece, words))
            while batch := list(itertools.islice(runs, _BATCH)):
                sketch.update_batch(batch)
        row[:] = sketch.hashvalues
    return {"sketches": sketches}


def _runs(text: str, n: int) -> set[str]:
    """All runs of `n` consecutive words; of a text with fewer words, the text itself."""
    words = _WORD.findall(text)
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)} or {text}


def _hash(run: str) -> int:
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "little")


def _short(values: bytes) -> bytes:
    return hashlib.blake2b(values, digest_size=8).digest()


def find(settings: CorpusSettings, out: Path, folder: Path, pool: Executor, workers: int, bar: Any) -> set[bytes]:
    """Reads the input once, up to `max_bytes` of text that stays, and finds the near-duplicates in it.

    Args:
        folder: for the sketches; those of an interrupted run are used again where the texts are the same.

    Returns:
        Digests of the near-duplicates, without the texts that are equal to an earlier one.

    Raises:
        DataError: datasketch is missing.
    """
    assert settings.dedup is not None and settings.dedup_words is not None
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise DataError(f"--dedup needs datasketch 2: {how_to_install('data')}.") from error
    threshold, words = settings.dedup, settings.dedup_words
    limit = float("inf") if settings.max_bytes is None else settings.max_bytes
    sketches = shards.ShardLog(folder, sketches=("<u4", SKETCH))
    # Its values are replaced by each text's: the tables take a MinHash and keep hashes of parts of its values.
    probe = MinHash(SKETCH, scheme=_SCHEME)
    tables = MinHashLSH(threshold, SKETCH, weights=_WEIGHTS, hashfunc=_short)
    near: set[bytes] = set()
    kept_bytes = 0
    texts = sources.distinct_texts(settings, out, sources.Tally())

    def wanted() -> Iterator[shards.Shard]:
        """Shards until the texts that stay reach `max_bytes`."""
        return itertools.takewhile(lambda _: kept_bytes < limit, shards.make_shards(texts))

    def alike(sketch: np.ndarray, number: int) -> bool:
        return float(np.mean(sketch == sketches.rows("sketches", number, 1)[0])) >= threshold

    numbers = itertools.count()
    for shard_number, shard in shards.work_through(
        wanted(), sketches, lambda shard: pool.submit(sketch_texts, [text.body for text in shard.items], words), workers
    ):
        for text, sketch, number in zip(shard.items, sketches.read(shard_number, "sketches"), numbers, strict=False):
            if kept_bytes >= limit:
                break
            probe.hashvalues = sketch
            if any(alike(sketch, candidate) for candidate in tables.query(probe)):
                near.add(text.digest)
            else:
                tables.insert(number, probe, check_duplication=False)
                kept_bytes += text.n_bytes
        bar.update(shard.n_bytes)
    return near
