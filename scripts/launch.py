#!/usr/bin/env python
r"""Starts training on this machine like `fabric run train.py`, but faster; saves on signals and can share a node.

    python scripts/launch.py --devices 4 +experiment/longcrawl64/forgetting_transformer=pro_760m_48b \
        output_dir=… data_dir=…
    python scripts/launch.py --devices 8 --num-nodes 2 --node-rank 0 --main-address HOST --main-port 1234 …

The options are those of `fabric run`; everything else goes to train.py. --devices is a number, or auto for all GPUs of
this machine; CUDA_VISIBLE_DEVICES chooses among them. This script sets some environment variables, unless you set them
yourself:

    PET_SIGNALS_TO_HANDLE            signals that reach every rank; without it SIGUSR1 only ends the launcher
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds for a rank to save after a signal before it is killed: 600 instead of 30
    PET_STANDALONE                   a free port, so that several jobs share a machine (one node only, and without
                                     --main-port)
    OMP_NUM_THREADS                  this machine's cores divided by --devices

The exit code is 0 when the run is done, 75 after a signal and 1 after an error; output_dir/status.json agrees with it.
The first rank of a node reports an error once. The launcher only adds which rank was killed, because no rank can
report that.
"""

import argparse
import logging
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import command_line, console
from forgetting_transformer.command_line import at_least, count, port
from forgetting_transformer.console import how_to_install

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of `fabric run`, and the rest of the arguments, which are train.py's."""
    parser = argparse.ArgumentParser(prog="launch.py", add_help=False, allow_abbrev=False)
    for name in ("--accelerator", "--strategy", "--precision"):
        parser.add_argument(name)
    parser.add_argument("--devices", default="1")
    parser.add_argument("--num-nodes", "--num_nodes", type=count, default=1)
    parser.add_argument("--node-rank", "--node_rank", type=at_least(0), default=0)
    parser.add_argument("--main-address", "--main_address", default="127.0.0.1")
    parser.add_argument("--main-port", "--main_port", type=port)
    return parser.parse_known_args(arguments)


def processes(args: argparse.Namespace, here: int) -> int:
    """Number of processes on this machine, a GPU each.

    Args:
        here: number of GPUs of this machine.

    Raises:
        ValueError: --devices is no number, or more than there are.
    """
    if args.devices == "auto":
        return 1 if args.accelerator == "cpu" else max(1, here)
    if not re.fullmatch(r"0*[1-9]\d*", args.devices):
        raise ValueError(
            f"--devices={args.devices} must be a number of GPUs from 1 on, or auto; CUDA_VISIBLE_DEVICES chooses among "
            "them"
        )
    # Without a GPU the ranks name what is missing; on a CPU any number of processes will do.
    if args.accelerator != "cpu" and 0 < here < int(args.devices):
        raise ValueError(
            f"--devices={args.devices}, but this machine has {here} GPU{'s' * (here != 1)}: ask for as many, or look "
            f"at CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
        )
    return int(args.devices)


def environment(args: argparse.Namespace, count: int, cores: int) -> dict[str, str]:
    """Environment variables for ranks and launcher.

    Args:
        count: processes of this machine.
    """
    added = {**console.ELASTIC_LAUNCHER, "OMP_NUM_THREADS": str(max(1, cores // count))}
    if args.num_nodes == 1 and args.main_port is None:
        added["PET_STANDALONE"] = "1"
    return added


def for_fabric(args: argparse.Namespace, count: int) -> dict[str, str]:
    """Environment variables by which `fabric run` tells Fabric its options in the ranks."""
    told = {
        "LT_CLI_USED": "1",
        "LT_ACCELERATOR": args.accelerator,
        "LT_STRATEGY": args.strategy,
        "LT_DEVICES": str(count),
        "LT_NUM_NODES": str(args.num_nodes),
        "LT_PRECISION": args.precision,
    }
    return {name: value for name, value in told.items() if value is not None}


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    args, rest = parse(arguments)
    console.end_on_signals()  # until there are ranks to pass them to
    return launch(args, rest)


def launch(args: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        # Not Lightning's command line: it imports all of Lightning, which takes longer than everything else here.
        import torch
        import torch.distributed.run
    except ImportError as error:
        print(f"error: {error}; {how_to_install('train')}", file=sys.stderr)
        return 1
    try:
        count = processes(args, torch.cuda.device_count())
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.update(environment(args, count, cores) | dict(os.environ))
    os.environ.update(for_fabric(args, count))
    for part in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        # `conclude` or a rank reports in one line what these log.
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    command = [
        f"--nproc_per_node={count}",
        f"--nnodes={args.num_nodes}",
        f"--node_rank={args.node_rank}",
        f"--master_addr={args.main_address}",
        f"--master_port={args.main_port or 29400}",
        str(TRAIN),
        *rest,
    ]
    with tempfile.TemporaryDirectory(prefix="forgetting_transformer-") as folder:
        outcome = Path(folder, "outcome")
        os.environ[console.OUTCOME_VARIABLE] = str(outcome)
        failure: Exception | None = None
        try:
            torch.distributed.run.main(command)
        except SystemExit as end:
            if isinstance(end.code, int) and end.code:
                return end.code  # it has refused an option
        except Exception as error:
            failure = error
        code, lines = conclude(failure, outcome.read_text() if outcome.exists() else None)
    for line in lines:
        print(line, file=sys.stderr)
    return code


def conclude(error: Exception | None, outcome: str | None) -> tuple[int, list[str]]:
    """Exit code, and lines that no rank could print.

    Args:
        error: raised by `torch.distributed.run`; None if it returned. An unknown one is raised again.
        outcome: "done", "preempted" or "failed", as the first rank of this node has reported; None if it has not.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if error is None or isinstance(error, SignalException):
        if error is not None and outcome is None:
            return 128 + error.sigval, [f"{error.sigval.name}: the ranks have ended without a status"]
        return {None: 0, "done": 0, "preempted": console.PREEMPTED_EXIT_CODE}.get(outcome, 1), []
    if isinstance(error, ChildFailedError):
        failures = error.failures
        stopped = {
            rank for rank, failure in failures.items()
            if failure.exitcode == console.PREEMPTED_EXIT_CODE or failure.signal_name() == "SIGTERM"
        }  # fmt: skip
        if outcome == "preempted" and len(stopped) == len(failures):
            return console.PREEMPTED_EXIT_CODE, []
        # One that ends with 1 has printed its error: `console.fail`, or Python with a traceback.
        silent = {rank: failure for rank, failure in failures.items() if failure.exitcode != 1}
        if silent.keys() - stopped or len(silent) < len(failures):
            # The others were stopped because one failed, which is named here or has printed its error.
            silent = {rank: failure for rank, failure in silent.items() if rank not in stopped}
        return 1, [
            f"rank {rank} (process {failure.pid}) "
            + (
                f"was killed by {failure.signal_name()}"
                if failure.exitcode < 0
                else f"ended with code {failure.exitcode}"
            )
            for rank, failure in sorted(silent.items())
        ]
    if "EADDRINUSE" in str(error):
        return 1, [
            "error: the port of this job is taken by another job on this machine: give this one another, as in "
            "--main-port 29401"
        ]
    raise error


if __name__ == "__main__":
    command_line.take_any_text()
    sys.exit(main())
