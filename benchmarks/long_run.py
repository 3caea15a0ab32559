#!/usr/bin/env python
"""Trains on long sequences of text that the GPUs of this machine share, and shows the loss at every position.

    python benchmarks/long_run.py                        # FoX (Pro) 760M, 200 steps of 131,072 tokens, on all GPUs
    python benchmarks/long_run.py --devices 8 --seq_len 262144 --steps 50 --parts straight --out results.json
    python benchmarks/long_run.py --accelerator cpu --devices 2       # to try it: a tiny model, two processes with gloo

All GPUs share each sequence (strategy.context), unless --context says how many. Every group of them has one sequence in
a step. Runs are started as a user would, with activation checkpointing, compiled on a GPU, on the Python sources of
this machine. Rows of the corpus, files joined end to end, are twice as long as a sequence. The learning rate warms up
over a tenth of the steps. Parts, each a row of the table that is printed and saved to --out (record.py) when it is
measured; the same command measures missing parts, each from its start:

straight     a run without interruption
beyond       its loss on held-out rows of twice the length of training: eval/per_token_loss on the same devices,
             which share each row. It follows `straight`, or trains as that did
resumed      the same run: SIGTERM to the launcher after half of the steps, and the same command again

s per step   median, from the run's metrics
memory GB    the most that PyTorch's allocator of rank 0 had, with AdamW's moments
losses       of `resumed`: "bitwise" if every step's loss, and all weights and moments in the end, are those of
             `straight`; otherwise the largest difference of a step's loss
loss from    mean held-out loss at the end over the positions from there to the next column's
"""

import argparse
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, end_with_parent, run_main
from runs import largest_difference, weights_digest, whole_lines
from start import launch_command, ran_out_of_memory, read_status
from tables import long_run_cells, long_run_header
from whole_run import ROOT, BenchmarkError, corpus, follow

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count
from training import experiment_file, experiment_override

PARTS = ("straight", "beyond", "resumed")
DATASET = "python_code"
#: Held-out sequences that are evaluated: at the end of a run, and beyond the length of training.
HELDOUT = 8
ON_GPU = {
    "experiment": "forgetting_transformer/pro_760m_16b",
    "seq_len": 131072,
    "steps": 200,
    "vocabulary": 50257,
    "max_bytes": "160MB",
}
ON_CPU = {"experiment": "demo/fox_pro", "seq_len": 512, "steps": 8, "vocabulary": 1024, "max_bytes": "1MB"}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=count, help="default: all GPUs of this machine")
    parser.add_argument("--context", type=count, help="devices that share a sequence (default: all)")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--experiment", metavar="NAME", help="of configs/experiment; default as above")
    parser.add_argument("--seq_len", type=count, help="tokens of a sequence (default 131072 on a GPU)")
    parser.add_argument("--steps", type=at_least(4), help="of a run, at least 4 (default 200 on a GPU)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--vocabulary", type=count, help="ids of the corpus; default GPT-2's 50,257 on a GPU")
    parser.add_argument("--max_bytes", help="text of the corpus (default 160MB on a GPU, about 40M tokens)")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more overrides of train.py")
    parser.add_argument("--folder", type=command_line.path, help="for the corpus, which stays, and runs, which do not")
    add_options(parser)
    args = parser.parse_args(argv)
    for key, value in (ON_GPU if args.accelerator == "cuda" else ON_CPU).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if not experiment_file(args.experiment).is_file():
        parser.error(f"there is no experiment {args.experiment!r} in configs/experiment")
    if args.devices is None:
        import torch

        args.devices = torch.cuda.device_count() if args.accelerator == "cuda" else 1
    args.context = args.context or max(1, args.devices)
    if args.devices % args.context or args.seq_len % args.context:
        parser.error(
            f"--context {args.context} must divide --devices {args.devices} and --seq_len {args.seq_len}: groups of so "
            "many devices share a sequence in equal parts"
        )
    if args.seq_len < 64 or args.seq_len & (args.seq_len - 1):
        parser.error(f"--seq_len {args.seq_len} must be a power of two from 64 on, so that it has whole octaves")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.devices < 1:
        print("error: this needs a GPU, and there is none; try --accelerator cpu", file=sys.stderr)
        return 2
    try:
        record = Record("long_run", args, argv, args.accelerator, leave_out=("folder",))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.devices} x {device_name(record.environment)}")
    header = long_run_header(args.seq_len)
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|", flush=True)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        args.folder = args.folder or Path(scratch)
        for part in args.parts:
            case = {key: getattr(args, key) for key in ("experiment", "seq_len", "devices", "context")} | {"part": part}
            row = record.find(case) or record.add({**case, **measured(args, part, Path(scratch), record)})
            print(f"| {' | '.join(long_run_cells(row))} |", flush=True)
    return 1 if record.failed else 0


