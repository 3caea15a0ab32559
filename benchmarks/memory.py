#!/usr/bin/env python
"""Measures how much memory long sequences take in training, with activation checkpointing, on one GPU.

    python benchmarks/memory.py --seq_len 131072 262144 524288 --out memory.json
    python benchmarks/memory.py --seq_len 524288 --inputs host gpu          # block inputs on the host, and on the GPU

A step is forward and backward of one sequence of random tokens under bf16 autocast, gradient clipping and AdamW, by
default of 760M FoX (Pro) as train.py runs it: compiled, pruned, with the loss in slices. Each row of a Markdown table
is printed as soon as it is measured, and --out saves all rows as JSON (record.py); the same command measures missing
rows. Running out of memory is a result, not an error.

The learning rate is 0: all rows of a length compute the same numbers, and losses and norms of gradients show that they
do. Gates are those of initialisation, where pruning skips most; --gate_bias 6 makes gates like trained ones.

fixed        weights, moments and what else lies there between steps; gradients do not
forward end  memory when the forward pass is done, less fixed, per token: what waits for the backward pass
peak         of PyTorch's allocator in a step; per token: less fixed and gradients
reserved     what the allocator took from the GPU for it
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, run_main

from forgetting_transformer.command_line import count, number
from forgetting_transformer.ranges import Range
from training import CONFIGS, compose, experiment_file

HEADER = """
| tokens | block inputs | fixed GB | forward end bytes/token | peak GB | peak bytes/token | reserved GB | seconds |
|---:|---|---:|---:|---:|---:|---:|---:|"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="forgetting_transformer/pro_760m_16b", help="default %(default)s")
    parser.add_argument("--seq_len", type=count, nargs="+", required=True, help="tokens of a sequence")
    parser.add_argument("--inputs", nargs="+", choices=("gpu", "host"), default=["gpu"], help="where block inputs wait")
    parser.add_argument("--steps", type=count, default=2, help="measured steps, after one that compiles (default 2)")
    parser.add_argument("--vocab_size", type=count, default=50257)
    parser.add_argument(
        "--gate_bias", type=number(Range(-1e9, 1e9)), default=0.0, help="added to the biases of forget gates"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add_options(parser)
    args = parser.parse_args(argv)
    if not experiment_file(args.experiment).is_file():
        folder = CONFIGS / "experiment"
        known = sorted(str(f.relative_to(folder).with_suffix("")) for f in folder.glob("**/*.yaml"))
        parser.error(f"there is no experiment {args.experiment!r}; choose from {', '.join(known)}")
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("memory", args, argv, args.device)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import torch

    model, optimizer, config = build(args)
    print(HEADER, flush=True)
    for length in args.seq_len:
        for inputs in args.inputs:
            row: dict[str, Any] = {"seq_len": length, "inputs": inputs}
            if (known := record.find(row)) is None:
                try:
                    row |= {"status": "ok", **measure(args, model, optimizer, config, length, inputs == "host")}
                except torch.OutOfMemoryError as error:
                    row |= {"status": "out of memory", "said": " ".join(str(error).split())[:300]}
                    error.__traceback__ = None  # its frames hold the tensors
                optimizer.zero_grad()
                known = record.add(row)
            print(describe(known), flush=True)
    return 0


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    import torch

    from forgetting_transformer.training import setup
    from forgetting_transformer.training.compilation import Compilation
    from forgetting_transformer.training.parameter_groups import undecayed_parameters

    device = torch.device(args.device)
    config = compose(args.experiment, ["train.gradient_checkpointing=true", "optimizer.lr=0.0", *args.overrides])
    config.train.compile = args.compile
    model = setup.build_model(config, SimpleNamespace(vocab_size=args.vocab_size, bos_token_id=0, eos_token_id=0))
    undecayed = undecayed_parameters(model, config.train)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if args.gate_bias and name.endswith("fgate_proj.bias"):
                parameter += args.gate_bias
    model = model.to(device).train()
    optimizer = setup.build_optimizer(model, undecayed, config.optimizer)
    if args.compile:
        Compilation(config, args.vocab_size, device).compile(model)
    return model, optimizer, config


def measure(args: argparse.Namespace, model: Any, optimizer: Any, config: Any, length: int, on_host: bool) -> dict:
    """One compiling step and args.steps more, with peaks and seconds of those."""
    import torch

    from forgetting_transformer.model.decoder import DecoderBlock

    device, on_gpu = torch.device(args.device), args.device == "cuda"
    for block in model.modules():
        if isinstance(block, DecoderBlock):
            block.inputs_on_host = on_host
    tokens = torch.randint(args.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    inputs_BT, labels_BT = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def allocated() -> int:
        return torch.cuda.memory_allocated(device) if on_gpu else 0

    def step() -> tuple[float, float, int]:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.fabric.precision == "bf16-mixed"):
            loss = model(input_ids=inputs_BT, labels=labels_BT).loss.mean()
        waiting = allocated()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item(), waiting

    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    fixed, seconds, found = allocated(), [], []
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(args.steps):
        began = time.perf_counter()
        found.append(step())
        seconds.append(time.perf_counter() - began)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return {
        "fixed_bytes": fixed,
        "gradient_bytes": weights,
        "waiting_bytes": max(waiting for *_, waiting in found) - fixed,
        "peak_memory_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else 0,
        "step_seconds": seconds,
        "first_step_seconds": first,
        "losses": [loss for loss, _, _ in found],
        "gradient_norms": [norm for _, norm, _ in found],
    }


def describe(row: dict[str, Any]) -> str:
    start = f"| {row['seq_len']:,} | {row['inputs']} |"
    if row["status"] != "ok":
        return f"{start} {row['status']} | | | | | |"
    length, fixed = row["seq_len"], row["fixed_bytes"]
    peak = row["peak_memory_bytes"]
    cells = (
        f"{fixed / 1e9:.1f}",
        f"{row['waiting_bytes'] / length:,.0f}",
        f"{peak / 1e9:.1f}",
        f"{(peak - fixed - row['gradient_bytes']) / length:,.0f}",
        f"{row['reserved_bytes'] / 1e9:.1f}",
        f"{statistics.median(row['step_seconds']):.2f}",
    )
    return f"{start} {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(run_main(main))
