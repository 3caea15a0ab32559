#!/usr/bin/env python
"""Measures the speed of reading token arrays in the paper's order and the amount of decoding, against plain Zarr.

    python benchmarks/data.py
    python benchmarks/data.py --workers 1 --out results.json

Makes an array with LongCrawl64's chunks (2048 documents × 2048 tokens, Blosc lz4) of random tokens that compress about
as well as text, and reads all of it as rank 0 of a training run would, without training. "plain zarr" is
`array[documents, tokens]` per batch in the same kind of loader, as a reader without kept chunks does it. The decode
factor is bytes decoded per byte used; CPU is that of all processes. The clock runs from the first batch to the last.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import parse, parser, run, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count

with command_line.interruptible("interrupted"):
    import numcodecs
    import numpy as np
    import torch
    import zarr
    from torch.utils.data import DataLoader, Dataset

    from forgetting_transformer.data import LongCrawl64DataModule, ReadingOrder
    from forgetting_transformer.data.longcrawl64 import PREFETCHED_BATCHES

CHUNK = (2048, 2048)
#: Zipf's exponent for which Blosc lz4 leaves 88 % of a chunk; of LongCrawl64 about 92 % are left.
ZIPF_EXPONENT = 1.1
VOCAB_SIZE = 50257


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--documents", type=count, default=4096, help="rows of the array (default 4096)")
    made.add_argument("--doc_len", type=count, default=32768, help="tokens of a row (default 32,768)")
    made.add_argument("--seq_len", type=count, default=16384, help="tokens of a sequence (default 16,384)")
    made.add_argument("--batch_size", type=count, default=32, help="sequences of a batch (default 32)")
    made.add_argument("--workers", type=at_least(0), nargs="+", default=[0, 1], help="worker processes")
    made.add_argument("--repeats", type=count, default=3, help="passes, of which the median counts (default 3)")
    made.add_argument("--plain_batches", type=count, default=32, help="batches read with plain zarr (default 32)")
    made.add_argument("--data_dir", type=command_line.path, help="keeps the array; default: a temporary folder")
    made.set_defaults(device="cpu")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [{"reader": reader, "workers": workers} for reader in READERS for workers in args.workers]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.data_dir or Path(temporary)) / "longcrawl64"
        return run(__file__, args, argv, cases, lambda case: measure(args, folder, **case), packages=["numcodecs"])


def make_array(path: Path, shape: tuple[int, int]) -> float:
    """Writes the array unless it is there; returns stored bytes per byte of tokens."""
    if not path.exists():
        # Under another name until it is whole: chunks that are missing would be read as zeros, which costs nothing.
        unfinished = path.with_name(f"{path.name}.unfinished")
        array = zarr.create_array(
            unfinished,
            shape=shape,
            chunks=CHUNK,
            dtype="<u2",
            fill_value=0,
            compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
            chunk_key_encoding={"name": "v2", "separator": "."},
            zarr_format=2,
            overwrite=True,
        )
        random = np.random.default_rng(0)
        for first in range(0, shape[0], CHUNK[0]):
            for begin in range(0, shape[1], CHUNK[1]):
                tokens = np.minimum(random.zipf(ZIPF_EXPONENT, CHUNK), VOCAB_SIZE - 1).astype(np.uint16)
                part = array[first : first + CHUNK[0], begin : begin + CHUNK[1]].shape
                array[first : first + CHUNK[0], begin : begin + CHUNK[1]] = tokens[: part[0], : part[1]]
        unfinished.rename(path)
    elif zarr.open_array(path, mode="r").shape != shape:
        raise SystemExit(
            f"{path} has another shape than --documents and --doc_len say; delete it or name another folder"
        )
    return sum(file.stat().st_size for file in path.iterdir()) / (shape[0] * shape[1] * 2)


def kept_chunks(folder: Path, args: argparse.Namespace, workers: int) -> tuple[DataLoader, Callable[[], int]]:
    """The framework's own loader, and the chunks that it has decoded."""
    data = LongCrawl64DataModule(
        str(folder.parent),
        vocab_size=VOCAB_SIZE,
        bos_token_id=VOCAB_SIZE - 1,
        train_batch_len=args.seq_len,
        train_batch_size=args.batch_size,
        train_num_workers=workers,
        eval_batch_len=args.seq_len,
        eval_local_batch_size=1,
    )
    loader = data.train_loader(0, data.train_info().total_batches, 0, 1)
    array, decoded = data.array("train"), multiprocessing.Value("q", 0)
    decode = array.decode

    def counted(chunk: tuple[int, int]) -> np.ndarray:
        with decoded.get_lock():
            decoded.value += 1
        return decode(chunk)

    array.decode = counted  # a reader is forked later
    return loader, lambda: decoded.value


def plain_zarr(folder: Path, args: argparse.Namespace, workers: int) -> tuple[DataLoader, Callable[[], int]]:
    """Every batch from Zarr, which decodes all chunks that a batch touches, and those chunks."""
    dataset = _PlainBatches(folder / "train.zarr", args)
    prefetched = PREFETCHED_BATCHES if workers else None
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=prefetched)
    rows, columns = (-(-size // chunk) for size, chunk in zip((args.batch_size, args.seq_len), CHUNK, strict=True))
    return loader, lambda: len(dataset) * rows * columns


class _PlainBatches(Dataset):
    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.array = zarr.open_array(path, mode="r")
        self.order = ReadingOrder(*self.array.shape, args.seq_len, args.batch_size)
        self.batches = min(args.plain_batches, self.order.batches)

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        where = self.order.locate(batch, 0, 1)
        tokens = self.array[where.first_document : where.last_document, where.begin_token : where.end_token]
        labels = torch.from_numpy(tokens.astype(np.int64))
        input_ids = labels.roll(1, dims=1)
        input_ids[:, 0] = VOCAB_SIZE - 1
        return {"input_ids": input_ids, "labels": labels}


READERS = {"plain zarr": plain_zarr, "kept chunks": kept_chunks}


def measure(args: argparse.Namespace, folder: Path, reader: str, workers: int) -> dict[str, Any]:
    stored = make_array(folder / "train.zarr", (args.documents, args.doc_len))
    rates, factors, cpus = [], [], []
    for _ in range(args.repeats):
        loader, decoded = READERS[reader](folder, args, workers)
        before, batches = cpu_seconds(), iter(loader)
        tokens, began, timed = next(batches)["labels"].numel(), time.perf_counter(), 0
        for batch in batches:
            timed += batch["labels"].numel()
        rates.append(timed / (time.perf_counter() - began))
        factors.append(decoded() * CHUNK[0] * CHUNK[1] / (tokens + timed))
        del loader, batches  # ends the workers, whose time counts when they are gone
        cpus.append((cpu_seconds() - before) / (tokens + timed))
    return {
        "tokens_per_second": rates,
        "decode_factor": statistics.median(factors),
        "cpu_seconds_per_token": statistics.median(cpus),
        "stored_share": stored,
    }


def cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


if __name__ == "__main__":
    sys.exit(run_main(main))
