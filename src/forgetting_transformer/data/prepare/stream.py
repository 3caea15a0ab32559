"""From pieces to one long token stream on disk: encoded in parallel, committed in order, restartable.

Pieces are collected into shards of about `SHARD_BYTES` of text. Workers encode shards in any order; the parent
appends the results in input order, so the file does not depend on the number of workers. A shard is committed by
one line in a log, with a hash of its text. After a kill the log is believed up to its last whole line: a shard
whose text is still the same is not encoded again, and from the first that changed everything is.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from forgetting_transformer.data.prepare.sources import Piece
from forgetting_transformer.data.prepare.tokenizers import Encoder, TokenizerInfo
from forgetting_transformer.files import append_durably as _append
from forgetting_transformer.files import write_atomically
from forgetting_transformer.progress import Progress

SHARD_BYTES = 2 << 20


@dataclass(frozen=True)
class Shard:
    """Consecutive pieces that are encoded together.

    Attributes:
        texts: the pieces' texts.
        ends: for each piece, whether it ends its text and is followed by the end-of-text id.
        paths: for each piece, the path of its text.
        n_bytes: UTF-8 bytes of all pieces.
        digest: hash of everything above.
    """

    texts: list[str]
    ends: list[bool]
    paths: list[tuple[str, ...]]
    n_bytes: int
    digest: str


@dataclass(frozen=True)
class EncodedShard:
    tokens: np.ndarray  # TokenizerInfo.dtype, (tokens,): all pieces, end-of-text ids included
    lengths: np.ndarray  # uint32, (pieces,): tokens of each piece
    reversible: bool  # decoding gave the first piece back


@dataclass(frozen=True)
class TextTable:
    """One entry per text, in stream order.

    Attributes:
        tokens: int64, tokens of the text with its end-of-text id.
        shared: uint16, number of leading path components the text has in common with the one before it.
    """

    tokens: np.ndarray
    shared: np.ndarray


# In the workers -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def load_encoder(folder: Path, info: TokenizerInfo) -> Encoder:
    return Encoder(folder, info)


def encode_shard(texts: list[str], ends: list[bool], folder: Path, info: TokenizerInfo) -> EncodedShard:
    """Encode the pieces of one shard; runs in a worker process."""
    encoder = load_encoder(folder, info)
    end_of_text = np.array([info.eos_token_id], dtype=info.dtype)
    parts: list[np.ndarray] = []
    lengths = np.zeros(len(texts), dtype=np.uint32)
    for i, (text, ends_text) in enumerate(zip(texts, ends, strict=True)):
        ids = encoder.encode(text)
        parts += [ids, end_of_text] if ends_text else [ids]
        lengths[i] = len(ids) + ends_text
    return EncodedShard(np.concatenate(parts), lengths, encoder.is_reversible_on(texts[0]))


# In the parent ------------------------------------------------------------------------------------------------


def make_shards(pieces: Iterator[Piece]) -> Iterator[Shard]:
    batch: list[Piece] = []
    n_bytes = 0
    for piece in pieces:
        batch.append(piece)
        n_bytes += piece.n_bytes
        if n_bytes >= SHARD_BYTES:
            yield _shard(batch, n_bytes)
            batch, n_bytes = [], 0
    if batch:
        yield _shard(batch, n_bytes)


def _shard(batch: list[Piece], n_bytes: int) -> Shard:
    hasher = hashlib.blake2b(digest_size=16)
    for piece in batch:
        hasher.update(f"{piece.path}{piece.n_bytes}{piece.ends_text}".encode(errors="surrogateescape"))
        hasher.update(piece.text.encode())
    return Shard(
        texts=[piece.text for piece in batch],
        ends=[piece.ends_text for piece in batch],
        paths=[piece.path for piece in batch],
        n_bytes=n_bytes,
        digest=hasher.hexdigest(),
    )


def combined_digest(digests: Iterable[str]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for digest in digests:
        hasher.update(bytes.fromhex(digest))
    return hasher.hexdigest()


class TokenStream:
    """The stream's files in `folder`: `tokens.bin` (of `dtype`), `lengths.bin` (uint32 per piece), `shards.jsonl`."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.dtype = dtype.newbyteorder("<")
        self.tokens_path = folder / "tokens.bin"
        self.lengths_path = folder / "lengths.bin"
        self.log_path = folder / "shards.jsonl"
        for path in (self.tokens_path, self.lengths_path, self.log_path):
            path.touch()
        self.shards = self._read_log()
        self.truncate(len(self.shards))

    def _read_log(self) -> list[dict]:
        """The shards that are whole: their line is, and the files are as long as it says."""
        n_tokens = self.tokens_path.stat().st_size // self.dtype.itemsize
        n_pieces = self.lengths_path.stat().st_size // 4
        shards = []
        for line in self.log_path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # the kill fell into the middle of this line
                break
            shard = json.loads(line)
            if shard["tokens_end"] > n_tokens or shard["pieces_end"] > n_pieces:
                break
            shards.append(shard)
        return shards

    def _ends(self, n_shards: int) -> tuple[int, int]:
        """Tokens and pieces in the first `n_shards` shards."""
        if n_shards == 0:
            return 0, 0
        last = self.shards[n_shards - 1]
        return last["tokens_end"], last["pieces_end"]

    @property
    def fingerprint(self) -> str:
        """Hash of all text in the stream."""
        return combined_digest(shard["digest"] for shard in self.shards)

    @property
    def roundtrip(self) -> dict[str, int]:
        """Beginnings of pieces that were decoded again, and how many of them came out different."""
        lossy = sum(not shard["reversible"] for shard in self.shards)
        return {"checked": len(self.shards), "lossy": lossy}

    def truncate(self, n_shards: int) -> None:
        """Forget all shards after the first `n_shards`, and what a kill left behind them."""
        self.shards = self.shards[:n_shards]
        tokens, pieces = self._ends(n_shards)
        write_atomically(self.log_path, "".join(json.dumps(shard) + "\n" for shard in self.shards))
        os.truncate(self.tokens_path, tokens * self.dtype.itemsize)
        os.truncate(self.lengths_path, pieces * 4)

    def append(self, digest: str, encoded: EncodedShard) -> None:
        """Commit one shard: the data is on the disk before the line that says so."""
        tokens, pieces = self._ends(len(self.shards))
        _append(self.tokens_path, encoded.tokens.astype(self.dtype).tobytes())
        _append(self.lengths_path, encoded.lengths.astype("<u4").tobytes())
        shard = {
            "digest": digest,
            "tokens_end": tokens + len(encoded.tokens),
            "pieces_end": pieces + len(encoded.lengths),
            "reversible": encoded.reversible,
        }
        _append(self.log_path, (json.dumps(shard) + "\n").encode())
        self.shards.append(shard)

    def has(self, index: int, digest: str) -> bool:
        return index < len(self.shards) and self.shards[index]["digest"] == digest

    def lengths(self, index: int) -> np.ndarray:
        start, stop = self._ends(index)[1], self._ends(index + 1)[1]
        return np.fromfile(self.lengths_path, "<u4", count=stop - start, offset=start * 4)


