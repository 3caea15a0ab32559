"""Decoded chunks are shared, bounded, decoded once, and never mixed up."""

import multiprocessing
import os
import re
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import zarr

from forgetting_transformer.data import LongCrawl64DataModule, TokenArray
from forgetting_transformer.data.decoded_chunks import DecodedChunks, slots_for
from forgetting_transformer.data.longcrawl64 import PREFETCHED_BATCHES
from tests.data.mirror import tokens_of_corpus, write_layout
from tests.processes import Command, run_command
from tests.waiting import HANG

pytestmark = pytest.mark.slow

START = "import multiprocessing, os\nfrom tests.data.test_decoded_chunks import module\n"
WHOLE = (slice(None), slice(None))


def chunk_of(number: int) -> np.ndarray:
    return np.full((4, 3), number, dtype=np.uint16)


def take(kept: DecodedChunks, number: int, decode=None) -> int:
    out = np.zeros((4, 3), dtype=np.uint16)
    kept.copy((number, 0), decode or (lambda: chunk_of(number)), WHOLE, out)
    assert (out == out[0, 0]).all()
    return int(out[0, 0])


def test_a_chunk_is_decoded_once_and_the_one_unused_for_longest_makes_room():
    kept = DecodedChunks((4, 3), slots=2, context=None, dtype=np.uint16)
    assert [take(kept, n) for n in (1, 2, 1, 1)] == [1, 2, 1, 1] and kept.decoded == 2
    take(kept, 3)  # pushes out 2, which was used before 1
    assert kept.lacking([(1, 0), (2, 0), (3, 0)]) == [(2, 0)]
    take(kept, 1)
    assert kept.decoded == 3


def test_a_failed_decoding_is_raised_and_tried_again_by_the_next():
    kept = DecodedChunks((4, 3), slots=1, context=None, dtype=np.uint16)

    def fail():
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        take(kept, 5, fail)
    assert take(kept, 5) == 5


def test_ragged_chunks_and_parts_of_chunks():
    kept = DecodedChunks((4, 3), slots=1, context=None, dtype=np.uint16)
    small = np.arange(4, dtype=np.uint16).reshape(2, 2)
    for _ in range(2):
        out = np.zeros((1, 2), dtype=np.uint16)
        kept.copy((9, 9), lambda: small, (slice(1, 2), slice(0, 2)), out)
        np.testing.assert_array_equal(out, small[1:])


def test_who_needs_a_chunk_that_another_decodes_waits_for_it():
    kept = DecodedChunks((4, 3), slots=3, context=None, dtype=np.uint16)
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slow():
        calls.append(1)
        begun.set()
        assert go_on.wait(HANG)
        return chunk_of(1)

    found = []
    threads = [threading.Thread(target=lambda: found.append(take(kept, 1, slow))) for _ in range(4)]
    threads[0].start()
    assert begun.wait(HANG)
    for thread in threads[1:]:
        thread.start()
    assert take(kept, 2) == 2, "another chunk need not wait"
    go_on.set()
    for thread in threads:
        thread.join(HANG)
    assert found == [1] * 4 and len(calls) == 1


