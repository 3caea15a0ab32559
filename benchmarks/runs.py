"""Starts runs of train.py on several devices, interrupts them from outside, and reads what they leave behind."""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import end_with_parent
from start import FIRST_LINE, launch_command, on_random_tokens, read_status, write_corpus

from training import compose


class Failure(RuntimeError):
    """A run did not do what it should; the message says what it did."""


class TimeOver(RuntimeError):
    """--time_limit is reached."""


@dataclasses.dataclass
class Ended:
    """How a start of train.py ended. `notes`: the folder of recorded_tokens.py; `struck`: when the signal came."""

    code: int
    notes: Path
    said: str
    first_step_seconds: float | None
    seconds_to_end: float | None
    struck: float | None


class Runs:
    """Starts of train.py in `folder`, on a corpus that is made there."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.deadline = time.monotonic() + args.time_limit
        config = compose(args.experiment, [f"fabric.accelerator={args.accelerator}", *args.overrides])
        self.length, self.batch = config.datamodule.train_batch_len, config.datamodule.train_batch_size
        self.step_tokens = self.length * self.batch

    def done(self, output: Path, devices: int, steps: int | None = None, overrides: Sequence[str] = ()) -> Ended:
        """A start that is to end by itself, with so many steps done.

        Raises:
            Failure: it did not.
        """
        ended = self.start(output, devices, steps, overrides)
        if ended.code != 0 or read_status(output)["status"] != "done":
            raise Failure(f"a start on {devices} devices ended with code {ended.code}: {ended.said[-2000:]}")
        return ended

    def start(
        self,
        output: Path,
        devices: int,
        steps: int | None = None,
        overrides: Sequence[str] = (),
        strike: signal.Signals | None = None,
    ) -> Ended:
        """Starts a run, or continues it; with `strike`, sends that signal to the last rank after a third of the steps.

        Raises:
            TimeOver: --time_limit is reached.
            Failure: it ended before the signal.
        """
        # Imported here: it imports PyTorch, for which --help need not wait.
        from forgetting_transformer.training.faults.peers import is_gone

        if time.monotonic() > self.deadline:
            raise TimeOver
        data, notes = self.folder / "data", output.with_name(f"{output.name}.notes-{len(notes_of(output))}")
        write_corpus(data / "random", self.length, self.batch * self.args.steps, self.args.vocabulary)
        command = launch_command(devices, self.args.accelerator, self.args.launcher)
        command += on_random_tokens(self.args.experiment, output, data, self.args.vocabulary)
        command += [*self.settings(steps or self.args.steps, notes), *self.args.overrides, *overrides]
        environment = os.environ | {"NCCL_ALGO": self.args.nccl_algo}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        printed = output.with_name(notes.name.replace(".notes-", ".printed-"))
        began, first, struck_at = time.monotonic(), None, None
        with printed.open("w", encoding="utf-8") as said:
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, preexec_fn=end_with_parent)
            try:
                while process.poll() is None or not all(map(is_gone, processes(notes, devices))):
                    if time.monotonic() > self.deadline:
                        raise TimeOver
                    if first is None and FIRST_LINE in printed.read_text(encoding="utf-8", errors="replace"):
                        first = time.monotonic() - began
                    due = struck_at is None and max(times(notes, devices - 1), default=0) >= self.args.steps // 3
                    if strike and due:
                        os.kill(processes(notes, devices)[-1], strike)
                        struck_at = time.monotonic()
                    time.sleep(0.01)
            finally:
                for rank in itertools.filterfalse(is_gone, processes(notes, devices)):
                    kill(rank)
                process.kill()
                process.wait()
        ended, text = time.monotonic(), printed.read_text(encoding="utf-8", errors="replace")
        if strike and struck_at is None:
            raise Failure(f"it ended with code {process.returncode} before the signal: {text[-2000:]}")
        struck = struck_at and time.time() - (ended - struck_at)
        return Ended(process.returncode, notes, text, first, struck_at and ended - struck_at, struck)

    def settings(self, steps: int, notes: Path) -> list[str]:
        """Arguments of every start. What decides the weights is the same in all of them."""
        tokens, whole = self.step_tokens, self.args.steps * self.step_tokens
        return [
            f"strategy={self.args.strategy}", f"train.max_tokens={steps * tokens}", f"log_interval={tokens}",
            f"schedule.warmup_tokens={whole // 4}", f"schedule.total_tokens={whole}", "wandb.mode=disabled",
            f"checkpoint_interval={whole // 4}", f"checkpoint_keep_interval={whole}",
            "plugins=[recorded_tokens]", f"+callbacks.recorded_tokens.folder={notes}",
        ]  # fmt: skip


def processes(notes: Path, devices: int) -> list[int]:
    """Those of all ranks that began to train."""
    return [process for rank in range(devices) if (process := process_of(notes, rank)) is not None]


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


# What runs leave behind.


def result(output: Path) -> dict[str, Any]:
    """Of a run that is done: loss and tokens of every step, and a digest of all weights and moments in the end."""
    lines = (output / "metrics/jsonlines/train.jsonl").read_text(encoding="utf-8").splitlines()
    tokens: dict[int, str] = {}
    for notes in notes_of(output):
        tokens |= tokens_by_step(notes, len(list(notes.iterdir())))
    return {
        "losses": [json.loads(line)["train/loss"] for line in lines],
        "tokens": [tokens.get(step) for step in range(len(lines))],
        "weights": weights_digest(output),
    }


def weights_digest(output: Path) -> str:
    """Of all weights and moments in a run's newest checkpoint."""
    newest = max(output.glob("checkpoints/step-*/trainer.json"))
    digests = json.loads(newest.read_text(encoding="utf-8"))["digests"]
    return hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=8).hexdigest()


def notes_of(output: Path) -> list[Path]:
    """The folders of recorded_tokens.py, one per start."""
    return sorted(output.parent.glob(f"{output.name}.notes-*"))


def taken_once(output: Path) -> bool:
    """Whether no step was taken by two starts."""
    steps = [step for notes in notes_of(output) for step in times(notes)]
    return len(steps) == len({*steps})


def step_seconds(taken: dict[int, float]) -> dict[int, float]:
    """From a step's batch to the next one's."""
    return {step: taken[step + 1] - taken[step] for step in sorted(taken) if step + 1 in taken}


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def process_of(folder: Path, rank: int) -> int | None:
    """The rank's process; None before training begins."""
    return next((line["pid"] for line in whole_lines(folder / f"rank-{rank}.jsonl")), None)


def times(folder: Path, rank: int = 0) -> dict[int, float]:
    """When the rank took the batch of each step."""
    return {line["step"]: line["time"] for line in whole_lines(folder / f"rank-{rank}.jsonl")[1:]}


def tokens_by_step(folder: Path, devices: int) -> dict[int, str]:
    """A digest of every step's tokens in the order of the global batch, however many ranks shared it.

    Only steps that all ranks took.
    """
    # Ranks that share sequences (strategy.context) take the same ones.
    shares: dict[int, dict[int, list[str]]] = {}
    for rank in range(devices):
        if lines := whole_lines(folder / f"rank-{rank}.jsonl"):
            shares[lines[0]["share"]] = {line["step"]: line["sequences"] for line in lines[1:]}
    ranks = [shares[share] for share in sorted(shares)]
    steps = set.intersection(*map(set, ranks)) if ranks else set()
    whole = {step: [name for rank in ranks for name in rank[step]] for step in sorted(steps)}
    return {step: hashlib.blake2b("".join(names).encode(), digest_size=8).hexdigest() for step, names in whole.items()}


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """Those that are written to their end."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
