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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import parse, parser, run, run_main
from checkpoint import Steps, add_step

from forgetting_transformer.command_line import count


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    add_step(made)
    made.add_argument("--steps", type=count, default=20, help="timed, with and without digests after each")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run(__file__, args, argv, [{"experiment": args.experiment}], lambda _: measure(args))


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
