"""Chunks are decoded once, by one process of a rank, which ends with it."""

import multiprocessing
import os
import re
import select
from pathlib import Path

import numpy as np
import pytest
import zarr

from forgetting_transformer.data import LongCrawl64DataModule, TokenArray
from forgetting_transformer.data.decoded_chunks import slots_for
from tests.data.mirror import tokens_of_corpus, write_layout
from tests.processes import Command, run_command
from tests.waiting import HANG

START = "import multiprocessing, os\nfrom tests.data.test_decoded_chunks import module\n"


@pytest.mark.parametrize(
    ("documents", "seq_len", "expected"),
    [
        (32, 16_384, 2 * 8),  # a batch of the paper, which may lie across two rows of chunks
        (2050, 2048, 3),
        (32, 512, 2),
        (32, 3000, 2 * 3),  # not aligned with chunks: 3,000 tokens can touch three of them
    ],
)
def test_room_for_the_chunks_that_a_batch_touches(documents, seq_len, expected):
    assert slots_for((2048, 2048), documents, seq_len) == expected


@pytest.fixture
def corpus(tmp_path):
    for split in ("train", "heldout"):
        write_layout(tmp_path / "longcrawl64" / f"{split}.zarr")
    return tmp_path


def module(data_dir, **changes) -> LongCrawl64DataModule:
    settings = {"train_batch_len": 48, "train_batch_size": 4, "eval_batch_len": 48, "eval_local_batch_size": 2}
    settings |= {"vocab_size": 50_257, "bos_token_id": 50_256}
    return LongCrawl64DataModule(str(data_dir), **{**settings, **changes})


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("batch_size", "seq_len", "documents", "chunks"),
    [
        (4, 48, 44, 24),
        (4, 96, 44, 24),
        (5, 24, 40, 20),  # batches straddle rows of chunks
        (5, 32, 40, 3 * 2 * 5),  # each of three columns of 32 tokens touches two chunks of 24
    ],
)
def test_a_sweep_in_the_papers_order_decodes_every_chunk_once(
    corpus, decoded, workers, batch_size, seq_len, documents, chunks
):
    data = module(corpus, train_num_workers=workers, train_batch_size=batch_size, train_batch_len=seq_len)
    loader = data.train_loader(0, data.train_info().total_batches, 0, 1)
    decoded.value = 0  # opening the array looks at some rows
    labels = [batch["labels"].numpy() for batch in loader]
    whole = tokens_of_corpus()[:documents].astype(np.int64)
    expected = np.concatenate([whole[:, begin : begin + seq_len] for begin in range(0, 96, seq_len)])
    np.testing.assert_array_equal(np.concatenate(labels), expected)
    assert decoded.value == chunks


@pytest.mark.slow
def test_every_rank_and_an_evaluation_decode_every_chunk_once(corpus, decoded):
    data = module(corpus)
    data.array("heldout")
    for loader in (*(data.train_loader(0, 22, rank, 2) for rank in range(2)), data.eval_loader(0, 1)):
        decoded.value = 0
        assert len(list(loader)) == len(loader)
        assert decoded.value == 24


def in_own_process(program: str):
    return run_command("-c", START + program)


def test_a_missing_chunk_is_an_error_in_a_worker_too(corpus):
    program = f"""
loader = module({str(corpus)!r}, train_batch_len=24).train_loader(0, 44, 0, 1)
os.unlink({str(corpus / "longcrawl64/train.zarr/2.1")!r})  # later than the look at some rows that opening takes
try:
    list(loader)
except ValueError as error:
    print(error, flush=True)
    os._exit(0)
"""
    said = in_own_process(program).stdout
    assert re.search(r"missing chunk .*train\.zarr/2\.1: it holds documents 16 and on", said)


def test_a_chunk_that_goes_while_it_is_read_is_an_error_never_zeros(corpus, monkeypatch):
    """The store itself refuses: there is no moment between looking and reading."""
    array = TokenArray(corpus / "longcrawl64/train.zarr", 50_257)
    fetch = array.files.fetch

    def vanish(key):
        fetch(key)
        (corpus / "longcrawl64/train.zarr" / key).unlink(missing_ok=True)

    monkeypatch.setattr(array.files, "fetch", vanish)
    with pytest.raises(ValueError, match=r"missing chunk .*train\.zarr/1\.0"):
        array.read(8, 16, 0, 24)


def test_a_killed_worker_ends_the_reading_and_nothing_waits_for_ever(corpus):
    program = f"""
loader = iter(module({str(corpus)!r}, repeat=True).train_loader(0, 10**6, 0, 1))
next(loader)
multiprocessing.active_children()[0].kill()
for batch in loader:
    pass
"""
    done = in_own_process(program)
    assert done.returncode == 1 and "DataLoader worker" in done.stderr


def said_by(program: str, folder: Path) -> str:
    """Output of a process and of those that it started, until the last of them is gone."""
    os.mkfifo(folder / "said")
    Command("-c", START + program, output=folder / "said")
    with (folder / "said").open() as pipe:
        assert select.select([pipe], [], [], HANG)[0], "nothing was written"
        said = pipe.readline()
        assert select.select([pipe], [], [], HANG)[0], "a process lives on"
        return said + pipe.read()


def test_workers_do_not_outlive_a_killed_rank(tmp_path):
    """Nor one with a batch half handed over, which is larger than a pipe holds."""
    zarr.create_array(
        tmp_path / "longcrawl64/train.zarr", data=np.full((64, 16384), 7, dtype=np.uint16), chunks=(64, 2048)
    )
    program = f"""
batches = iter(module({str(tmp_path)!r}, repeat=True, train_batch_len=16384, train_batch_size=32,
                      eval_batch_len=16384).train_loader(0, 10**6, 0, 1))
next(batches)
print("killed", flush=True)
os.kill(os.getpid(), 9)
"""
    assert said_by(program, tmp_path) == "killed\n"
