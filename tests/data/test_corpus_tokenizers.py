"""Tokenizers: built or loaded, they end as a folder that AutoTokenizer loads, and ids decode to the text."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgetting_transformer.data import DataError
from forgetting_transformer.data.prepare import sources
from forgetting_transformer.data.prepare.pipeline import summary_lines
from forgetting_transformer.data.prepare.tokenizers import (
    TokenizerInfo,
    byte_tokenizer,
    encode,
    save_built,
    save_loaded,
    train_tokenizer,
)
from tests.data.corpus_helpers import numbered_text, package_tree, prepare, write_tree

HARD_TEXTS = [
    "plain",
    " leading and trailing \n",
    "a . b , c ! don't  do   that \t\r\n\n",
    "<|endoftext|> <|endoftext|>x",
    "naïve 例 🙂 \u2028 \ufeff \x7f \x85 e\u0301",
    "".join(map(chr, range(1, 0x300))),
    "".join(random.Random(0).choices([chr(c) for c in range(1, 0x11000) if not 0xD800 <= c < 0xE000], k=2000)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    trained = train_tokenizer([numbered_text(i, 50) for i in range(20)], 300)
    save_built(byte_tokenizer(), root / "bytes")
    save_built(trained, root / "trained")
    save_loaded(str(root / "trained"), root / "loaded")
    return {name: root / name for name in ("bytes", "trained", "loaded")}


@pytest.mark.parametrize("kind", ["bytes", "trained", "loaded"])
def test_any_text_survives_encoding_and_never_holds_the_end_id(folders: dict[str, Path], kind: str):
    info = TokenizerInfo(kind, 300, 256, 256)
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    for text in HARD_TEXTS:
        ids = encode(text, folders[kind], info)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eos_token_id not in ids
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ids.tolist() == plain


def test_a_long_text_gets_the_ids_of_the_uncut_text(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    text = "".join(f"def f{i}():\n    return {i}\n\n\n" + "x = 1\n" * (i % 4) for i in range(300))
    at = folders["trained"], TokenizerInfo("trained", 300, 299, 299)
    monkeypatch.setattr(sources, "PIECE_CHARS", 200)
    pieces = list(sources.cut(text))
    assert len(pieces) > 20
    assert np.concatenate([encode(piece, *at) for piece, _ in pieces]).tolist() == encode(text, *at).tolist()


# Loaded tokenizers --------------------------------------------------------------------------------------------


def word_tokenizer(folder, n_words: int, **special: str) -> Path:
    vocab = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, n_words)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Lowercase()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(folder)
    return folder


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    folder = word_tokenizer(tmp_path / "endless", 100)
    with pytest.raises(DataError, match=r"has no end-of-text token.*Set its eos_token"):
        prepare(tmp_path / "out", package_tree(tmp_path / "in"), tokenizer=str(folder))


def test_the_end_of_a_loaded_tokenizer_begins_texts_where_it_has_no_bos_and_what_it_loses_is_said(tmp_path):
    folder = word_tokenizer(tmp_path / "words", 100, eos_token="</s>")
    manifest = prepare(tmp_path / "out", package_tree(tmp_path / "in"), tokenizer=str(folder), doc_len=64)
    assert manifest["bos_token_id"] == manifest["eos_token_id"] == 1
    assert "WARNING: the tokenizer is lossy: ids do not decode to the same text" in summary_lines(manifest)
    kept = prepare(tmp_path / "bytes", package_tree(tmp_path / "in"))
    assert not any("lossy" in line for line in summary_lines(kept))


def test_no_text_at_all_says_what_was_left_out(tmp_path):
    write_tree(tmp_path / "in", {"a.py": "", "b.txt": "x"})
    with pytest.raises(DataError, match=r"found no text in .*in\. Left out: 1 × does not match --glob, 1 × empty"):
        prepare(tmp_path / "out", tmp_path / "in", include=("*.py",))
    assert not (tmp_path / "out").exists()
