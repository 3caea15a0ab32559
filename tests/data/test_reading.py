"""Reading order, token arrays and loaders: the same tokens at the same step, and never an invented one."""

import errno
import itertools
import json
import multiprocessing
import os
import shutil

import numpy as np
import pytest
import torch
import zarr

from forgetting_transformer.data import DataError, LongCrawl64DataModule, ReadingOrder, TokenArray, worker

DOCUMENTS, DOC_LEN, VOCAB = 50, 96, 1000


def tokens_of_array(documents: int = DOCUMENTS, doc_len: int = DOC_LEN) -> np.ndarray:
    """Every token says where it stands, so that a misplaced one shows."""
    return (np.arange(documents * doc_len).reshape(documents, doc_len) % (VOCAB - 1) + 1).astype(np.uint16)


def write_array(path, tokens: np.ndarray, **options) -> None:
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.create_array(path, shape=tokens.shape, dtype=tokens.dtype, **options)
        array[:] = tokens


@pytest.fixture
def corpus(tmp_path):
    for split in ("train", "heldout"):
        write_array(tmp_path / "longcrawl64" / f"{split}.zarr", tokens_of_array(), chunks=(8, 24), zarr_format=2)
    return tmp_path


def module(data_dir, **changes) -> LongCrawl64DataModule:
    settings = {
        "train_batch_len": 32,
        "train_batch_size": 4,
        "train_num_workers": 0,
        "eval_batch_len": 32,
        "eval_local_batch_size": 4,
        "eval_num_workers": 0,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
    }
    return LongCrawl64DataModule(str(data_dir), **{**settings, **changes})


def test_the_order_of_the_paper_at_its_own_size():
    order = ReadingOrder(documents=6_609_334, doc_len=65_536, seq_len=16_384, batch_size=32)
    assert (order.rows, order.columns, order.batches) == (206_541, 4, 826_164)
    last = order.locate(92_159)  # the last batch of the 48 B-token run
    assert (last.first_document, last.last_document, last.begin_token) == (2_949_088, 2_949_120, 0)
    second_column = order.locate(206_541)
    assert (second_column.first_document, second_column.begin_token) == (0, 16_384)


