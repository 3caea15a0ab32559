#!/usr/bin/env python
"""Measures the numbers of the documentation again on this machine, in pieces of any length.

    python benchmarks/measure.py --list                           # what there is, and what is done
    python benchmarks/measure.py step models --time_limit 600     # two groups, ten minutes of them
    python benchmarks/measure.py several_gpus                     # on 2, 4 and 8 GPUs, as many as there are
    cp output/benchmarks/*.json benchmarks/results/ && python -m studies.pages     # puts them into the pages

commands.yaml beside this script has the commands. Each writes its file into --folder, row by row (record.py). The same
command goes on where the last one ended: what is finished is left alone, and an unfinished file gets its missing rows.
A command that needs more GPUs than there are is not run. A command that fails is named at the end, and the others still
run. What a command prints is also in a .log beside its file. After a change of the code give another --folder: a file
takes the rows of one commit only.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from record import end_with_parent, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, positive
from forgetting_transformer.versions import installed_versions

FOLDER = Path(__file__).resolve().parent
COMMANDS = FOLDER / "commands.yaml"
#: In --folder: which commands have measured all of their rows.
FINISHED = ".finished.json"
#: Seconds that a command gets to save what it has, once its time is over.
GRACE = 20


class Measurement(NamedTuple):
    """A file of results, the command without --out that writes it, and the GPUs it needs."""

    group: str
    name: str
    command: str
    gpus: int


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="NAME", help="groups, or files without .json (default: all)")
    parser.add_argument(
        "--folder", type=command_line.path, default=Path("output/benchmarks"), help="of the files (default %(default)s)"
    )
    parser.add_argument(
        "--time_limit", type=positive, help="seconds for this call; default: until everything is measured"
    )
    parser.add_argument(
        "--gpus", type=at_least(0), help="as if there were so many GPUs (default: those of this machine)"
    )
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    args = parser.parse_args(argv)
    known = measurements()
    names = {name for found in known for name in (found.group, found.name)}
    for name in args.wanted:
        if name not in names:
            groups = dict.fromkeys(found.group for found in known)
            parser.error(f"{name!r} is no group and no file; groups are {', '.join(groups)}, and --list shows all")
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    return args


def measurements() -> list[Measurement]:
    """Those of commands.yaml, one for each number of GPUs."""
    triton = installed_versions(["triton"]).get("triton", "none")
    found = []
    for group, entries in yaml.safe_load(COMMANDS.read_text(encoding="utf-8")).items():
        for name, entry in entries.items():
            command, several = " ".join(entry["command"].split()), "{gpus}" in name
            for gpus in entry["gpus"] if several else [entry.get("gpus", 1)]:
                filled = (text.replace("{gpus}", str(gpus)).replace("{triton}", triton) for text in (name, command))
                found.append(Measurement(group, *filled, gpus))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a command that runs is ended too
    chosen = [m for m in measurements() if not args.wanted or m.group in args.wanted or m.name in args.wanted]
    try:
        finished = read_finished(args.folder)
    except (ValueError, TypeError):
        cure = "delete it: commands that are finished run once more, and keep their rows"
        print(f"error: {args.folder / FINISHED} is damaged; {cure}", file=sys.stderr)
        return 2
    deadline = args.time_limit and time.monotonic() + args.time_limit
    states: dict[str, str] = {}
    for found in chosen:
        if finished.get(found.name) == found.command and (args.folder / f"{found.name}.json").is_file():
            states[found.name] = "finished"
        elif found.gpus > args.gpus:
            states[found.name] = (
                f"not run: needs {found.gpus} GPU{'s' if found.gpus > 1 else ''}, there are {args.gpus}"
            )
        elif args.list or (deadline and time.monotonic() >= deadline):
            states[found.name] = "not measured yet"
        else:
            print(f"== {found.name}: python benchmarks/{found.command}", flush=True)
            states[found.name] = run(found, args.folder, deadline)
            if states[found.name] == "finished":
                finished[found.name] = found.command
                write_finished(args.folder, finished)
    group = None
    for found in chosen:
        if found.group != group:
            group = found.group
            print(f"\n{group}")
        print(f"  {found.name}: {states[found.name]}")
        if args.list:
            print(f"      python benchmarks/{found.command}")
    return 0 if args.list or all(state.startswith(("finished", "not run: ")) for state in states.values()) else 1


def run(found: Measurement, folder: Path, deadline: float | None) -> str:
    """Measures what is missing in the file. Returns "finished", or why not."""
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = shlex.split(found.command)
    file, log = folder / f"{found.name}.json", folder / f"{found.name}.log"
    command = [sys.executable, str(FOLDER / script), *options, "--out", str(file)]
    with log.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
        clock = threading.Timer(deadline - time.monotonic() if deadline else math.inf, _end, [process])
        clock.daemon = True
        if deadline:
            clock.start()
        try:
            for line in process.stdout or ():
                stream.write(line)
                stream.flush()
                print(line, end="", flush=True)
            code = process.wait()
        finally:
            clock.cancel()
            _end(process)
    if code and deadline and time.monotonic() >= deadline:
        return "out of time; the same command goes on"
    # Some commands have a limit of their own, after which they end as if all were well.
    statuses = statuses_of(file) if code in (0, 1) else []
    stopped = [status for status in statuses if status.startswith("stopped")]
    if stopped and not any(status.startswith("failed") for status in statuses):
        rows = f"{len(stopped)} row{'s' * (len(stopped) > 1)}"
        return f"{rows} {stopped[0].partition(';')[0]}; the same command goes on"
    return "finished" if code == 0 else f"failed with exit code {code}; its output is in {log}"


def statuses_of(file: Path) -> list[str]:
    """Those of the rows of a file of results; none if it is not one."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return [str(row["status"]) for row in rows if "status" in row]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends the command and all that it started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def read_finished(folder: Path) -> dict[str, str]:
    """
    Raises:
        ValueError, TypeError: the file is damaged.
    """
    file = folder / FINISHED
    return {**json.loads(file.read_text(encoding="utf-8"))} if file.is_file() else {}


def write_finished(folder: Path, finished: dict[str, str]) -> None:
    from forgetting_transformer.files import write_json

    write_json(folder / FINISHED, finished)


if __name__ == "__main__":
    sys.exit(run_main(main, "interrupted; the rows so far are saved, and the same command goes on"))
