#!/usr/bin/env python
"""Measures the cost of comparing ranks (strategy.compare_steps): digests of all weights and moments against a step.

    python benchmarks/corruption.py                                             # FoX (Pro) 760M on one GPU
    python benchmarks/corruption.py --experiment longcrawl64/forgetting_transformer/pro_125m_2b --steps 50
    python benchmarks/corruption.py --experiment demo/fox_pro --device cpu --seq-len 128

Takes real steps on random tokens, one sequence each, which is the shortest step that a run can have. `share` is the
largest part of a run's time that digests can take at the default of compare_steps. It does not include gathering the
digests of the ranks, a few kilobytes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import compose, parse, parser, run, run_main

from forgetting_transformer.command_line import count
from training import at_rest, build


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--experiment", metavar="NAME", default="longcrawl64/forgetting_transformer/pro_760m_48b")
    made.add_argument("--seq-len", type=count, default=4096)
    made.add_argument("--vocab-size", type=count, default=50257)
    made.add_argument("--steps", type=count, default=20, help="timed, with and without digests after each")
    return parse(made, argv)


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
    """Medians in seconds of a step alone, and of the digests after it."""
    from forgetting_transformer.training.faults.corruption import digests, weights_and_moments

    steps = Steps(args)

    def digest() -> None:
        digests(weights_and_moments(steps.model, steps.optimizer).values())

    for _ in range(3):
        steps.timed(steps.take, digest)
    # In turn, so that a clock that changes its speed changes both.
    pairs = [(steps.timed(steps.take), steps.timed(steps.take, digest)) for _ in range(args.steps)]
    alone, together = (statistics.median(times) for times in zip(*pairs, strict=True))
    every = steps.config.strategy.compare_steps
    return {
        "parameters": sum(parameter.numel() for parameter in steps.model.parameters()),
        "tensors": len(weights_and_moments(steps.model, steps.optimizer)),
        "step_seconds": alone,
        "digest_seconds": together - alone,
        "compare_steps": every,
        "share": (together - alone) / (every * alone),
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
