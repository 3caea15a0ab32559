#!/usr/bin/env python
"""Measures training through train.py, started as in the README, and steps with the weights at the end of that run.

    python benchmarks/whole_run.py                               # FoX (Pro) 125M, 44M tokens, one GPU, five minutes
    python benchmarks/whole_run.py --experiments transformer/llama_125m_2b --tokens 20000000 --devices 4
    python benchmarks/whole_run.py --data_dir data --dataset longcrawl64                   # an existing corpus
    python benchmarks/whole_run.py --experiments demo/fox_pro --data_dir quickstart/data   # to try it on a CPU

Parts, each a row:

  train            `fabric run train.py` for --tokens tokens of the unchanged experiment, at its own learning rate
  step             forward, backward, clipping and AdamW of one micro-batch of held-out text, with the weights that
                   `train` left (benchmarks/training.py --optimizer_step)
  step_unpruned    the same without pruning (only models that prune)

train.py receives its folders, the tokens after which it stops, the experiment's learning-rate schedule as it would be
without that stop, and the request to log twenty times. Speeds come from the run's metrics/jsonlines/throughput.jsonl:

tokens_per_second              from the first of these lines to the last, with all that happens between two steps
tokens_per_second_at_the_end   the same over the last quarter of the steps, with the most trained weights
mfu                            the last value that train.py logged
first_loss_seconds             from the start of the command to its first logged loss; it uses kernels that earlier runs
                               left in the caches of Triton and PyTorch

Without --data_dir the corpus is made from the Python sources of this machine. If it has fewer tokens than a run, it is
read again. The rest of an unfinished run is moved to previous/ in its folder.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, compose, end_with_parent, experiment_overrides, parse, parser, run, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("train", "step", "step_unpruned")
NO_PRUNING = "model.config.log_pruning_tolerance=null"
ON_GPU = {"experiments": ["forgetting_transformer/pro_125m_2b"], "tokens": 44_000_000, "vocabulary": 50_257}
ON_CPU = {"experiments": ["demo/fox_pro"], "tokens": 65_536, "vocabulary": 4_096}
#: A loss that train.py logged, as in "8,192 of 16,384 tokens, loss 10.8459, lr 1.50e-03".
LOSS_LINE = re.compile(r"\bloss \d")
#: Steps between two log lines, at each of which the host waits for the GPU.
LINES = 20


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--experiments", nargs="+", metavar="NAME", help="as in benchmarks/training.py")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    made.add_argument("--tokens", type=count, help="of part train; default 44,000,000 on a GPU")
    made.add_argument("--devices", type=count, default=1, help="processes of train.py (default 1)")
    made.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more overrides of train.py")
    made.add_argument("--data_dir", type=command_line.path, help="of the corpus; default: one is made in --folder")
    made.add_argument("--dataset", type=command_line.name, default="python_code", help="the corpus in it")
    made.add_argument("--vocabulary", type=count, help="of the corpus that is made; default GPT-2's 50,257 on a GPU")
    made.add_argument(
        "--folder",
        type=command_line.path,
        default=Path("output/whole_run"),
        help="for corpus and runs (default output/whole_run)",
    )
    return parse(made, argv, ON_GPU, ON_CPU)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    configs = {experiment: compose(experiment, args.overrides) for experiment in args.experiments}
    cases = [
        {"experiment": experiment, "part": part}
        for experiment, config in configs.items()
        for part in args.parts
        if part != "step_unpruned" or config.model.config.get("log_pruning_tolerance") is not None
    ]
    return run(__file__, args, argv, cases, lambda case: measure(args, configs[case["experiment"]], case))


def measure(args: argparse.Namespace, config: Any, case: Case) -> dict[str, Any]:
    folder = args.folder.absolute() / case["experiment"].replace("/", "_") / "train"
    if case["part"] == "train":
        return train(case["experiment"], args, config, folder)
    return step(folder, args, config, case["part"] == "step_unpruned")


def train(experiment: str, args: argparse.Namespace, config: Any, output_dir: Path) -> dict[str, Any]:
    """A run from its start: speeds, losses, and what its log says of backends."""
    length = config.datamodule.train_batch_len
    data_dir = corpus(args, length) if args.data_dir is None else args.data_dir.absolute()
    batch = length * config.datamodule.train_batch_size
    total = -(-args.tokens // batch) * batch
    every = max(1, total // batch // LINES) * batch
    command = train_command(experiment, args, output_dir, data_dir)
    command += [f"train.max_tokens={total}", f"log_interval={every}"]
    command += [f"schedule.total_tokens={config.schedule.total_tokens}"] if config.schedule.total_tokens else []
    command += ["resume=false"] if output_dir.exists() else []
    first_loss = follow([*command, *args.overrides], output_dir.with_name("train.log"))
    return {"first_loss_seconds": first_loss, **speeds(output_dir)}


def train_command(experiment: str, args: argparse.Namespace, output_dir: Path, data_dir: Path) -> list[str]:
    """The README's command for this experiment."""
    fabric = Path(sys.executable).with_name("fabric")
    # Where packages are on PYTHONPATH only, there is no `fabric` command.
    start = [str(fabric), "run"] if fabric.exists() else [sys.executable, "-m", "lightning.fabric.cli"]
    return [
        *start, str(ROOT / "train.py"), "--devices", str(args.devices),
        *(["--accelerator", "cpu"] if args.device == "cpu" else []),
        *experiment_overrides(experiment), f"output_dir={output_dir}", f"data_dir={data_dir}",
        f"datamodule.dataset={args.dataset}", "datamodule.repeat=true", "wandb.mode=offline",
    ]  # fmt: skip


