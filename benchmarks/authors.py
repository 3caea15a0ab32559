#!/usr/bin/env python
"""Compares the training speed of FoX (Pro) with that of the paper authors' public code, each mode with the same mode.

    git clone https://github.com/zhixuan-lin/forgetting-transformer .authors
    python benchmarks/authors.py --authors .authors --out results.json

A step is forward and backward of one micro-batch of random tokens on one device, without an optimizer. The modes are
with and without pruning, each with and without activation checkpointing. Weights are fp32 and those of initialisation,
where pruning skips most; autocast is bf16 on a GPU. Each code runs as its own train.py runs it. Each row has a separate
process, and the two rows of a mode follow each other.

Of their code, only the model of FoX is loaded. It needs the packages einops and pytest, and block pointers, which
Triton 3.6 has and Triton 3.9 lacks.

Defaults on a GPU: pro_760m_16b and 16,384 tokens. On a CPU, to try it: the demo, 512 tokens; their kernels need a GPU.
Values: benchmarks/training.py; `mfu` counts the FLOPs of our model for both.
"""

import argparse
import importlib
import importlib.util
import inspect
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, compose, parse, parser, run, run_main

import training
from forgetting_transformer import command_line
from forgetting_transformer.command_line import CommandError, count

#: Their model of FoX, below the folder of --authors, and the op that it imports.
MODEL = "src/forgetting_transformer/model/forgetting_transformer"
OP = "src/forgetting_transformer/ops/forgetting_attention.py"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--authors", type=command_line.path, default=Path(".authors"), help="their checkout (default %(default)s)"
    )
    made.add_argument("--authors_commit", help="its commit, where the checkout has no .git")
    made.add_argument("--experiment", metavar="NAME", help="of FoX (Pro), as in benchmarks/training.py")
    made.add_argument("--seq_len", type=count, help="tokens of the one sequence")
    made.add_argument("--steps", type=count, default=10, help="measured steps (default 10)")
    made.add_argument("--warmup_steps", type=count, default=4, help="steps before them (default 4)")
    on_gpu = {"experiment": "forgetting_transformer/pro_760m_16b", "seq_len": training.ON_GPU["seq_len"]}
    args = parse(made, argv, on_gpu, {"experiment": "demo/fox_pro", "seq_len": training.ON_CPU["seq_len"]})
    args.authors_commit = args.authors_commit or commit(args.authors)
    return args


def commit(folder: Path) -> str | None:
    """The commit of a checkout; None where the folder itself has no .git, as a copy of its files has none."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "-c", "safe.directory=*", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if not args.dry_run and not (args.authors / OP).is_file():
        clone = f"git clone https://github.com/zhixuan-lin/forgetting-transformer {args.authors}"
        raise CommandError(f"--authors {args.authors} has no {OP}; make it with {clone}")
    cases = [
        {"experiment": args.experiment, "pruned": pruned, "checkpointing": checkpointing, "code": code}
        for pruned in (True, False)
        for checkpointing in (False, True)
        for code in ("authors", "ours")
    ]
    return run(__file__, args, argv, cases, lambda case: measure(args, case), lambda _: 1, packages=["einops"])


def measure(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    chosen = ["--experiments", case["experiment"], "--device", args.device]
    chosen += ["--steps", str(args.steps), "--warmup_steps", str(args.warmup_steps), "--seq_len", str(args.seq_len)]
    if not case["pruned"]:
        chosen += ["--overrides", "model.config.log_pruning_tolerance=null"]
    options = training.parse_args(chosen)
    return training.measure(options, case) if case["code"] == "ours" else measure_theirs(options, case, args.authors)


def measure_theirs(options: argparse.Namespace, case: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """Steps of the authors' model, which is used as their train.py uses it."""
    import torch

    device = torch.device(options.device)
    config = compose(case["experiment"], training.overrides(options, case["checkpointing"]))
    with torch.device("meta"):
        ours = training.build(config, options.vocab_size).config
    code = load(checkout)
    fields = [name for name in inspect.signature(code.ForgettingTransformerConfig).parameters if hasattr(ours, name)]
    with device:
        model = code.ForgettingTransformerForCausalLM(
            code.ForgettingTransformerConfig(**{name: getattr(ours, name) for name in fields})
        )
    model.train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens_BT = torch.randint(options.vocab_size, (options.batch_size, options.seq_len + 1), device=device)
    inputs_BT, labels_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16-mixed")

    def step() -> torch.Tensor:
        with autocast:
            loss = model(input_ids=inputs_BT, labels=labels_BT, return_dict=True).loss.mean()
        loss.backward()
        return loss.detach()

    flops_per_token = ours.flops_per_token(options.seq_len)
    times = training.measure_steps(options, step, inputs_BT.numel(), flops_per_token, device)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), **times}


def load(checkout: Path) -> Any:
    """The module of the authors' FoX, beside our package of the same name.

    Its modules import each other relatively, but the op by its full name, which leads to theirs while they are loaded.
    """
    op = "forgetting_transformer.ops.forgetting_attention"
    spec = importlib.util.spec_from_file_location("authors_op", checkout / OP)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    package = types.ModuleType("authors_fox")  # without their __init__, which registers names that ours has registered
    package.__path__ = [str(checkout / MODEL)]
    sys.modules[package.__name__] = package
    ours = importlib.import_module(op)
    sys.modules[op] = theirs
    try:
        return importlib.import_module("authors_fox.modeling_forgetting_transformer")
    finally:
        sys.modules[op] = ours


if __name__ == "__main__":
    sys.exit(run_main(main))
