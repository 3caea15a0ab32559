#!/usr/bin/env python
"""Starts training on this machine: `fabric run train.py`, with what it needs to stop in order and to share a node.

    python scripts/launch.py --devices 4 +experiment/longcrawl64/forgetting_transformer=pro_760m_48b output_dir=… data_dir=…
    python scripts/launch.py --devices 8 --num-nodes 2 --node-rank 0 --main-address HOST --main-port 1234 …

Arguments are those of `fabric run` and of train.py. What this adds, as environment variables that you may set yourself:

    PET_SIGNALS_TO_HANDLE            signals that reach every rank; without it SIGUSR1 ends the launcher alone
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds a rank has to save after a signal before it is killed: 600 instead of 30
    PET_STANDALONE                   a free port, so that several jobs share a machine (one node only, and without
                                     --main-port)
    OMP_NUM_THREADS                  this machine's cores divided by --devices

The exit code is 0 when the run is done, 75 when a signal stopped it, 1 after an error; output_dir/status.json says the same.
What failed is said once, by the first rank of a node. The launcher adds only what no rank could say: which one was killed.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import console, elastic

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, of the last one if there are several."""
    found = None
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            found = arguments[i + 1]
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found


def environment(arguments: Sequence[str], cores: int) -> dict[str, str]:
    """What to add to the environment of `fabric run ARGUMENTS`."""
    added = {
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    }
    if (option(arguments, "--num-nodes") or "1") == "1" and option(arguments, "--main-port") is None:
        added["PET_STANDALONE"] = "1"
    devices = option(arguments, "--devices") or "1"
    if devices.isdigit() and int(devices) > 0:
        added["OMP_NUM_THREADS"] = str(max(1, cores // int(devices)))
    return added


def problem(arguments: Sequence[str]) -> str | None:
    """What is wrong with --devices, which Fabric would answer with a traceback; None if nothing is."""
    devices = option(arguments, "--devices")
    if devices is None or re.fullmatch(r"auto|-1|0*[1-9]\d*|\d+,|\d+(,\d+)+,?", devices):
        return None
    return f"--devices={devices} must be a number of GPUs from 1 on, a list of them such as 0,1, or auto"


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if wrong := problem(arguments):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    # Until there are ranks, to which the launcher passes signals on.
    with console.stopped_by_signals():
        return launch(arguments)


def launch(arguments: Sequence[str]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.update(environment(arguments, cores) | dict(os.environ))
    try:
        from lightning.fabric.cli import _main as fabric  # what the command `fabric` calls
    except ImportError as error:
        print(f'error: {error}; install this project with pip install -e ".[train]"', file=sys.stderr)
        return 1
    elastic.listen()
    error = None
    try:
        fabric(["run", str(TRAIN), *arguments], prog_name="fabric")
    except SystemExit as end:
        if end.code:
            return end.code  # it did not like an option, and said so
    except Exception as raised:
        error = raised
    end = elastic.conclude(error)
    if end is None:
        raise error
    code, lines = end
    for line in lines:
        print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
