"""Manifest and vocabulary of a corpus: how many token ids it has, and the token of each.

The arrays do not say. A model with the vocabulary of another tokenizer trains all the same, only worse: so nothing is
assumed of an array that nobody describes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from forgetting_transformer.console import redact
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.remote import RemoteFolder, is_url
from forgetting_transformer.files import UnreadableError, parse_json, read_json
from forgetting_transformer.ranges import COUNT, Range, refusal

#: LongCrawl64 is tokenised with GPT-2's BPE: 50,257 ids, of which the last begins and ends a text.
GPT2_VOCAB_SIZE = 50257
GPT2_BOS_TOKEN_ID = 50256
LONGCRAWL64_DOC_LEN = 65536
#: Types of token ids in arrays: two bytes where they suffice, as in LongCrawl64, else four.
TOKEN_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))
_ID = Range(0, COUNT.high)
#: Keys of a manifest that training reads.
_MANIFEST = {
    "vocab_size": (int, COUNT),
    "bos_token_id": (int, _ID),
    "eos_token_id": (int, _ID),
    "doc_len": (int, COUNT),
    "unigram_entropy_nats": (float | None, Range(0, 64)),
}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest that scripts/prepare_data.py leaves beside its arrays; {} where there is none (LongCrawl64).

    Raises:
        DataError: it is damaged.
    """
    file = Path(folder) / "manifest.json"
    if is_url(folder):
        text = RemoteFolder(str(folder)).read(file.name)
    else:
        text = file.read_bytes() if file.is_file() else None
    if text is None:
        return {}
    try:
        manifest = parse_json(text, f"{folder}/{file.name}")
    except UnreadableError as error:
        raise DataError(f"{error}; bring back a copy of it, or run scripts/prepare_data.py again") from error
    if problem := _problem(manifest):
        raise DataError(f"{folder}/{file.name}: {problem}; bring back a copy, or run scripts/prepare_data.py again")
    return manifest


def _problem(manifest: Any) -> str | None:
    """Fault in the parts of a manifest that training reads; None if there is none."""
    arrays = manifest.get("arrays", {}) if isinstance(manifest, dict) else None
    if not isinstance(arrays, dict) or not all(isinstance(array, dict) for array in arrays.values()):
        return "it is not an object with an object for each array"
    for key, (kind, allowed) in _MANIFEST.items():
        if key in manifest and (better := refusal(manifest[key], kind, allowed)):
            return f"{key}={manifest[key]!r} must be {better}"
    return None


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of TOKEN_DTYPES that holds ids in [0, vocab_size)."""
    return TOKEN_DTYPES[0] if vocab_size <= 1 << 16 else TOKEN_DTYPES[1]


@dataclass(frozen=True)
class Vocabulary:
    """Ids lie in [0, size), `bos_token_id` begins a text, and `eos_token_id`, perhaps the same id, ends it."""

    size: int
    bos_token_id: int
    eos_token_id: int


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
    assumed: Vocabulary | None = None,
) -> Vocabulary:
    """The vocabulary of the corpus at `place`.

    It is what is stated, else what its manifest says, else GPT-2's for LongCrawl64, else what is assumed. EOS is
    BOS where only BOS is stated or in the manifest.

    LongCrawl64 is a folder of that name with documents of 65,536 tokens, or of as many as
    scripts/download_longcrawl64.py cut them to, which its note says.

    Args:
        split: "train" or "heldout", the array whose documents have `doc_len` tokens.
        manifest: of the corpus, {} if it has none.

    Raises:
        DataError: neither says, or the two do not fit together.
    """
    size = manifest.get("vocab_size") if stated.size is None else stated.size
    bos = manifest.get("bos_token_id") if stated.bos_token_id is None else stated.bos_token_id
    eos = manifest.get("eos_token_id") if stated.eos_token_id is None else stated.eos_token_id
    if size is None or bos is None:
        known = _known(place, split, doc_len) or assumed or StatedVocabulary()
        size = known.size if size is None else size
        if bos is None:
            bos, eos = known.bos_token_id, known.eos_token_id if eos is None else eos
    if size is None or bos is None:
        missing = [f"datamodule.{key}" for key, value in (("vocab_size", size), ("bos_token_id", bos)) if value is None]
        raise DataError(
            f"{redact(str(place))} has no manifest.json that states its vocabulary and is not LongCrawl64 with "
            f"documents of 65,536 tokens, so it does not say which tokenizer made it: set {' and '.join(missing)} for "
            "training, or write a manifest.json, or bring back that of scripts/prepare_data.py (docs/data.md)"
        )
    found = Vocabulary(size, bos, bos if eos is None else eos)
    for key in ("bos_token_id", "eos_token_id"):
        if not 0 <= getattr(found, key) < size:
            raise DataError(f"datamodule.{key}={getattr(found, key)} is not in [0, vocab_size={size})")
    return found


def _known(place: str | Path, split: str, doc_len: int) -> Vocabulary | None:
    """GPT-2's if this is LongCrawl64."""
    if PurePosixPath(str(place)).name.partition("@")[0] != "longcrawl64":
        return None
    cut_short = doc_len != LONGCRAWL64_DOC_LEN
    if cut_short and not (isinstance(place, Path) and download_note(place, split).get("tokens") == doc_len):
        return None
    return Vocabulary(GPT2_VOCAB_SIZE, GPT2_BOS_TOKEN_ID, GPT2_BOS_TOKEN_ID)


def download_note(folder: Path, split: str) -> dict[str, Any]:
    """Note of scripts/download_longcrawl64.py beside its copy of an array: `source`, and `tokens` of a document.

    Empty if the script did not make the array.
    """
    note = folder / f"{split}.download.json"
    return read_json(note) if note.is_file() else {}


def other_token(texts: Mapping[int, str], model: Mapping[int, str], of_model: str) -> str | None:
    """Which id of texts a model takes for another token: "id 5 is 'b' there and 'a' in OF_MODEL"; None where none is.

    Args:
        texts, model: id -> token. The model may know more ids than the texts have.
    """
    different = next((id for id in sorted(texts) if model.get(id) != texts[id]), None)
    if different is None:
        return None
    return f"id {different} is {texts[different]!r} there and {model.get(different)!r} in {of_model}"


def other_tokens(folder: Path, reference: Path) -> str | None:
    """`other_token` of two corpora; None also where one of them does not say which tokens it has.

    Raises:
        DataError: a tokenizer.json is damaged.
    """
    own = tokens_of(reference)
    other = tokens_of(folder) if own is not None else None
    return None if own is None or other is None else other_token(other, own, f"{reference}/tokenizer")


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
