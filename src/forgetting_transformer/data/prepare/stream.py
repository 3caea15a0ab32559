"""From pieces to one long token stream on disk, encoded in parallel.

Workers encode shards in any order and the parent appends the results in input order, so the stream does not depend on
the number of workers.
"""

from array import array
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forgetting_transformer.data.prepare import shards
from forgetting_transformer.data.prepare.sources import Piece
from forgetting_transformer.data.prepare.tokenizers import TokenizerInfo, encode


@dataclass(frozen=True)
class TextTable:
    """One entry per text, in stream order.

    Attributes:
        tokens: int64, tokens of the text with its end-of-text id.
        shared: uint16, number of leading path components the text has in common with the one before it.
    """

    tokens: np.ndarray
    shared: np.ndarray


def encode_shard(pieces: list[Piece], folder: Path, info: TokenizerInfo) -> shards.Result:
    """Ids of the pieces of a shard, an end-of-text id where a text ends, and how many of each; in a worker process."""
    end_of_text = np.array([info.eos_token_id], dtype=info.dtype)
    ids = [np.append(encode(piece.text, folder, info), end_of_text[: piece.ends_text]) for piece in pieces]
    return {"tokens": np.concatenate(ids), "lengths": np.array([*map(len, ids)], dtype="<u4")}


def write_stream(
    pieces: Iterable[Piece], folder: Path, tokenizer: Path, info: TokenizerInfo, pool: Executor, workers: int
) -> TextTable:
    """Encodes `pieces` into `folder`: `tokens.bin`, and `lengths.bin` with the tokens of each piece.

    Args:
        tokenizer: its folder.
    """
    log = shards.ShardLog(folder, tokens=info.dtype, lengths="<u4")
    tokens, shared = array("q"), array("H")  # a list would take four times the memory
    open_tokens = 0  # of a text whose last piece has not come yet
    last_path: tuple[str, ...] = ()

    def start(batch: list[Piece]) -> Future:
        return pool.submit(encode_shard, batch, tokenizer, info)

    for number, batch in shards.work_through(pieces, log, start, workers):
        for piece, length in zip(batch, log.read(number, "lengths").tolist(), strict=True):
            open_tokens += length
            if piece.ends_text:
                tokens.append(open_tokens)
                shared.append(_n_shared(last_path, piece.path))
                open_tokens, last_path = 0, piece.path
    return TextTable(np.array(tokens, dtype=np.int64), np.array(shared, dtype=np.uint16))


def _n_shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
