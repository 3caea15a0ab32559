#!/usr/bin/env python
"""Measures the numbers of the documentation again on this machine.

    python benchmarks/measure.py --list                                 # the commands
    timeout 600 python benchmarks/measure.py training attention         # two groups, ten minutes of them
    python benchmarks/measure.py several_gpus                           # on 2, 4 and 8 GPUs, as many as there are
    cp output/benchmarks/*.json benchmarks/results/ && python -m studies.pages     # puts them into the pages

commands.yaml beside this script has the commands. Each writes its file into --folder, row by row (cases.py), and the
same command measures the rows that are missing. A command that needs more GPUs than there are is not run, and the
authors' code only where --authors says where it is. A command that fails is named at the end, and the others still run.
After a change of the code give another --folder: a file takes the rows of one commit only.
"""

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from cases import end_with_parent, run_main

from forgetting_transformer import command_line

FOLDER = Path(__file__).resolve().parent
COMMANDS = FOLDER / "commands.yaml"


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
    parser.add_argument("--authors", type=command_line.path, help="a checkout of the paper authors' code (authors.py)")
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    args = parser.parse_args(argv)
    known = measurements()
    for name in args.wanted:
        if not any(name in (found.group, found.name) for found in known):
            groups = dict.fromkeys(found.group for found in known)
            parser.error(f"{name!r} is no group and no file; groups are {', '.join(groups)}, and --list shows all")
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
    import torch

    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a command that runs is ended too
    states: dict[str, str] = {}
    for found in measurements():
        if args.wanted and found.group not in args.wanted and found.name not in args.wanted:
            continue
        name, command = f"{found.group}  {found.name}", found.command
        if args.authors is not None:
            command = command.replace("{authors}", shlex.quote(str(args.authors)))
        if args.list:
            states[name] = f"python benchmarks/{command}"
        elif "{authors}" in command:
            states[name] = "not run: needs --authors, a checkout of the paper authors' code"
        elif found.gpus > (there := torch.cuda.device_count()):
            states[name] = f"not run: needs {found.gpus} GPU{'s' * (found.gpus > 1)}, there are {there}"
        else:
            print(f"== {found.name}: python benchmarks/{command}", flush=True)
            script, *options = shlex.split(command)
            args.folder.mkdir(parents=True, exist_ok=True)
            out = ["--out", str(args.folder / f"{found.name}.json")]
            whole = [sys.executable, str(FOLDER / script), *options, *out]
            code = subprocess.run(whole, preexec_fn=end_with_parent, check=False).returncode
            states[name] = f"failed with exit code {code}" if code else "finished"
    for name, state in states.items():
        print(f"{name}: {state}")
    return 1 if any(state.startswith("failed") for state in states.values()) else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
