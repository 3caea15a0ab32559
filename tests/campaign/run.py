"""A campaign of faults against training: hundreds of random ones, after which nothing may be lost.

    python tests/campaign/run.py                          # 200 faults, in some minutes
    python tests/campaign/run.py --seed 17 --faults 10    # one run again, with the faults that its seed stands for
    python tests/campaign/run.py --faults 1000 --jobs 8 --folder /scratch/campaign

Runs of twenty steps suffer faults, ten for each seed, and are started again after each: they are killed at one of their
calls to the file system, meet disks that fail, are full or slow, and damaged checkpoints. Then each is left alone, and
must end in the weights, moments and logged numbers, bit for bit, of a run that nothing happened to. On the way no start
may lose a checkpoint that was whole, end with an error that no message explains, or hang.

Needs Linux and a C compiler. Each run prints its seed; the exit code is 1 if anything was lost.
"""

import argparse
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.campaign import faults
from tests.campaign.faults import Fault
from tests.campaign.runs import DONE, FAILED, STEPS, config, contents, start, valid_steps
from tests.processes import free_port
from tests.tiny import STEP, make_corpus

#: Seconds. No start takes as long unless it hangs.
HANG = 900.0
#: Starting a process looks after those of all threads, and of two that ask at once how one has ended only one is told.
PROCESSES = threading.Lock()
#: Faults for each seed.
EACH = 10
#: (strategy, processes), and how often it is chosen.
STRATEGIES = {("auto", 1): 6, ("ddp", 2): 2, ("fsdp", 2): 2}
#: What a start may end by, with a message that says what to do.
EXPLAINED = ("TrainingError", "CheckpointError", "RunDirectoryError", "DataError", "ConfigError")


class Lost(AssertionError):
    """What must never happen."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if not sys.platform.startswith("linux") or faults.compiler() is None:
        print("error: the campaign needs Linux and a C compiler (cc or gcc)", file=sys.stderr)
        return 2
    runs = -(-args.faults // EACH)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=args.folder))
    with ThreadPoolExecutor(args.jobs) as pool:
        campaign = Campaign(folder)
        print(f"{runs} times {EACH} faults, seeds {args.seed} to {args.seed + runs - 1}, in {folder}", flush=True)
        problems = [p for p in pool.map(campaign.suffer, range(args.seed, args.seed + runs)) if p]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(campaign.kinds.items()))
    print(f"{sum(campaign.kinds.values())} faults in {time.monotonic() - began:.0f} s: {kinds}")
    for problem in problems:
        print(f"LOST: {problem}")
    if not problems:
        shutil.rmtree(folder)
        print("nothing was lost")
    return int(bool(problems))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="at least so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each further one has the next")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: one per core)")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    return parser.parse_args(argv)


class Campaign:
    """The corpus, the fork server and the runs to which nothing happened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.kinds: Counter[str] = Counter()
        self._straight: dict[str, dict[str, Any]] = {}
        self.calls: dict[str, int] = {}
        self.context = faults.server(self.folder, ["tests.campaign.runs"])
        self.run(make_corpus, self.data)
        for strategy, ranks in STRATEGIES:
            run = Run(self, strategy, ranks, self.folder / f"straight-{strategy}", 0)
            if run.start() != [DONE] * ranks:
                raise SystemExit(f"a run that nothing happens to fails: {run.said()}")
            self.calls[strategy] = max(int(said.rpartition("CALLS ")[2]) for said in run.said().split("\f"))
            self._straight[strategy] = contents(run.folder)

    def run(self, action: Callable[..., None], *arguments: Any) -> None:
        process = self.context.Process(target=action, args=arguments)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{action.__name__} failed")

    def suffer(self, seed: int) -> str | None:
        """One run with its faults; what was lost, if anything was."""
        generator = random.Random(seed)
        # A data worker costs seconds: it is forked from a separate server, which imports PyTorch.
        (strategy, ranks), workers = weighted(generator, STRATEGIES), weighted(generator, {0: 5, 1: 1})
        history: list[str] = []
        ended = 0

        def begin() -> Run:
            return Run(self, strategy, ranks, self.folder / f"run-{seed}-{ended}", workers)

        run = begin()
        try:
            for _ in range(EACH):
                kind = weighted(generator, KINDS)
                history.append(kind.__name__)
                self.kinds[kind.__name__] += 1
                kind(run, generator)
                run.check()
                if run.kept == STEPS:  # the others happen to another run
                    run.end(self._straight[strategy])
                    ended += 1
                    run = begin()
            run.end(self._straight[strategy])
        except Exception as error:
            print(f"seed {seed}: {strategy}, {', '.join(history)}: LOST", flush=True)
            again = f"python tests/campaign/run.py --seed {seed} --faults {EACH}"
            return f"seed {seed} ({again}), {run.folder}: {type(error).__name__}: {error}"
        print(f"seed {seed}: {strategy}, {', '.join(history)}: nothing lost in {ended + 1} runs", flush=True)
        return None


def weighted(generator: random.Random, choices: dict[Any, int]) -> Any:
    return generator.choices(list(choices), list(choices.values()))[0]


def exit_code(process: Any) -> int | None:
    """None while it runs."""
    with PROCESSES:
        return process.exitcode