def measured(args: argparse.Namespace, part: str, scratch: Path, record: Record) -> dict[str, Any]:
    """The values of a row, or why there are none."""
    output, evaluated = scratch / ("straight" if part == "beyond" else part), scratch / "beyond.log"
    try:
        data_dir = corpus(args, DATASET, 2 * args.seq_len, HELDOUT)
        command = train_command(args, output, data_dir)
        if part == "beyond":
            if not (output / "checkpoints").is_dir():  # measured by an earlier call
                start(command, output.with_name("straight.log"))
            return {"status": "ok", **loss_beyond(args, output, data_dir, evaluated)}
        if part == "resumed":
            half = args.steps // 2 * step_tokens(args)
            start(command, output.with_name("stopped.log"), lambda: trained(output) >= half)
            status = read_status(output)["status"]
            if status != "preempted":
                raise BenchmarkError(f"after SIGTERM the run is {status}, and not preempted")
        stopped = trained(output) // step_tokens(args) if part == "resumed" else None
        start(command, output.with_name(f"{part}.log"))
        if (status := read_status(output)["status"]) != "done":
            raise BenchmarkError(f"the run is {status}, and not done")
        found = result(output)
    except BenchmarkError as error:
        said = evaluated.read_text(encoding="utf-8", errors="replace") if evaluated.is_file() else ""
        if ran_out_of_memory(output) or (part == "beyond" and "out of memory" in said):
            return {"status": "out of memory"}
        return {"status": f"failed: {error}"}
    straight = record.find({"part": "straight", "status": "ok"})
    if part == "resumed" and straight is not None:
        found["bitwise"] = all(found[key] == straight[key] for key in ("losses", "weights"))
        found["largest_difference"] = largest_difference(found["losses"], straight["losses"])
    return {"status": "ok", "stopped_after": stopped, **found}


def settings(args: argparse.Namespace) -> list[str]:
    """Overrides of every run."""
    tokens, groups, whole = args.seq_len, args.devices // args.context, args.steps * step_tokens(args)
    shared = ["strategy=fsdp", f"strategy.context={args.context}"] if args.devices > 1 else []
    return [
        *shared, f"datamodule.dataset={DATASET}", f"datamodule.train_batch_len={tokens}",
        f"datamodule.train_batch_size={groups}", f"datamodule.eval_batch_len={tokens}",
        "datamodule.eval_local_batch_size=1", f"datamodule.eval_tokens={HELDOUT * tokens}", "skip_eval=false",
        "datamodule.repeat=true",
        f"train.grad_acc_tokens={tokens}", "train.gradient_checkpointing=true", f"train.max_tokens={whole}",
        f"schedule.warmup_tokens={whole // 10}", f"schedule.total_tokens={whole}", f"log_interval={step_tokens(args)}",
        f"eval_interval={whole}", f"checkpoint_interval={whole}", "wandb.mode=disabled",
    ]  # fmt: skip


def step_tokens(args: argparse.Namespace) -> int:
    return args.seq_len * (args.devices // args.context)


def train_command(args: argparse.Namespace, output: Path, data_dir: Path) -> list[str]:
    return [
        *launch_command(args.devices, args.accelerator, "launch.py"), experiment_override(args.experiment),
        f"output_dir={output}", f"data_dir={data_dir}", *settings(args), *args.overrides,
    ]  # fmt: skip


def start(command: Sequence[str], log: Path, stop: Callable[[], bool] | None = None) -> None:
    """Starts train.py, and waits for its end. Where `stop` comes to be true it gets a SIGTERM.

    Raises:
        BenchmarkError: it failed, or ended before it was to be stopped.
    """
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=end_with_parent)
        try:
            signalled = False
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if stop is not None and not signalled and stop():
                        process.send_signal(signal.SIGTERM)
                        signalled = True
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if stop is not None and not signalled:
        problem = "before it was to be stopped"
    elif stop is None and code != 0:
        problem = f"with code {code}"
    else:
        return
    raise BenchmarkError(f"train.py ended {problem}: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def loss_beyond(args: argparse.Namespace, run: Path, data_dir: Path, log: Path) -> dict[str, Any]:
    """Of a run's last weights on whole held-out rows; `log` gets what the evaluation prints.

    Raises:
        BenchmarkError: the evaluation failed.
    """
    import numpy as np

    length, saved = 2 * args.seq_len, run.with_name("beyond")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.devices),
        str(ROOT / "eval/per_token_loss/run_per_token_loss.py"), "--model_path", str(run),
        "--data_path", str(data_dir / DATASET), "--save_dir", str(saved), "--eval_len", str(length),
        "--eval_tokens", str(HELDOUT * length), "--local_batch_size", "1", "--context", str(args.context),
        "--device", args.accelerator,
    ]  # fmt: skip
    _, _, seconds = follow(command, log)
    with np.load(saved / run.name / "results.npz") as evaluated:
        return {"evaluation_seconds": seconds, "octaves": octaves(evaluated["val/loss_per_token"])}


def octaves(loss_T: Any) -> list[list[float]]:
    """Where each octave of positions begins, and its mean loss."""
    from forgetting_transformer.analysis.position_loss import octave_edges

    return [[a, float(loss_T[a:b].mean())] for a, b in itertools.pairwise(octave_edges(loss_T.size))]


def trained(output: Path) -> int:
    """Tokens after which a run has logged its last loss."""
    return max((line["step"] for line in whole_lines(output / "metrics/jsonlines/train.jsonl")), default=0)


def result(output: Path) -> dict[str, Any]:
    """Of a run that is done."""
    import numpy as np

    from forgetting_transformer.analysis.runs import read_metrics

    folder = output / "metrics"
    speeds = read_metrics(folder / "jsonlines/throughput.jsonl")
    times = [line["throughput/total_time"] for line in speeds]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    with np.load(max((folder / "npz/val").glob("step-*.npz"))) as evaluated:
        loss_T, heldout = evaluated["val/loss_per_token"], float(evaluated["val/loss"])
    return {
        "step_seconds": statistics.median(seconds),
        "peak_memory_bytes": max(line.get("throughput/peak_memory_bytes", 0) for line in speeds) or None,
        "losses": [line["train/loss"] for line in read_metrics(folder / "jsonlines/train.jsonl")],
        "heldout_loss": heldout,
        "octaves": octaves(loss_T),
        "weights": weights_digest(output),
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
