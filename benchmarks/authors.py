#!/usr/bin/env python
"""Compares the training speed of FoX (Pro) with that of the paper authors' public code, each mode with the same mode.

    git clone https://github.com/zhixuan-lin/forgetting-transformer .authors
    python benchmarks/authors.py --authors .authors                         # all, defaults below
    python benchmarks/authors.py --authors .authors --modes pruned --out results.json

A step is forward and backward of one micro-batch of random tokens on one device, without an optimizer. The modes are
with and without pruning, each with and without activation checkpointing. Weights are fp32 and those of initialisation,
where pruning skips most; autocast is bf16 on a GPU. Each code runs as its own train.py runs it. Each row has a separate
process, and the two rows of a mode follow each other. A row is printed as soon as it is measured, and --out saves it as
JSON (record.py). The same command measures missing rows.

Of their code, only the model of FoX is loaded. It needs the packages einops and pytest, and block pointers, which
Triton 3.6 has and Triton 3.9 lacks.

Defaults on a GPU: pro_760m_16b and 16,384 tokens. On a CPU, to try it: the demo, 512 tokens; their kernels need a GPU.
Columns: benchmarks/training.py; MFU counts the FLOPs of our model for both.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, run_main

import training
from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, positive

CODES = {"authors": "paper authors", "ours": "ours"}
PRUNED = {"both": (True, False), "pruned": (True,), "unpruned": (False,)}
#: Their model of FoX, below the folder of --authors, and the op that it imports.
MODEL = "src/forgetting_transformer/model/forgetting_transformer"
OP = "src/forgetting_transformer/ops/forgetting_attention.py"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--authors", type=command_line.path, default=Path(".authors"), help="their checkout (default %(default)s)"
    )
    parser.add_argument("--authors_commit", help="its commit, where the checkout has no .git")
    parser.add_argument("--experiment", help="of FoX (Pro), as in benchmarks/training.py")
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES), help="whose model (default both)")
    parser.add_argument("--modes", choices=PRUNED, default="both", help="with pruning or without (default both)")
    parser.add_argument("--checkpointing", choices=training.CHECKPOINTING, default="both")
    parser.add_argument("--seq_len", type=count, help="tokens of the one sequence")
    parser.add_argument("--steps", type=count, default=10, help="measured steps (default 10)")
    parser.add_argument(
        "--warmup_steps", type=count, default=4, help="steps before them, the first included (default 4)"
    )
    parser.add_argument("--time_limit", type=positive, default=600, help="seconds that a row may take (default 600)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add_options(parser)
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.authors_commit = args.authors_commit or commit(args.authors)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = args.device == "cuda"
    args.experiment = args.experiment or ("forgetting_transformer/pro_760m_16b" if on_gpu else "demo/fox_pro")
    args.seq_len = args.seq_len or (training.ON_GPU if on_gpu else training.ON_CPU)["seq_len"]
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
    if args.worker:
        case, file = json.loads(args.worker[0]), Path(args.worker[1])
        row = case | training.attempt(functools.partial(measure, args, case))
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
        return 0
    if not (args.authors / OP).is_file():
        command = f"git clone https://github.com/zhixuan-lin/forgetting-transformer {args.authors}"
        print(f"error: --authors {args.authors} has no {OP}; make it with {command}", file=sys.stderr)
        return 2
    try:
        record = Record("authors", args, argv, args.device, ("time_limit", "worker"), packages=("einops",))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    modes = itertools.product(PRUNED[args.modes], reversed(training.CHECKPOINTING[args.checkpointing]), args.codes)
    for pruned, checkpointing, code in modes:
        case = {"experiment": args.experiment, "pruned": pruned, "checkpointing": checkpointing, "code": code}
        row = record.find(case)
        if row is None:
            given = list(sys.argv[1:] if argv is None else argv)
            command = [sys.executable, __file__, *given, "--device", args.device, "--worker", json.dumps(case)]
            [row] = training.rows_of_process(command, [case], args.time_limit)
            record.add(row)
        print(describe_row(row), flush=True)
    print(
        f"\n{device_name(record.environment)}; a step is forward and backward. MFU: causal-exact FLOPs of our model, "
        f"pruned attention as if full, over dense peak. The authors' code: {args.authors_commit or 'commit unknown'}."
    )
    return 1 if record.failed else 0


# The worker: measures one row.


def measure(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    chosen = ["--experiments", case["experiment"], "--device", args.device]
    chosen += ["--steps", str(args.steps), "--warmup_steps", str(args.warmup_steps), "--seq_len", str(args.seq_len)]
    if not case["pruned"]:
        chosen += ["--overrides", "model.config.log_pruning_tolerance=null"]
    options = training.parse_args(chosen)
    if case["code"] == "ours":
        return training.measure(options, case["experiment"], case["checkpointing"], cold=True)
    return measure_theirs(options, case, args.authors)


def measure_theirs(options: argparse.Namespace, case: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """Steps of the authors' model, which is used as their train.py uses it."""
    import torch

    from forgetting_transformer.training import setup

    device = torch.device(options.device)
    config = training.compose(case["experiment"], training.overrides(options, case["checkpointing"]))
    with torch.device("meta"):
        ours = setup.build_model(
            config, SimpleNamespace(vocab_size=options.vocab_size, bos_token_id=0, eos_token_id=0)
        ).config
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
    times = training.measure_steps(options, step, inputs_BT.numel(), flops_per_token, device, cold=True)
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
    ours = sys.modules.get(op)
    sys.modules[op] = theirs
    try:
        return importlib.import_module("authors_fox.modeling_forgetting_transformer")
    finally:
        if ours is None:
            del sys.modules[op]
        else:
            sys.modules[op] = ours


# The table.

HEADER = "| pruned | checkpointing | code | ms per step | tokens/s | MFU | memory GB |\n|---|---|---|---|---|---|---|"


def describe_row(row: dict[str, Any]) -> str:
    cells = ["yes" if row[key] else "no" for key in ("pruned", "checkpointing")] + [CODES[row["code"]]]
    if row["status"] == "ok":
        cells += training.describe_row(row).strip("| ").split(" | ")[2:6]
    else:
        cells += [row["status"].replace("|", "/"), "", "", ""]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(run_main(main))
