#!/usr/bin/env python
"""Interrupts real runs of train.py on several GPUs of this machine, and holds what becomes of them to a straight run.

    python benchmarks/interruptions.py                                  # FoX (Pro) 125M on all GPUs of this machine
    python benchmarks/interruptions.py --devices 8 --out results.json   # again and again, until no row is missing
    python benchmarks/interruptions.py --checks sigterm sigkill hang --overrides train.compile=false
    python benchmarks/interruptions.py --accelerator cpu --devices 4    # to try it: a tiny model, processes with gloo

Every run is started as a user would, by scripts/launch.py or `fabric run`, on random tokens, for --steps steps. Four
checkpoints are written in this time, and a third of the steps is done when a signal comes, from outside, to the last
rank. A row is printed and saved to --out (record.py) as soon as it is measured. The same command measures the missing
rows, each from its start. One call takes about --time_limit seconds at most: what it did not come to is "stopped".

straight          a run without interruption on N devices, and one on N/2: what the other rows are compared with
world_sizes       a run that ends and is continued on N, N/2, N/4 and N devices
sigterm           SIGTERM to one rank; then the run is continued
sigkill           SIGKILL to one rank; then the run is continued
hang              SIGSTOP to one rank, with strategy.timeout_seconds=--timeout
checkpoint_stall  a checkpoint is written in the background while training goes on

first step    seconds from each command to the end of its first step. Kernels that earlier runs left in the caches of
              Triton and PyTorch are used
to the end    seconds from the signal until the launcher and all ranks have ended
exit code     of the launcher, after the signal
steps lost    steps that were done when the run ended and are done again by the next start
tokens        whether all steps took the straight run's tokens in its order: a digest per step over the global batch
losses        "bitwise": every step's loss, and all weights and moments in the end, are those of the straight run.
              Otherwise the largest difference of a step's loss; in brackets that of the straight runs on N and N/2,
              which only add in another order
remark        what status.json says of the rank that was lost, and how many seconds after the signal; milliseconds of a
              step, without a checkpoint and while one is written

A row whose run did not do what docs/reliability.md promises has failed, says why, and makes the exit code 1. Losses on
other numbers of devices are not judged, but reported. Runs log every step, for which the host waits for the GPUs.
"""

import argparse
import json
import re
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, run_main
from runs import (
    Ended,
    Failure,
    Runs,
    TimeOver,
    largest_difference,
    result,
    step_seconds,
    taken_once,
    times,
)
from start import VOCABULARY, read_status
from tables import INTERRUPTIONS, interruption_cells

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count, positive
from training import experiment_file

CHECKS = ("world_sizes", "sigterm", "sigkill", "hang", "checkpoint_stall")
ON_GPU: dict[str, Any] = {"experiment": "forgetting_transformer/pro_125m_2b", "vocabulary": VOCABULARY}
ON_CPU: dict[str, Any] = {"experiment": "demo/fox_pro", "vocabulary": 512}
#: What a CPU can do: eight short sequences a step, one at a time, of which eight processes have one each.
TINY = ["datamodule.train_batch_len=128", "datamodule.train_batch_size=8", "datamodule.train_num_workers=0"]
TINY += ["train.grad_acc_tokens=128", "model.config.hidden_size=64", "model.config.num_hidden_layers=2"]
#: What may be wrong with a run.
OTHER_TOKENS, NOT_NAMED = "its steps had other tokens", "status.json does not name the rank"
#: Steps of a start that do not count as usual ones: the first compiles, and memory for checkpoints is reserved then.
WARMUP = 3


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=count, help="N (default: all GPUs of this machine)")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="default: all")
    parser.add_argument("--experiment", metavar="NAME", help="of configs/experiment; default as above")
    parser.add_argument("--strategy", choices=("fsdp", "ddp", "hsdp"), default="fsdp", help="default fsdp")
    parser.add_argument(
        "--steps", type=at_least(12), default=24, help="of a run (default 24, a multiple of 4 from 12 on)"
    )
    parser.add_argument("--vocabulary", type=count, help="ids of the random tokens; default GPT-2's 50,257 on a GPU")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    parser.add_argument("--launcher", choices=("launch.py", "fabric"), default="launch.py")
    parser.add_argument("--timeout", type=count, default=20, help="strategy.timeout_seconds of `hang` (default 20)")
    # NCCL chooses an algorithm by message, topology and version, and each adds in another order. A ring adds in one.
    parser.add_argument("--nccl_algo", default="Ring", help="NCCL_ALGO of all runs, for equal bits (default Ring)")
    parser.add_argument(
        "--folder", type=command_line.path, help="where runs write, for the time of the call (default /tmp)"
    )
    parser.add_argument("--time_limit", type=positive, default=540, help="seconds for all (default 540)")
    add_options(parser)
    args = parser.parse_args(argv)
    for key, value in (ON_GPU if args.accelerator == "cuda" else ON_CPU).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.accelerator == "cpu" and args.experiment == ON_CPU["experiment"]:
        args.overrides = [*TINY, *args.overrides]
    if not experiment_file(args.experiment).is_file():
        parser.error(f"there is no experiment {args.experiment!r} in configs/experiment")
    if args.devices is None:
        import torch

        args.devices = torch.cuda.device_count() if args.accelerator == "cuda" else 2
    if args.steps % 4:
        parser.error(f"--steps {args.steps} must be a multiple of 4")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.devices < 2:
        problem = f"this needs several devices, and there are {args.devices}; try --accelerator cpu --devices 4"
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        record = Record("interruptions", args, argv, args.accelerator, leave_out=("folder", "time_limit"))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.devices} x {device_name(record.environment)}")
    print(f"| {' | '.join(INTERRUPTIONS)} |\n{'|---' * len(INTERRUPTIONS)}|", flush=True)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs = Runs(args, Path(folder))
        failed = False
        for case in cases(args):
            row = record.find(case) or record.add({**case, **measured(runs, case, record)})
            print(f"| {' | '.join(interruption_cells(row, record.rows))} |", flush=True)
            failed |= row["status"] != "ok"
    return 1 if failed else 0


