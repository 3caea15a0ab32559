"""Which tokens the ids of a corpus stand for, as far as its folder says: two tokenizers may have equally many."""

import json
from pathlib import Path

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.regular import check_regular
from forgetting_transformer.data.remote_cache import LARGEST_TOKENIZER_FILE


def other_tokens(folder: Path, reference: Path) -> str | None:
    """Which id stands for another token in `folder` than in `reference`; None where none does, or one does not say.

    Raises:
        DataError: a tokenizer.json is damaged.
    """
    own = _tokens(reference)
    other = _tokens(folder) if own is not None else None
    if own is None or other is None or other == own:
        return None
    different = next(id for id in range(max(*own, *other) + 1) if own.get(id) != other.get(id))
    return f"id {different} is {other.get(different)!r} there and {own.get(different)!r} in {reference}/tokenizer"


def _tokens(folder: Path) -> dict[int, str] | None:
    """Id -> token of the tokenizer in `folder/tokenizer`; None where there is none in the form of prepare_data.py."""
    file = folder / "tokenizer" / "tokenizer.json"
    if not check_regular(file, LARGEST_TOKENIZER_FILE):
        return None
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        # Of a Unigram model it is a list of tokens with their scores.
        named = (
            {token: id for token, id in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {token: id for id, (token, _) in enumerate(vocabulary)}
        )
        named |= {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
        return {int(id): token for token, id in named.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is not a tokenizer ({error}); bring back a copy of it, or delete it") from error
