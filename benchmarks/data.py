#!/usr/bin/env python
"""Measures what data costs: preparing text and reading arrays.

    python benchmarks/data.py --out data.json
    python benchmarks/data.py --parts reading --documents 8192

preparing   scripts/prepare_data.py on `--megabytes` of made-up text: MB of text per CPU second of all processes,
            without the CPU seconds of the same command on 100 kB, which are its start; and the most memory of the
            process that leads and of the largest other one
reading     an array with LongCrawl64's chunks, in the paper's order, by a loop that takes `--step` seconds a batch:
            the wait for the first batch and the longest after it, chunks decoded per chunk of tokens used, memory.
            "plain zarr" is `array[documents, tokens]` for each batch, as a reader without kept chunks does it

CPU times hold for one machine under one load: compare rows of one run.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from cases import parse, parser, run, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, positive

with command_line.interruptible():
    import numcodecs
    import numpy as np
    import zarr
    from tests.data.mirror import serve
    from torch.utils.data import DataLoader, Dataset

    from forgetting_transformer.data import LongCrawl64DataModule, ReadingOrder

ROOT = Path(__file__).resolve().parents[1]
CHUNK = (2048, 2048)
VOCAB_SIZE = 50257
#: Zipf's exponent for which Blosc lz4 leaves 88 % of a chunk; of LongCrawl64 about 92 % are left.
ZIPF_EXPONENT = 1.1
#: Options of scripts/prepare_data.py that differ in cost.
PREPARED = {"bytes": ["--tokenizer", "bytes"], "dedup": ["--tokenizer", "bytes", "--dedup"], "train:32768": []}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: all")
    made.add_argument("--megabytes", type=positive, default=8, help="of text that is prepared (default 8)")
    made.add_argument("--documents", type=count, default=4096, help="rows of the array that is read (default 4096)")
    made.add_argument("--doc_len", type=count, default=16384, help="tokens of a row (default 16,384)")
    made.add_argument("--seq_len", type=count, default=16384, help="tokens of a sequence (default 16,384)")
    made.add_argument("--batch_size", type=count, default=32, help="sequences of a batch (default 32)")
    made.add_argument("--batches", type=count, default=96, help="that are read, 16 with plain zarr (default 96)")
    made.add_argument("--step", type=positive, default=0.2, help="seconds of a step (default 0.2)")
    made.set_defaults(device="cpu")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [{"part": part, **case} for part in args.parts for case in PARTS[part][0]]
    with tempfile.TemporaryDirectory() as folder:
        return run(__file__, args, argv, cases, lambda case: PARTS[case["part"]][1](case, args, Path(folder)))


# Preparing ----------------------------------------------------------------------------------------------------


def made_up_text(folder: Path, megabytes: float) -> Path:
    """Files of 20 kB in folders of 50, of words with the frequencies of a language. The same at every call."""
    if not folder.exists():
        pick = random.Random(0)
        words = ["".join(pick.choices("etaoinshrdlucmfwypvbgk", k=pick.randint(1, 9))) for _ in range(30_000)]
        weights = [1 / (rank + 3) for rank in range(len(words))]
        for number in range(max(1, round(megabytes * 50))):
            file = folder / f"{number // 50:04}" / f"{number:06}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            chosen = pick.choices(words, weights, k=3600)
            file.write_text("".join(" ".join(chosen[n : n + 12]) + "\n" for n in range(0, len(chosen), 12)))
    return folder


def measure_preparing(case: dict[str, Any], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    start, found = (
        prepare_by_script(made_up_text(folder / name, size), folder / "out", case["options"], case["workers"])
        for name, size in (("start", 0.1), ("text", args.megabytes))
    )
    rate = found["bytes"] / 1e6 / (found["cpu_seconds"] - start["cpu_seconds"])
    return {"mb_per_cpu_second": rate, "start_cpu_seconds": start["cpu_seconds"], **found}


def prepare_by_script(text: Path, out: Path, options: str, workers: int) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), str(text), "--out", str(out)]
    command += [*PREPARED[options], "--workers", str(workers), "--doc_len", "2048"]
    began, cpu = time.perf_counter(), {}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    leader = other = 0
    while process.poll() is None:
        # As it was last seen: a worker's time is lost to its parent, which is a fork server.
        cpu |= {pid: seconds for pid in (process.pid, *descendants(process.pid)) if (seconds := cpu_seconds(pid))}
        leader = max(leader, peak_bytes(process.pid))
        other = max([other, *map(peak_bytes, descendants(process.pid))])
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"prepare_data.py ended with {process.returncode}")
    n_bytes = json.loads((out / "manifest.json").read_text())["bytes"]
    shutil.rmtree(out)
    times = {"cpu_seconds": sum(cpu.values()), "seconds": seconds}
    return {"bytes": n_bytes, **times, "leader_peak_bytes": leader, "other_peak_bytes": other}


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """Peak memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


