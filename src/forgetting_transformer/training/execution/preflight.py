"""Checks before a long run: whether everything fits, its duration, and the fastest micro-batch.

    fabric run train.py --devices 4 +experiment/… output_dir=… data_dir=… preflight=true

Takes real steps of the real model on the real data, and evaluates a batch, in a temporary folder; the run's own folder
is not touched.
"""

import dataclasses
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.files import size_in_words
from forgetting_transformer.ranges import divisors
from forgetting_transformer.training import setup
from forgetting_transformer.training.checkpoint.folder import steps_in
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.faults.failures import Supervisor
from forgetting_transformer.training.records.metrics import duration
from forgetting_transformer.training.records.run_directory import RunDirectory
from forgetting_transformer.training.trainer import Trainer

#: Steps timed after the first, which compiles and tunes: for the estimate, and for each micro-batch that is compared.
_STEPS, _COMPARED_STEPS = 4, 2
#: Part of a GPU's memory beyond which nothing is tried: an evaluation or a fragmented allocator needs more than a step.
_MOST_MEMORY = 0.92


def preflight(config: Config) -> None:
    """Checks `config`, prints a table and compares micro-batches.

    Raises:
        ConfigError, DataError: as training would.
        RunDirectoryError: output_dir holds what is not a run's.
        TrainingError: the disk is too small for the checkpoints, or a step or an evaluation too big for the device.
    """
    directory = RunDirectory(config.output_dir)
    directory.check_ours(config.resume)
    # A run that continues does not read its initial weights, which may be gone.
    continues = config.resume and steps_in(directory.checkpoints)
    begins: dict[str, Any] = {"init_from": None, "init_allow": []} if continues else {}
    # Under a launcher every rank has another folder; only rank 0 writes into its folder.
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        trial = dataclasses.replace(
            config,
            output_dir=folder,
            resume=True,
            fork_dir=None,
            fork_step=None,
            train=dataclasses.replace(config.train, profile_steps=None),
            wandb=dataclasses.replace(config.wandb, mode="disabled"),
            **begins,
        )
        with Supervisor(trial) as supervisor:
            trainer = Trainer(trial, supervisor)
            _check(trainer, directory.root)
            _compare(trainer)


def _check(trainer: Trainer, place: Path) -> None:
    config, fabric, data, ranks = trainer.config, trainer.fabric, trainer.config.datamodule, trainer.ranks
    tokens = data.train_batch_size * data.train_batch_len
    total_steps = math.ceil(config.train.max_tokens / tokens)
    problems, seconds = [], []
    trainer.callbacks.on_start()  # which refuse here what they would lack after hours
    if trainer.compiled:
        trainer.compilation.announce()
    for batch in trainer.data.train_loader(0, min(1 + _STEPS, total_steps), ranks.data_rank, ranks.data_size):
        seconds.append(_seconds(trainer, fabric.to_device(batch)))
        trainer.counters.batch_count += 1
    # the last batch of the run, elsewhere in the corpus
    last = total_steps - 1
    next(iter(trainer.data.train_loader(last, last + 1, ranks.data_rank, ranks.data_size)))
    if not config.skip_eval:
        with trainer.clock.during("evaluation"):
            _evaluate(trainer)
    trainer.guard.poll(wait=True)
    if bad := trainer.guard.take_reports():
        problems.append(f"the loss or gradient of batch {bad[0].batch} is not finite at the initial weights")
    trainer.vote.wait_for_all()
    if not fabric.is_global_zero:
        return
    step = statistics.median(seconds[1:] or seconds)
    takes = seconds[0] + step * (total_steps - 1)
    # Weights and AdamW's two moments, over all ranks.
    checkpoint = 3 * sum(p.numel() * p.element_size() for p in trainer.model.module.parameters())
    free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.is_dir())).free
    # All checkpoints that stay, and one more: a new one is complete before an old one is deleted.
    there = len(steps_in(RunDirectory(place).checkpoints)) if config.resume else 0
    kept = config.train.max_tokens // config.checkpoint_keep_interval + config.checkpoint_keep_last
    needed = max(1, kept + 1 - there) * checkpoint
    end = datetime.now() + timedelta(seconds=takes)
    rows = {
        "steps": f"{total_steps:,} of {data.train_batch_size} x {data.train_batch_len:,}",
        "first step, then": f"{seconds[0]:.2f} s, {step:.3f} s",
        "tokens per second": f"{tokens / step:,.0f} on {fabric.world_size}",
        "training takes": f"{duration(takes)} without evaluations: until {end:%Y-%m-%d %H:%M}",
        f"{'GPU' if fabric.device.type == 'cuda' else 'process'}-hours": f"{takes / 3600 * fabric.world_size:,.1f}",
        "a checkpoint": size_in_words(checkpoint),
        "disk: needed, free": f"{size_in_words(needed)}, {size_in_words(free)}",
    }
    if fabric.device.type == "cuda":
        peak, total = _memory(fabric.device)
        rows["GPU memory: peak, all"] = f"{size_in_words(peak)}, {size_in_words(total)}"
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()), flush=True)
    if free < needed:
        problems.append(
            f"{place} has {size_in_words(free)} free and the checkpoints to come need {size_in_words(needed)}: make "
            "room (scripts/checkpoints.py prune --permanent deletes older ones), raise checkpoint_keep_interval, which "
            "counts for those to come, or lower checkpoint_keep_last"
        )
    if problems:
        raise TrainingError("; ".join(problems))


