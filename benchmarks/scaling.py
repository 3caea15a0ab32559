#!/usr/bin/env python
"""Measures steps of training on several GPUs of this machine under each strategy, beside one GPU alone.

    python benchmarks/scaling.py                                     # FoX (Pro) 760M on two GPUs
    python benchmarks/scaling.py --experiments forgetting_transformer/pro_125m_2b --batch_size 4 --micro_batches 4
    python benchmarks/scaling.py --devices 4 --micro_batches 1 8 --out results.json
    python benchmarks/scaling.py --devices 8 --cases one context --seq_len 131072 --micro_batches 1 --checkpointing
    python benchmarks/scaling.py --device cpu --experiments demo/fox_pro --seq_len 256 --steps 2      # to try it

A step is forward and backward of each micro-batch (--batch_size sequences of random tokens on every GPU), the reduction
of gradients, clipping and AdamW, from random weights. Every step has fresh tokens, because a model learns by heart what
is repeated, and its forget gates change. Steps follow each other without waiting, as in training. The paper's
experiments take half a million tokens a step: on two GPUs 16 micro-batches of one sequence. Each row is measured by
separate processes.

one           one GPU alone
one_graphs    the same with train.cuda_graphs=true; all cases without _graphs have train.cuda_graphs=false
ddp           strategy=ddp
ddp_graphs    strategy=ddp train.cuda_graphs=true
fsdp          strategy=fsdp strategy.keep_gathered=false
fsdp_kept     strategy=fsdp strategy.keep_gathered=true
context       strategy=ddp strategy.context=N: all GPUs share each sequence

tokens_per_second   of one GPU: tokens of its micro-batches / mean seconds of --steps steps
mfu                 of one GPU: model FLOPs per second / peak dense FLOP/s, counted as in benchmarks/training.py
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, compose, parse, parser, run, run_main

from forgetting_transformer.command_line import count
from training import build, time_steps

CASES = ("one", "one_graphs", "fsdp", "fsdp_kept", "ddp", "ddp_graphs", "context")
VOCABULARY = 50257
#: Steps before the first measured one, the one that compiles included.
WARMUP = 3


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--experiments", nargs="+", default=["forgetting_transformer/pro_760m_16b"], metavar="NAME")
    made.add_argument("--cases", nargs="+", choices=CASES, default=["one", "fsdp_kept", "ddp"])
    made.add_argument("--devices", type=count, default=2)
    made.add_argument("--seq_len", type=count, default=16384)
    made.add_argument("--batch_size", type=count, default=1, help="sequences of a micro-batch (default 1)")
    made.add_argument("--micro_batches", type=count, nargs="+", default=[16], help="of a step (default 16)")
    made.add_argument("--steps", type=count, default=8, help="measured steps (default 8)")
    made.add_argument("--checkpointing", action="store_true", help="with activation checkpointing")
    made.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        {"experiment": experiment, "case": case, "micro_batches": count}
        for experiment in args.experiments
        for case in args.cases
        for count in args.micro_batches
    ]
    ranks = {case: 1 if case.startswith("one") else args.devices for case in CASES}
    return run(__file__, args, argv, cases, lambda case: measure(args, case), lambda case: ranks[case["case"]])


def measure(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The values of a row, as its rank 0 has them."""
    import torch

    from forgetting_transformer.training.execution import hardware

    rank, has_graphs = int(os.environ.get("RANK", 0)), case["case"].endswith("_graphs")
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shares = args.devices if case["case"] == "context" else 1
    draws = torch.Generator(device).manual_seed(rank // shares)
    step, model, precision = prepare(args, case, device, draws)
    for _ in range(WARMUP):
        loss = step()
    if device.type == "cuda":
        if not has_graphs:
            torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    losses = [loss.item()]
    seconds = time_steps(step, args.steps, device, losses)
    rate = case["micro_batches"] * args.batch_size * args.seq_len / shares / statistics.mean(seconds)
    peak = hardware.peak_flops(device, precision)
    # PyTorch counts memory of graphs while they are recorded, and no longer when later micro-batches record theirs.
    is_counted = device.type == "cuda" and not (has_graphs and case["micro_batches"] > 1)
    return {
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * model.config.flops_per_token(args.seq_len) / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if is_counted else None,
        "loss": losses[-1],
    }


def prepare(args: argparse.Namespace, case: Case, device: Any, draws: Any) -> tuple[Callable[[], Any], Any, str]:
    """A step, the model and the precision as a run would have them under the case's strategy.

    Args:
        draws: a generator on the device; each step takes its tokens from it.
    """
    import torch
    from lightning.fabric import Fabric

    from forgetting_transformer.training.execution.compilation import Compilation
    from forgetting_transformer.training.execution.graphs import Graphs
    from forgetting_transformer.training.optimization.building import build_optimizer, undecayed_parameters
    from forgetting_transformer.training.parallel import launch
    from forgetting_transformer.training.parallel.ranks import Ranks

    kind, count = case["case"], case["micro_batches"]
    alone, context_size = kind.startswith("one"), args.devices if kind == "context" else 1
    config = compose(case["experiment"], [f"fabric.accelerator={args.device}", *args.overrides])
    config.train.gradient_checkpointing = args.checkpointing
    config.strategy.name = "auto" if alone else "ddp" if context_size > 1 else kind.partition("_")[0]
    config.strategy.keep_gathered = kind == "fsdp_kept"
    world = 1 if alone else args.devices
    fabric = Fabric(
        accelerator=args.device,
        devices=world,
        strategy=launch._strategy(config, world),
        precision=config.fabric.precision,
    )
    model = build(config, VOCABULARY).train()
    undecayed = undecayed_parameters(model, config.train)
    wrapped = fabric.setup_module(model)
    model = wrapped.module
    optimizer = build_optimizer(model, undecayed, config.optimizer)
    compiles = config.train.compile is True or (config.train.compile == "auto" and device.type == "cuda")
    graphs = Graphs(kind.endswith("_graphs"), model.parameters(), reduced=not alone)
    if compiles:
        Compilation(config, device, fabric.global_rank, world).compile(model)
    ranks = Ranks(fabric.global_rank, world, context_size, timedelta(seconds=args.time_limit))
    shape = (count, args.batch_size, args.seq_len + 1)

    def step() -> Any:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for k, tokens in enumerate(torch.randint(VOCABULARY, shape, generator=draws, device=device)):
            whole = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            last = k == count - 1
            with fabric.no_backward_sync(wrapped, enabled=not last), ranks.in_context(), graphs.micro_batch(last):
                loss = wrapped(**ranks.part_of(whole)).loss.mean() / count
                fabric.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        return total

    return step, model, config.fabric.precision


if __name__ == "__main__":
    sys.exit(run_main(main))
