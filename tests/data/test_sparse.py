"""A partial copy is an error, or, on purpose, an array of the documents that are there."""

import shutil

import numpy as np
import pytest
import zarr

from forgetting_transformer.data import DataError, LongCrawl64DataModule, TokenArray
from tests.data.mirror import DOC_LEN, tokens_of_corpus, write_layout

#: Row-chunks 1 and 3 are not whole; of 44 documents 28 are left.
HOLES = ("1.0", "1.1", "1.2", "1.3", "3.3")
LEFT = [*range(8), *range(16, 24), *range(32, 44)]


@pytest.fixture
def sparse(tmp_path):
    for split in ("train", "heldout"):
        write_layout(tmp_path / "longcrawl64" / f"{split}.zarr", HOLES)
    return tmp_path


def module(data_dir, **changes) -> LongCrawl64DataModule:
    settings = {
        "train_batch_len": 48,
        "train_batch_size": 4,
        "eval_batch_len": 48,
        "eval_local_batch_size": 2,
        "train_num_workers": 0,
        "eval_num_workers": 0,
        "vocab_size": 50_257,
        "bos_token_id": 50_256,
    }
    return LongCrawl64DataModule(str(data_dir), **{**settings, **changes})


def test_a_partial_copy_is_refused_with_the_file_and_both_ways_out(sparse):
    with pytest.raises(DataError, match=r"missing chunk .*train\.zarr/1\.0.*fetch the chunk.*missing_chunks=skip"):
        module(sparse).train_info()


def test_skipping_leaves_the_documents_that_are_whole_in_their_order(sparse):
    data = module(sparse, missing_chunks="skip")
    info = data.train_info()
    assert (info.documents, info.total_batches, info.total_tokens) == (28, 14, 28 * DOC_LEN)
    labels = np.concatenate([batch["labels"].numpy() for batch in data.train_loader(0, 14, 0, 1)])
    whole = tokens_of_corpus()[LEFT].astype(np.int64)
    np.testing.assert_array_equal(labels, np.concatenate([whole[:, :48], whole[:, 48:]]))
    assert sum(batch["weight"].sum() for batch in data.eval_loader(0, 1)) == 2 * 28


@pytest.mark.slow
def test_reads_across_holes_and_says_where_a_document_lies_on_disk(sparse):
    array = TokenArray(sparse / "longcrawl64/train.zarr", 50_257, missing_chunks="skip")
    for first in range(28):
        for last in range(first + 1, 29):
            expected = tokens_of_corpus()[LEFT[first:last], 20:70]
            np.testing.assert_array_equal(array.read(first, last, 20, 70), expected)
    assert [array.stored_row(document) for document in range(28)] == LEFT
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(array.path, mode="r+")[34, 5] = 60_000
    with pytest.raises(DataError, match=r"id 60000 in document 18 \(row 34 on disk\) at position 5"):
        array.read(16, 20, 0, 24)


def test_the_fingerprint_says_which_documents_are_there(sparse, tmp_path_factory):
    skipping = module(sparse, missing_chunks="skip").train_info().fingerprint
    full = tmp_path_factory.mktemp("full")
    write_layout(full / "longcrawl64/train.zarr")
    whole = module(full).train_info().fingerprint
    assert module(full, missing_chunks="skip").train_info().fingerprint == whole, "nothing is missing, nothing changes"
    assert skipping != whole
    other = tmp_path_factory.mktemp("other")
    # As many documents as `sparse` has, all of which look alike where samples are taken, but others.
    tokens = np.ones((44, 96), dtype=np.uint16)
    prints = set()
    for holes in (("1.0", "3.0"), ("2.0", "3.0")):
        shutil.rmtree(other / "longcrawl64", ignore_errors=True)
        write_layout(other / "longcrawl64/train.zarr")
        zarr.open_array(other / "longcrawl64/train.zarr", mode="r+")[:] = tokens
        for key in holes:
            (other / "longcrawl64/train.zarr" / key).unlink()
        prints.add(module(other, missing_chunks="skip").train_info().fingerprint)
    assert len(prints) == 2


def test_the_fingerprint_of_a_whole_array_is_what_it_was(tmp_path):
    """Checkpoints written before arrays could be sparse must still find their data."""
    write_layout(tmp_path / "longcrawl64/train.zarr")
    assert module(tmp_path).train_info().fingerprint == "cb75879b89f03aa7"


def test_a_damaged_chunk_is_named_with_the_fix(tmp_path):
    write_layout(tmp_path / "train.zarr")
    array = TokenArray(tmp_path / "train.zarr", 50_257)
    (tmp_path / "train.zarr/3.2").write_bytes((tmp_path / "train.zarr/3.2").read_bytes()[:-4])
    with pytest.raises(DataError, match=r"train\.zarr/3\.2 cannot be decoded .*delete it and fetch"):
        array.read(24, 32, 48, 72)
