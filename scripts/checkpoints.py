#!/usr/bin/env python
"""Lists, verifies, compares and prunes the checkpoints of a run.

    python scripts/checkpoints.py ls RUN                     lists tokens, size, age and whether it is kept permanently
    python scripts/checkpoints.py verify RUN                 reads every file and compares it with its checksum
    python scripts/checkpoints.py diff RUN STEP RUN2 STEP2   compares settings, counters, weights and moments
    python scripts/checkpoints.py prune RUN --keep 1         deletes all but the newest ones

RUN is the output_dir of a run. STEP is the number in a checkpoint's name, in training tokens, or "newest" for the
newest valid checkpoint. `verify` exits with 1 if a checkpoint is damaged, and `diff` if tensors differ.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from forgetting_transformer.console import redact
from forgetting_transformer.files import flatten, size_in_words
from forgetting_transformer.training.checkpoint import folder as checkpoints
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError
from forgetting_transformer.training.checkpoint.reading import load_tensors
from forgetting_transformer.training.records.metrics import duration
from forgetting_transformer.training.records.run_directory import RunDirectory

T = TypeVar("T")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ls = commands.add_parser("ls", help="list checkpoints; reads only their manifests")
    verify = commands.add_parser("verify", help="compare every file with its checksum")
    diff = commands.add_parser("diff", help="compare two checkpoints")
    prune = commands.add_parser("prune", help="delete older checkpoints; never while the run is training")
    for command in (ls, verify, prune):
        command.add_argument("run", type=command_line.path, metavar="RUN", help="output_dir of a run")
    for number in ("", "2"):
        diff.add_argument(f"run{number}", type=command_line.path, metavar=f"RUN{number}", help="output_dir of a run")
        diff.add_argument(f"step{number}", metavar=f"STEP{number}", help='training tokens, or "newest"')
    prune.add_argument("--keep", type=count, default=1, help="valid checkpoints to keep, the newest (default 1)")
    prune.add_argument("--permanent", action="store_true", help="also delete checkpoints that are kept permanently")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    return parser.parse_args(argv)


def ls(args: argparse.Namespace) -> int:
    folder = RunDirectory(args.run).checkpoints
    for path in folders(folder):
        manifest = checkpoints.read_manifest(path)
        if manifest is None:
            print(f"{checkpoints.step_of(path):>20,} tokens  damaged: see verify")
            continue
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        age = duration(max(0.0, time.time() - (path / checkpoints.MANIFEST).stat().st_mtime))
        stays = "  kept permanently" if manifest["permanent"] else ""
        print(f"{checkpoints.step_of(path):>20,} tokens  {size_in_words(size):>9}  {age:>9} old{stays}")
    return 0


def verify(args: argparse.Namespace) -> int:
    damaged = 0
    for path in folders(RunDirectory(args.run).checkpoints):
        try:
            checkpoints.inspect(path)
            print(f"{path.name}  whole")
        except CheckpointError as error:
            damaged += 1
            print(f"{path.name}  damaged: {error}")
    return int(damaged > 0)


def diff(args: argparse.Namespace) -> int:
    import torch

    def read(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return flatten(checkpoint.trainer_state()), load_tensors(checkpoint)

    pair = [find(args.run, args.step, read), find(args.run2, args.step2, read)]
    states = [state for state, _ in pair]
    for key in sorted(states[0].keys() | states[1].keys()):
        before, after = (state.get(key, "(absent)") for state in states)
        if before != after and not key.startswith("environment.git.patch"):
            print(redact(f"{key}: {before} -> {after}"))
    first, second = (tensors for _, tensors in pair)
    for name in sorted(first.keys() ^ second.keys()):
        print(f"{name}: only in {'the first' if name in first else 'the second'}")
    changes = []
    for name in first.keys() & second.keys():
        if first[name].shape != second[name].shape:
            print(f"{name}: {tuple(first[name].shape)} -> {tuple(second[name].shape)}")
        elif not torch.equal(first[name], second[name]):
            change = (second[name].double() - first[name].double()).norm().item()
            changes.append((change / (first[name].double().norm().item() or 1.0), name))
    changes.sort(reverse=True)
    equal = len(first.keys() & second.keys()) - len(changes)
    print(f"{equal} tensors are equal in every bit, {len(changes)} differ" + ("; the most:" if changes else ""))
    for change, name in changes[:10]:
        print(f"  {name}: by {change:.2g} times its norm")
    return int(bool(changes) or first.keys() != second.keys())


def prune(args: argparse.Namespace) -> int:
    directory = RunDirectory(args.run)
    folders(directory.checkpoints)
    directory.acquire()
    try:
        kept = 0
        for path in reversed(folders(directory.checkpoints)):
            manifest = checkpoints.read_manifest(path)
            if manifest is None:
                continue  # damaged ones are kept: somebody may mend them
            if kept < args.keep:
                try:
                    # Only a checkpoint that was read from end to end counts as one to continue from.
                    checkpoints.inspect(path)
                    kept += 1
                except CheckpointError as error:
                    print(f"{path.name}  left, although damaged: {error}")
                continue
            if manifest["permanent"] and not args.permanent:
                print(f"{path.name}  kept permanently")
                continue
            print(f"{path.name}  {'would be deleted' if args.dry_run else 'deleted'}")
            if not args.dry_run:
                checkpoints.remove(path)
    finally:
        directory.release()
    return 0


def folders(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [folder / f"step-{step:015d}" for step in checkpoints.steps_in(folder)]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoints; RUN is the output_dir of a run")
    return found


def find(run: Path, step: str, read: Callable[[Checkpoint], T]) -> T:
    """Result of `read` on a checkpoint by its step or "newest"; the run may be training."""
    folder = RunDirectory(run).checkpoints
    if step != "newest" and not step.isdigit():
        raise CheckpointError(
            f'{step!r} is not a number of tokens; `ls` shows them, and "newest" is the newest valid one'
        )
    return checkpoints.read_newest(folder, read, None if step == "newest" else int(step))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return {"ls": ls, "verify": verify, "diff": diff, "prune": prune}[args.command](args)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