def follow(command: Sequence[str], log: Path) -> float | None:
    """Runs a command and shows its output, which `log` keeps. Returns seconds until the first loss was logged, if any.

    Raises:
        RuntimeError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    first_loss, started = None, time.perf_counter()
    environ = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        preexec_fn=end_with_parent,
    )  # fmt: skip
    try:
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout or ():
                file.write(line)
                print(line, end="", file=sys.stderr, flush=True)
                if first_loss is None and LOSS_LINE.search(line):
                    first_loss = time.perf_counter() - started
        code = process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    if code != 0:
        raise RuntimeError(f"{' '.join(command[:3])} … ended with code {code}; its output is in {log}")
    return first_loss


def speeds(output_dir: Path) -> dict[str, Any]:
    """Tokens per second and losses from the metrics of a run.

    Raises:
        RuntimeError: it has logged fewer than two speeds.
    """
    from forgetting_transformer.analysis.runs import read_metrics

    folder = output_dir / "metrics" / "jsonlines"
    logged = read_metrics(folder / "throughput.jsonl")
    if len(logged) < 2:
        raise RuntimeError(f"{output_dir} has trained too few steps for a speed; give more --tokens")

    def rate(first: dict[str, Any], last: dict[str, Any]) -> float:
        done, seconds = (
            last[f"throughput/{key}"] - first[f"throughput/{key}"] for key in ("token_count", "total_time")
        )
        return done / seconds

    losses = read_metrics(folder / "train.jsonl")
    return {
        "parameters": read_metrics(folder / "model_info.jsonl")[-1]["model_info/total_params"],
        "tokens": logged[-1]["step"],
        "steps": round(logged[-1]["throughput/batch_count"]),
        "tokens_per_second": rate(logged[0], logged[-1]),
        "tokens_per_second_at_the_end": rate(logged[-1 - max(1, len(logged) // 4)], logged[-1]),
        "mfu": logged[-1].get("throughput/mfu_total_recent"),
        "losses": [[entry["step"], round(entry["train/loss"], 4)] for entry in losses],
    }


def corpus(args: argparse.Namespace, length: int) -> Path:
    """The folder of a corpus of documents of so many tokens; makes it in `args.folder`, unless it is there."""
    data_dir = args.folder.absolute() / "data"
    paths = sysconfig.get_paths()
    command = [
        sys.executable, str(ROOT / "scripts" / "prepare_data.py"), paths["stdlib"], paths["purelib"], "--glob", "*.py",
        "--max_bytes", "120MB", "--tokenizer", f"train:{args.vocabulary}", "--doc_len", str(length),
        "--heldout_docs", "32", "--out", str(data_dir / args.dataset),
    ]  # fmt: skip
    follow(command, args.folder.absolute() / "corpus.log")
    return data_dir


def step(folder: Path, args: argparse.Namespace, config: Any, unpruned: bool) -> dict[str, Any]:
    """The row of benchmarks/training.py for a run's newest checkpoint at the run's micro-batch.

    Raises:
        RuntimeError: there is no such run, or it could not be measured.
    """
    if not (folder / "checkpoints").is_dir():
        raise RuntimeError(
            f"part step needs the weights of part train, which are not in {folder}; measure that part too"
        )
    length = config.datamodule.train_batch_len
    out = folder.with_name("step.json")
    command = [
        sys.executable, str(ROOT / "benchmarks" / "training.py"), "--experiments", str(folder), "--optimizer_step",
        "--seq_len", str(length), "--batch_size", str(max(1, config.train.grad_acc_tokens // length)),
        "--checkpointing", "on" if config.train.gradient_checkpointing else "off",
        "--precision", config.fabric.precision,
        "--steps", "10", "--device", args.device, "--out", str(out), "--replace",
        *(["--overrides", NO_PRUNING] if unpruned else []),
    ]  # fmt: skip
    follow(command, folder.with_name("step.log"))
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    if row["status"] != "ok":
        raise RuntimeError(f"benchmarks/training.py on {folder}: {row['status']}")
    return {key: value for key, value in row.items() if key not in ("experiment", "status")}


if __name__ == "__main__":
    sys.exit(run_main(main))
