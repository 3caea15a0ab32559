#!/usr/bin/env python
"""Measures training speed and memory of whole models with the configs of configs/experiment and the training code.

    python benchmarks/training.py                                    # one model per architecture, defaults below
    python benchmarks/training.py --experiments mamba2/760m_16b transformer/llama_760m_16b --out results.json
    python benchmarks/training.py --experiments forgetting_transformer/pro_760m_16b \\
        "forgetting_transformer/pro_760m_16b model.config.log_pruning_tolerance=null"    # with an override
    python benchmarks/training.py --experiments output/run           # a run: config, trained weights, held-out tokens

A step is forward and backward of one micro-batch of random tokens on one device. --optimizer_step adds gradient
clipping and AdamW at a learning rate of 0, which costs the same and changes no weight. Each row is measured in a
separate process, with activation checkpointing and without. Running out of memory or of time is a result, not an
error.

Defaults on a GPU: the 760M models, 16,384 tokens, bf16 autocast. On a CPU, to try it: demo models, 512 tokens, fp32.

tokens_per_second   tokens of a step / median seconds of --steps steps, after --warmup_steps. On a GPU the host queues
                    them without waiting, as train.py does, and seconds are those between marks in the GPU's queue
mfu                 model FLOPs per second / peak dense FLOP/s of the GPU at this precision. Model FLOPs count what the
                    model needs: causal attention has T(T+1)/2 pairs, backward is twice forward, recomputation is not
                    counted, and pruned attention counts as full. None if the peak is unknown; --peak_flops gives it
peak_memory_bytes   of PyTorch's allocator during the measured steps: weights, gradients, activations, with
                    --optimizer_step AdamW's moments
first_step_seconds  of the first step, which compiles and tunes kernels, with what earlier runs left in the disk caches

Weights are those of initialisation, where forget gates are near 1/2 and pruning skips most, unless --experiments names
the output_dir of a run.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, compose, is_run, parse, parser, run, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, large

ON_GPU = {
    "experiments": [
        "forgetting_transformer/pro_760m_16b",
        "forgetting_transformer/llama_760m_16b",
        "transformer/pro_760m_16b",
        "transformer/llama_760m_16b",
        "transformer_swa/760m_16b",
        "mamba2/760m_16b",
        "hgrn2/760m_16b",
        "delta_net/760m_16b",
        "samba/760m_16b",
    ],
    "seq_len": 16384,
    "vocab_size": 50257,
    "precision": "bf16-mixed",
}
ON_CPU = {
    "experiments": ["demo/fox_pro", "demo/transformer_llama"],
    "seq_len": 512,
    "vocab_size": 4096,
    "precision": "32-true",
}
CHECKPOINTING = {"both": (True, False), "on": (True,), "off": (False,)}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--experiments",
        nargs="+",
        metavar="NAME",
        help='files of configs/experiment/longcrawl64, or demo/NAME, or runs; overrides may follow: "NAME KEY=VALUE"',
    )
    made.add_argument("--seq_len", type=count, help="tokens of a sequence")
    made.add_argument("--batch_size", type=count, default=1, help="sequences of a micro-batch (default 1)")
    made.add_argument("--vocab_size", type=count, help="tokens of the vocabulary; GPT-2's 50,257 on a GPU")
    made.add_argument("--checkpointing", choices=CHECKPOINTING, default="both", help="activation checkpointing")
    made.add_argument("--steps", type=count, default=5, help="measured steps (default 5)")
    made.add_argument("--warmup_steps", type=count, default=2, help="steps before them (default 2)")
    made.add_argument("--optimizer_step", action="store_true", help="a step includes clipping and AdamW")
    made.add_argument("--precision", choices=("bf16-mixed", "32-true"))
    made.add_argument("--peak_flops", type=large, help="peak FLOP/s of the device, for MFU")
    made.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    command_line.add_plugins(made)
    args = parse(made, argv, ON_GPU, ON_CPU)
    del args.plugins  # which are imported, and change nothing that is measured
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        {"experiment": experiment, "checkpointing": checkpointing}
        for experiment in args.experiments
        for checkpointing in CHECKPOINTING[args.checkpointing]
    ]
    return run(__file__, args, argv, cases, lambda case: measure(args, case), lambda _: 1)


def measure(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Builds the model as a training run would, and times its steps."""
    import torch

    from forgetting_transformer.training.execution import choice as execution
    from forgetting_transformer.training.execution.choice import choose_on_all_ranks
    from forgetting_transformer.training.execution.compilation import Compilation
    from forgetting_transformer.training.execution.graphs import Graphs
    from forgetting_transformer.training.execution.graphs import choose as choose_graphs

    device = torch.device(args.device)
    if is_run(case["experiment"]):
        model, config, tokens_BT = read_run(args, case["experiment"], case["checkpointing"])
    else:
        config = compose(case["experiment"], overrides(args, case["checkpointing"]))
        model = build(config, args.vocab_size)
        tokens_BT = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1))
    optimizer = at_rest(model, config, device)
    tokens_BT = tokens_BT.to(device)
    inputs_BT, labels_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16-mixed")

    dtype = torch.bfloat16 if args.precision == "bf16-mixed" else torch.float32
    chosen = choose_on_all_ranks(model, dtype, device, [inputs_BT.shape[1]])
    compiles = execution.choose(config.train.compile, device, None, chosen).compile
    flops_per_token = model.config.flops_per_token(args.seq_len)
    flops_per_block = flops_per_token * inputs_BT.numel() / model.config.num_hidden_layers
    graphs = Graphs(choose_graphs(config, device, 1, compiles, flops_per_block), model.parameters())
    if compiles:
        Compilation(config, device).compile(model)

    def step() -> torch.Tensor:
        with graphs.micro_batch(last=args.optimizer_step):
            with autocast:
                loss = model(input_ids=inputs_BT, labels=labels_BT).loss.mean()
            loss.backward()
        # Without an optimizer step gradients add up, as they do over the micro-batches of a training step.
        if args.optimizer_step:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    times = measure_steps(args, step, inputs_BT.numel(), flops_per_token, device, graphs=graphs.on)
    return {
        "trained": is_run(case["experiment"]),
        "compiled": model._is_compiled,
        "cuda_graphs": graphs.on,
        "pruned": getattr(model.config, "log_pruning_tolerance", None) is not None,
        "backends": {op: backend.text for op, backend in chosen.items()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **times,
    }


def build(config: Any, vocabulary: int, **options: Any) -> Any:
    """The model of an experiment with another vocabulary, whose first token is BOS and EOS."""
    from forgetting_transformer.training import setup

    data: Any = SimpleNamespace(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0)
    return setup.build_model(config, data, **options)


def at_rest(model: Any, config: Any, device: Any) -> Any:
    """The model's optimizer, whose steps change no weight; moves the model to the device.

    All steps have the same batch, which a model learns by heart, and then its gates change.
    """
    from forgetting_transformer.training.optimization.building import build_optimizer, undecayed_parameters

    undecayed = undecayed_parameters(model, config.train)
    optimizer = build_optimizer(model.to(device).train(), undecayed, config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def measure_steps(
    args: argparse.Namespace,
    step: Callable[[], Any],
    tokens: int,
    flops_per_token: float,
    device: Any,
    graphs: bool = False,
) -> dict[str, Any]:
    """Times of `step`, which returns its loss, after the warm-up: the part of a row that every model has.

    Args:
        graphs: CUDA graphs are replayed. PyTorch counts their memory while they are recorded, in the first steps.

    Raises:
        ArithmeticError: a loss is not finite.
    """
    import torch

    from forgetting_transformer.training.execution import hardware

    started = time.perf_counter()
    losses = [step().item()]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_step = time.perf_counter() - started
    for _ in range(args.warmup_steps - 1):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if not graphs:
            torch.cuda.reset_peak_memory_stats(device)
    seconds = time_steps(step, args.steps, device, losses)
    for loss in losses:
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")

    rate = tokens / statistics.median(seconds)
    peak = args.peak_flops or hardware.peak_flops(device, args.precision)
    return {
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_token,
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "first_step_seconds": first_step,
    }


def time_steps(step: Callable[[], Any], count: int, device: Any, losses: list[float]) -> list[float]:
    """Seconds of each of `count` steps, one after another without waiting, as in training; adds to losses."""
    import torch

    if device.type != "cuda":
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            losses.append(step().item())
            seconds.append(time.perf_counter() - started)
        return seconds
    marks, found = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)], []
    marks[0].record()
    for mark in marks[1:]:
        found.append(step())
        mark.record()
    torch.cuda.synchronize(device)
    losses.extend(loss.item() for loss in found)
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def read_run(args: argparse.Namespace, output_dir: str, checkpointing: bool) -> tuple[Any, Any, Any]:
    """A trained model as its run trains it, the run's config, and held-out tokens (batch_size, seq_len + 1).

    --overrides change both; what does not fit the trained weights is an error.
    """
    import numpy as np
    import torch
    from omegaconf import OmegaConf

    from forgetting_transformer.evaluation.held_out import find_heldout, open_heldout
    from forgetting_transformer.evaluation.models import load_model
    from forgetting_transformer.training import setup
    from forgetting_transformer.training.config import ConfigError
    from forgetting_transformer.training.config.parsing import parse

    stored = OmegaConf.load(Path(output_dir) / "config.yaml")
    # A run's config.yaml is resolved: it has values, and no groups to choose from.
    for override in overrides(args, checkpointing):
        key, equals, _ = override.partition("=")
        if not equals or not key.replace(".", "").isidentifier() or OmegaConf.is_dict(OmegaConf.select(stored, key)):
            raise ConfigError(f"--overrides {override}: for a run, give KEY=VALUE with a key of its config.yaml")
    config = parse(OmegaConf.merge(stored, OmegaConf.from_dotlist(overrides(args, checkpointing))))
    trained = load_model(output_dir).model
    model = setup.build_model(config, trained.config)  # its vocabulary, BOS and EOS
    model.load_state_dict(trained.state_dict())
    folder = find_heldout(Path(config.data_dir) / config.datamodule.dataset)
    data = open_heldout(folder, args.seq_len, args.batch_size * args.seq_len)
    labels_BT = torch.from_numpy(np.concatenate([data.read(i) for i in range(args.batch_size)]).astype(np.int64))
    first_B1 = torch.full((args.batch_size, 1), data.bos_token_id)
    return model, config, torch.cat([first_B1, labels_BT], dim=1)


def overrides(args: argparse.Namespace, checkpointing: bool) -> list[str]:
    """Overrides of a row. CUDA graphs exclude activation checkpointing, so no config may have both first."""
    return [f"train.gradient_checkpointing={str(checkpointing).lower()}", *args.overrides]


if __name__ == "__main__":
    sys.exit(run_main(main))
