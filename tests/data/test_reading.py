"""Reading order, token arrays and loaders: the same tokens at the same step, and never an invented one."""

import errno
import json
import multiprocessing
import os
import select
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from forgetting_transformer.data import DataError, ReadingOrder, TokenArray, worker
from tests.data.corpus_helpers import labels, module, rewrite, write_array
from tests.data.mirror import CHUNK, DOC_LEN, DOCUMENTS, tokens_of_corpus, write_layout
from tests.processes import Command
from tests.waiting import HANG

VOCAB = 50_257
#: Row-chunks 1 and 3 are not whole; of 44 documents 28 are left.
HOLES = ("1.0", "1.1", "1.2", "1.3", "3.3")
LEFT = [*range(8), *range(16, 24), *range(32, 44)]


@pytest.fixture
def corpus(tmp_path):
    for split in ("train", "heldout"):
        write_layout(tmp_path / f"longcrawl64/{split}.zarr")
    return tmp_path


@pytest.fixture
def sparse(tmp_path):
    for split in ("train", "heldout"):
        write_layout(tmp_path / f"longcrawl64/{split}.zarr", HOLES)
    return tmp_path


# The order ----------------------------------------------------------------------------------------------------


def test_the_order_of_the_paper_at_its_own_size():
    order = ReadingOrder(documents=6_609_334, doc_len=65_536, seq_len=16_384, batch_size=32)
    assert (order.rows, order.columns, order.batches) == (206_541, 4, 826_164)
    last = order.locate(92_159)  # the last batch of the 48 B-token run
    assert (last.first_document, last.last_document, last.begin_token) == (2_949_088, 2_949_120, 0)
    second_column = order.locate(206_541)
    assert (second_column.first_document, second_column.begin_token) == (0, 16_384)


def test_an_epoch_reads_every_slice_of_the_kept_documents_once():
    order = ReadingOrder(7, 96, 32, batch_size=4)
    places = [order.locate(batch) for batch in range(order.batches)]
    seen = [(d, place.begin_token) for place in places for d in range(place.first_document, place.last_document)]
    assert sorted(seen) == [(d, t) for d in range(4) for t in (0, 32, 64)]
    again = ReadingOrder(50, 96, 96, batch_size=4)
    assert [again.locate(batch).first_document for batch in range(again.batches)] == list(range(0, 48, 4))


def test_past_the_end_is_an_error_unless_repeating():
    order = ReadingOrder(50, 96, 32, batch_size=4)
    with pytest.raises(IndexError, match=r"past the last of 36 batches.*repeat=true"):
        order.locate(order.batches)
    again = ReadingOrder(50, 96, 32, batch_size=4, repeat=True)
    assert again.locate(order.batches + 5) == order.locate(5)


# Arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"zarr_format": 2, "chunks": (8, 24)},
        {"zarr_format": 3, "chunks": (8, 24)},
        {"zarr_format": 2, "chunks": (7, 100)},
    ],
    ids=["v2", "v3", "ragged chunks"],
)
def test_reads_what_was_written_in_every_layout(tmp_path, options):
    write_array(tmp_path / "train.zarr", tokens_of_corpus(), **options)
    array = TokenArray(tmp_path / "train.zarr", VOCAB)
    assert (array.documents, array.doc_len) == (DOCUMENTS, DOC_LEN)
    np.testing.assert_array_equal(array.read(3, 21, 20, 70), tokens_of_corpus()[3:21, 20:70])
    np.testing.assert_array_equal(array.read(43, 44, 0, 96), tokens_of_corpus()[43:, :])


