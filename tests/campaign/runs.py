"""What the processes of the campaign do: a corpus, a start of a run that suffers a fault, and what a run has kept.

The fork server imports this module, so that a start takes a second and not ten.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training import trainer  # noqa: F401 (what takes the time)
from forgetting_transformer.training.checkpoint.folder import CheckpointError, inspect
from forgetting_transformer.training.checkpoint.safe_reader import read_tensors
from tests.campaign import faults
from tests.campaign.faults import Fault
from tests.tiny import STEP, tiny_config

#: Exit codes of a start, besides those of signals.
DONE, FAILED, PREEMPTED = 0, 1, 75
STEPS = 20


def config(output_dir: Path, data_dir: Path, strategy: str) -> dict[str, Any]:
    """Twenty steps of four sequences of 32 tokens, a checkpoint every three, two evaluations."""
    tiny = tiny_config(output_dir, data_dir)
    tiny |= {"checkpoint_interval": 3 * STEP, "checkpoint_keep_interval": 9 * STEP}
    tiny["strategy"] = {"name": strategy, "timeout_seconds": 60, "compare_steps": 5}
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "qk_norm": True, "use_k_shift": True}
    tiny["model"]["config"] = shape
    return tiny


def start(settings: dict[str, Any], environment: dict[str, str], fault: Fault, said: Path) -> None:
    """One rank of one start, in a separate process. Its output, and how many calls it made, go to `said`."""
    os.environ.update(environment)
    printed = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    torch.set_num_threads(1)
    fault.begin(Path(settings["output_dir"]))
    code = FAILED
    try:
        outcome = training.run(training.parse(OmegaConf.create(settings)))
        code = DONE if outcome == "done" else PREEMPTED
    except BaseException as error:
        traceback.print_exc()
        print(f"\nENDED BY {type(error).__name__}: {error}")
    print(f"\nCALLS {faults.seen()}")
    sys.stdout.flush()
    os._exit(code)


def valid_steps(output_dir: Path) -> list[int]:
    """Steps of the checkpoints that are whole."""
    found = []
    for path in sorted((output_dir / "checkpoints").glob("step-*")):
        try:
            found.append(inspect(path).step // STEP)
        except (CheckpointError, OSError, ValueError):
            continue
    return found


def untimed(names: Iterable[str]) -> list[str]:
    """Names of reports, without those of what clocks say."""
    return [name for name in names if "time" not in name and "per_second" not in name]


def contents(output_dir: Path) -> dict[str, Any]:
    """What must be bitwise the same after any faults: weights, moments, and every number that was logged."""
    tensors = read_tensors(output_dir / "checkpoints" / f"step-{STEPS * STEP:015d}" / "state")
    found: dict[str, Any] = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    for kind in ("train", "norm", "train_eval", "val"):
        lines = (output_dir / f"metrics/jsonlines/{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        found[f"{kind}.jsonl"] = [{name: entry[name] for name in untimed(entry)} for entry in entries]
    for file in sorted((output_dir / "metrics/npz").glob("*/*.npz")):
        with np.load(file) as arrays:
            found[str(file.relative_to(output_dir))] = {name: arrays[name].tobytes() for name in untimed(arrays.files)}
    return found
