#!/usr/bin/env python
"""Measures training through train.py, started as in the README, and steps with the weights at the end of that run.

    python benchmarks/whole_run.py                               # FoX (Pro) 125M, 44M tokens, one GPU, five minutes
    python benchmarks/whole_run.py --experiments transformer/llama_125m_2b --tokens 20000000 --devices 4
    python benchmarks/whole_run.py --data_dir data --dataset longcrawl64                   # an existing corpus
    python benchmarks/whole_run.py --experiments demo/fox_pro --data_dir quickstart/data   # to try it on a CPU

Parts, each a row of the table, saved to --out (record.py) as soon as it is measured:

  train            `fabric run train.py` for --tokens tokens of the unchanged experiment, at its own learning rate
  train_unpruned   the same without pruning, for --unpruned_tokens (only models that prune)
  step             forward, backward, clipping and AdamW of one micro-batch of held-out text, with the weights that
                   `train` left (benchmarks/training.py --optimizer_step)
  step_unpruned    the same without pruning

train.py receives its folders, the tokens after which it stops, the experiment's learning-rate schedule as it would be
without that stop, and the request to log twenty times. Speeds come from the run's metrics/jsonlines/throughput.jsonl:

tokens/s      from the first of these lines to the last, including everything that happens between two steps
at the end    the same over the last quarter of the steps, with the most trained weights
MFU           the last value that train.py logged
first loss    seconds from the start of the command to its first logged loss; it uses kernels that earlier runs left in
              the caches of Triton and PyTorch

--out also has losses, the log lines that name backends, compilation and the first step, and the shares of wall time.

Without --data_dir the corpus is made from the Python sources of this machine. If it has fewer tokens than a run, it is
read again. The same command with the same --out and --folder measures the missing parts, each from its start. The rest
of an unfinished run is moved to previous/ in its folder.
"""

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, end_with_parent, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from training import compose, experiment_file, experiment_override

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("train", "train_unpruned", "step", "step_unpruned")
NO_PRUNING = "model.config.log_pruning_tolerance=null"
ON_GPU = {
    "experiments": ["forgetting_transformer/pro_125m_2b"],
    "tokens": 44_000_000,
    "unpruned_tokens": 8_000_000,
    "vocabulary": 50_257,
}
ON_CPU = {"experiments": ["demo/fox_pro"], "tokens": 65_536, "unpruned_tokens": 32_768, "vocabulary": 4_096}
#: A loss that train.py logged, as in "8,192 of 16,384 tokens, loss 10.8459, lr 1.50e-03".
LOSS_LINE = re.compile(r"\bloss \d")
#: Lines of the log that say what runs, and how long the first step took.
KEPT_LINE = re.compile(
    r"gluon|triton|flash-linear-attention|\bFLA\b|(?<!loading )pytorch|cudnn|compil|self-test|first step is done",
    re.IGNORECASE,
)
#: Folders of a file's absolute path, which say nothing about the measurement and much about the machine.
FOLDERS = re.compile(r"(?<![\w.…])/(?:[^\s/,;:()]+/)+")
#: How often a run logs. The host waits for the GPU at each.
LINES = 20
HEADER = (
    "| experiment | part | tokens | tokens/s | at the end | MFU | first loss s | memory GB |\n"
    "|---|---|---|---|---|---|---|---|"
)


