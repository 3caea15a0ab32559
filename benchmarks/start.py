#!/usr/bin/env python
"""Measures the time between the command that starts a training run and the end of its first step, by stage.

    python benchmarks/start.py                                  # FoX (Pro) 760M on one GPU
    python benchmarks/start.py --devices 2 --experiments forgetting_transformer/pro_760m_48b hgrn2/760m_16b
    python benchmarks/start.py --experiments demo/fox_pro --devices 1 --accelerator cpu

Starts train.py (`fabric run train.py` or scripts/launch.py on several devices) as a user would, on random tokens and
for one step: first without compiled code in any cache, then with the caches of that start. It reports seconds:

first line   from the command to the first line with a loss
launcher     of these, the time before the process of rank 0 began: `fabric run` imports PyTorch too
stages       from there on, as the run logs them (docs/reliability.md)

Everything is written to a temporary folder, which needs space for two checkpoints. --out saves each row as soon as it
is measured (record.py). A run that does not fit into memory is a result.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, end_with_parent, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, positive
from training import CONFIGS, compose, experiment_file, experiment_override

CACHES = ("empty", "warm")
LAUNCH = CONFIGS.parent / "scripts/launch.py"
VOCABULARY = 50257
FIRST_LINE = "the first step is done, loss "


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=["forgetting_transformer/pro_760m_48b"], metavar="NAME")
    parser.add_argument("--devices", type=count, default=1)
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--launcher", choices=("fabric", "launch.py"), default="fabric", help="of several devices")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    parser.add_argument(
        "--folder", type=command_line.path, help="where to write; default: the system's temporary folder"
    )
    parser.add_argument("--time_limit", type=positive, default=540, help="seconds a start may take (default 540)")
    add_options(parser)
    args = parser.parse_args(argv)
    for name in args.experiments:
        if not experiment_file(name).is_file():
            parser.error(f"there is no experiment {name!r} in configs/experiment")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("start", args, argv, args.accelerator, leave_out=("folder", "time_limit"))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.devices} x {device_name(record.environment)}", flush=True)
    for experiment in args.experiments:
        rows = [record.find({"experiment": experiment, "caches": caches}) for caches in CACHES]
        if None in rows:
            # Both: the second start finds what the first one has left.
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                for i, caches in enumerate(CACHES):
                    found = {
                        "experiment": experiment,
                        "caches": caches,
                        **start(args, experiment, Path(folder) / caches),
                    }
                    rows[i] = rows[i] or record.add(found)
                    print(describe(rows[i]), flush=True)
        else:
            print(*map(describe, rows), sep="\n", flush=True)
    return 1 if record.failed else 0


def start(args: argparse.Namespace, experiment: str, output: Path) -> dict[str, Any]:
    """Starts a run in `output` and lets it take one step. Corpus and caches are beside that folder."""
    config = compose(experiment, [f"fabric.accelerator={args.accelerator}", *args.overrides])
    data, folder = config.datamodule, output.parent
    write_corpus(folder / "data/random", data.train_batch_len, data.train_batch_size)
    command = [
        *launch_command(args.devices, args.accelerator, args.launcher),
        *on_random_tokens(experiment, output, folder / "data"), "log_interval=1",
        f"train.max_tokens={data.train_batch_len * data.train_batch_size}",
        f"schedule.total_tokens={config.schedule.total_tokens or 'null'}", *args.overrides,
    ]  # fmt: skip
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    log, began, seconds = output / "logs/rank-0.log", time.perf_counter(), None
    with Path(f"{output}.txt").open("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, env=os.environ | caches, stdout=said, stderr=said, preexec_fn=end_with_parent
        )
        try:
            while process.poll() is None and time.perf_counter() - began < args.time_limit:
                if seconds is None and log.is_file() and FIRST_LINE in log.read_text(encoding="utf-8"):
                    seconds = time.perf_counter() - began
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()  # it may be writing into a folder that is about to be removed
        if process.returncode != 0 or seconds is None:
            if ran_out_of_memory(output):
                return {"status": "out of memory"}
            said.seek(0)
            ended = f"ended with code {process.returncode} after {time.perf_counter() - began:.0f} s"
            return {"status": f"failed: {ended}: {said.read()[-2000:]}"}
    stages = json.loads((output / "goodput.json").read_text(encoding="utf-8"))["starts"][-1]["stages"]
    launcher = seconds - sum(stages.values())
    return {"status": "ok", "first_line_seconds": seconds, "launcher_seconds": launcher, "stages": stages}


def ran_out_of_memory(output: Path) -> bool:
    """Whether a run says that it ended so."""
    return (output / "status.json").is_file() and "out of memory in " in read_status(output)["reason"]


def read_status(output: Path) -> dict[str, Any]:
    return json.loads((output / "status.json").read_text(encoding="utf-8"))


def launch_command(devices: int, accelerator: str, launcher: str) -> list[str]:
    """What starts train.py on so many devices, with `launcher` ("fabric" or "launch.py") on several."""
    train = str(CONFIGS.parent / "train.py")
    if devices == 1:
        return [sys.executable, train, "fabric.devices=1", f"fabric.accelerator={accelerator}"]
    fabric = str(Path(sys.executable).with_name("fabric"))
    started = [fabric, "run", train] if launcher == "fabric" else [sys.executable, str(LAUNCH)]
    return [*started, "--devices", str(devices), "--accelerator", accelerator]


def on_random_tokens(experiment: str, output: Path, data_dir: Path, vocabulary: int = VOCABULARY) -> list[str]:
    """Arguments of train.py: the experiment in `output`, on what `write_corpus` has written to `data_dir`/random."""
    return [
        experiment_override(experiment), f"output_dir={output}", f"data_dir={data_dir}", "datamodule.dataset=random",
        f"datamodule.vocab_size={vocabulary}", "datamodule.bos_token_id=0", "skip_eval=true",
    ]  # fmt: skip


def write_corpus(folder: Path, length: int, documents: int, vocabulary: int = VOCABULARY) -> None:
    """Random documents, as many as the steps of a run read."""
    import numpy as np
    import zarr

    if folder.exists():
        return
    generator = np.random.default_rng(0)
    for split in ("train", "heldout"):
        tokens = generator.integers(0, vocabulary, size=(documents, length)).astype(np.uint16)
        array = zarr.create_array(folder / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(1, length))
        array[:] = tokens


def describe(row: dict[str, Any]) -> str:
    name = f"{row['experiment']}, {row['caches']} caches: "
    if row["status"] != "ok":
        return name + row["status"]
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in row["stages"].items())
    return f"{name}first line after {row['first_line_seconds']:.1f} s: launcher {row['launcher_seconds']:.1f}, {stages}"


if __name__ == "__main__":
    sys.exit(run_main(main))