def test_a_missing_chunk_is_an_error_that_names_the_file_never_zeros(tmp_path, monkeypatch):
    path = tmp_path / "train.zarr"
    write_array(path, tokens_of_corpus(), zarr_format=3, chunks=(8, 24))
    array = TokenArray(path, VOCAB)
    (path / "c/1/1").unlink()
    with pytest.raises(DataError, match=r"missing chunk .*train\.zarr/c/1/1"):
        array.read(0, 32, 0, 96)
    array.read(0, 8, 0, 24)  # elsewhere the array is still good
    # The store itself refuses: there is no moment between looking and reading.
    monkeypatch.setattr(array.files, "fetch_all", lambda keys: [(path / key).unlink(missing_ok=True) for key in keys])
    with pytest.raises(DataError, match=r"missing chunk .*train\.zarr/c/0/0"):
        array.read(0, 8, 0, 24)


def test_another_corpus_is_named_where_the_one_asked_for_is_not(tmp_path):
    for name in ("words", "python_code"):
        (tmp_path / name / "train.zarr").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no token array at .*holds python_code, words: .*datamodule\.dataset=words$"):
        TokenArray(tmp_path / "word" / "train.zarr", VOCAB)
    with pytest.raises(DataError, match=r"words is a corpus itself: choose it with datamodule\.dataset=\.$"):
        TokenArray(tmp_path / "words" / "longcrawl64" / "train.zarr", VOCAB)
    with pytest.raises(DataError, match=r"Set data_dir to the folder that holds longcrawl64/heldout\.zarr"):
        TokenArray(tmp_path / "longcrawl64" / "heldout.zarr", VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filters": [{"id": "pickle", "protocol": 5}]}, "pickle"),
        ({"chunks": [100_000, 100_000]}, "1024 MiB in a chunk are read"),
        ({"shape": [10**18, DOC_LEN]}, r"states shape \(1000000000000000000, 96\)"),
    ],
)
def test_metadata_from_a_stranger_runs_no_code_and_fills_no_memory(corpus, change, message):
    metadata = corpus / "longcrawl64/train.zarr/.zarray"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    with pytest.raises(DataError, match=message) as error:
        TokenArray(metadata.parent, VOCAB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[" * 100_000, "not valid JSON"),
        ('{"vocab_size": "64"}', "vocab_size='64': Input should be a valid integer"),
        ('{"arrays": {"train": 5}}', "arrays.train=5: Input should be a valid dictionary"),
    ],
)
def test_a_damaged_manifest_is_refused_by_what_is_wrong(corpus, text, named):
    (corpus / "longcrawl64/manifest.json").write_text(text)
    with pytest.raises(DataError, match=f"manifest.json.*{named}"):
        module(corpus).train_info()


# A partial copy -----------------------------------------------------------------------------------------------


def test_skipping_leaves_the_documents_that_are_whole_in_their_order(sparse):
    with pytest.raises(DataError, match=r"missing chunk .*train\.zarr/1\.0.*fetch the chunk.*missing_chunks=skip"):
        module(sparse).train_info()
    data = module(sparse, missing_chunks="skip")
    info = data.train_info()
    assert (info.documents, info.total_batches, info.total_tokens) == (28, 14, 28 * DOC_LEN)
    whole = tokens_of_corpus()[LEFT]
    np.testing.assert_array_equal(labels(data, 0, 14), np.concatenate([whole[:, :48], whole[:, 48:]]))
    assert sum(batch["weight"].sum() for batch in data.eval_loader(0, 1)) == 2 * 28
    array = data.array("train")
    for first, last in ((0, 28), (7, 9), (8, 17), (15, 21), (27, 28)):
        np.testing.assert_array_equal(array.read(first, last, 20, 70), whole[first:last, 20:70])
    assert [array.stored_row(document) for document in range(28)] == LEFT
    rewrite(array.path, 34, 5, 60_000)
    with pytest.raises(DataError, match=r"id 60000 in document 18 \(row 34 on disk\) at position 5"):
        array.read(16, 20, 0, 24)