class BenchmarkError(RuntimeError):
    """A part could not be measured; the message says which command failed and where its log is."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--experiments", nargs="+", metavar="NAME", help="files of configs/experiment/longcrawl64, or demo/NAME"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--tokens", type=count, help="tokens of part train; default 44,000,000 on a GPU")
    parser.add_argument(
        "--unpruned_tokens", type=count, help="tokens of part train_unpruned; default 8,000,000 on a GPU"
    )
    parser.add_argument("--devices", type=count, default=1, help="processes of train.py (default 1)")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more overrides of train.py")
    parser.add_argument(
        "--data_dir", type=command_line.path, help="folder of the corpus; default: one is made in --folder"
    )
    parser.add_argument(
        "--dataset",
        type=command_line.name,
        default="python_code",
        help="name of the corpus in it (default python_code)",
    )
    parser.add_argument(
        "--max_bytes", default="120MB", help="text of the corpus that is made (default 120MB, about 29M tokens)"
    )
    parser.add_argument(
        "--vocabulary", type=count, help="ids of the corpus that is made; default GPT-2's 50,257 on a GPU"
    )
    parser.add_argument(
        "--folder",
        type=command_line.path,
        default=Path("output/whole_run"),
        help="for corpus and runs (default output/whole_run)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add_options(parser)
    args = parser.parse_args(argv)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for key, value in (ON_GPU if args.device == "cuda" else ON_CPU).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    for name in args.experiments:
        if not experiment_file(name).is_file():
            parser.error(f"there is no experiment {name!r} in {ROOT / 'configs' / 'experiment'}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("whole_run", args, argv, args.device, leave_out=("folder", "data_dir"))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from hydra.errors import HydraException

    from forgetting_transformer.training import ConfigError

    print(HEADER, flush=True)
    for experiment in args.experiments:
        try:
            for row in measure(experiment, args, record):
                print(describe_row(row), flush=True)
        except (BenchmarkError, ConfigError, HydraException) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(footer(record.content))
    return 0


def measure(experiment: str, args: argparse.Namespace, record: Record) -> Iterator[dict[str, Any]]:
    """The rows of one experiment, part by part."""
    config = compose(experiment, args.overrides)
    prunes = config.model.config.get("log_pruning_tolerance") is not None
    folder = args.folder.absolute() / experiment.replace("/", "_")
    for part in args.parts:
        if part.endswith("unpruned") and not prunes:
            continue
        case = {"experiment": experiment, "part": part}
        if part.startswith("train"):
            tokens = args.tokens if part == "train" else args.unpruned_tokens
            yield record.row(case, functools.partial(train, experiment, args, config, folder / part, tokens))
        else:
            yield record.row(case, functools.partial(step, folder / "train", args, config, part == "step_unpruned"))


# Training.


def train(experiment: str, args: argparse.Namespace, config: Any, output_dir: Path, tokens: int) -> dict[str, Any]:
    """A run from its start: speeds, losses, and what its log says of backends."""
    length = config.datamodule.train_batch_len
    data_dir = corpus(args, args.dataset, length) if args.data_dir is None else args.data_dir.absolute()
    batch = length * config.datamodule.train_batch_size
    total = -(-tokens // batch) * batch
    every = max(1, total // batch // LINES) * batch
    command = train_command(experiment, args, output_dir, data_dir)
    command += [f"train.max_tokens={total}", f"log_interval={every}"]
    command += [f"schedule.total_tokens={config.schedule.total_tokens}"] if config.schedule.total_tokens else []
    command += ["resume=false"] if output_dir.exists() else []
    command += [NO_PRUNING] if output_dir.name == "train_unpruned" else []
    log = output_dir.with_name(f"{output_dir.name}.log")
    lines, first_loss, seconds = follow([*command, *args.overrides], log)
    return {
        "first_loss_seconds": first_loss,
        "wall_seconds": seconds,
        "log": [FOLDERS.sub("…/", line) for line in lines if KEPT_LINE.search(line)],
        **speeds(output_dir),
    }


def train_command(experiment: str, args: argparse.Namespace, output_dir: Path, data_dir: Path) -> list[str]:
    """The README's command for this experiment."""
    fabric = Path(sys.executable).with_name("fabric")
    # Where packages are on PYTHONPATH only, there is no `fabric` command.
    start = [str(fabric), "run"] if fabric.exists() else [sys.executable, "-m", "lightning.fabric.cli"]
    return [
        *start, str(ROOT / "train.py"), "--devices", str(args.devices),
        *(["--accelerator", "cpu"] if args.device == "cpu" else []),
        experiment_override(experiment), f"output_dir={output_dir}", f"data_dir={data_dir}",
        f"datamodule.dataset={args.dataset}", "datamodule.repeat=true", "wandb.mode=offline",
    ]  # fmt: skip


