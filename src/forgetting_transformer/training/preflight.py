"""Before a long run: does everything fit, how long will it take, what will it cost.

    fabric run train.py --devices 4 +experiment/… output_dir=… data_dir=… preflight=check

Takes real steps of the real model on the real data, and evaluates a batch, in a temporary folder; the run's own folder
is not touched. What would be faster is measured by proposal.py.
"""

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy

from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.files import size_in_words
from forgetting_transformer.training import setup
from forgetting_transformer.training.checkpoint import read_manifest, steps_in
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.faults.failures import out_of_memory
from forgetting_transformer.training.faults.sentinel import Sentinel
from forgetting_transformer.training.metrics import duration
from forgetting_transformer.training.run_directory import RunDirectory
from forgetting_transformer.training.trainer import Trainer

log = logging.getLogger(__name__)

#: Steps timed after the first, which compiles and tunes.
STEPS = 4
_TEST_BYTES = 1 << 28


class PreflightError(RuntimeError):
    """The run would fail later; the message lists every reason."""


class StepTooBigError(PreflightError):
    """A step, or an evaluation beside what steps hold, does not fit into the memory of the device."""


def preflight(config: Config) -> dict[str, float]:
    """Checks `config` and prints a table; returns its numbers on rank 0.

    Raises:
        ConfigError, DataError: as training would.
        RunDirectoryError: output_dir holds what is not a run's.
        PreflightError: the disk is too small for the checkpoints, or a step or an evaluation too big for the device.
    """
    directory = RunDirectory(config.output_dir)
    directory.check_ours(config.resume)
    place = directory.root
    with trial(config) as trainer:
        return _measure(trainer, place)


@contextlib.contextmanager
def trial(config: Config) -> Iterator[Trainer]:
    """A trainer of a run like this one in a temporary folder, on every rank, that takes steps from the initial weights.

    Raises:
        ConfigError, DataError: as training would.
    """
    directory = RunDirectory(config.output_dir)
    data = config.datamodule
    if config.resume and (recorded := setup.recorded_vocabulary(config, directory)) is not None:
        # Of a run that is there already; the trial below does not see it.
        data = dataclasses.replace(
            data,
            vocab_size=recorded.size if data.vocab_size is None else data.vocab_size,
            bos_token_id=recorded.bos_token_id if data.bos_token_id is None else data.bos_token_id,
            eos_token_id=recorded.eos_token_id if data.eos_token_id is None else data.eos_token_id,
        )
    # A run that continues does not read what it began with, which may be gone.
    continues = config.resume and bool(steps_in(directory.checkpoints))
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        # Under a launcher every rank has another folder; only rank 0 writes into its folder.
        its_config = dataclasses.replace(
            config,
            output_dir=folder,
            resume=True,
            fork_dir=None,
            fork_step=None,
            init_from=None if continues else config.init_from,
            init_step=None if continues else config.init_step,
            init_allow=[] if continues else config.init_allow,
            datamodule=data,
            train=dataclasses.replace(config.train, profile_steps=None),
            wandb=dataclasses.replace(config.wandb, mode="disabled"),
        )
        with Sentinel(config.strategy.timeout_seconds) as sentinel:
            trainer = Trainer(its_config, sentinel)
            try:
                yield trainer
            finally:
                trainer.close()