def test_the_fingerprint_follows_the_contents_and_says_which_documents_are_there(corpus, tmp_path_factory):
    whole = module(corpus).train_info().fingerprint
    assert whole == "cb75879b89f03aa7", "checkpoints must still find their data"
    assert module(corpus, missing_chunks="skip").train_info().fingerprint == whole, "nothing is missing"
    other = tmp_path_factory.mktemp("other")
    # As many documents each time, all of which look alike where samples are taken, but others.
    found = {whole}
    for holes in (("1.0", "3.0"), ("2.0", "3.0")):
        shutil.rmtree(other / "longcrawl64", ignore_errors=True)
        write_layout(other / "longcrawl64/train.zarr")
        rewrite(other / "longcrawl64/train.zarr", slice(None), slice(None), 1)
        for key in holes:
            (other / "longcrawl64/train.zarr" / key).unlink()
        found.add(module(other, missing_chunks="skip").train_info().fingerprint)
    shutil.rmtree(other / "longcrawl64")
    write_array(other / "longcrawl64/train.zarr", tokens_of_corpus()[::-1].copy(), chunks=CHUNK)
    assert len(found | {module(other).train_info().fingerprint}) == 4


# Loaders ------------------------------------------------------------------------------------------------------


def test_labels_are_the_slice_and_inputs_the_tokens_before_with_bos_first(corpus):
    [batch] = module(corpus).train_loader(12, 13, rank=0, world_size=1)  # the second column begins at batch 11
    expected = tokens_of_corpus()[4:8, 48:].astype(np.int64)
    np.testing.assert_array_equal(batch["labels"].numpy(), expected)
    assert batch["input_ids"].dtype == torch.int64 and (batch["input_ids"][:, 0] == 50_256).all()
    np.testing.assert_array_equal(batch["input_ids"][:, 1:].numpy(), expected[:, :-1])


def test_workers_and_ranks_do_not_change_the_tokens(corpus):
    whole = labels(module(corpus), 3, 9)
    np.testing.assert_array_equal(labels(module(corpus, train_num_workers=2), 3, 9), whole)
    ranks = [labels(module(corpus), 3, 9, rank, 2).reshape(6, 2, 48) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(ranks, axis=1).reshape(24, 48), whole)


