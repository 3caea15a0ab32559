"""A campaign of faults against training: random ones, after which nothing may be lost.

    python tests/campaign/run.py                          # ten faults
    python tests/campaign/run.py --seed 17 --seeds 20     # ten for each of twenty seeds

Runs of twenty steps are killed at one of their calls to the file system, meet disks that fail or are full, and damaged
checkpoints, and are started again after each. No start may lose a checkpoint that was whole, end with an error that no
message explains, or hang. At the end each run is left alone, and must be, bit for bit, one that nothing happened to.

Needs Linux and a C compiler: faults.c is preloaded, into this process and so into those that it forks.
"""

import argparse
import ctypes
import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training.checkpoint.folder import newest_valid
from tests.tiny import STEP, make_corpus, tiny_config
from tests.training.conftest import assert_same_run, changed

#: Seconds. No start takes as long unless it hangs.
HANG = 900.0
#: Faults for each seed.
EACH = 10
#: What a start may end by, with a message that says what to do.
EXPLAINED = ("TrainingError", "CheckpointError", "RunDirectoryError", "DataError", "ConfigError")
#: Kinds of faults.c.
NOTHING, FAIL, KILL = range(3)


class Lost(AssertionError):
    """What must never happen."""


def start(config: dict[str, Any], said: Path, *fault: int) -> tuple[int | None, str]:
    """Exit code and output of a start in a separate process.

    Args:
        fault: its kind, which call it hits (from 1), the errno, and whether it hits all calls after that one too.
    """
    process = multiprocessing.get_context("fork").Process(target=_train, args=(config, said, fault))
    process.start()
    process.join(HANG)
    return process.exitcode, said.read_text(errors="replace")


def _train(config: dict[str, Any], said: Path, fault: tuple[int, ...]) -> None:
    printed = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    library = ctypes.CDLL(None)
    library.faults_set(os.fsencode(config["output_dir"]), *(fault or (NOTHING, 0, 0, 0)))
    code = 0
    try:
        training.run(training.parse(OmegaConf.create(config)))
    except BaseException as error:
        traceback.print_exc()
        print(f"\nENDED BY {type(error).__name__}: {error}")
        code = 1
    print(f"\nCALLS {library.faults_seen()}")
    sys.stdout.flush()
    os._exit(code)


def kept(config: dict[str, Any]) -> int:
    """Tokens of the newest whole checkpoint."""
    found = newest_valid(Path(config["output_dir"]) / "checkpoints")
    return found.step if found else 0


def damage_newest(config: dict[str, Any], generator: random.Random) -> None:
    """Where there is one before it."""
    checkpoints = sorted((Path(config["output_dir"]) / "checkpoints").glob("step-*/manifest.json"))
    if len(checkpoints) < 2:
        return
    file = generator.choice(sorted(path for path in checkpoints[-1].parent.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    damage = generator.choice(("flip", "cut", "gone"))
    if damage == "flip" and data:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    file.unlink() if damage == "gone" else file.write_bytes(data[: len(data) // 2] if damage == "cut" else data)


def suffer(config: dict[str, Any], straight: dict[str, Any], calls: int, generator: random.Random) -> None:
    """Runs with the faults of a seed; one that has reached its end is followed by another.

    Raises:
        Lost: something was.
    """
    said, newest = Path(config["output_dir"] + ".txt"), 0
    for number in range(EACH):
        if generator.random() < 0.25:
            damage_newest(config, generator)
            newest = kept(config)
        at = generator.randint(1, max(1, calls // generator.choice((1, 4, 16))))
        reason = generator.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS))
        fault = generator.choice(((KILL, at, 0, 0), (FAIL, at, reason, 0), (FAIL, at, reason, 1)))
        code, printed = start(config, said, *fault)
        if code not in (0, 1) and not (fault[0] == KILL and code == -signal.SIGKILL):
            raise Lost(f"ended with {code} after {fault}: {printed[-1500:]}")
        if code == 1 and not printed.rpartition("ENDED BY ")[2].startswith(EXPLAINED):
            raise Lost(f"ended by what no message explains after {fault}: {printed[-1500:]}")
        if kept(config) < newest:
            raise Lost(f"the newest whole checkpoint was at {newest} tokens and is at {kept(config)} after {fault}")
        newest = kept(config)
        if newest == config["train"]["max_tokens"] or number == EACH - 1:
            for _ in range(2):
                if (end := start(config, said))[0] != 0:
                    raise Lost(f"left alone, it does not end: {end}")
            assert_same_run(straight["output_dir"], config["output_dir"])
            shutil.rmtree(config["output_dir"])
            newest = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    args = parser.parse_args()
    if "faults.so" not in os.environ.get("LD_PRELOAD", ""):
        library, source = Path(tempfile.mkdtemp()) / "faults.so", Path(__file__).with_name("faults.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)})
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=args.folder))
    make_corpus(folder / "data")
    straight = changed(tiny_config(folder / "straight", folder / "data"), checkpoint_interval=3 * STEP)
    code, said = start(straight, folder / "straight.txt")
    if code != 0:
        raise SystemExit(f"a run that nothing happens to fails: {said}")
    for seed in range(args.seed, args.seed + args.seeds):
        config = changed(straight, output_dir=str(folder / f"run-{seed}"))
        suffer(config, straight, int(said.rpartition("CALLS ")[2]), random.Random(seed))
        print(f"seed {seed}: {EACH} faults", flush=True)
    shutil.rmtree(folder)
    print("nothing was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
