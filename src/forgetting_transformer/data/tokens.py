"""Which tokens the ids of a corpus stand for, as far as its folder says: two tokenizers may have equally many."""

from collections.abc import Mapping
from pathlib import Path

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.files import read_json


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
    """Id -> token of the tokenizer in `folder/tokenizer`; None where there is none in the form of prepare_data.py.

    Raises:
        DataError: its tokenizer.json is damaged.
    """
    file = folder / "tokenizer" / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        vocabulary = content["model"]["vocab"]
        # Of a Unigram model it is a list of tokens with their scores.
        named = (
            {token: id for token, id in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {token: id for id, (token, _) in enumerate(vocabulary)}
        )
        named |= {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
        return {int(id): token for token, id in named.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not a tokenizer ({error}); bring back a copy of it, or delete it") from error