@pytest.mark.parametrize(("world_size", "documents"), [(1, 1), (2, 44), (3, 10)])
def test_evaluation_counts_every_held_out_slice_once_whatever_the_world_size(corpus, world_size, documents):
    seen, lengths = [], set()
    for rank in range(world_size):
        batches = list(module(corpus, eval_tokens=documents * DOC_LEN).eval_loader(rank, world_size))
        lengths.add(len(batches))
        seen += [row for b in batches for row, w in zip(b["labels"].tolist(), b["weight"], strict=True) if w == 1]
    assert len(lengths) == 1, "every rank must take part in every forward pass"
    assert sorted(seen) == sorted(tokens_of_corpus()[:documents].reshape(-1, 48).tolist())


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_held_out_batch_has_no_more_rows_than_there_are(corpus, world_size):
    """One of as many as are asked for may be larger than the memory."""
    data = module(corpus, eval_tokens=5 * DOC_LEN, eval_local_batch_size=10**6)  # 10 sequences
    for rank in range(world_size):
        (batch,) = data.eval_loader(rank, world_size)
        assert len(batch["labels"]) == len(batch["weight"]) == -(-10 // world_size)


def test_lengths_and_sizes_that_do_not_fit_are_refused_with_the_fix(corpus):
    assert module(corpus, train_batch_size=45).train_info().total_batches == 0  # of 44 documents; training refuses it
    for changes, message in (
        ({"train_batch_len": 33}, r"train_batch_len=33 must divide .* 96 tokens.*nearest .* 24, 32, 48"),
        ({"eval_batch_len": 64}, "eval_batch_len=64 must divide"),
        ({"eval_tokens": 95}, r"eval_tokens takes 95 tokens of .*between one document"),
        ({"bos_token_id": VOCAB}, "bos_token_id=50257 is not in"),
    ):
        with pytest.raises(DataError, match=message):
            (data := module(corpus, **changes)).train_info()
            data.eval_info()


def test_a_batch_that_cannot_be_handed_over_is_an_error_with_the_resource(corpus, monkeypatch):
    """PyTorch, which would do it later in a thread, prints a traceback and drops the batch."""

    def refuse(_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </x>: No space left on device (28)")

    said = r"^/dev/shm \(.* free\) is too small .*`--shm-size`, or use no .*datamodule\.train_num_workers=0"
    with monkeypatch.context() as patch, pytest.raises(DataError, match=said):
        patch.setattr(torch.Tensor, "share_memory_", refuse)
        worker.hand_over({"labels": torch.zeros(2)})

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as sem_open: it names no file

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Lock", full)
    with pytest.raises(DataError, match=said):
        list(module(corpus, train_num_workers=1).train_loader(0, 6, 0, 1))


# Each chunk is decoded once, by one process of a rank, which ends with it -----------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """A count of decoded chunks, of all processes."""
    count, decode = multiprocessing.get_context("fork").Value("q", 0), TokenArray.decode

    def counted(array, chunk):
        with count.get_lock():
            count.value += 1
        return decode(array, chunk)

    monkeypatch.setattr(TokenArray, "decode", counted)
    return count


@pytest.mark.parametrize(
    ("workers", "batch_size", "seq_len", "documents", "chunks"),
    [
        (2, 4, 48, 44, 24),
        (0, 5, 24, 40, 20),  # batches straddle rows of chunks
        (0, 5, 32, 40, 3 * 2 * 5),  # each of three columns of 32 tokens touches two chunks of 24
    ],
)
def test_a_sweep_in_the_papers_order_and_an_evaluation_decode_every_chunk_once(
    corpus, decoded, workers, batch_size, seq_len, documents, chunks
):
    sizes = {"train_batch_size": batch_size, "train_batch_len": seq_len}
    data = module(corpus, train_num_workers=workers, eval_num_workers=workers, **sizes)
    batches = data.train_info().total_batches
    data.eval_info()
    decoded.value = 0  # opening the array looks at some rows
    found = labels(data, 0, batches)
    whole = tokens_of_corpus()[:documents]
    expected = np.concatenate([whole[:, begin : begin + seq_len] for begin in range(0, 96, seq_len)])
    np.testing.assert_array_equal(found, expected)
    assert decoded.value == chunks
    decoded.value = 0
    assert len(list(data.eval_loader(0, 1))) == 44 and decoded.value == 24


def test_a_worker_that_misses_a_chunk_ends_the_reading(corpus):
    loader = module(corpus, train_num_workers=1, train_batch_len=24).train_loader(0, 44, 0, 1)
    (corpus / "longcrawl64/train.zarr/2.1").unlink()  # later than the look at some rows that opening takes
    with pytest.raises(DataError, match=r"missing chunk .*train\.zarr/2\.1: it holds documents 16 and on"):
        list(loader)


def test_workers_do_not_outlive_a_killed_rank(tmp_path):
    """Nor one with a batch half handed over, which is larger than a pipe holds."""
    write_array(tmp_path / "longcrawl64/train.zarr", np.full((64, 16384), 7, dtype=np.uint16), chunks=(64, 2048))
    program = f"""
import os
from tests.data.corpus_helpers import module
batches = iter(module({str(tmp_path)!r}, repeat=True, train_batch_len=16384, train_batch_size=32, train_num_workers=1,
                      eval_batch_len=16384).train_loader(0, 10**6, 0, 1))
next(batches)
print("killed", flush=True)
os.kill(os.getpid(), 9)
"""
    assert said_by(program, tmp_path) == "killed\n"


def said_by(program: str, folder: Path) -> str:
    """Output of a process and of those that it started, until the last of them is gone."""
    os.mkfifo(folder / "said")
    Command("-c", program, output=folder / "said")
    with (folder / "said").open() as pipe:
        assert select.select([pipe], [], [], HANG)[0], "nothing was written"
        said = pipe.readline()
        assert select.select([pipe], [], [], HANG)[0], "a process lives on"
        return said + pipe.read()