@pytest.mark.parametrize("documents", [4, 7, 50])
@pytest.mark.parametrize("seq_len", [1, 32, 96])
def test_an_epoch_reads_every_slice_of_the_kept_documents_once(documents, seq_len):
    order = ReadingOrder(documents, DOC_LEN, seq_len, batch_size=4)
    seen = [
        (document, where.begin_token)
        for batch in range(order.batches)
        for where in [order.locate(batch)]
        for document in range(where.first_document, where.last_document)
    ]
    kept = documents // 4 * 4
    assert sorted(seen) == [(d, t) for d in range(kept) for t in range(0, DOC_LEN, seq_len)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_read_the_global_batch_in_order(world_size):
    order = ReadingOrder(DOCUMENTS, DOC_LEN, 32, batch_size=4)
    whole = order.locate(17)
    parts = [order.locate(17, rank, world_size) for rank in range(world_size)]
    assert parts[0].first_document == whole.first_document and parts[-1].last_document == whole.last_document
    assert all(a.last_document == b.first_document for a, b in itertools.pairwise(parts))


def test_past_the_end_is_an_error_unless_repeating():
    order = ReadingOrder(DOCUMENTS, DOC_LEN, 32, batch_size=4)
    with pytest.raises(IndexError, match=r"past the last of 36 batches.*repeat=true"):
        order.locate(order.batches)
    again = ReadingOrder(DOCUMENTS, DOC_LEN, 32, batch_size=4, repeat=True)
    assert again.locate(order.batches + 5) == order.locate(5)


@pytest.mark.parametrize(
    "options",
    [
        {"zarr_format": 2, "chunks": (8, 24)},
        {"zarr_format": 3, "chunks": (8, 24)},
        {"zarr_format": 3, "chunks": (4, 12), "shards": (16, 48)},
        {"zarr_format": 2, "chunks": (7, 100)},
    ],
    ids=["v2", "v3", "v3 sharded", "ragged chunks"],
)
def test_reads_what_was_written_in_every_layout(tmp_path, options):
    write_array(tmp_path / "train.zarr", tokens_of_array(), **options)
    array = TokenArray(tmp_path / "train.zarr", VOCAB)
    assert (array.documents, array.doc_len) == (DOCUMENTS, DOC_LEN)
    np.testing.assert_array_equal(array.read(3, 21, 20, 70), tokens_of_array()[3:21, 20:70])
    np.testing.assert_array_equal(array.read(49, 50, 0, 96), tokens_of_array()[49:, :])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_missing_chunk_is_an_error_that_names_the_file_never_zeros(tmp_path, sharded):
    options = {"chunks": (4, 12), "shards": (16, 48)} if sharded else {"chunks": (8, 24)}
    write_array(tmp_path / "train.zarr", tokens_of_array(), zarr_format=3, **options)
    array = TokenArray(tmp_path / "train.zarr", VOCAB)
    (tmp_path / "train.zarr" / "c" / "1" / "1").unlink()
    with pytest.raises(DataError, match=r"missing chunk .*train\.zarr/c/1/1"):
        array.read(0, 32, 0, 96)
    array.read(0, 8, 0, 24)  # elsewhere the array is still good


def test_zeros_inside_a_shard_are_refused(tmp_path):
    """An empty chunk inside a shard leaves no missing file; Zarr reads it as zeros."""
    tokens = tokens_of_array()
    tokens[5, 24:48] = 0
    write_array(tmp_path / "train.zarr", tokens, chunks=(4, 12), shards=(16, 48), zarr_format=3)
    array = TokenArray(tmp_path / "train.zarr", VOCAB)
    with pytest.raises(DataError, match="document 5 is all zeros from position 24"):
        array.read(4, 8, 24, 48)


def test_ids_out_of_range_are_refused_with_their_place(tmp_path):
    tokens = tokens_of_array()
    tokens[0, 7] = 4000
    write_array(tmp_path / "train.zarr", tokens, chunks=(8, 24), zarr_format=2)
    with pytest.raises(DataError, match=r"token id 4000 in document 0 at position 7.*vocab_size=1000"):
        TokenArray(tmp_path / "train.zarr", VOCAB)


def test_another_corpus_is_named_where_the_one_asked_for_is_not(tmp_path):
    for name in ("words", "python_code"):
        (tmp_path / name / "train.zarr").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"no token array at .*\. .* holds python_code, words: .* datamodule\.dataset=words$"
    ):
        TokenArray(tmp_path / "word" / "train.zarr", VOCAB)
    with pytest.raises(DataError, match=r"words is a corpus itself: choose it with datamodule\.dataset=\.$"):
        TokenArray(tmp_path / "words" / "longcrawl64" / "train.zarr", VOCAB)
    with pytest.raises(DataError, match=r"Set data_dir to the folder that holds longcrawl64/heldout\.zarr"):
        TokenArray(tmp_path / "longcrawl64" / "heldout.zarr", VOCAB)


def test_labels_are_the_slice_and_inputs_the_tokens_before_with_bos_first(corpus):
    data = module(corpus)
    batches = list(data.train_loader(13, 15, rank=0, world_size=1))  # the second column begins at batch 12
    expected = tokens_of_array()[4:8, 32:64].astype(np.int64)
    np.testing.assert_array_equal(batches[0]["labels"].numpy(), expected)
    assert batches[0]["input_ids"].dtype == torch.int64
    assert (batches[0]["input_ids"][:, 0] == 0).all()
    np.testing.assert_array_equal(batches[0]["input_ids"][:, 1:].numpy(), expected[:, :-1])


