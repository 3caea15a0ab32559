"""One process of `preflight=true`: `python -m forgetting_transformer.training.candidate JOB`, started by proposal.py.

JOB is a JSON file: the config, and which micro-batches to measure. A process of its own, because what it may meet, a
device without memory or a compiler that fails, is not to end the search.
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from forgetting_transformer import command_line, console, plugins
from forgetting_transformer.data import DataError
from forgetting_transformer.files import write_atomically
from forgetting_transformer.training import setup
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.parsing import parse
from forgetting_transformer.training.preflight import PreflightError, StepTooBigError, preflight, trial
from forgetting_transformer.training.run_directory import RunDirectoryError

#: What the process exits with when a step does not fit into memory.
OUT_OF_MEMORY = 3
NO_MEMORY = "out of memory"
#: Part of a device's memory beyond which nothing is proposed: an evaluation, another batch or a fragmented allocator
#: needs more than a step.
_MOST_MEMORY = 0.92
#: Steps timed for each micro-batch: at least two, more while they are short.
_STEPS, _ENOUGH_SECONDS = (2, 8), 3.0


def measure(config: Config, sequences: list[int], memory_bytes: float | None, place: Path) -> None:
    """Steps with each of these micro-batches, which ascend, until memory is full; a file of points per rank in `place`.

    A point is {"sequences", "seconds" of a step, "memory" in bytes} or {"sequences", "problem"}.

    Args:
        sequences: of a rank's micro-batch.
        memory_bytes: what this process may use on a CPU; a GPU's is known.
    """
    points: list[dict[str, Any]] = []
    with trial(config) as trainer:
        trainer.callbacks.start()  # which may hold memory
        fabric, ranks, length = trainer.fabric, trainer.ranks, config.datamodule.train_batch_len
        batch = fabric.to_device(next(iter(trainer.data.train_loader(0, 1, ranks.data_rank, ranks.data_size))))
        for count in sequences:
            trainer.config.train.grad_acc_tokens = count * length
            point: dict[str, Any] = {"sequences": count}
            try:
                if fabric.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(fabric.device)
                trainer.step({name: tensor[:count] for name, tensor in batch.items()})  # compiles
                if trainer.graphs.on:
                    trainer.step(batch)  # records
                setup.synchronize(fabric.device)
                point["seconds"] = _seconds_of_a_step(trainer, batch)
                point["memory"], most = _memory(fabric.device, memory_bytes)
                if point["memory"] > most:
                    point["problem"] = "leaves too little memory free" if fabric.device.type == "cuda" else NO_MEMORY
            except torch.OutOfMemoryError:
                point = {"sequences": count, "problem": NO_MEMORY}
            points.append(point)
            write_atomically(place / f"points-{fabric.global_rank}.json", json.dumps(points))
            if "seconds" not in point:
                sys.exit(OUT_OF_MEMORY)  # other ranks may wait in the middle of a step: proposal.py ends them
            trainer.sentinel.starting("preflight")
            too_much = torch.tensor(float("problem" in point))
            if trainer.fabric.world_size > 1:
                too_much = too_much.to(fabric.device)
                trainer.sum_over_ranks(too_much)
            if too_much.item():
                return


def _seconds_of_a_step(trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    seconds: list[float] = []
    least, most = _STEPS
    while len(seconds) < least:
        began = time.perf_counter()
        trainer.step(batch)
        setup.synchronize(trainer.fabric.device)
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1 and trainer.fabric.world_size == 1:  # ranks must take equally many
            least = min(most, max(least, round(_ENOUGH_SECONDS / seconds[0])))
    return statistics.median(seconds)


def _memory(device: torch.device, memory_bytes: float | None) -> tuple[float, float]:
    """The peak so far, and what it may be."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device), _MOST_MEMORY * total
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, float("inf") if memory_bytes is None else memory_bytes


def main() -> None:
    command_line.take_any_text()
    console.die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plugins.load(job["config"]["plugins"])
    config = parse(OmegaConf.create(job["config"]))
    console.start_log()
    try:
        if job["sequences"]:
            measure(config, job["sequences"], job["memory_bytes"], Path(sys.argv[1]).parent)
        else:
            preflight(config)
    except StepTooBigError as error:
        if console.first_of_node():
            print(f"PreflightError: {error}", file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)
    except (ConfigError, DataError, RunDirectoryError, TrainingError, PreflightError) as error:
        console.fail(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
