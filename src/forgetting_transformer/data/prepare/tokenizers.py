"""The tokenizer of a corpus: trained on it, loaded from elsewhere, or plain bytes; and text -> token ids.

Whatever its origin it ends as a folder that `transformers.AutoTokenizer` loads without network,
and workers encode with the very `tokenizer.json` in that folder.
"""

import functools
import hashlib
import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.data.vocabulary import token_dtype

END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 32 << 20
#: Test of tokenizers that change texts: case, accents, spaces, rare characters.
PROBE = "One word,  two .\n\n\tÉté {x} = 例\n"


@dataclass(frozen=True)
class TokenizerInfo:
    """Facts about a corpus's tokenizer that its readers need."""

    kind: str  # "bytes", "trained" or "loaded"
    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    #: Whether a sample of text comes back from its ids.
    lossless: bool = True

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids, in memory and in the arrays."""
        return token_dtype(self.vocab_size)


# Building -----------------------------------------------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """Ids 0…255 are the bytes of UTF-8, 256 is <|endoftext|>."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train_tokenizer(sample: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with GPT-2's pre-tokenizer: exactly reversible, never an unknown token.

    <|endoftext|> gets the last id, as in GPT-2. The vocabulary is smaller than `vocab_size` where the sample has
    too few distinct pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def sample(texts: Iterable[str], max_bytes: int = SAMPLE_BYTES) -> list[str]:
    """A uniform sample of texts, at most `max_bytes` long, that depends on them and not on their order.

    Every text has a priority, a hash of it; the sample is the longest run of lowest priorities that fits. One pass,
    bounded memory, no random numbers.
    """
    heap: list[tuple[int, str]] = []  # (-priority, text): the root is the first to go
    n_bytes, too_high = 0, 1 << 64  # the lowest priority that did not fit; nothing above it may come in later
    for text in texts:
        encoded = text.encode()
        priority = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")
        if priority >= too_high:
            continue
        heapq.heappush(heap, (-priority, text))
        n_bytes += len(encoded)
        while n_bytes > max_bytes and len(heap) > 1:
            negative, highest = heapq.heappop(heap)
            too_high = -negative
            n_bytes -= len(highest.encode())
    return [text for _, text in sorted(heap, reverse=True)]


# Saving and loading -------------------------------------------------------------------------------------------


def save_built(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer built here as a folder that AutoTokenizer loads."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,  # it would drop the space in " ." and with it reversibility
    ).save_pretrained(folder)


def save_loaded(name: str, folder: Path) -> None:
    """Copy the tokenizer `name` (local folder or hub id) into `folder`.

    Raises:
        DataError: there is none, or it has no token that ends a text, or no fast form.
    """
    from forgetting_transformer.data.model_tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(name)
    except Exception as error:  # the library raises OSError, ValueError, ImportError and the hub's own errors
        raise DataError(
            f"cannot load the tokenizer {name!r}: {error}\nGive a local folder with a tokenizer, a Hugging Face hub "
            "id (this needs the network once), bytes, or train:N."
        ) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {name!r} has no end-of-text token, and texts are separated by it. "
            "Set its eos_token and save it to a folder, then give that folder as --tokenizer."
        )
    if tokenizer.bos_token_id is None:
        tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"the tokenizer {name!r} has no fast form (no tokenizer.json). "
            "Choose one that has, or train one with --tokenizer train:N."
        )


def make(settings: CorpusSettings, texts: Iterable[str], folder: Path) -> TokenizerInfo:
    """Saves the tokenizer that the settings name in `folder`, which is not there.

    Args:
        texts: to train it on; not read otherwise.
    """
    from forgetting_transformer.data.model_tokenizer import load_tokenizer

    name = settings.tokenizer
    if name == "bytes":
        kind = name
        save_built(byte_tokenizer(), folder)
    elif name.startswith("train:"):
        kind = "trained"
        save_built(train_tokenizer(sample(texts), settings.trained_vocab_size()), folder)
    else:
        kind = "loaded"
        save_loaded(name, folder)
    tokenizer, fast = load_tokenizer(folder), encoder(folder)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    lossless = fast.decode(fast.encode(PROBE, add_special_tokens=False).ids) == PROBE
    return TokenizerInfo(kind, vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id, lossless)


# Encoding -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def encoder(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`, for text alone.

    A text that spells out a special token (source code does) gets the ids of its characters, so that the
    end-of-text id in an array always is the end of a text.
    """
    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(text: str, folder: Path, info: TokenizerInfo) -> np.ndarray:
    """Ids of a text, without any special token, shape (tokens,)."""
    if info.kind == "bytes":  # the same ids as the tokenizer's, a hundred times faster
        return np.frombuffer(text.encode(), np.uint8).astype(info.dtype)
    # The batch call for one text: it leaves out the character offsets, which cost a third of the time.
    [encoding] = encoder(folder).encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, dtype=info.dtype)
