"""How many token ids a corpus has, and which of them begin and end a text.

The arrays do not say. A model with the vocabulary of another tokenizer trains all the same, only worse: so nothing is
assumed of an array that nobody describes.
"""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from forgetting_transformer.console import redact
from forgetting_transformer.data.errors import DataError

#: LongCrawl64 is tokenised with GPT-2's BPE: 50,257 ids, of which the last begins and ends a text.
GPT2_VOCAB_SIZE = 50257
GPT2_BOS_TOKEN_ID = 50256
LONGCRAWL64_DOC_LEN = 65536
#: What arrays of token ids may hold: two bytes where they suffice, as in LongCrawl64, else four.
TOKEN_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of TOKEN_DTYPES that holds ids in [0, vocab_size)."""
    return TOKEN_DTYPES[0] if vocab_size <= 1 << 16 else TOKEN_DTYPES[1]


@dataclass(frozen=True)
class Vocabulary:
    """Ids lie in [0, size), `bos_token_id` begins a text, and `eos_token_id` ends it; by default it is the same id."""

    size: int
    bos_token_id: int
    eos_token_id: int = None  # type: ignore[assignment]  # BOS's, which a default cannot say

    def __post_init__(self) -> None:
        if self.eos_token_id is None:
            object.__setattr__(self, "eos_token_id", self.bos_token_id)


@dataclass(frozen=True)
class StatedVocabulary:
    """The same as far as the user states it; None is not stated."""

    size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def vocabulary_of(
    place: str | Path,
    split: str,
    doc_len: int,
    manifest: dict[str, Any],
    stated: StatedVocabulary = StatedVocabulary(),
    recorded: Vocabulary | None = None,
    prefix: str = "datamodule.",
) -> Vocabulary:
    """The vocabulary of the corpus at `place`.

    It is what is stated, else what its manifest says, else GPT-2's for LongCrawl64, else what a
    run recorded when it began. EOS is BOS where only BOS is stated or in the manifest.

    LongCrawl64 is a folder of that name with documents of 65,536 tokens, or of as many as
    scripts/download_longcrawl64.py cut them to, which its note says.

    Args:
        split: "train" or "heldout", the array whose documents have `doc_len` tokens.
        manifest: of the corpus, {} if it has none.
        prefix: of the keys or flags that state it, for messages.

    Raises:
        DataError: neither says, or the two do not fit together.
    """
    size = manifest.get("vocab_size") if stated.size is None else stated.size
    bos = manifest.get("bos_token_id") if stated.bos_token_id is None else stated.bos_token_id
    eos = manifest.get("eos_token_id") if stated.eos_token_id is None else stated.eos_token_id
    if size is None or bos is None:
        known = _known(place, split, doc_len) or recorded or StatedVocabulary()
        size = known.size if size is None else size
        if bos is None:
            bos, eos = known.bos_token_id, known.eos_token_id if eos is None else eos
    if size is None or bos is None:
        missing = [f"{prefix}{key}" for key, value in (("vocab_size", size), ("bos_token_id", bos)) if value is None]
        raise DataError(
            f"{redact(str(place))} has no manifest.json that states its vocabulary and is not LongCrawl64 with "
            f"documents of 65,536 tokens, so it does not say which tokenizer made it: set {' and '.join(missing)}, or "
            f"bring back the manifest "
            "that scripts/prepare_data.py wrote (docs/data.md)"
        )
    found = Vocabulary(size, bos, bos if eos is None else eos)
    for key in ("bos_token_id", "eos_token_id"):
        if not 0 <= getattr(found, key) < size:
            raise DataError(f"{prefix}{key}={getattr(found, key)} is not in [0, vocab_size={size})")
    return found


def _known(place: str | Path, split: str, doc_len: int) -> Vocabulary | None:
    """GPT-2's if this is LongCrawl64."""
    if PurePosixPath(str(place)).name.partition("@")[0] != "longcrawl64":
        return None
    if doc_len != LONGCRAWL64_DOC_LEN and (not isinstance(place, Path) or _downloaded_length(place, split) != doc_len):
        return None
    return Vocabulary(GPT2_VOCAB_SIZE, GPT2_BOS_TOKEN_ID)


def _downloaded_length(folder: Path, split: str) -> int | None:
    """Tokens of a document in a copy that scripts/download_longcrawl64.py made."""
    try:
        return json.loads((folder / f"{split}.download.json").read_text(encoding="utf-8"))["tokens"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
