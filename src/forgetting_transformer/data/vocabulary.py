"""Manifest and vocabulary of a corpus: how many token ids it has, and the token of each.

The arrays do not state them. A model with the vocabulary of another tokenizer trains all the same, only worse: so
nothing is assumed about an undescribed array.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from tokenizers import Tokenizer

from forgetting_transformer.console import redact
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.remote import read_file
from forgetting_transformer.files import UnreadableError, parse_json, read_json
from forgetting_transformer.ranges import COUNT

#: LongCrawl64 is tokenised with GPT-2's BPE: 50,257 ids, of which the last begins and ends a text.
GPT2_VOCAB_SIZE = 50257
GPT2_BOS_TOKEN_ID = 50256
LONGCRAWL64_DOC_LEN = 65536
#: Types of token ids in arrays: two bytes where they suffice, as in LongCrawl64, else four.
TOKEN_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))

_Id = Annotated[int, Field(ge=0, le=COUNT.high)]


class _Manifest(BaseModel, strict=True):
    """Keys of a manifest that training reads."""

    vocab_size: Annotated[int, Field(ge=COUNT.low, le=COUNT.high)] | None = None
    bos_token_id: _Id | None = None
    eos_token_id: _Id | None = None
    doc_len: Annotated[int, Field(ge=COUNT.low, le=COUNT.high)] | None = None
    unigram_entropy_nats: Annotated[float, Field(ge=0, le=64)] | None = None
    arrays: dict[str, dict[str, Any]] = {}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest that scripts/prepare_data.py leaves beside its arrays; {} where there is none (LongCrawl64).

    Raises:
        DataError: it is damaged.
    """
    text, place = read_file(folder, "manifest.json"), f"{folder}/manifest.json"
    if text is None:
        return {}
    cure = "bring back a copy of it, or run scripts/prepare_data.py again"
    try:
        manifest = parse_json(text, place)
        _Manifest.model_validate(manifest)
    except UnreadableError as error:
        raise DataError(f"{error}; {cure}") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise DataError(f"{place}: {key}={wrong['input']!r}: {wrong['msg']}; {cure}") from error
    return manifest


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of TOKEN_DTYPES that holds ids in [0, vocab_size)."""
    return TOKEN_DTYPES[0] if vocab_size <= 1 << 16 else TOKEN_DTYPES[1]


@dataclass(frozen=True)
class Vocabulary:
    """Ids lie in [0, size), `bos_token_id` begins a text, and `eos_token_id`, perhaps the same id, ends it."""

    size: int
    bos_token_id: int
    eos_token_id: int


#: The vocabulary as far as the user states them; None is not stated.
StatedVocabulary = tuple[int | None, int | None, int | None]


def vocabulary_of(
    place: str | Path,
    split: str,
    doc_len: int,
    manifest: dict[str, Any],
    stated: StatedVocabulary = (None, None, None),
    assumed: Vocabulary | None = None,
) -> Vocabulary:
    """The vocabulary of the corpus at `place`.

    The stated one, else that of its manifest, else GPT-2's for LongCrawl64, else the assumed one. EOS is BOS where only
    BOS is stated or in the manifest.

    LongCrawl64 is a folder of that name with documents of 65,536 tokens, or of as many as
    scripts/download_longcrawl64.py cut them to, which its note says.

    Args:
        split: "train" or "heldout", the array whose documents have `doc_len` tokens.
        manifest: of the corpus, {} if it has none.

    Raises:
        DataError: neither says, or the two do not fit together.
    """
    keys = ("vocab_size", "bos_token_id", "eos_token_id")
    size, bos, eos = (manifest.get(key) if value is None else value for key, value in zip(keys, stated, strict=True))
    if PurePosixPath(str(place)).name.partition("@")[0] == "longcrawl64":
        cut_to = download_note(place, split).get("tokens") if isinstance(place, Path) else None
        if doc_len in (LONGCRAWL64_DOC_LEN, cut_to):
            assumed = Vocabulary(GPT2_VOCAB_SIZE, GPT2_BOS_TOKEN_ID, GPT2_BOS_TOKEN_ID)
    if assumed is not None:
        if bos is None:
            bos, eos = assumed.bos_token_id, assumed.eos_token_id if eos is None else eos
        size = assumed.size if size is None else size
    if size is None or bos is None:
        missing = [f"datamodule.{key}" for key, value in zip(keys, (size, bos), strict=False) if value is None]
        raise DataError(
            f"{redact(str(place))} has no manifest.json that states its vocabulary and is not LongCrawl64 with "
            f"documents of 65,536 tokens, so it does not say which tokenizer made it: set {' and '.join(missing)} for "
            "training, or write a manifest.json, or bring back that of scripts/prepare_data.py (docs/data.md)"
        )
    found = Vocabulary(size, bos, bos if eos is None else eos)
    for key in keys[1:]:
        if not 0 <= getattr(found, key) < size:
            raise DataError(f"datamodule.{key}={getattr(found, key)} is not in [0, vocab_size={size})")
    return found


def download_note(folder: Path, split: str) -> dict[str, Any]:
    """Note of scripts/download_longcrawl64.py beside its copy of an array: `source`, and `tokens` of a document.

    Empty if the script did not make the array.
    """
    note = folder / f"{split}.download.json"
    return read_json(note) if note.is_file() else {}


def other_token(texts: Mapping[int, str], model: Mapping[int, str], of_model: str) -> str | None:
    """An id that stands for another token in a model: "id 5 is 'b' there and 'a' in OF_MODEL"; None if there is none.

    Args:
        texts, model: id -> token. The model may know more ids than the texts have.
    """
    different = next((id for id in sorted(texts) if model.get(id) != texts[id]), None)
    if different is None:
        return None
    return f"id {different} is {texts[different]!r} there and {model.get(different)!r} in {of_model}"


def tokens_of(folder: Path) -> dict[int, str] | None:
    """Id -> token of the tokenizer in `folder/tokenizer`; None where there is none.

    Raises:
        DataError: its tokenizer.json is damaged.
    """
    file = folder / "tokenizer" / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} is not a tokenizer ({error}); bring back a copy of it, or delete it") from error
    return {id: token for token, id in tokenizer.get_vocab().items()}
