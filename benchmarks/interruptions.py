#!/usr/bin/env python
"""Interrupts real runs of train.py on several GPUs of this machine, and holds what becomes of them to a straight run.

    python benchmarks/interruptions.py                                  # FoX (Pro) 125M on all GPUs of this machine
    python benchmarks/interruptions.py --devices 8 --out results.json   # again and again, until no row is missing
    python benchmarks/interruptions.py --checks sigterm sigkill hang --overrides train.compile=false
    python benchmarks/interruptions.py --device cpu --devices 4         # to try it: a tiny model, processes with gloo

Every run is started as a user would, by scripts/launch.py, on random tokens, for --steps steps. Four checkpoints are
written in this time, and a third of the steps is done when a signal comes, from outside, to the last rank.

straight      a run without interruption on N devices, and one on N/2: what the other rows are compared with
world_sizes   a run that ends and is continued on N, N/2, N/4 and N devices
sigterm       SIGTERM to one rank; then the run is continued
sigkill       SIGKILL to one rank; then the run is continued
hang          SIGSTOP to one rank, with strategy.timeout_seconds=--timeout

first_step_seconds   from each command to the end of its first step, with the kernels that earlier runs left in caches
seconds_to_end       from the signal until the launcher has ended
exit_code            of the launcher, after the signal
steps_lost           steps that were done when the run ended and are done again by the next start
bitwise              whether every step's loss, and all weights and moments in the end, are those of the straight run
largest_difference   of a step's loss
reason               what status.json says of the rank that was lost

A row whose run did not do what docs/operations.md promises has failed and says why. Losses on other numbers of
devices are not judged, but reported: sums are made in another order. Runs log every step, for which the host waits for
the GPUs.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import compose, end_with_parent, parse, parser, run, run_main
from start import FIRST_LINE, VOCABULARY, launch_command, on_random_tokens, read_status, write_corpus

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count

CHECKS = ("world_sizes", "sigterm", "sigkill", "hang")
ON_GPU = {"experiment": "forgetting_transformer/pro_125m_2b", "vocabulary": VOCABULARY}
ON_CPU = {"experiment": "demo/fox_pro", "vocabulary": 512}
#: What a CPU can do: eight short sequences a step, one at a time, of which eight processes have one each.
TINY = ["datamodule.train_batch_len=128", "datamodule.train_batch_size=8", "datamodule.train_num_workers=0"]
TINY += ["train.grad_acc_tokens=128", "model.config.hidden_size=64", "model.config.num_hidden_layers=2"]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, time_limit=540)
    made.add_argument("--devices", type=count, help="N (default: all GPUs of this machine)")
    made.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="default: all")
    made.add_argument("--experiment", metavar="NAME", help="of configs/experiment; default as above")
    made.add_argument("--strategy", choices=("fsdp", "ddp"), default="fsdp", help="default fsdp")
    made.add_argument("--steps", type=at_least(12), default=24, help="of a run, a multiple of 4 (default 24)")
    made.add_argument("--vocabulary", type=count, help="ids of the random tokens; default GPT-2's 50,257 on a GPU")
    made.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    made.add_argument("--timeout", type=count, default=20, help="strategy.timeout_seconds of `hang` (default 20)")
    # NCCL chooses an algorithm by message, topology and version, and each adds in another order. A ring adds in one.
    made.add_argument("--nccl_algo", default="Ring", help="NCCL_ALGO of all runs, for equal bits (default Ring)")
    made.add_argument("--folder", type=command_line.path, help="where runs write, for the time of the call")
    args = parse(made, argv, ON_GPU, ON_CPU)
    if args.device == "cpu" and args.experiment == ON_CPU["experiment"]:
        args.overrides = [*TINY, *args.overrides]
    if args.devices is None:
        import torch

        args.devices = torch.cuda.device_count() if args.device == "cuda" else 2
    if args.steps % 4:
        made.error(f"--steps {args.steps} must be a multiple of 4")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.devices < 2:
        problem = f"this needs several devices, and there are {args.devices}; try --device cpu --devices 4"
        print(f"error: {problem}", file=sys.stderr)
        return 2
    sizes = [size for size in (args.devices, args.devices // 2, args.devices // 4) if size] + [args.devices]
    cases = [{"check": "straight", "devices": [size]} for size in sizes[:2]]
    cases += [{"check": check, "devices": sizes if check == "world_sizes" else sizes[:1]} for check in args.checks]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs = Runs(args, Path(folder))
        cases = [{"experiment": args.experiment, **case} for case in cases]
        return run(__file__, args, argv, cases, lambda case: getattr(runs, case["check"])(case["devices"]))


class Runs:
    """Runs of train.py in `folder`, on a corpus that is made there. Each check is a method that returns its row."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self._straight: dict[int, dict[str, Any]] = {}

    def straight(self, devices: list[int]) -> dict[str, Any]:
        (size,) = devices
        if size not in self._straight:
            output = self.folder / f"straight-{size}"
            first = self._done(output, size)
            clock = [line["throughput/total_time"] for line in lines(output, "throughput")][3:]  # usual steps
            usual = statistics.median(after - before for before, after in itertools.pairwise(clock))
            self._straight[size] = {"first_step_seconds": [first], "step_seconds": usual, **result(output)}
        return self._straight[size]

    def world_sizes(self, sizes: list[int]) -> dict[str, Any]:
        output, starts = self.folder / "world_sizes", []
        for part, size in enumerate(sizes, 1):
            starts.append(self._done(output, size, self.args.steps * part // len(sizes)))
        losses = result(output)["losses"]
        difference = largest_difference(losses, self.straight(sizes[:1])["losses"])
        return {"first_step_seconds": starts, "largest_difference": difference, "losses": losses}

    def sigterm(self, devices: list[int]) -> dict[str, Any]:
        return self._struck(devices, signal.SIGTERM)

    def sigkill(self, devices: list[int]) -> dict[str, Any]:
        return self._struck(devices, signal.SIGKILL)

    def _struck(self, devices: list[int], number: signal.Signals) -> dict[str, Any]:
        """A signal to the last rank, and the next start."""
        reference, output = self.straight(devices), self.folder / number.name
        end = self._strike(output, number)
        done = len(lines(output, "train"))
        again = self._done(output, *devices)
        resumed = json.loads((output / "starts.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
        found = result(output)
        row = {
            **end,
            "first_step_seconds": [*end["first_step_seconds"], again],
            "steps_lost": max(0, done - resumed // self._step_tokens()),
            "bitwise": found["losses"] == reference["losses"] and found["weights"] == reference["weights"],
            "largest_difference": largest_difference(found["losses"], reference["losses"]),
        }
        promised = {"losses or weights differ from the straight run's": row["bitwise"]}
        if number == signal.SIGTERM:
            promised |= {"it is not preempted": row["outcome"] == "preempted", "steps were lost": not row["steps_lost"]}
        return judged(row, promised)

    def hang(self, devices: list[int]) -> dict[str, Any]:
        """SIGSTOP to the last rank."""
        timeout = [f"strategy.timeout_seconds={self.args.timeout}"]
        return {"timeout": self.args.timeout, **self._strike(self.folder / "hang", signal.SIGSTOP, timeout)}

    def _strike(self, output: Path, number: signal.Signals, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """End of a run after a signal to the last rank, and its message.

        Raises:
            RuntimeError: it ended before the signal, or does not name the rank after SIGKILL or SIGSTOP.
        """
        rank = self.args.devices - 1
        code, first, seconds = self._start(output, self.args.devices, self.args.steps, overrides, number)
        status = read_status(output)
        row = {
            "rank": rank,
            "first_step_seconds": [first],
            "seconds_to_end": seconds,
            "exit_code": code,
            "outcome": status["status"],
            "reason": status["reason"].replace(socket.gethostname(), "HOST"),
        }
        is_named = number == signal.SIGTERM or re.search(rf"\brank {rank}\b", row["reason"])
        return judged(row, {"status.json does not name the rank": bool(is_named)})

    def _done(self, output: Path, devices: int, steps: int | None = None) -> float | None:
        """Seconds to the first step of a start that ends after so many steps.

        Raises:
            RuntimeError: it did not.
        """
        code, first, _ = self._start(output, devices, steps or self.args.steps)
        if code != 0 or read_status(output)["status"] != "done":
            said = output.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"a start on {devices} devices ended with code {code}: {said[-2000:]}")
        return first

    def _start(
        self,
        output: Path,
        devices: int,
        steps: int,
        overrides: Sequence[str] = (),
        strike: signal.Signals | None = None,
    ) -> tuple[int, float | None, float | None]:
        """Starts or continues a run; with `strike`, sends that signal to the last rank after a third of the steps.

        Returns:
            exit code of the launcher; seconds to the first step; seconds from the signal to the end.
        """
        args, tokens, printed = self.args, self._step_tokens(), output.with_suffix(".txt")
        data, whole = self.folder / "data", self.args.steps * self._step_tokens()
        write_corpus(data / "random", self._length(), whole // self._length(), args.vocabulary)
        command = [
            *launch_command(devices, args.device, "launch.py"),
            *on_random_tokens(args.experiment, output, data, args.vocabulary), f"strategy={args.strategy}",
            f"train.max_tokens={steps * tokens}", f"log_interval={tokens}", "wandb.mode=disabled",
            f"schedule.warmup_tokens={whole // 4}", f"schedule.total_tokens={whole}",
            f"checkpoint_interval={whole // 4}", f"checkpoint_keep_interval={whole}", *args.overrides, *overrides,
        ]  # fmt: skip
        began, first, struck = time.monotonic(), None, None
        with printed.open("w", encoding="utf-8") as said:
            process = subprocess.Popen(
                command, env=os.environ | {"NCCL_ALGO": args.nccl_algo}, stdout=said, stderr=said,
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
            try:
                while process.poll() is None:
                    if time.monotonic() - began > args.time_limit:
                        raise RuntimeError(f"a start took more than {args.time_limit:g} s")
                    if first is None and FIRST_LINE in printed.read_text(encoding="utf-8", errors="replace"):
                        first = time.monotonic() - began
                    if strike and struck is None and len(lines(output, "train")) >= args.steps // 3:
                        os.kill(process_of(process.pid, devices - 1), strike)
                        struck = time.monotonic()
                    time.sleep(0.02)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if strike and struck is None:
            raise RuntimeError(f"it ended with code {process.returncode} before the signal")
        return process.returncode, first, struck and time.monotonic() - struck

    def _length(self) -> int:
        return self._config().datamodule.train_batch_len

    def _step_tokens(self) -> int:
        return self._length() * self._config().datamodule.train_batch_size

    def _config(self) -> Any:
        return compose(self.args.experiment, [f"fabric.accelerator={self.args.device}", *self.args.overrides])


def process_of(launcher: int, rank: int) -> int:
    """The process of a rank that this launcher has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"\0RANK={rank}\0" in f"\0{(folder / 'environ').read_text()}":
                return int(folder.name)
        except OSError:
            continue
    raise RuntimeError(f"the launcher has no process of rank {rank}")


def lines(output: Path, name: str) -> list[dict[str, Any]]:
    """Lines that a run has logged, without one that is being written."""
    file = output / f"metrics/jsonlines/{name}.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def result(output: Path) -> dict[str, Any]:
    """Losses of all steps of a run that is done, and a digest of its weights and moments in the end."""
    import torch

    from forgetting_transformer.training.checkpoint.folder import newest_valid
    from forgetting_transformer.training.checkpoint.reading import load_tensors

    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(load_tensors(newest_valid(output / "checkpoints")).items()):
        digest.update(name.encode() + tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return {"losses": [line["train/loss"] for line in lines(output, "train")], "weights": digest.hexdigest()}


def largest_difference(ours: Iterable[float], theirs: Iterable[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def judged(row: dict[str, Any], promised: dict[str, bool]) -> dict[str, Any]:
    """The row. `promised`: what is wrong -> whether it is not.

    Raises:
        RuntimeError: a promise is broken.
    """
    if broken := [problem for problem, kept in promised.items() if not kept]:
        raise RuntimeError(f"{'; '.join(broken)}: {row}")
    return row


if __name__ == "__main__":
    sys.exit(run_main(main))