def follow(command: Sequence[str], log: Path) -> tuple[list[str], float | None, float]:
    """Runs a command and shows its output, which `log` keeps.

    Returns:
        its lines without their time stamps; seconds until the first loss was logged, if one was; seconds until its end.

    Raises:
        BenchmarkError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines, first_loss, started = [], None, time.perf_counter()
    environ = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        preexec_fn=end_with_parent,
    )  # fmt: skip
    try:
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                print(line, end="", file=sys.stderr, flush=True)
                if first_loss is None and LOSS_LINE.search(line):
                    first_loss = time.perf_counter() - started
                lines.append(re.sub(r"^[\d-]+ [\d:]+ (rank \d+ )?", "", line.rstrip()))
        code = process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    if code != 0:
        raise BenchmarkError(f"{' '.join(command[:3])} … ended with code {code}; its output is in {log}")
    return lines, first_loss, time.perf_counter() - started


def speeds(output_dir: Path) -> dict[str, Any]:
    """Tokens per second and losses from the metrics of a run.

    Raises:
        BenchmarkError: it has logged fewer than two speeds.
    """
    from forgetting_transformer.analysis.runs import read_metrics

    folder = output_dir / "metrics" / "jsonlines"
    logged = read_metrics(folder / "throughput.jsonl")
    if len(logged) < 2:
        raise BenchmarkError(f"{output_dir} has trained too few steps for a speed; give more --tokens")

    def rate(first: dict[str, Any], last: dict[str, Any]) -> float:
        done, seconds = (
            last[f"throughput/{key}"] - first[f"throughput/{key}"] for key in ("token_count", "total_time")
        )
        return done / seconds

    losses = read_metrics(folder / "train.jsonl")
    heldout = read_metrics(folder / "val.jsonl") if (folder / "val.jsonl").is_file() else []
    goodput = read_metrics(folder / "goodput.jsonl")[-1]
    return {
        "parameters": read_metrics(folder / "model_info.jsonl")[-1]["model_info/total_params"],
        "tokens": logged[-1]["step"],
        "steps": round(logged[-1]["throughput/batch_count"]),
        "tokens_per_second": rate(logged[0], logged[-1]),
        "tokens_per_second_at_the_end": rate(logged[-1 - max(1, len(logged) // 4)], logged[-1]),
        "mfu": logged[-1].get("throughput/mfu_total_recent"),
        "goodput": {key.removeprefix("goodput/"): value for key, value in goodput.items() if key != "step"},
        "losses": [[entry["step"], round(entry["train/loss"], 4)] for entry in losses],
        "heldout_loss": round(heldout[-1]["val/loss"], 4) if heldout else None,
    }


def corpus(args: argparse.Namespace, dataset: str, length: int, heldout_docs: int = 32) -> Path:
    """The folder of a corpus of documents of so many tokens; makes it in `args.folder`, unless it is there.

    Raises:
        BenchmarkError: it could not be made.
    """
    data_dir = args.folder.absolute() / "data"
    paths = sysconfig.get_paths()
    command = [
        sys.executable, str(ROOT / "scripts" / "prepare_data.py"), paths["stdlib"], paths["purelib"], "--glob", "*.py",
        "--max_bytes", args.max_bytes, "--tokenizer", f"train:{args.vocabulary}", "--doc_len", str(length),
        "--heldout_docs", str(heldout_docs), "--out", str(data_dir / dataset),
    ]  # fmt: skip
    follow(command, args.folder.absolute() / "corpus.log")
    return data_dir


# One step, with the weights that training left.


def step(run: Path, args: argparse.Namespace, config: Any, unpruned: bool) -> dict[str, Any]:
    """What benchmarks/training.py measures of a run's newest checkpoint at the run's micro-batch.

    Raises:
        BenchmarkError: there is no such run, or it could not be measured.
    """
    if not (run / "checkpoints").is_dir():
        raise BenchmarkError(
            f"part step needs the weights of part train, which are not in {run}; measure that part too"
        )
    length = config.datamodule.train_batch_len
    out = run.with_name("step.json")
    command = [
        sys.executable, str(ROOT / "benchmarks" / "training.py"), "--experiments", str(run), "--optimizer_step",
        "--seq_len", str(length), "--batch_size", str(max(1, config.train.grad_acc_tokens // length)),
        "--checkpointing", "on" if config.train.gradient_checkpointing else "off",
        "--precision", config.fabric.precision,
        "--steps", "10", "--device", args.device, "--out", str(out), "--replace",
        *(["--overrides", NO_PRUNING] if unpruned else []),
    ]  # fmt: skip
    follow(command, run.with_name("step.log"))
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    if row["status"] != "ok":
        raise BenchmarkError(f"benchmarks/training.py on {run}: {row['status']}")
    return {key: value for key, value in row.items() if key not in ("experiment", "status")}


# The table.


def describe_row(row: dict[str, Any]) -> str:
    end, first, memory = (
        row.get("tokens_per_second_at_the_end"),
        row.get("first_loss_seconds"),
        row.get("peak_memory_bytes"),
    )
    cells = [
        row["experiment"],
        row["part"],
        f"{row['tokens']:,}" if "tokens" in row else "–",
        f"{row['tokens_per_second']:,.0f}",
        "–" if end is None else f"{end:,.0f}",
        "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "–" if first is None else f"{first:.1f}",
        "–" if memory is None else f"{memory / 1e9:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def footer(result: dict[str, Any]) -> str:
    named = [line for row in result["rows"] for line in row.get("log", ())]
    devices = result["settings"]["devices"]
    return "\n".join(["", f"{devices} × {device_name(result['environment'])}", *dict.fromkeys(named)])


if __name__ == "__main__":
    sys.exit(run_main(main))