def _compare(trainer: Trainer) -> None:
    """Times steps with each micro-batch, with activation checkpointing and without, and prints the fastest that fits.

    Neither changes what is trained.
    """
    say = print if trainer.fabric.is_global_zero else lambda *_, **__: None
    say(f"\n{'checkpointing':<15}{'grad_acc_tokens':<17}{'tokens/s':<12}memory", flush=True)
    timed = []
    for speed, tokens, checkpointing, memory in _timings(trainer):
        said = f"{speed:,.0f}" if speed else "-"
        say(f"{'yes' if checkpointing else 'no':<15}{tokens:<17,}{said:<12}{memory}", flush=True)
        timed.append((speed, tokens, checkpointing))
    speed, tokens, checkpointing = max(timed)
    if speed:
        how = f"train.grad_acc_tokens={tokens} train.gradient_checkpointing={str(checkpointing).lower()}"
        say(f"\nfastest that fits ({speed:,.0f} tokens/s):\n  {how}", flush=True)


def _timings(trainer: Trainer) -> Iterator[tuple[float, int, bool, str]]:
    """Yields tokens per second (0 where memory ran out), tokens of the micro-batch, checkpointing, and peak memory.

    Sizes ascend up to where the next would not fit: a rank that has no memory ends in the middle of a step, in which
    others wait for it.
    """
    fabric, ranks, train, data = trainer.fabric, trainer.ranks, trainer.config.train, trainer.config.datamodule
    batch = fabric.to_device(next(iter(trainer.data.train_loader(0, 1, ranks.data_rank, ranks.data_size))))
    with_graphs, most = trainer.graphs.on, _MOST_MEMORY * _memory(fabric.device)[1]
    sizes = divisors(len(batch["input_ids"]))
    # The host keeps the tensors that checkpointing keeps.
    for checkpointing in (True,) if train.block_inputs_on_host else (True, False):
        trainer.model.module.checkpoint_activations(checkpointing)
        trainer.graphs.on = with_graphs and not checkpointing
        for sequences, following in zip(sizes, [*sizes[1:], 0], strict=True):
            tokens = train.grad_acc_tokens = sequences * data.train_batch_len
            try:
                for _ in range(3 if trainer.graphs.on else 1):
                    _seconds(trainer, batch)  # compiles; CUDA graphs warm up and are recorded
                if most:
                    torch.cuda.reset_peak_memory_stats(fabric.device)
                step = statistics.median(_seconds(trainer, batch) for _ in range(_COMPARED_STEPS))
            except torch.OutOfMemoryError:
                yield 0.0, tokens, checkpointing, "out of memory"
                if fabric.world_size > 1:
                    return  # DDP and FSDP cannot go on after half a step
                break
            peak = _memory(fabric.device)[0]
            yield trainer.tokens_per_step / step, tokens, checkpointing, size_in_words(peak) if most else "-"
            trainer.optimizer.zero_grad()
            held = torch.cuda.memory_allocated(fabric.device) if most else 0  # weights and moments
            full = torch.tensor(float(held + (peak - held) * following / sequences > most > 0), device=fabric.device)
            trainer.sum_over_ranks(full)
            if full:
                break


def _seconds(trainer: Trainer, batch: dict[str, torch.Tensor]) -> float:
    """Takes a step; returns its seconds."""
    device = trainer.fabric.device
    setup.synchronize(device)
    began = time.perf_counter()
    trainer.step(batch)
    setup.synchronize(device)
    trainer.watchdog.enter_stage("preflight")
    return time.perf_counter() - began


def _memory(device: torch.device) -> tuple[int, int]:
    """Peak and all of a GPU's memory in bytes; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


@torch.no_grad()
def _evaluate(trainer: Trainer) -> None:
    """Evaluates a batch of held-out documents, with training's memory in use."""
    fabric, ranks = trainer.fabric, trainer.ranks
    trainer.model.eval()
    inputs = model_inputs(fabric.to_device(next(iter(trainer.data.eval_loader(ranks.data_rank, ranks.data_size)))))
    with ranks.in_context():
        trainer.model(**ranks.part_of(inputs))
    setup.synchronize(fabric.device)
    trainer.watchdog.enter_stage("preflight")
