#!/usr/bin/env python
"""Measures the cost of bitwise equal starts: TorchInductor chooses by rule instead of by timing on the GPU.

    python benchmarks/compile.py --out rules.json
    python benchmarks/compile.py --experiments hgrn2/760m_16b mamba2/760m_16b --steps 20
    python benchmarks/compile.py --device cpu --steps 2            # to try it; nothing is timed on a CPU

A row is a compiled experiment, measured as by benchmarks/training.py, in a separate process that begins with empty
caches:

timed          PyTorch's default: launch configurations of reductions and padding of matrix products are chosen by time
by rule        the setting of runs (ops/compiling.py)
reductions     only those two choices by rule, and everything else as by default

first step: its seconds, including compiling and timing. --out also has the kernels that take most of a step.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, end_with_parent, run_main

import training
from forgetting_transformer.command_line import count

#: Options of TorchInductor; None: those that runs use.
WAYS: dict[str, dict[str, Any] | None] = {
    "timed": {},
    "by rule": None,
    "reductions": {"test_configs.force_filter_reduction_configs": True, "shape_padding": False},
}
KERNELS = 40


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", metavar="NAME", help="default: 125M and 760M FoX (Pro)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seq_len", type=count, help="tokens of a sequence; 16,384 on a GPU")
    parser.add_argument("--batch_size", type=count, default=1, help="sequences of a micro-batch (default 1)")
    parser.add_argument("--steps", type=count, default=10, help="measured steps (default 10)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worker", nargs=3, metavar=("EXPERIMENT", "WAY", "FILE"), help=argparse.SUPPRESS)
    add_options(parser)
    args = parser.parse_args(argv)
    on_gpu = ["forgetting_transformer/pro_125m_2b", "forgetting_transformer/pro_760m_16b"]
    args.experiments = args.experiments or (on_gpu if args.device == "cuda" else ["demo/fox_pro"])
    for name in args.experiments:
        if not training.experiment_file(name).is_file():
            parser.error(f"there is no experiment {name!r} in configs/experiment")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker:
        work(args, *args.worker)
        return 0
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda (the default), and PyTorch sees no GPU; give --device cpu", file=sys.stderr)
        return 2
    try:
        record = Record("compile", args, argv, args.device, leave_out=("worker",))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(device_name(record.environment), flush=True)
    for experiment in args.experiments:
        for way in args.ways:
            row = record.row({"experiment": experiment, "way": way}, functools.partial(measure, args, experiment, way))
            print(describe(row), flush=True)
    return 1 if record.failed else 0


def measure(args: argparse.Namespace, experiment: str, way: str) -> dict[str, Any]:
    """In a new process, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, __file__, "--device", args.device, "--steps", str(args.steps)]
        command += ["--batch_size", str(args.batch_size), "--worker", experiment, way, str(file)]
        if args.seq_len:
            command += ["--seq_len", str(args.seq_len)]
        done = subprocess.run(command, env=os.environ | caches, preexec_fn=end_with_parent)
        if not file.exists():
            return {"status": f"failed: the process ended with code {done.returncode}"}
        return json.loads(file.read_text(encoding="utf-8"))


def work(args: argparse.Namespace, experiment: str, way: str, file: str) -> None:
    from forgetting_transformer.ops import compiling

    options = WAYS[way]
    if options is not None:
        compiling.OPTIONS.clear()
        compiling.OPTIONS.update(options)
    length = ["--seq_len", str(args.seq_len)] if args.seq_len else []
    chosen = training.parse_args([
        "--device", args.device, "--experiments", experiment, "--steps", str(args.steps), "--warmup_steps", "3",
        *length,
        "--batch_size", str(args.batch_size), "--kernels", str(KERNELS), "--overrides", "train.compile=true",
    ])  # fmt: skip
    row = training.attempt(functools.partial(training.measure, chosen, experiment, False, cold=True))
    Path(file).write_text(json.dumps(row), encoding="utf-8")


def describe(row: dict[str, Any]) -> str:
    name = f"{row['experiment']}, {row['way']}: "
    if row["status"] != "ok":
        return name + row["status"]
    milliseconds = [seconds * 1000 for seconds in row["step_seconds"]]
    return (
        f"{name}{statistics.median(milliseconds):.2f} ms a step ({min(milliseconds):.2f} to {max(milliseconds):.2f}), "
        f"{row['tokens_per_second']:,.0f} tokens/s, first step {row['first_step_seconds']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
