#!/usr/bin/env python
"""Measures the cost of a checkpoint: how long training waits, and how much slower its steps are during the writing.

    python benchmarks/checkpoint.py                                   # FoX (Pro) 760M on one GPU, a temporary folder
    python benchmarks/checkpoint.py --folder /scratch/x --saves 5     # on the file system that a run would use
    python benchmarks/checkpoint.py --experiment demo/fox_pro --device cpu --seq-len 128

Takes real steps on random tokens. The row has the median step before the first save, and of each save: seconds that the
device waited, `copy_seconds` that the loop waited, `write_seconds` in the background, and the median step in between.
The first save also makes the room that all copies use. Every byte is written and flushed, so the folder needs space for
two checkpoints.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import compose, parse, parser, run, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from training import at_rest, build


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    add_step(made)
    made.add_argument("--steps", type=count, default=10, help="timed before the first save")
    made.add_argument("--saves", type=count, default=3)
    made.add_argument("--folder", type=command_line.path, help="where to write; default: a temporary folder")
    made.add_argument("--foreground", action="store_true", help="training waits for the writing")
    return parse(made, argv)


def add_step(made: argparse.ArgumentParser) -> None:
    """Options of `Steps`."""
    made.add_argument("--experiment", metavar="NAME", default="longcrawl64/forgetting_transformer/pro_760m_48b")
    made.add_argument("--seq-len", type=count, default=4096)
    made.add_argument("--vocab-size", type=count, default=50257)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run(__file__, args, argv, [{"experiment": args.experiment}], lambda _: measure(args))


class Steps:
    """A model, its optimizer and whole steps of one sequence of random tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.device, self.config = torch.device(args.device), compose(args.experiment, [])
        self.model = build(self.config, args.vocab_size)
        self.optimizer = at_rest(self.model, self.config, self.device)
        self.tokens_BT = torch.randint(args.vocab_size, (1, args.seq_len), device=self.device)

    def take(self) -> None:
        import torch

        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.fabric.precision == "bf16-mixed"):
            loss = self.model(input_ids=self.tokens_BT, labels=self.tokens_BT.roll(-1, dims=1)).loss.mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, *actions: Callable[[], object]) -> float:
        """Seconds of the actions until the device is done."""
        import torch

        began = time.perf_counter()
        for action in actions:
            action()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from forgetting_transformer.training.checkpoint import Checkpointer

    steps = Steps(args)
    model, optimizer = steps.model, steps.optimizer
    for _ in range(3):
        steps.take()
    alone = statistics.median(steps.timed(steps.take) for _ in range(args.steps))
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    saves = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpointer = Checkpointer(Path(folder), 1, 0, 1, background=not args.foreground)
        for number in range(1, args.saves + 1):
            # Until the copy is whole, as the GPU sees it: nothing launched later runs before.
            waited = steps.timed(
                lambda n=number: checkpointer.save(n, model, optimizer, {"token_count": n}, {}, permanent=False)
            )
            meanwhile, saved = [], None
            while saved is None:
                meanwhile.append(steps.timed(steps.take))
                saved = checkpointer.finished()
            if saved.error is not None:
                raise saved.error
            files = Path(folder).glob(f"step-{number:015d}/**/*")
            saves.append({
                "bytes": sum(file.stat().st_size for file in files if file.is_file()),
                "device_waits_seconds": waited,
                "copy_seconds": saved.copy_seconds,
                "write_seconds": saved.write_seconds,
                "step_seconds_meanwhile": statistics.median(meanwhile),
            })  # fmt: skip
        checkpointer.close()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_seconds": alone,
        "saves": saves,
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
