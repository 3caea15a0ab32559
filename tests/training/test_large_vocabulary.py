"""Vocabularies over 65,536 ids, as those of Llama 3 and Qwen, take four bytes an id, from the text to the export."""

import json
import random

import numpy as np
import pytest

from forgetting_transformer.data.vocabulary import token_dtype
from forgetting_transformer.training.export import export
from tests.data.corpus_helpers import prepare, rows
from tests.tiny import tiny_config
from tests.training.conftest import STEP, changed, train, word_tokenizer

WORDS = 70_000  # also the vocabulary's size: <eos> and <unk> stand in the places of two words


@pytest.mark.parametrize(("ids", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_two_bytes_where_they_suffice(ids, dtype):
    assert token_dtype(ids) == dtype
    assert token_dtype(ids).type(ids - 1) == ids - 1


@pytest.mark.slow
def test_a_text_becomes_a_corpus_a_run_and_an_export(tmp_path):
    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, WORDS)}}
    word_tokenizer(tmp_path / "tokenizer", vocabulary, bos_token="<eos>", eos_token="<eos>", unk_token="<unk>")
    ids = random.Random(7).sample(range(60_000, WORDS), 6000)
    (tmp_path / "a.txt").write_text(" ".join(f"w{n}" for n in ids))
    corpus = {"tokenizer": str(tmp_path / "tokenizer"), "doc_len": 64, "heldout_docs": 12}
    assert prepare(tmp_path / "data/wide", tmp_path / "a.txt", **corpus)["vocab_size"] == WORDS
    for split in ("train", "heldout"):
        stored = rows(tmp_path / "data/wide", split)
        assert stored.dtype == np.uint32
        for row in stored.tolist():
            begin = ids.index(row[0])
            assert [*ids, 0][begin : begin + 64] == row

    config = changed(
        tiny_config(tmp_path / "run", tmp_path / "data"), datamodule__dataset="wide", datamodule__vocab_size=None,
        datamodule__bos_token_id=None, datamodule__eval_tokens=None, train__max_tokens=4 * STEP,
        model__config__hidden_size=16,
    )  # fmt: skip
    train(config)
    export(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == WORDS
