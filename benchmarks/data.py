"""Measures the speed of reading token arrays in the paper's order and the amount of decoding, against plain Zarr.

    python benchmarks/data.py
    python benchmarks/data.py --workers 2 --world_size 4 --out results.json

Makes an array with LongCrawl64's chunks (2048 documents × 2048 tokens, Blosc lz4) of random tokens that compress about
as well as text, and reads all of it as rank 0 of a training run would, without training. "plain zarr" is
`array[documents, tokens]` per batch in the same kind of loader, as a reader without kept chunks does it. Each row of a
Markdown table is printed and saved to --out (record.py) as soon as it is measured. The same command measures missing
rows. The decode factor is bytes decoded per byte used; CPU is that of all processes. The clock runs from the first
batch to the last.
"""

import argparse
import functools
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import INTERRUPTED, Record, RecordError, add_options, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count

with command_line.interruptible(INTERRUPTED):
    import numcodecs
    import numpy as np
    import torch
    import zarr
    from torch.utils.data import DataLoader, Dataset
    from tqdm import tqdm
    from zarr.storage import LocalStore, WrapperStore

    from forgetting_transformer.data import LongCrawl64DataModule, ReadingOrder
    from forgetting_transformer.data.longcrawl64 import PREFETCHED_BATCHES

CHUNK = (2048, 2048)
#: Zipf's exponent for which Blosc lz4 leaves 88 % of a chunk; of LongCrawl64 about 92 % are left.
ZIPF_EXPONENT = 1.1
VOCAB_SIZE = 50257


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=count, default=4096, help="rows of the array (default 4096)")
    parser.add_argument("--doc_len", type=count, default=32768, help="tokens of a row (default 32,768)")
    parser.add_argument("--seq_len", type=count, default=16384, help="tokens of a sequence (default 16,384)")
    parser.add_argument("--batch_size", type=count, default=32, help="sequences of a global batch (default 32)")
    parser.add_argument("--world_size", type=count, default=1, help="ranks; the share of the first is read (default 1)")
    parser.add_argument(
        "--workers", type=at_least(0), nargs="+", default=[0, 1, 2], help="worker processes (default 0 1 2)"
    )
    parser.add_argument("--repeats", type=count, default=3, help="passes, of which the median counts (default 3)")
    parser.add_argument("--plain_batches", type=count, default=32, help="batches read with plain zarr (default 32)")
    parser.add_argument(
        "--data_dir", type=command_line.path, help="folder for the array, kept and used again (default: temporary)"
    )
    add_options(parser)
    args = parser.parse_args(argv)
    if args.batch_size % args.world_size:
        parser.error(f"--batch_size {args.batch_size} cannot be shared equally by --world_size {args.world_size}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("data", args, argv, "cpu", leave_out=("data_dir",), packages=("numcodecs",))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        data_dir = args.data_dir or Path(temporary)
        stored = make_array(data_dir / "longcrawl64" / "train.zarr", (args.documents, args.doc_len))
        for reader in (plain_zarr, kept_chunks):
            for workers in args.workers:
                case = {"reader": reader.__name__.replace("_", " "), "workers": workers}
                row = record.row(case, functools.partial(measure, reader, data_dir, args, workers, stored))
                print(describe_row(row), flush=True)
    rank = "" if args.world_size == 1 else f", the share of one of {args.world_size} ranks"
    print(
        f"\n{args.documents:,} x {args.doc_len:,} tokens stored in {stored:.0%} of their size, batches of "
        f"{args.batch_size} x {args.seq_len:,}{rank}; median of {args.repeats} passes."
    )
    return 0


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
        for first in tqdm(range(0, shape[0], CHUNK[0]), desc="writing the array", unit="row-chunk", leave=False):
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


class Reading:
    """A loader, and how much its workers have decoded."""

    def __init__(self, loader: DataLoader, kept_bytes: int, decoded: Any) -> None:
        self.loader, self.kept_bytes, self.decoded = loader, kept_bytes, decoded


def kept_chunks(data_dir: Path, args: argparse.Namespace, workers: int) -> Reading:
    """The framework's own loader."""
    data = LongCrawl64DataModule(
        str(data_dir),
        vocab_size=VOCAB_SIZE,
        bos_token_id=VOCAB_SIZE - 1,
        train_batch_len=args.seq_len,
        train_batch_size=args.batch_size,
        train_num_workers=workers,
        eval_batch_len=args.seq_len,
        eval_local_batch_size=1,
    )
    loader = data.train_loader(0, data.train_info().total_batches, 0, args.world_size)
    kept = loader.dataset.kept
    return Reading(loader, kept.nbytes, lambda: kept.decoded)


def plain_zarr(data_dir: Path, args: argparse.Namespace, workers: int) -> Reading:
    """Every batch from Zarr, inputs and labels made where it is read."""
    counter = multiprocessing.Value("q", 0)
    dataset = _PlainBatches(data_dir / "longcrawl64" / "train.zarr", args, counter)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, prefetch_factor=PREFETCHED_BATCHES if workers else None
    )
    return Reading(loader, 0, lambda: counter.value)


