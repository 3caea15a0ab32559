#!/usr/bin/env python
"""Measures the time between the command that starts a training run and the end of its first step, by stage.

    python benchmarks/start.py                                  # FoX (Pro) 760M on one GPU
    python benchmarks/start.py --devices 2 --experiments forgetting_transformer/pro_760m_48b hgrn2/760m_16b
    python benchmarks/start.py --experiments demo/fox_pro --devices 1 --device cpu

Starts train.py (`fabric run train.py` or scripts/launch.py on several devices) as a user would, on random tokens and
for one step: first without compiled code in any cache, then with the caches of that start. It reports seconds:

first_line_seconds   from the command to the first line with a loss
launcher_seconds     of these, the time before the process of rank 0 began: `fabric run` imports PyTorch too
stages               from there on, as the run logs them (docs/operations.md)
imports_seconds      what `import torch, transformers, lightning, hydra` takes alone, its files read once before

Everything is written to a temporary folder, which needs space for two checkpoints. A run that does not fit into memory
is a result.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import CONFIGS, NotMeasured, compose, end_with_parent, experiment_overrides, parse, parser, run, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count

CACHES = ("empty", "warm")
LAUNCH = CONFIGS.parent / "scripts/launch.py"
VOCABULARY = 50257
FIRST_LINE = "the first step is done, loss "


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, time_limit=540)
    made.add_argument("--experiments", nargs="+", default=["forgetting_transformer/pro_760m_48b"], metavar="NAME")
    made.add_argument("--devices", type=count, default=1)
    made.add_argument("--launcher", choices=("fabric", "launch.py"), default="fabric", help="of several devices")
    made.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    made.add_argument("--folder", type=command_line.path, help="where to write; default: a temporary folder")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [{"experiment": experiment, "caches": caches} for experiment in args.experiments for caches in CACHES]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return run(__file__, args, argv, cases, lambda case: measure(args, Path(folder), **case))


def measure(args: argparse.Namespace, folder: Path, experiment: str, caches: str) -> dict[str, Any]:
    """A start with empty caches, or one that finds what the start before has left."""
    alone = imports_seconds()
    folder /= experiment.replace("/", "_")
    if caches == "warm" and not (folder / "empty").exists():
        start(args, experiment, folder / "empty")
    return {"imports_seconds": alone, **start(args, experiment, folder / caches)}


def imports_seconds() -> float:
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, transformers, lightning, hydra"], check=True)
    return time.perf_counter() - began


def start(args: argparse.Namespace, experiment: str, output: Path) -> dict[str, Any]:
    """Starts a run in `output` and lets it take one step. Corpus and caches are beside that folder."""
    config = compose(experiment, [f"fabric.accelerator={args.device}", *args.overrides])
    data, folder = config.datamodule, output.parent
    write_corpus(folder / "data/random", data.train_batch_len, data.train_batch_size)
    command = [
        *launch_command(args.devices, args.device, args.launcher),
        *on_random_tokens(experiment, output, folder / "data"), "log_interval=1",
        f"train.max_tokens={data.train_batch_len * data.train_batch_size}",
        f"schedule.total_tokens={config.schedule.total_tokens or 'null'}", *args.overrides,
    ]  # fmt: skip
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    seconds = follow(command, Path(f"{output}.txt"), args.time_limit, caches)
    stages = json.loads((output / "goodput.json").read_text(encoding="utf-8"))["starts"][-1]["stages"]
    return {"first_line_seconds": seconds, "launcher_seconds": seconds - sum(stages.values()), "stages": stages}


def follow(command: Sequence[str], log: Path, limit: float, environ: Mapping[str, str] | None = None) -> float:
    """Runs a command, whose output goes to `log`; seconds to its first line with a loss, or to its end without one.

    Raises:
        NotMeasured: a run that ran out of memory.
        RuntimeError: another failure, or it took more than `limit` seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began, seconds = time.perf_counter(), None
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=os.environ | dict(environ or {}), stdout=output, stderr=output, start_new_session=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            while process.poll() is None and time.perf_counter() - began < limit:
                if seconds is None and FIRST_LINE in log.read_text(encoding="utf-8", errors="replace"):
                    seconds = time.perf_counter() - began
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # it may be writing into a folder that is about to be removed
    ended = time.perf_counter() - began
    if process.returncode != 0:
        printed = log.read_text(encoding="utf-8", errors="replace")
        if "out of memory in " in printed:
            raise NotMeasured("out of memory")
        raise RuntimeError(f"ended with code {process.returncode} after {ended:.0f} s: {printed[-2000:]}")
    return seconds or ended


def launch_command(devices: int, accelerator: str, launcher: str) -> list[str]:
    """Command that starts train.py on so many devices, with `launcher` ("fabric" or "launch.py") on several."""
    train = str(CONFIGS.parent / "train.py")
    if devices == 1:
        return [sys.executable, train, "fabric.devices=1", f"fabric.accelerator={accelerator}"]
    fabric = str(Path(sys.executable).with_name("fabric"))
    started = [fabric, "run", train] if launcher == "fabric" else [sys.executable, str(LAUNCH)]
    return [*started, "--devices", str(devices), "--accelerator", accelerator]


def on_random_tokens(experiment: str, output: Path, data_dir: Path) -> list[str]:
    """Arguments of train.py: the experiment in `output`, on what `write_corpus` has written to `data_dir`/random."""
    return [
        *experiment_overrides(experiment), f"output_dir={output}", f"data_dir={data_dir}", "datamodule.dataset=random",
        f"datamodule.vocab_size={VOCABULARY}", "datamodule.bos_token_id=0", "skip_eval=true",
    ]  # fmt: skip


def write_corpus(folder: Path, length: int, documents: int) -> None:
    """Random documents, as many as the steps of a run read."""
    import numpy as np
    import zarr

    if folder.exists():
        return
    generator = np.random.default_rng(0)
    for split in ("train", "heldout"):
        tokens = generator.integers(0, VOCABULARY, size=(documents, length)).astype(np.uint16)
        array = zarr.create_array(folder / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(1, length))
        array[:] = tokens


if __name__ == "__main__":
    sys.exit(run_main(main))