def _measure(trainer: Trainer, place: Path) -> dict[str, float]:
    config, fabric, data, ranks = trainer.config, trainer.fabric, trainer.config.datamodule, trainer.ranks
    tokens = data.train_batch_size * data.train_batch_len
    total_steps = math.ceil(config.train.max_tokens / tokens)
    problems, seconds = [], []
    trainer.callbacks.start()  # which refuse what they would miss after hours
    if trainer.compiled:
        trainer.compilation.announce()
    with _fits(trainer, "a step"):
        loader = trainer.data.train_loader(0, min(1 + STEPS, total_steps), ranks.data_rank, ranks.data_size)
        for batch in loader:
            setup.synchronize(fabric.device)
            began = time.perf_counter()
            trainer.step(fabric.to_device(batch))
            setup.synchronize(fabric.device)
            seconds.append(time.perf_counter() - began)
            trainer.sentinel.starting("preflight")
            trainer.counters.batch_count += 1
    # The last batch of the run, which lies elsewhere in the corpus.
    last = total_steps - 1
    next(iter(trainer.data.train_loader(last, last + 1, ranks.data_rank, ranks.data_size)))
    if not config.skip_eval:
        with _fits(trainer, "evaluation"):
            _evaluate(trainer)
    if bad := trainer.guard.bad_steps(wait=True):
        problems.append(f"the loss or gradient of batch {bad[0].batch} is not finite at the initial weights")

    step = statistics.median(seconds[1:] or seconds)
    train_seconds = seconds[0] + step * (total_steps - 1)
    found = {
        "steps": total_steps,
        "first_step_seconds": seconds[0],
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "train_seconds": train_seconds,
        "gpu_hours": train_seconds / 3600 * fabric.world_size,
        "checkpoint_bytes": _checkpoint_bytes(trainer),
        "host_copy_bytes": _checkpoint_bytes(trainer) / _writers(trainer) if config.checkpoint_background else 0,
    }
    if fabric.device.type == "cuda":
        found["memory_bytes"] = torch.cuda.max_memory_allocated(fabric.device)
        found["memory_total_bytes"] = torch.cuda.get_device_properties(fabric.device).total_memory
        found["host_link_bytes_per_second"] = _host_link(fabric.device)
    if fabric.world_size > 1:
        found["all_reduce_bytes_per_second"] = _all_reduce(fabric.device)
    trainer.vote.wait_for_all()
    if not fabric.is_global_zero:
        return {}
    found |= _disk(place, config, found["checkpoint_bytes"])
    if found["disk_free_bytes"] < found["disk_needed_bytes"]:
        problems.append(
            f"{place} has {size_in_words(found['disk_free_bytes'])} free and the checkpoints to come need "
            f"{size_in_words(found['disk_needed_bytes'])}: make room (scripts/checkpoints.py prune --permanent "
            "deletes older ones), raise checkpoint_keep_interval, which counts for those to come, or lower "
            "checkpoint_keep_last"
        )
    print(table(found, config, fabric.world_size), flush=True)
    if problems:
        raise PreflightError("; ".join(problems))
    return found


@contextlib.contextmanager
def _fits(trainer: Trainer, during: str) -> Iterator[None]:
    """
    Raises:
        StepTooBigError: memory ended in it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = out_of_memory(error, trainer.config, during, trainer.fabric.world_size, trainer.graphs.on)
        raise StepTooBigError(said) from None


@torch.no_grad()
def _evaluate(trainer: Trainer) -> None:
    """A batch of each held-out set, beside what training holds."""
    fabric, ranks = trainer.fabric, trainer.ranks
    trainer.model.eval()
    for corpus in (trainer.data, *trainer.eval_sets.values()):
        inputs = model_inputs(fabric.to_device(next(iter(corpus.eval_loader(ranks.data_rank, ranks.data_size)))))
        with ranks.share():
            trainer.model(**ranks.part_of(inputs))
        setup.synchronize(fabric.device)
        trainer.sentinel.starting("preflight")


def table(found: dict[str, float], config: Config, world_size: int) -> str:
    """What was found, for people."""
    device = "GPU" if "memory_bytes" in found else "process"
    end = datetime.now() + timedelta(seconds=found["train_seconds"])
    rows = [
        (
            "steps",
            f"{found['steps']:,} of {config.datamodule.train_batch_size} x {config.datamodule.train_batch_len:,}",
        ),
        ("first step, then", f"{found['first_step_seconds']:.2f} s, {found['step_seconds']:.3f} s"),
        ("tokens per second", f"{found['tokens_per_second']:,.0f} on {world_size}"),
        ("training takes", f"{duration(found['train_seconds'])} without evaluations: until {end:%Y-%m-%d %H:%M}"),
        (f"{device}-hours", f"{found['gpu_hours']:,.1f}"),
        ("a checkpoint", size_in_words(found["checkpoint_bytes"])),
        ("copy of it in host memory, per rank", size_in_words(found["host_copy_bytes"])),
        (
            "disk: needed, free",
            f"{size_in_words(found['disk_needed_bytes'])}, {size_in_words(found['disk_free_bytes'])}",
        ),
        ("disk: speed of writing", f"{size_in_words(found['disk_bytes_per_second'])}/s"),
    ]
    if "memory_bytes" in found:
        rows.append(
            (
                "GPU memory: peak, all",
                f"{size_in_words(found['memory_bytes'])}, {size_in_words(found['memory_total_bytes'])}",
            )
        )
        rows.append(("GPU to host: speed", f"{size_in_words(found['host_link_bytes_per_second'])}/s"))
    if "all_reduce_bytes_per_second" in found:
        rows.append(("all-reduce: speed", f"{size_in_words(found['all_reduce_bytes_per_second'])}/s"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _checkpoint_bytes(trainer: Trainer) -> int:
    """Weights and AdamW's two moments, and what callbacks keep beside them, over all ranks."""
    parameters = 3 * sum(p.numel() * p.element_size() for p in trainer.model.module.parameters())
    return parameters + sum(t.numel() * t.element_size() for t in trainer.callbacks.large_state().values())