class _Counting(WrapperStore[LocalStore]):
    """Counts the chunks that are read; Zarr decodes each chunk it reads, and keeps none."""

    def __init__(self, store: LocalStore, counter: Any) -> None:
        super().__init__(store)
        self.counter = counter

    def _with_store(self, store: LocalStore) -> "_Counting":
        return type(self)(store, self.counter)

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        if key[-1].isdigit():
            with self.counter.get_lock():
                self.counter.value += 1
        return await super().get(key, *arguments, **options)


class _PlainBatches(Dataset):
    def __init__(self, path: Path, args: argparse.Namespace, counter: Any) -> None:
        self.array = zarr.open_array(_Counting(LocalStore(path, read_only=True), counter), mode="r")
        self.order = ReadingOrder(*self.array.shape, args.seq_len, args.batch_size)
        self.world_size, self.batches = args.world_size, min(args.plain_batches, self.order.batches)

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> dict[str, torch.Tensor]:
        where = self.order.locate(batch, 0, self.world_size)
        tokens = self.array[where.first_document : where.last_document, where.begin_token : where.end_token]
        labels = torch.from_numpy(tokens.astype(np.int64))
        input_ids = labels.roll(1, dims=1)
        input_ids[:, 0] = VOCAB_SIZE - 1
        return {"input_ids": input_ids, "labels": labels}


def measure(reader: Any, data_dir: Path, args: argparse.Namespace, workers: int, stored_share: float) -> dict[str, Any]:
    rates, factors, cpus, kept_bytes = [], [], [], 0
    for _ in tqdm(range(args.repeats), desc=f"{reader.__name__}, {workers} workers", unit="pass", leave=False):
        reading = reader(data_dir, args, workers)
        before = cpu_seconds()
        tokens, timed_tokens, seconds = run(iter(reading.loader))
        rates.append(timed_tokens / seconds)
        factors.append(reading.decoded() * CHUNK[0] * CHUNK[1] / tokens)
        kept_bytes = reading.kept_bytes
        del reading.loader  # ends the workers, whose time counts when they are gone
        cpus.append((cpu_seconds() - before) / tokens)
    return {
        "tokens_per_second": rates,
        "decode_factor": statistics.median(factors),
        "cpu_seconds_per_token": statistics.median(cpus),
        "kept_bytes": kept_bytes,
        "stored_share": stored_share,
    }


def run(batches: Iterator[dict[str, torch.Tensor]]) -> tuple[int, int, float]:
    """Takes all batches; returns their tokens, those after the first batch, and the seconds since the first."""
    first = next(batches)["labels"].numel()
    started, tokens = time.perf_counter(), first
    for batch in batches:
        tokens += batch["labels"].numel()
    return tokens, tokens - first, time.perf_counter() - started


def cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


HEADER = "| reader | workers | M tokens/s | decode factor | CPU ns per token | kept MiB |\n|---|---|---|---|---|---|"


def describe_row(row: dict[str, Any]) -> str:
    rate = statistics.median(row["tokens_per_second"]) / 1e6
    cpu = row["cpu_seconds_per_token"] * 1e9
    sizes = f"{row['decode_factor']:.2f} | {cpu:,.1f} | {row['kept_bytes'] / 2**20:,.0f}"
    return f"| {row['reader']} | {row['workers']} | {rate:,.1f} | {sizes} |"


if __name__ == "__main__":
    sys.exit(run_main(main))
