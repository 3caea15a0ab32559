"""GPT-2's vocabulary is LongCrawl64's and nobody else's."""

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from forgetting_transformer.data import DataError, LongCrawl64DataModule
from forgetting_transformer.data.vocabulary import Vocabulary, vocabulary_of
from forgetting_transformer.evaluation import held_out
from tests.data import corpus_helpers
from tests.data.corpus_helpers import package_tree, prepare
from tests.data.mirror import serve


def write(path: Path, doc_len: int = 64) -> None:
    """Eight documents; long ones are one value repeated, which takes no time to write."""
    zarr.create_array(path, data=np.full((8, doc_len), 3, dtype=np.uint16), chunks=(8, min(doc_len, 8192)))


def module(data_dir: Path | str, dataset: str, **options) -> LongCrawl64DataModule:
    sizes = {"train_batch_len": 32, "eval_batch_len": 32, "vocab_size": None, "bos_token_id": None}
    return corpus_helpers.module(data_dir, dataset=dataset, **sizes | options)


def test_an_array_without_manifest_needs_vocabulary_and_bos(tmp_path):
    for split in ("train", "heldout"):
        write(tmp_path / f"longcrawl64/{split}.zarr")  # of that name, but not of its length
    for options, missing in (
        ({}, "datamodule.vocab_size and datamodule.bos_token_id"),
        ({"vocab_size": 64}, "datamodule.bos_token_id"),
    ):
        for ask in ("train_info", "eval_info"):
            with pytest.raises(DataError, match=rf"does not say .*: set {missing}"):
                getattr(module(tmp_path, "longcrawl64", **options), ask)()
    info = module(tmp_path, "longcrawl64", vocab_size=64, bos_token_id=0).train_info()
    assert (info.vocab_size, info.bos_token_id) == (64, 0)


def test_a_prepared_corpus_that_lost_its_manifest_is_refused(tmp_path):
    prepare(tmp_path / "out", package_tree(tmp_path / "in"))
    assert module(tmp_path, "out").train_info().vocab_size == 257
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(DataError, match=r"out has no manifest\.json.*prepare_data"):
        module(tmp_path, "out").train_info()
    with pytest.raises(DataError, match=r"or write a manifest\.json"):
        held_out.open_heldout(tmp_path / "out")


def test_longcrawl64_needs_no_manifest(tmp_path):
    write(tmp_path / "longcrawl64/train.zarr", doc_len=65_536)
    write(tmp_path / "longcrawl64/heldout.zarr", doc_len=65_536)
    for data_dir, dataset in ((tmp_path, "longcrawl64"), (tmp_path / "longcrawl64", ".")):
        info = module(data_dir, dataset).train_info()
        assert (info.vocab_size, info.bos_token_id) == (50_257, 50_256)
    assert held_out.open_heldout(tmp_path / "longcrawl64").bos_token_id == 50_256
    with serve(tmp_path) as mirror:
        assert module(mirror.url, "longcrawl64", cache_dir=str(tmp_path / "cache")).train_info().vocab_size == 50_257


def test_longcrawl64_cut_short_by_the_downloader_is_still_longcrawl64(tmp_path):
    write(tmp_path / "longcrawl64/train.zarr", doc_len=128)
    note = tmp_path / "longcrawl64/train.download.json"
    note.write_text(json.dumps({"source": "hf://datasets/clankur/longcrawl64", "tokens": 128}))
    assert module(tmp_path, "longcrawl64").train_info().bos_token_id == 50_256
    note.write_text(json.dumps({"source": "hf://datasets/clankur/longcrawl64", "tokens": 256}))
    with pytest.raises(DataError, match=r"set datamodule\.vocab_size"):
        module(tmp_path, "longcrawl64").train_info()


def test_what_is_stated_wins_and_what_a_run_recorded_comes_last(tmp_path):
    both, recorded = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1}, Vocabulary(500, 499, 2)
    none = (None, None, None)
    for manifest, stated, expected in (
        (both, none, Vocabulary(300, 0, 1)),
        ({"vocab_size": 300, "bos_token_id": 5}, none, Vocabulary(300, 5, 5)),  # one token where BOS alone is known
        (both, (600, 3, None), Vocabulary(600, 3, 1)),
        (both, (None, None, 7), Vocabulary(300, 0, 7)),
        ({}, none, recorded),
        ({}, (500, 499, None), Vocabulary(500, 499, 499)),
    ):
        assert vocabulary_of("data/x", "train", 64, manifest, stated, recorded) == expected
    with pytest.raises(DataError, match=r"datamodule\.eos_token_id=300 is not in \[0, vocab_size=300\)"):
        vocabulary_of("data/x", "train", 64, both | {"eos_token_id": 300})
