#!/usr/bin/env python
"""Measures the cost of comparing ranks (strategy.compare_steps): digests of all weights and moments against a step.

    python benchmarks/corruption.py                                             # FoX (Pro) 760M on one GPU
    python benchmarks/corruption.py --experiment longcrawl64/forgetting_transformer/pro_125m_2b --steps 50
    python benchmarks/corruption.py --experiment demo/fox_pro --device cpu --seq-len 128

Takes real steps on random tokens, one sequence each, which is the shortest step that a run can have. `share` is the
largest part of a run's time that digests can take at the default of compare_steps. It does not include gathering the
digests of the ranks, a few kilobytes. Prints one line of JSON; --out saves it (record.py).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, run_main

from forgetting_transformer.command_line import count
from training import compose, keep_weights


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="longcrawl64/forgetting_transformer/pro_760m_48b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seq-len", type=count, default=4096)
    parser.add_argument("--vocab-size", type=count, default=50257)
    parser.add_argument("--steps", type=count, default=20, help="timed, with and without digests after each")
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("corruption", args, argv, args.device)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in record.rows or [record.add(measure(args))]:
        print(json.dumps(row), flush=True)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians in seconds of a step alone, and of a step with digests after it."""
    import torch

    from forgetting_transformer.training import setup
    from forgetting_transformer.training.faults.corruption import digests, weights_and_moments
    from forgetting_transformer.training.parameter_groups import undecayed_parameters

    device = torch.device(args.device)
    config = compose(args.experiment, [])
    model = setup.build_model(config, SimpleNamespace(vocab_size=args.vocab_size, bos_token_id=0, eos_token_id=0))
    undecayed = undecayed_parameters(model, config.train)
    model = model.to(device).train()
    optimizer = setup.build_optimizer(model, undecayed, config.optimizer)
    keep_weights(optimizer)
    tokens_BT = torch.randint(args.vocab_size, (1, args.seq_len), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.fabric.precision == "bf16-mixed")

    def step() -> None:
        with autocast:
            loss = model(input_ids=tokens_BT, labels=tokens_BT.roll(-1, dims=1)).loss.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def digest() -> None:
        digests([(tensor, 0) for tensor in weights_and_moments(model, optimizer).values()])

    def timed(*actions: Callable[[], None]) -> float:
        began = time.perf_counter()
        for action in actions:
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for _ in range(3):
        timed(step, digest)
    # In turn, so that a clock that changes its speed changes both.
    pairs = [(timed(step), timed(step, digest)) for _ in range(args.steps)]
    alone, together = (statistics.median(times) for times in zip(*pairs, strict=True))
    every = config.strategy.compare_steps
    return {
        "experiment": args.experiment,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(weights_and_moments(model, optimizer)),
        "step_seconds": alone,
        "digest_seconds": together - alone,
        "compare_steps": every,
        "share": (together - alone) / (every * alone),
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
