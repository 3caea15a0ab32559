"""A campaign of faults against training: hundreds of random ones, after which nothing may be lost.

    python tests/campaign/run.py --seeds 20               # ten faults for each seed, in some minutes
    python tests/campaign/run.py --seed 17                # those of one seed again
    python tests/campaign/run.py --seed 100 --seeds 100 --folder /scratch/campaign

Runs of twenty steps suffer faults and are started again after each: they are killed at one of their calls to the file
system, meet disks that fail, are full or slow, and damaged checkpoints. Then each is left alone, and must end in the
weights, moments and logged numbers, bit for bit, of a run that nothing happened to. On the way no start may lose a
checkpoint that was whole, end with an error that no message explains, or hang.

Needs Linux and a C compiler. The exit code is 1 if anything was lost.
"""

import argparse
import errno
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
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
#: Faults for each seed.
EACH = 10
#: (strategy, processes), and how often it is chosen.
STRATEGIES = {("auto", 1): 6, ("ddp", 2): 2, ("fsdp", 2): 2}
#: What a start may end by, with a message that says what to do.
EXPLAINED = ("TrainingError", "CheckpointError", "RunDirectoryError", "DataError", "ConfigError")


class Lost(AssertionError):
    """What must never happen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    args = parser.parse_args()
    if not sys.platform.startswith("linux") or faults.compiler() is None:
        print("error: the campaign needs Linux and a C compiler (cc or gcc)", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=args.folder))
    campaign = Campaign(folder)
    for seed in range(args.seed, args.seed + args.seeds):
        began = time.monotonic()
        campaign.suffer(seed)
        print(f"seed {seed}: {EACH} faults in {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(folder)
    print("nothing was lost")
    return 0


class Campaign:
    """The corpus, the fork server and the runs to which nothing happened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self._straight: dict[str, dict[str, Any]] = {}
        self.calls: dict[str, int] = {}
        self.context = faults.server(self.folder, ["tests.campaign.runs"])
        corpus = self.context.Process(target=make_corpus, args=(self.data,))
        corpus.start()
        corpus.join()
        for strategy, ranks in STRATEGIES:
            run = Run(self, strategy, ranks, self.folder / f"straight-{strategy}")
            if run.start() != [DONE] * ranks:
                raise SystemExit(f"a run that nothing happens to fails: {run.said()}")
            self.calls[strategy] = max(int(said.rpartition("CALLS ")[2]) for said in run.said().split("\f"))
            self._straight[strategy] = contents(run.folder)

    def suffer(self, seed: int) -> None:
        """Runs with the faults of a seed.

        Raises:
            Lost: something was.
        """
        generator = random.Random(seed)
        strategy, ranks = weighted(generator, STRATEGIES)
        run = None
        for number in range(EACH):
            run = run or Run(self, strategy, ranks, self.folder / f"run-{seed}-{number}")
            weighted(generator, KINDS)(run, generator)
            run.check()
            if run.kept == STEPS or number == EACH - 1:  # the others happen to another run
                run.end(self._straight[strategy])
                run = None


def weighted(generator: random.Random, choices: dict[Any, int]) -> Any:
    return generator.choices(list(choices), list(choices.values()))[0]


class Run:
    """One output_dir, started again and again."""

    def __init__(self, campaign: Campaign, strategy: str, ranks: int, folder: Path) -> None:
        self.campaign, self.strategy, self.ranks, self.folder = campaign, strategy, ranks, folder
        self.settings = config(folder, campaign.data, strategy)
        self.kept = 0  # step of the newest whole checkpoint

    def start(self, fault: Fault | None = None, victim: int = 0) -> list[int | None]:
        """Starts every rank, of which `victim` suffers `fault`; returns their exit codes."""
        environment = {}
        if self.ranks > 1:
            environment = {
                "LT_CLI_USED": "1", "LT_DEVICES": str(self.ranks), "LT_ACCELERATOR": "cpu", "LT_NUM_NODES": "1",
                "TORCHELASTIC_RUN_ID": "campaign", "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            }  # fmt: skip
        processes = []
        for rank in range(self.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            suffers = fault if fault is not None and rank == victim else Fault()
            said = self.folder.with_name(f"{self.folder.name}.{rank}.txt")
            arguments = (self.settings, environment | own, suffers, said)
            processes.append(self.campaign.context.Process(target=start, args=arguments, daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(HANG)
        return [process.exitcode for process in processes]

    def said(self) -> str:
        files = [self.folder.with_name(f"{self.folder.name}.{rank}.txt") for rank in range(self.ranks)]
        return "\f".join(file.read_text(errors="replace") if file.is_file() else "" for file in files)

    def last_words(self) -> str:
        return " | ".join(line for line in self.said().splitlines() if line.strip())[-1500:]

    def expect(self, codes: list[int | None], *allowed: int) -> None:
        """
        Raises:
            Lost: a start hangs, or ended in a way that is not allowed, or with an error that no message explains.
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