def _reader(kept, numbers, results):
    results.put(all(take(kept, number, lambda number=number: chunk_of(number)) == number for number in numbers))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_chunks_and_never_read_a_half_written_one(method):
    context = multiprocessing.get_context(method)
    kept, results = DecodedChunks((4, 3), slots=3, context=context, dtype=np.uint16), context.Queue()
    pick = np.random.default_rng(0)
    readers = [
        context.Process(target=_reader, args=(kept, pick.integers(0, 6, 400).tolist(), results)) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    assert all(results.get(timeout=HANG) for _ in readers)
    for reader in readers:
        reader.join(HANG)
    assert 6 <= kept.decoded <= 800


def test_shared_memory_has_no_name_that_could_outlive_a_kill():
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    kept = DecodedChunks((64, 64), slots=4, context=multiprocessing.get_context(), dtype=np.uint16)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert kept.nbytes == 4 * 64 * 64 * 2
    assert not {name for name in after - before if not name.startswith("sem.")}


@pytest.mark.parametrize(
    ("window", "seq_len", "expected"),
    [
        (32, 16_384, 2 * 8),  # one batch of the paper, whose window may lie across two rows of chunks
        (9 * 32, 16_384, 2 * 8),  # two workers with four batches ahead of each
        (9 * 32, 65_536, 2 * 32),
        (2049, 2048, 3),
        (32, 512, 2),
        (32, 3000, 2 * 3),  # not aligned with chunks: 3,000 tokens can touch three of them
    ],
)
def test_room_for_the_chunks_of_all_batches_in_flight(window, seq_len, expected):
    assert slots_for((2048, 2048), window, seq_len, 65_536, 6_609_334) == expected


def test_no_more_room_than_the_array_has_chunks():
    assert slots_for((8, 24), 1000, 96, 96, 44) == 6 * 4
    assert slots_for((8, 24), 1000, 24, 96, 44) == 6 * 4


def test_room_where_a_window_lies_in_two_columns():
    """A window of 27 touches at most five rows of eight inside a column; of 41 documents, three at each end."""
    assert slots_for((8, 24), 27, 48, 96, 400) == 2 * 5
    assert slots_for((8, 24), 27, 48, 96, 41) == 2 * 6


@pytest.fixture
def corpus(tmp_path):
    for split in ("train", "heldout"):
        write_layout(tmp_path / "longcrawl64" / f"{split}.zarr")
    return tmp_path


def module(data_dir, **changes) -> LongCrawl64DataModule:
    settings = {"train_batch_len": 48, "train_batch_size": 4, "eval_batch_len": 48, "eval_local_batch_size": 2}
    settings |= {"vocab_size": 50_257, "bos_token_id": 50_256}
    return LongCrawl64DataModule(str(data_dir), **{**settings, **changes})


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sweep_in_the_papers_order_decodes_every_chunk_once(corpus, workers):
    """11 rows × 2 columns of batches over 6 × 4 chunks; without keeping them, 44 chunks would be decoded."""
    loader = module(corpus, train_num_workers=workers).train_loader(0, 22, 0, 1)
    labels = [batch["labels"].numpy() for batch in loader]
    whole = tokens_of_corpus().astype(np.int64)
    np.testing.assert_array_equal(np.concatenate(labels), np.concatenate([whole[:, :48], whole[:, 48:]]))
    assert loader.dataset.kept.decoded == 24


def unlucky_schedules(schedules: int, batches: int, in_flight: int) -> Iterator[list[int]]:
    """Orders in which two workers may finish batches: each worker its own in order, and the newest batch that has
    been handed out is less than `in_flight` after the oldest that is not finished."""
    for seed in range(schedules):
        pick, next_of = np.random.default_rng(seed), [0, 1]
        order: list[int] = []
        while min(next_of) < batches:
            may_go = [w for w in (0, 1) if next_of[w] < min(batches, min(next_of) + in_flight)]
            # A worker that has the core keeps it for a while, as on a busy machine.
            worker = int(pick.choice(may_go))
            for _ in range(pick.integers(1, in_flight)):
                if next_of[worker] < min(batches, min(next_of) + in_flight):
                    order.append(next_of[worker])
                    next_of[worker] += 2
        yield order


#: Each reads the whole corpus once.
FEW, MANY = 5, 40
THE_FEW = (
    "tests/data/test_decoded_chunks.py::test_every_chunk_is_decoded_once_however_far_one_worker_is_behind_the_other"
)


@pytest.mark.parametrize("schedules", [FEW, pytest.param(MANY, marks=pytest.mark.rare(THE_FEW))])
@pytest.mark.parametrize(
    ("settings", "chunks"),
    [
        ({}, 24),
        ({"train_batch_size": 5, "train_batch_len": 24}, 20),  # 40 of 44 documents are read; batches straddle chunks
        ({"train_batch_len": 96}, 24),
    ],
)
def test_every_chunk_is_decoded_once_however_far_one_worker_is_behind_the_other(corpus, settings, chunks, schedules):
    data = module(corpus, train_num_workers=2, **settings)
    batches = data.train_info().total_batches
    for order in unlucky_schedules(schedules, batches, 2 * PREFETCHED_BATCHES):
        assert sorted(order) == list(range(batches))
        dataset = data.train_loader(0, batches, 0, 1).dataset
        for batch in order:
            dataset[batch]
        assert dataset.kept.decoded == chunks, order


def test_a_chunk_is_decoded_once_where_the_sweep_goes_on_to_the_next_column(corpus):
    """In flight then: 11 documents in three rows of chunks at the end of a column, and 16 in three of the next."""
    data = module(corpus, eval_tokens=41 * 96, eval_local_batch_size=3, eval_num_workers=2)
    for order in unlucky_schedules(FEW, 28, 2 * PREFETCHED_BATCHES):
        dataset = data.eval_loader(0, 1).dataset
        assert len(dataset) == 28
        for batch in order:
            dataset[batch]
        assert dataset.parts[0].kept.decoded == 24, order


def test_evaluation_decodes_every_chunk_once_too(corpus):
    loader = module(corpus, eval_num_workers=2).eval_loader(0, 1)
    assert sum(int(batch["weight"].sum()) for batch in loader) == 88
    assert loader.dataset.parts[0].kept.decoded == 24


def test_every_rank_decodes_for_itself_and_once(corpus):
    for rank in range(2):
        loader = module(corpus, train_num_workers=2).train_loader(0, 22, rank, 2)
        assert len(list(loader)) == 22 and loader.dataset.kept.decoded == 24


def test_batches_that_straddle_chunks_decode_them_once_as_well(corpus):
    data = module(corpus, train_batch_size=5, train_batch_len=32, train_num_workers=0)
    loader = data.train_loader(0, 24, 0, 1)
    labels = np.concatenate([batch["labels"].numpy() for batch in loader])
    whole = tokens_of_corpus()[:40].astype(np.int64)
    np.testing.assert_array_equal(labels, np.concatenate([whole[:, i : i + 32] for i in (0, 32, 64)]))
    # Each of three columns of 32 tokens touches two chunks of 24 in each of 5 rows of chunks.
    assert (loader.dataset.kept.slots, loader.dataset.kept.decoded) == (6, 3 * 2 * 5)


def in_own_process(program: str) -> subprocess.CompletedProcess:
    """Runs a program that leaves workers behind, which would disturb the tests that follow."""
    return run_command("-c", START + program)


def _claim_and_die(kept):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    take(kept, 1, die)


def test_a_chunk_that_a_killed_process_was_decoding_is_decoded_by_the_next():
    context = multiprocessing.get_context("fork")
    kept = DecodedChunks((4, 3), slots=1, context=context, dtype=np.uint16)
    victim = context.Process(target=_claim_and_die, args=(kept,))
    victim.start()
    victim.join(HANG)
    assert kept.lacking([(1, 0)]) == [] and take(kept, 1) == 1


def test_a_lock_that_a_killed_process_held_is_an_error_not_a_wait_for_ever(monkeypatch):
    monkeypatch.setattr("forgetting_transformer.data.decoded_chunks.LONGEST_HOLD", 0.2)
    kept = DecodedChunks((4, 3), slots=1, context=None, dtype=np.uint16)
    kept._lock.acquire()
    with pytest.raises(RuntimeError, match="another worker was killed while it held the lock"):
        take(kept, 1)


def test_a_missing_chunk_is_an_error_in_a_worker_too(corpus):
    program = f"""
loader = module({str(corpus)!r}, train_num_workers=2, train_batch_len=24).train_loader(0, 44, 0, 1)
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
    """Also when it dies with the lock in its hands, or a chunk half decoded."""
    program = f"""
loader = iter(module({str(corpus)!r}, train_num_workers=2, repeat=True).train_loader(0, 10**6, 0, 1))
next(loader)
multiprocessing.active_children()[0].kill()
for batch in loader:
    pass
"""
    done = in_own_process(program)
    assert done.returncode == 1 and "DataLoader worker" in done.stderr


def read_to_the_end(pipe: IO[str], limit: float = HANG) -> str:
    """What is written into a pipe until the last process that could write into it is gone."""
    assert select.select([pipe], [], [], limit)[0], "nothing was written"
    said = pipe.readline()
    assert select.select([pipe], [], [], limit)[0], "a process lives on"
    return said + pipe.read()


def said_by(program: str, folder: Path) -> str:
    """Output of a process and of those that it started, until the last of them is gone."""
    os.mkfifo(folder / "said")
    Command("-c", START + program, output=folder / "said")
    with (folder / "said").open() as pipe:
        return read_to_the_end(pipe)


@pytest.mark.parametrize("killed_too", [0, 1])
def test_workers_do_not_outlive_a_killed_rank(tmp_path, killed_too):
    """Neither with a batch half handed over, which is larger than a pipe holds, nor when one of them was killed too."""
    zarr.create_array(
        tmp_path / "longcrawl64/train.zarr", data=np.full((64, 16384), 7, dtype=np.uint16), chunks=(64, 2048)
    )
    program = f"""
batches = iter(module({str(tmp_path)!r}, train_num_workers=2, repeat=True, train_batch_len=16384, train_batch_size=32,
                      eval_batch_len=16384).train_loader(0, 10**6, 0, 1))
next(batches)
for worker in multiprocessing.active_children()[:{killed_too}]:
    worker.kill()
print("killed", flush=True)
os.kill(os.getpid(), 9)
"""
    assert said_by(program, tmp_path) == "killed\n"


def test_a_worker_whose_rank_was_killed_before_it_began_ends_too(tmp_path):
    """PyTorch's own look at the parent begins later, and would find that nothing has changed."""
    program = """
import time
from forgetting_transformer.data.worker import start_worker

def late():
    while os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.01)
    print("begins", flush=True)
    start_worker(0)
    time.sleep(3600)

worker = multiprocessing.get_context("fork").Process(target=late)
worker.start()
os._exit(0)
"""
    assert said_by(program, tmp_path) == "begins\n"