class Run:
    """One output_dir, started again and again. `workers`: data workers of a rank."""

    def __init__(self, campaign: Campaign, strategy: str, ranks: int, folder: Path, workers: int) -> None:
        self.campaign, self.strategy, self.ranks, self.folder = campaign, strategy, ranks, folder
        self.settings = config(folder, campaign.data, strategy, workers)
        self.kept = 0  # step of the newest whole checkpoint

    def processes(self, fault: Fault | None = None, victim: int = 0) -> list[Any]:
        """Starts every rank; `victim` suffers `fault`."""
        environment = {}
        if self.ranks > 1:
            environment = {
                "LT_CLI_USED": "1", "LT_DEVICES": str(self.ranks), "LT_ACCELERATOR": "cpu", "LT_NUM_NODES": "1",
                "TORCHELASTIC_RUN_ID": "campaign", "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            }  # fmt: skip
        started = []
        for rank in range(self.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            suffers = fault if fault is not None and rank == victim else Fault()
            said = self.folder.with_name(f"{self.folder.name}.{rank}.txt")
            process = self.campaign.context.Process(
                target=start, args=(self.settings, environment | own, suffers, said)
            )
            with PROCESSES:
                process.start()
            started.append(process)
        return started

    def start(self, fault: Fault | None = None, victim: int = 0) -> list[int]:
        return self.wait(self.processes(fault, victim))

    def wait(self, processes: list[Any]) -> list[int]:
        """Exit codes."""
        deadline = time.monotonic() + HANG
        while None in (codes := [exit_code(process) for process in processes]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process, code in zip(processes, codes, strict=True):
            if code is None:
                os.kill(process.pid, signal.SIGKILL)
        if None in codes:
            raise Lost(f"rank {codes.index(None)} hangs: {self.last_words()}")
        return codes

    def said(self) -> str:
        files = [self.folder.with_name(f"{self.folder.name}.{rank}.txt") for rank in range(self.ranks)]
        return "\f".join(file.read_text(errors="replace") if file.is_file() else "" for file in files)

    def last_words(self) -> str:
        return " | ".join(line for line in self.said().splitlines() if line.strip())[-1500:]

    def expect(self, codes: list[int], *allowed: int) -> None:
        """
        Raises:
            Lost: a start ended in a way that is not allowed, or with an error that no message explains.
        """
        if any(code not in allowed for code in codes):
            raise Lost(f"ended with {codes}, expected are {allowed}: {self.last_words()}")
        if self.ranks == 1 and FAILED in codes:
            ended = self.said().rpartition("ENDED BY ")[2].splitlines()[:1]
            if not ended or not ended[0].startswith(EXPLAINED):
                raise Lost(f"ended by what no message explains: {self.last_words()}")

    def check(self) -> None:
        """
        Raises:
            Lost: there is no whole checkpoint that is as new as the newest one before.
        """
        steps = valid_steps(self.folder)
        newest = steps[-1] if steps else 0
        if newest < self.kept:
            raise Lost(f"the newest whole checkpoint was at step {self.kept}, and now it is at {newest}")
        self.kept = newest

    def end(self, straight: dict[str, Any]) -> None:
        """Leaves the run alone, until it ends and once more, and compares it with one to which nothing happened.

        Raises:
            Lost: it does not end, or a number is another.
        """
        for _ in range(2):
            if self.start() != [DONE] * self.ranks:
                raise Lost(f"left alone, it does not end: {self.last_words()}")
        self.check()
        ours = contents(self.folder)
        different = [name for name in sorted(ours.keys() | straight.keys()) if ours.get(name) != straight.get(name)]
        if different:
            raise Lost(
                f"{len(different)} of {len(straight)} things differ from a run to which nothing happened: "
                f"{different[:5]}"
            )
        shutil.rmtree(self.folder)


# The faults. Each starts the run at least once, or damages what it has kept.
# ------------------------------------------------


def killed_at_a_call(run: Run, generator: random.Random) -> None:
    """Between two writes, wherever that is: SIGKILL at one of the calls to the file system."""
    fault = Fault("kill", countdown=generator.randint(1, run.campaign.calls[run.strategy]))
    run.expect(run.start(fault, generator.randrange(run.ranks)), DONE, FAILED, -signal.SIGKILL)


def disk(run: Run, generator: random.Random) -> None:
    """A call fails, and perhaps all after it, or each takes long; what train.py says names the file system's reason."""
    fault = Fault(
        "fail",
        operations=generator.choice((faults.EVERYTHING, faults.WRITE, faults.FSYNC, faults.RENAME, faults.OPEN)),
        countdown=generator.randint(1, max(1, run.campaign.calls[run.strategy] // generator.choice((1, 4, 16)))),
        error=generator.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
        lasting=generator.random() < 0.5,
        delay_us=generator.choice((0, 0, 0, 2000)),
    )
    run.expect(run.start(fault, generator.randrange(run.ranks)), DONE, FAILED)


def damaged_checkpoint(run: Run, generator: random.Random) -> None:
    """The newest one, where there is one before it."""
    steps = valid_steps(run.folder)
    if len(steps) >= 2:
        newest = run.folder / "checkpoints" / f"step-{steps[-1] * STEP:015d}"
        file = generator.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        data = bytearray(file.read_bytes())
        damage = generator.choice(("flip", "cut", "gone", "empty"))
        if damage == "flip" and data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes({"flip": data, "cut": data[: len(data) // 2], "empty": b""}[damage])
        run.kept = steps[-2]
    killed_at_a_call(run, generator)


#: And how often each is chosen.
KINDS: dict[Callable[[Run, random.Random], None], int] = {killed_at_a_call: 5, disk: 5, damaged_checkpoint: 3}

if __name__ == "__main__":
    sys.exit(main())