# Reading ------------------------------------------------------------------------------------------------------


def make_array(path: Path, shape: tuple[int, int]) -> Path:
    if not path.exists():
        array = zarr.create_array(
            path,
            shape=shape,
            chunks=CHUNK,
            dtype="<u2",
            fill_value=0,
            compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
            chunk_key_encoding={"name": "v2", "separator": "."},
            zarr_format=2,
        )
        pick = np.random.default_rng(0)
        for first in range(0, shape[0], CHUNK[0]):
            for begin in range(0, shape[1], CHUNK[1]):
                tokens = np.minimum(pick.zipf(ZIPF_EXPONENT, CHUNK), VOCAB_SIZE - 1).astype(np.uint16)
                n_rows, n_columns = min(CHUNK[0], shape[0] - first), min(CHUNK[1], shape[1] - begin)
                array[first : first + n_rows, begin : begin + n_columns] = tokens[:n_rows, :n_columns]
    return path


class PlainBatches(Dataset):
    """Every batch from Zarr, which decodes all chunks that the batch touches."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.array = zarr.open_array(path, mode="r")
        self.order = ReadingOrder(*self.array.shape, args.seq_len, args.batch_size)

    def __len__(self) -> int:
        return self.order.batches

    def __getitem__(self, batch: int) -> np.ndarray:
        where = self.order.locate(batch)
        return self.array[where.first_document : where.last_document, where.begin_token : where.end_token]


def measure_reading(case: dict[str, Any], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = make_array(folder / "longcrawl64/train.zarr", (args.documents, args.doc_len))
    decoded, batches = multiprocessing.Value("q", 0), args.batches
    with ExitStack() as stack:
        if case["reader"] == "plain zarr":
            batches = min(batches, 16)
            loader: Any = DataLoader(PlainBatches(path, args), batch_size=None, num_workers=1, prefetch_factor=8)
            touched = -(-args.batch_size // CHUNK[0]) * -(-args.seq_len // CHUNK[1])
            decoded.value = batches * touched
        else:
            place: Path | str = folder
            if case["place"] == "URL, cold cache":
                place = stack.enter_context(serve(folder)).url
            data = LongCrawl64DataModule(
                str(place), vocab_size=VOCAB_SIZE, bos_token_id=VOCAB_SIZE - 1, train_batch_len=args.seq_len,
                train_batch_size=args.batch_size, train_num_workers=case["workers"], eval_batch_len=args.seq_len,
                eval_local_batch_size=1, repeat=True, cache_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            )  # fmt: skip
            loader, array = data.train_loader(0, batches, 0, 1), data.array("train")
            array.decode = counted(array.decode, decoded)  # type: ignore[method-assign]  # a reader is forked later
        Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is forgotten
        at_start, waits = peak_bytes(os.getpid()), []
        reader = iter(loader)
        for _ in range(batches):
            began = time.perf_counter()
            next(reader)
            waits.append(time.perf_counter() - began)
            time.sleep(args.step)
        readers = max([0, *map(peak_bytes, descendants(os.getpid()))])
        used = batches * args.batch_size * args.seq_len / (CHUNK[0] * CHUNK[1])
        return {
            "first_wait_seconds": waits[0],
            "longest_wait_seconds": max(waits[1:]),
            "waiting_share": sum(waits[1:]) / (sum(waits[1:]) + args.step * (batches - 1)),
            "decode_factor": decoded.value / used,
            "loop_grew_bytes": peak_bytes(os.getpid()) - at_start,
            "reader_peak_bytes": readers,
        }


def counted(function: Callable[..., Any], calls: Any) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with calls.get_lock():
            calls.value += 1
        return function(*arguments)

    return call


PARTS: dict[str, tuple[list[dict[str, Any]], Callable[..., dict[str, Any]]]] = {
    "preparing": ([{"options": o, "workers": w} for o in PREPARED for w in (1, 2)], measure_preparing),
    "reading": (
        [
            {"reader": "plain zarr", "place": "disk", "workers": 1},
            {"reader": "kept chunks", "place": "disk", "workers": 0},
            {"reader": "kept chunks", "place": "disk", "workers": 1},
            {"reader": "kept chunks", "place": "URL, cold cache", "workers": 1},
        ],
        measure_reading,
    ),
}

if __name__ == "__main__":
    sys.exit(run_main(main))