def _writers(trainer: Trainer) -> int:
    """Ranks among which the copy of a checkpoint is shared out: all, but with hsdp those of each copy of the model."""
    strategy = trainer.fabric.strategy
    return strategy.device_mesh.shape[1] if isinstance(strategy, ModelParallelStrategy) else trainer.fabric.world_size


def _disk(place: Path, config: Config, checkpoint_bytes: float) -> dict[str, float]:
    """Room where the run will write, and how fast it takes bytes: those of a file that is deleted again."""
    existing = next(folder for folder in (place, *place.parents) if folder.is_dir())
    size = int(min(_TEST_BYTES, shutil.disk_usage(existing).free // 2))
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=existing, prefix=".preflight-") as file:
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {
        "disk_needed_bytes": checkpoints_to_come(place, config) * checkpoint_bytes,
        "disk_free_bytes": shutil.disk_usage(existing).free,
        "disk_bytes_per_second": max(1, size >> 20) * len(block) / (time.perf_counter() - began),
    }


def checkpoints_to_come(place: Path, config: Config) -> int:
    """For how many more checkpoints than there are a run needs room at once, so that it can write all of them."""
    folder = RunDirectory(place).checkpoints
    steps = steps_in(folder) if config.resume else []
    manifests = [read_manifest(folder / f"step-{step:015d}") for step in steps]
    rotating = sum(manifest is not None and not manifest["permanent"] for manifest in manifests)
    permanent = config.train.max_tokens // config.checkpoint_keep_interval
    permanent -= max(steps, default=0) // config.checkpoint_keep_interval
    # One more than stay, because a new one is whole before an old one goes.
    return max(0, permanent) + max(0, config.checkpoint_keep_last + 1 - rotating)


def _host_link(device: torch.device) -> float:
    """Bytes per second from the GPU into locked memory of the host, which is what a checkpoint's copy waits for."""
    source = torch.empty(_TEST_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_TEST_BYTES, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    setup.synchronize(device)
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    setup.synchronize(device)
    return _TEST_BYTES / (time.perf_counter() - began)


def _all_reduce(device: torch.device) -> float:
    """Bytes per second of a sum over all ranks (bytes of the tensor, not of the wires)."""
    size = _TEST_BYTES if device.type == "cuda" else 1 << 22
    tensor = torch.zeros(size // 4, device=device)
    dist.all_reduce(tensor)
    setup.synchronize(device)
    began = time.perf_counter()
    dist.all_reduce(tensor)
    setup.synchronize(device)
    return size / (time.perf_counter() - began)
