#!/usr/bin/env python
"""Measures the numbers of the documentation again on this machine, in pieces of any length.

    python benchmarks/measure.py --list                                 # what there is, and what is done
    python benchmarks/measure.py training attention --time_limit 600    # two groups, ten minutes of them
    python benchmarks/measure.py several_gpus                           # on 2, 4 and 8 GPUs, as many as there are
    cp output/benchmarks/*.json benchmarks/results/ && python -m studies.pages     # puts them into the pages

commands.yaml beside this script has the commands. Each writes its file into --folder, row by row (cases.py). The same
command continues: what is finished is left alone, and an unfinished file gets its missing rows.
A command that needs more GPUs than there are is not run, and the authors' code only where --authors says where it is. A
command that fails is named at the end, and the others still run. After a change of the code give another --folder: a
file takes the rows of one commit only.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from cases import end_with_parent, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, positive

FOLDER = Path(__file__).resolve().parent
COMMANDS = FOLDER / "commands.yaml"
#: Seconds that a command gets to save what it has, once its time is over.
GRACE = 20


class Measurement(NamedTuple):
    """A file of results, the command without --out that writes it, and the GPUs it needs."""

    group: str
    name: str
    command: str
    gpus: int


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("wanted", nargs="*", metavar="NAME", help="groups, or files without .json (default: all)")
    parser.add_argument(
        "--folder", type=command_line.path, default=Path("output/benchmarks"), help="of the files (default %(default)s)"
    )
    parser.add_argument(
        "--time_limit", type=positive, help="seconds for this call; default: until everything is measured"
    )
    parser.add_argument("--gpus", type=at_least(0), help="as if there were so many (default: those of this machine)")
    parser.add_argument("--authors", type=command_line.path, help="a checkout of the paper authors' code (authors.py)")
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    args = parser.parse_args(argv)
    known = measurements()
    for name in args.wanted:
        if not any(name in (found.group, found.name) for found in known):
            groups = dict.fromkeys(found.group for found in known)
            parser.error(f"{name!r} is no group and no file; groups are {', '.join(groups)}, and --list shows all")
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    return args


def measurements() -> list[Measurement]:
    """The commands of commands.yaml, one for each number of GPUs."""
    found = []
    for group, entries in yaml.safe_load(COMMANDS.read_text(encoding="utf-8")).items():
        for name, entry in entries.items():
            command, several = " ".join(entry["command"].split()), "{gpus}" in name
            for gpus in entry["gpus"] if several else [entry.get("gpus", 1)]:
                name_of_file, filled = (text.replace("{gpus}", str(gpus)) for text in (name, command))
                found.append(Measurement(group, name_of_file, filled, gpus))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a command that runs is ended too
    deadline = time.monotonic() + args.time_limit if args.time_limit else None
    states: dict[Measurement, str] = {}
    for found in measurements():
        if args.wanted and found.group not in args.wanted and found.name not in args.wanted:
            continue
        if args.authors is not None:
            found = found._replace(command=found.command.replace("{authors}", shlex.quote(str(args.authors))))
        if is_finished(found, args.folder):
            states[found] = "finished"
        elif "{authors}" in found.command:
            states[found] = "not run: needs --authors, a checkout of the paper authors' code"
        elif found.gpus > args.gpus:
            states[found] = f"not run: needs {found.gpus} GPU{'s' * (found.gpus > 1)}, there are {args.gpus}"
        elif args.list or (deadline and time.monotonic() >= deadline):
            states[found] = "not measured yet"
        else:
            print(f"== {found.name}: python benchmarks/{found.command}", flush=True)
            states[found] = run(found, args.folder, deadline)
    for found, state in states.items():
        print(f"{found.group}  {found.name}: {state}")
        if args.list:
            print(f"      python benchmarks/{found.command}")
    return 0 if args.list or all(state.startswith(("finished", "not run: ")) for state in states.values()) else 1


def run(found: Measurement, folder: Path, deadline: float | None) -> str:
    """Measures the missing rows of the file. Returns "finished", or why not."""
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = shlex.split(found.command)
    command = [sys.executable, str(FOLDER / script), *options, "--out", str(folder / f"{found.name}.json")]
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()) if deadline else None)
    except subprocess.TimeoutExpired:
        return "out of time; the same command continues"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the command and all that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    if code:
        return f"failed with exit code {code}"
    (folder / f".{found.name}.finished").write_text(found.command, encoding="utf-8")
    return "finished" if is_finished(found, folder) else "some rows were stopped; the same command continues"


def is_finished(found: Measurement, folder: Path) -> bool:
    """Whether this command has ended and no row of its file was stopped at the row's own limit."""
    try:
        if (folder / f".{found.name}.finished").read_text(encoding="utf-8") != found.command:
            return False
        rows = json.loads((folder / f"{found.name}.json").read_text(encoding="utf-8"))["rows"]
        return not any(str(row.get("status")).startswith("stopped") for row in rows)
    except (OSError, ValueError, LookupError):
        return False


if __name__ == "__main__":
    sys.exit(run_main(main))
