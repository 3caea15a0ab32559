#!/usr/bin/env python
"""Continues real runs of train.py on other numbers of GPUs of this machine, and compares their losses.

    python benchmarks/interruptions.py                                  # FoX (Pro) 125M on all GPUs of this machine
    python benchmarks/interruptions.py --devices 8 --out results.json   # again and again, until no row is missing
    python benchmarks/interruptions.py --device cpu --devices 4         # to try it: a tiny model, processes with gloo

Every run is started by scripts/launch.py on random tokens, for --steps steps, and logs each of them.

straight      a run without interruption on N devices, and one on N/2
world_sizes   a run that ends and is continued on N, N/2, N/4 and N devices

first_step_seconds   from each command to the end of its first step, with the kernels that earlier runs left in caches
largest_difference   of a step's loss to that of the straight run on N devices; sums are made in another order

What becomes of a run whose rank gets a signal, dies or hangs is tested in tests/gpu/test_reliability_cuda.py.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import compose, parse, parser, run, run_main
from start import follow, launch_command, on_random_tokens, write_corpus

from forgetting_transformer.analysis.runs import read_metrics
from forgetting_transformer.command_line import at_least

#: What a CPU can do: eight short sequences a step, one at a time, of which eight processes have one each.
TINY = ["datamodule.train_batch_len=128", "datamodule.train_batch_size=8", "datamodule.train_num_workers=0"]
TINY += ["train.grad_acc_tokens=128", "model.config.hidden_size=64", "model.config.num_hidden_layers=2"]
ON_GPU = {"experiment": "forgetting_transformer/pro_125m_2b", "overrides": []}
ON_CPU = {"experiment": "demo/fox_pro", "overrides": TINY}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, time_limit=540)
    made.add_argument("--devices", type=at_least(2), help="N (default: all GPUs of this machine)")
    made.add_argument("--experiment", metavar="NAME", help="of configs/experiment; default as above")
    made.add_argument("--strategy", choices=("fsdp", "ddp"), default="fsdp", help="default fsdp")
    made.add_argument("--steps", type=at_least(4), default=24, help="of a run (default 24)")
    made.add_argument("--overrides", nargs="+", metavar="KEY=VALUE", help="config overrides for all")
    args = parse(made, argv, ON_GPU, ON_CPU)
    if args.devices is None:
        import torch

        args.devices = max(2, torch.cuda.device_count())
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    sizes = [size for size in (args.devices, args.devices // 2, args.devices // 4) if size] + [args.devices]
    cases = [{"check": "straight", "devices": [size]} for size in sizes[:2]]
    cases.append({"check": "world_sizes", "devices": sizes})
    cases = [{"experiment": args.experiment, **case} for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        return run(__file__, args, argv, cases, lambda case: measure(args, Path(folder), **case))


def measure(args: argparse.Namespace, folder: Path, experiment: str, check: str, devices: list[int]) -> dict[str, Any]:
    """A run of --steps steps, of which each number of devices does an equal part."""
    config = compose(experiment, [f"fabric.accelerator={args.device}", *args.overrides])
    length, documents = config.datamodule.train_batch_len, config.datamodule.train_batch_size
    step, output = length * documents, folder / f"{check}-{devices[0]}"
    write_corpus(folder / "data/random", length, args.steps * documents)
    first = []
    for part, size in enumerate(devices, 1):
        command = [
            *launch_command(size, args.device, "launch.py"), *on_random_tokens(experiment, output, folder / "data"),
            f"strategy={args.strategy}", f"train.max_tokens={args.steps * part // len(devices) * step}",
            f"schedule.total_tokens={args.steps * step}", f"schedule.warmup_tokens={args.steps * step // 4}",
            f"log_interval={step}", "wandb.mode=disabled", *args.overrides,
        ]  # fmt: skip
        # NCCL chooses an algorithm by message, topology and version, and each adds in another order.
        first.append(follow(command, Path(f"{output}.txt"), args.time_limit, {"NCCL_ALGO": "Ring"}))
    losses = [line["train/loss"] for line in read_metrics(output / "metrics/jsonlines/train.jsonl")]
    row: dict[str, Any] = {"first_step_seconds": first, "losses": losses}
    if check == "world_sizes":
        if not (folder / f"straight-{devices[0]}").exists():
            measure(args, folder, experiment, "straight", devices[:1])
        straight = read_metrics(folder / f"straight-{devices[0]}/metrics/jsonlines/train.jsonl")
        pairs = zip(losses, straight, strict=True)
        row["largest_difference"] = max(abs(ours - line["train/loss"]) for ours, line in pairs)
    return row


if __name__ == "__main__":
    sys.exit(run_main(main))