class _TextTableBuilder:
    """Adds piece lengths up to text lengths, and compares each path with the one before."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.shared: list[np.ndarray] = []
        self.open_tokens = 0  # tokens of a text whose last piece has not come yet
        self.last_path: tuple[str, ...] = ()

    def add(self, shard_ends: list[bool], paths: list[tuple[str, ...]], lengths: np.ndarray) -> None:
        tokens, shared = [], []
        for ends_text, path, length in zip(shard_ends, paths, lengths.tolist(), strict=True):
            self.open_tokens += length
            if ends_text:
                tokens.append(self.open_tokens)
                shared.append(_n_shared(self.last_path, path))
                self.open_tokens, self.last_path = 0, path
        self.tokens.append(np.array(tokens, dtype=np.int64))
        self.shared.append(np.array(shared, dtype=np.uint16))

    def table(self) -> TextTable:
        if not self.tokens:
            return TextTable(np.zeros(0, np.int64), np.zeros(0, np.uint16))
        return TextTable(np.concatenate(self.tokens), np.concatenate(self.shared))


def _n_shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def write_stream(
    pieces: Iterator[Piece],
    stream: TokenStream,
    folder: Path,
    info: TokenizerInfo,
    pool: Executor,
    workers: int,
    progress: Progress,
) -> TextTable:
    """Encode `pieces` into `stream` with the tokenizer in `folder`; return the table of texts.

    At most two shards per worker are held in memory.
    """
    builder = _TextTableBuilder()
    waiting: deque[tuple[Shard, Future[EncodedShard]]] = deque()

    def commit_oldest() -> None:
        shard, future = waiting.popleft()
        encoded = future.result()
        stream.append(shard.digest, encoded)
        builder.add(shard.ends, shard.paths, encoded.lengths)
        progress.advance(shard.n_bytes)

    index = -1
    for index, shard in enumerate(make_shards(pieces)):
        if stream.has(index, shard.digest):
            builder.add(shard.ends, shard.paths, stream.lengths(index))
            progress.advance(shard.n_bytes)
            continue
        if index < len(stream.shards):  # the text changed since the kill, here or earlier
            stream.truncate(index)
        waiting.append((shard, pool.submit(encode_shard, shard.texts, shard.ends, folder, info)))
        if len(waiting) >= 2 * workers:
            commit_oldest()
    while waiting:
        commit_oldest()
    stream.truncate(index + 1)  # the input may have become shorter since the kill
    return builder.table()
