"""Tokenizers of models: loads them, checks whether one fits a model, and encodes texts."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from forgetting_transformer.data.storage.hub import only_cached
from forgetting_transformer.tokenizer import JSONGPT2Tokenizer, packaged

#: A model's vocabulary is often padded to a round size. A tokenizer with fewer than this share of its ids belongs to
#: another model.
_LEAST_SHARE = 0.9


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or hub id, without running code that comes with it.

    Raises:
        OSError, ValueError: it is missing or unreadable, has no vocabulary, or needs code that comes with it.
    """
    cached = not os.path.isdir(source) and only_cached()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=cached)
    except OSError:
        raise
    except Exception as error:  # the library of fast tokenizers raises plain Exception
        if "trust_remote_code" not in str(error):
            raise ValueError(f"the tokenizer {source} cannot be read: {error}") from error
        raise ValueError(
            f"the tokenizer {source} asks for its own code (auto_map in tokenizer_config.json), which is never run; "
            "give one that Transformers knows, for example its tokenizer.json alone"
        ) from error
    # Without a vocabulary, transformers makes a tokenizer of special tokens (T5's has one token more).
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise ValueError(
            f"the tokenizer {source} has no vocabulary, only special tokens; bring back its tokenizer.json (or "
            "vocab.json and merges.txt, or tokenizer.model), or give another tokenizer"
        )
    return tokenizer


def longcrawl64_tokenizer(source: str = "gpt2") -> JSONGPT2Tokenizer:
    """LongCrawl64's tokenizer over GPT-2's vocabulary, which begins every text with the BOS token.

    Args:
        source: folder with GPT-2's files, or a hub id.

    Raises:
        OSError, ValueError: there is none, it is damaged or empty; the message says what to do.
    """
    cached = not Path(source).is_dir() and packaged(source) is None and only_cached()
    return JSONGPT2Tokenizer.from_pretrained(
        source, add_bos_token=True, trust_remote_code=False, local_files_only=cached
    )


def check_vocabulary(tokenizer: Any, vocab_size: int, bos_token_id: int | None = None) -> None:
    """Checks that a tokenizer fits a model.

    Args:
        vocab_size: ids of the model; it may have some more than the tokenizer.
        bos_token_id: the model's first token of every sequence; None to leave it out.

    Raises:
        ValueError: another vocabulary.
    """
    check_size_and_bos(
        max(tokenizer.get_vocab().values(), default=-1) + 1, tokenizer.bos_token_id, vocab_size, bos_token_id
    )


def check_size_and_bos(size: int, bos: int | None, vocab_size: int, bos_token_id: int | None) -> None:
    """`check_vocabulary` for a tokenizer of which only the number of ids and the BOS token are known.

    Raises:
        ValueError: another vocabulary.
    """
    if not _LEAST_SHARE * vocab_size <= size <= vocab_size:
        raise ValueError(f"its vocabulary has {size:,} ids, and the model was trained with {vocab_size:,}")
    if None not in (bos, bos_token_id) and bos != bos_token_id:
        raise ValueError(f"its BOS token is {bos}, and the model was trained with {bos_token_id}")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, as in prepared corpora, for evaluations and prompts; nothing is added before or after.

    A text that spells out a special token gets the ids of its characters, and half of a surrogate pair, which UTF-8
    does not have, becomes U+FFFD.
    """
    if not isinstance(tokenizer, JSONGPT2Tokenizer):  # which spells out surrogates, as LongCrawl64 does
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    # A text may well be longer than the model's training sequences, of which the tokenizer would warn.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