def world_sizes(devices: int) -> list[int]:
    """8 → 4 → 2 → 8; with fewer devices only those that there are."""
    return [size for size in (devices, devices // 2, devices // 4) if size] + [devices]


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What tells the rows apart, in their order: first the straight runs that the checks compare with."""
    straight = [args.devices] if {"world_sizes", "sigterm", "sigkill"} & {*args.checks} else []
    straight += [args.devices // 2] if "world_sizes" in args.checks else []
    found: list[dict[str, Any]] = [{"check": "straight", "devices": [devices]} for devices in straight]
    for check in (check for check in CHECKS if check in args.checks):
        found.append({"check": check, "devices": world_sizes(args.devices) if check == CHECKS[0] else [args.devices]})
    return [{"experiment": args.experiment, **case} for case in found]


def measured(runs: Runs, case: dict[str, Any], record: Record) -> dict[str, Any]:
    """The values of a row, or why there are none."""
    check, devices = case["check"], case["devices"]
    output = runs.folder / f"{check}-{devices[0]}"
    try:
        if check == "straight":
            return straight(runs, output, devices[0])
        if check == "hang":
            return hang(runs, output)
        if check == "checkpoint_stall":
            return checkpoint_stall(runs, output)
        straight_run = {"check": "straight", "devices": [runs.args.devices]}
        reference = record.find({**straight_run, "status": "ok"})
        if reference is None:
            if any(row["status"].startswith("stopped") for row in record.rows if row.items() >= straight_run.items()):
                raise TimeOver
            raise Failure("there is no straight run to compare with")
        if check == "world_sizes":
            return continued_elsewhere(runs, output, devices, reference)
        return struck(runs, output, getattr(signal, check.upper()), reference)
    except Failure as failure:
        return {"status": f"failed: {failure}"}
    except (OSError, LookupError, ValueError) as error:
        return {"status": f"failed: what a run should have written is not as it should be: {error!r}"}
    except TimeOver:
        return {"status": f"stopped after {runs.args.time_limit:g} s; the same command with --out goes on here"}


# The checks.


def straight(runs: Runs, output: Path, devices: int) -> dict[str, Any]:
    ended = runs.done(output, devices)
    seconds = step_seconds(times(ended.notes))
    usual = statistics.median(seconds[step] for step in seconds if step >= WARMUP)
    return {"status": "ok", "first_step_seconds": [ended.first_step_seconds], "step_seconds": usual, **result(output)}


def continued_elsewhere(runs: Runs, output: Path, sizes: list[int], reference: dict[str, Any]) -> dict[str, Any]:
    starts = []
    for part, size in enumerate(sizes, 1):
        starts.append(runs.done(output, size, runs.args.steps * part // len(sizes)))
    found = result(output)
    same = found["tokens"] == reference["tokens"]
    row = {
        "first_step_seconds": [ended.first_step_seconds for ended in starts],
        "same_tokens": same,
        "largest_difference": largest_difference(found["losses"], reference["losses"]),
        "losses": found["losses"],
    }
    return judged(row, {OTHER_TOKENS: same, "steps were taken twice": taken_once(output)})


def struck(runs: Runs, output: Path, number: signal.Signals, reference: dict[str, Any]) -> dict[str, Any]:
    """SIGTERM or SIGKILL to the last rank, and the next start."""
    args, rank = runs.args, runs.args.devices - 1
    ended = runs.start(output, args.devices, strike=number)
    end = end_of(ended, output, rank)
    preempted = end["outcome"] == "preempted"
    taken = max(times(ended.notes))  # by rank 0: steps from 0, of which the last one may not have ended
    again = runs.done(output, args.devices)
    resumed = json.loads((output / "starts.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
    found, done = result(output), taken + preempted
    row = {
        **end,
        "first_step_seconds": [ended.first_step_seconds, again.first_step_seconds],
        "steps_done": done,
        "steps_lost": done - resumed // runs.step_tokens,
        "same_tokens": found["tokens"] == reference["tokens"],
        "bitwise": found["losses"] == reference["losses"] and found["weights"] == reference["weights"],
        "largest_difference": largest_difference(found["losses"], reference["losses"]),
    }
    promises = {OTHER_TOKENS: row["same_tokens"], "losses or weights differ from the straight run's": row["bitwise"]}
    if number == signal.SIGTERM:
        promises |= {"it is not preempted": preempted, "steps were lost": row["steps_lost"] == 0}
    else:
        promises |= {NOT_NAMED: bool(row["named"])}
    return judged(row, promises)


def hang(runs: Runs, output: Path) -> dict[str, Any]:
    """SIGSTOP to the last rank."""
    args, rank = runs.args, runs.args.devices - 1
    short = [f"strategy.timeout_seconds={args.timeout}"]
    ended = runs.start(output, args.devices, strike=signal.SIGSTOP, overrides=short)
    row = {"timeout": args.timeout, "first_step_seconds": [ended.first_step_seconds], **end_of(ended, output, rank)}
    return judged(row, {NOT_NAMED: bool(row["named"])})


def end_of(ended: Ended, output: Path, rank: int) -> dict[str, Any]:
    """How a run ended after a signal to `rank`, and what it says of it."""
    status = read_status(output)
    reason = status["reason"].replace(socket.gethostname(), "HOST")
    return {
        "rank": rank,
        "seconds_to_end": ended.seconds_to_end,
        "seconds_to_status": (output / "status.json").stat().st_mtime - ended.struck if ended.struck else None,
        "exit_code": ended.code,
        "outcome": status["status"],
        "reason": reason,
        "named": re.search(rf"\brank {rank}\b", reason) is not None if reason else None,
    }


def checkpoint_stall(runs: Runs, output: Path) -> dict[str, Any]:
    """One checkpoint in the middle of a run (and one at its end, which no step waits for)."""
    middle = runs.args.steps // 2
    ended = runs.done(output, runs.args.devices, overrides=[f"checkpoint_interval={middle * runs.step_tokens}"])
    first = json.loads((output / "metrics/jsonlines/checkpoint.jsonl").read_text(encoding="utf-8").splitlines()[0])
    taken, written = times(ended.notes), first["checkpoint/write_time"]
    return {
        "status": "ok",
        "first_step_seconds": [ended.first_step_seconds],
        "copy_seconds": first["checkpoint/checkpoint_time"],
        "write_seconds": written,
        **stall(taken, middle, written),
    }


def stall(taken: dict[int, float], saved: int, written: float) -> dict[str, Any]:
    """What a checkpoint after `saved` steps costs.

    Args:
        taken: when the batch of each step, from 0, was taken.
        written: seconds that writing it took, after the copy.
    """
    seconds = step_seconds(taken)
    until = taken[saved] + written
    beside = [step for step in seconds if step >= saved and taken[step] < until]
    alone = [length for step, length in seconds.items() if step >= WARMUP and step not in (saved - 1, *beside)]
    usual = statistics.median(alone)
    return {
        "step_seconds": usual,
        "step_seconds_meanwhile": statistics.median(seconds[step] for step in beside) if beside else None,
        "steps_meanwhile": len(beside),
        "stall_seconds": sum(seconds[step] - usual for step in (saved - 1, *beside)),
    }


def judged(row: dict[str, Any], promises: dict[str, bool]) -> dict[str, Any]:
    """The row with its status. `promises`: what is wrong -> whether it is not."""
    broken = [problem for problem, kept in promises.items() if not kept]
    return {"status": f"failed: {'; '.join(broken)}" if broken else "ok", **row}


if __name__ == "__main__":
    sys.exit(run_main(main))
