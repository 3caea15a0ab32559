#!/usr/bin/env python
"""Measures training through train.py, from the start of the command to the end of the run.

    python benchmarks/whole_run.py                               # FoX (Pro) 125M, 44M tokens, one GPU, five minutes
    python benchmarks/whole_run.py --experiments transformer/llama_125m_2b --tokens 20000000 --devices 4
    python benchmarks/whole_run.py --experiments demo/fox_pro    # to try it on a CPU

Each row is train.py (on several GPUs `fabric run train.py`) for --tokens tokens of the unchanged experiment, at its own
learning rate. benchmarks/training.py measures a step with the weights that it left, output/whole_run/EXPERIMENT/train.

train.py receives its folders, the tokens after which it stops, the experiment's learning-rate schedule as it would be
without that stop, and the request to log twenty times. Speeds come from the run's metrics/jsonlines/throughput.jsonl:

tokens_per_second              from the first of these lines to the last, with all that happens between two steps
tokens_per_second_at_the_end   the same over the last quarter of the steps, with the most trained weights
mfu                            the last value that train.py logged
first_loss_seconds             from the start of the command to the end of its first step; it uses kernels that earlier
                               runs left in the caches of Triton and PyTorch

The corpus is made from the Python sources of this machine. If it has fewer tokens than a run, it is read again. The
rest of an unfinished run is moved to previous/ in its folder.
"""

import argparse
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import compose, experiment_overrides, parse, parser, run, run_main
from start import follow, launch_command

from forgetting_transformer import command_line
from forgetting_transformer.analysis.runs import read_metrics
from forgetting_transformer.command_line import count

PREPARE = Path(__file__).resolve().parents[1] / "scripts/prepare_data.py"
ON_GPU = {"experiments": ["forgetting_transformer/pro_125m_2b"], "tokens": 44_000_000, "vocabulary": 50_257}
ON_CPU = {"experiments": ["demo/fox_pro"], "tokens": 65_536, "vocabulary": 4_096}
#: Steps between two log lines, at each of which the host waits for the GPU.
LINES = 20


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, time_limit=3600)
    made.add_argument("--experiments", nargs="+", metavar="NAME", help="as in benchmarks/training.py")
    made.add_argument("--tokens", type=count, help="default 44,000,000 on a GPU")
    made.add_argument("--devices", type=count, default=1, help="processes of train.py (default 1)")
    made.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more overrides of train.py")
    made.add_argument("--vocabulary", type=count, help="of the corpus; default GPT-2's 50,257 on a GPU")
    made.add_argument(
        "--folder",
        type=command_line.path,
        default=Path("output/whole_run"),
        help="for corpus and runs (default output/whole_run)",
    )
    return parse(made, argv, ON_GPU, ON_CPU)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [{"experiment": experiment} for experiment in args.experiments]
    return run(__file__, args, argv, cases, lambda case: measure(args, **case), lambda _: 1)


def measure(args: argparse.Namespace, experiment: str) -> dict[str, Any]:
    """A run from its start: speeds and losses."""
    config = compose(experiment, args.overrides)
    output_dir = args.folder.absolute() / experiment.replace("/", "_") / "train"
    length = config.datamodule.train_batch_len
    batch = length * config.datamodule.train_batch_size
    total = -(-args.tokens // batch) * batch
    data_dir, paths = args.folder.absolute() / "data", sysconfig.get_paths()
    corpus = [
        sys.executable, str(PREPARE), paths["stdlib"], paths["purelib"], "--glob", "*.py", "--max_bytes", "120MB",
        "--tokenizer", f"train:{args.vocabulary}", "--doc_len", str(length), "--heldout_docs", "32",
        "--out", str(data_dir / "python_code"),
    ]  # fmt: skip
    follow(corpus, args.folder.absolute() / "corpus.log", args.time_limit)
    command = [
        *launch_command(args.devices, args.device, "fabric"), *experiment_overrides(experiment),
        f"output_dir={output_dir}", f"data_dir={data_dir}", "datamodule.dataset=python_code", "datamodule.repeat=true",
        "wandb.mode=offline", f"train.max_tokens={total}", f"log_interval={max(1, total // batch // LINES) * batch}",
        f"schedule.total_tokens={config.schedule.total_tokens or 'null'}",
        *(["resume=false"] if output_dir.exists() else []), *args.overrides,
    ]  # fmt: skip
    return {"first_loss_seconds": follow(command, Path(f"{output_dir}.log"), args.time_limit), **speeds(output_dir)}


def speeds(output_dir: Path) -> dict[str, Any]:
    """Tokens per second and losses from the metrics of a run.

    Raises:
        RuntimeError: it has logged fewer than two speeds.
    """
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


if __name__ == "__main__":
    sys.exit(run_main(main))