def test_workers_and_ranks_do_not_change_the_tokens(corpus):
    whole = [b["labels"] for b in module(corpus).train_loader(3, 9, 0, 1)]
    prefetched = [b["labels"] for b in module(corpus, train_num_workers=2).train_loader(3, 9, 0, 1)]
    shared = [
        torch.cat([a["labels"], b["labels"]])
        for a, b in zip(*(module(corpus).train_loader(3, 9, rank, 2) for rank in range(2)), strict=True)
    ]
    assert len(whole) == 6
    for a, b, c in zip(whole, prefetched, shared, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)",
            r"^/dev/shm \(.* free\) is too small .*`--shm-size`, or set datamodule\.train_num_workers=0",
        ),
        (
            "unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)",
            r"^Too many open files: this process may have [\d,]+ \(`ulimit -n`\).*, or set datamodule\.train_num_work",
        ),
    ],
)
def test_a_batch_that_cannot_be_handed_over_is_an_error_with_the_resource(monkeypatch, refusal, said):
    """PyTorch, which would do it later in a thread, prints a traceback and drops the batch."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(refusal)

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    with pytest.raises(DataError, match=said):
        worker.hand_over({"labels": torch.zeros(2)})


def test_locks_that_find_no_room_are_an_error_with_the_resource(corpus, monkeypatch):
    def refuse(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as sem_open: it names no file

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Lock", refuse)
    with pytest.raises(DataError, match=r"^/dev/shm \(.*`--shm-size`"):
        list(module(corpus, train_num_workers=1).train_loader(0, 6, 0, 1))
    list(module(corpus, train_num_workers=0).train_loader(0, 6, 0, 1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("documents", [1, 10, 50])
def test_evaluation_counts_every_held_out_slice_once_whatever_the_world_size(corpus, world_size, documents):
    seen, lengths = [], set()
    for rank in range(world_size):
        batches = list(module(corpus, eval_tokens=documents * DOC_LEN).eval_loader(rank, world_size))
        lengths.add(len(batches))
        seen += [row for b in batches for row, w in zip(b["labels"].tolist(), b["weight"], strict=True) if w == 1]
    assert len(lengths) == 1, "every rank must take part in every forward pass"
    expected = tokens_of_array()[:documents].reshape(-1, 32).tolist()
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_held_out_batch_has_no_more_rows_than_there_are(corpus, world_size):
    data = module(corpus, eval_tokens=7 * DOC_LEN, eval_local_batch_size=1000)
    [*batches] = [batch for rank in range(world_size) for batch in data.eval_loader(rank, world_size)]
    rows = -(-21 // world_size)
    assert [batch["labels"].shape for batch in batches] == [(rows, 32)] * world_size
    assert sum(batch["weight"].sum() for batch in batches) == 21


def test_lengths_and_sizes_that_do_not_fit_are_refused_with_the_fix(corpus):
    with pytest.raises(DataError, match=r"train_batch_len=33 must divide .* 96 tokens.*nearest .* 24, 32, 48"):
        module(corpus, train_batch_len=33).train_info()
    with pytest.raises(DataError, match="eval_batch_len=64 must divide"):
        module(corpus, eval_batch_len=64).eval_info()
    with pytest.raises(DataError, match="train_batch_size=51 is more than the 50 documents"):
        module(corpus, train_batch_size=51).train_info()
    with pytest.raises(DataError, match="eval_tokens=95 must be between one document"):
        module(corpus, eval_tokens=95).eval_info()
    with pytest.raises(DataError, match="bos_token_id=1000 is not in"):
        module(corpus, bos_token_id=1000)


def test_the_fingerprint_follows_the_contents_and_not_the_place(corpus, tmp_path_factory):
    first = module(corpus).train_info().fingerprint
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(corpus / "longcrawl64", copy / "longcrawl64")
    assert module(copy).train_info().fingerprint == first
    shutil.rmtree(copy / "longcrawl64" / "train.zarr")
    write_array(copy / "longcrawl64" / "train.zarr", tokens_of_array()[::-1].copy(), chunks=(8, 24))
    assert module(copy).train_info().fingerprint != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filters": [{"id": "pickle", "protocol": 5}]}, "pickle"),
        ({"filters": [{"id": "base64"}]}, "stored with the codec base64; accepted are blosc"),
        ({"chunks": [100_000, 100_000]}, "more than 1024 MiB each"),
    ],
)
def test_metadata_from_a_stranger_cannot_name_a_codec_that_runs_code_or_a_chunk_that_fills_the_memory(
    corpus, change, message
):
    metadata = corpus / "longcrawl64" / "train.zarr" / ".zarray"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    with pytest.raises(DataError, match=message):
        TokenArray(metadata.parent, VOCAB)
