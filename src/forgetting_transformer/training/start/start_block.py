"""Block of the log before the first step of a run: its settings, and the choices made for this machine."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy

from forgetting_transformer.training.faults.step_guard import decides_on_device
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.parallel.sharding import Sharded

_WAITS = "; cannot skip a bad step on the device (found_inf): the host waits for the loss in every step"


def start_block(trainer: TrainerInterface) -> str:
    """The block for rank 0 of a trainer that is about to take its first step."""
    config, data = trainer.config, trainer.config.datamodule
    info = trainer.data_info
    tokens = data.train_batch_size * data.train_batch_len
    local, sharing = data.train_batch_size // trainer.ranks.data_size, trainer.ranks.sharing
    at_once = config.sequences_at_once(trainer.ranks.data_size)
    parameters = sum(p.numel() for p in trainer.model.module.parameters())
    steps = math.ceil(config.train.max_tokens / tokens)
    rows = [
        ("model", f"{config.model.name}, {human_count(parameters)} parameters ({parameters:,})"),
        ("corpus", f"{info.path}, {info.total_tokens:,} tokens in {info.documents:,} documents"),
        (
            "batch",
            f"{data.train_batch_size:,} x {data.train_batch_len:,} = {tokens:,} tokens; each "
            f"{'process' if sharing == 1 else f'group of {sharing} processes'} {local:,} sequences, {at_once:,} at a "
            f"time{'' if sharing == 1 else ', each process a part of every sequence'}",
        ),
        (
            "steps",
            f"{max(0, steps - trainer.counters.batch_count):,} to go, to {config.train.max_tokens:,} tokens; "
            f"{trainer.counters.token_count:,} are done",
        ),
        ("devices", _devices(trainer)),
        ("precision", f"{config.fabric.precision}, strategy {_strategy(trainer)}"),
        *((op, backend.text) for op, backend in trainer.backends.items()),
        ("compiled", ("yes, with CUDA graphs" if trainer.graphs.on else "yes") if trainer.compiled else "no"),
        ("optimizer", _section(config.optimizer) + ("" if decides_on_device(trainer.optimizer.optimizer) else _WAITS)),
        ("schedule", _section(config.schedule)),
        ("output_dir", str(trainer.directory.root)),
        *((callback.name, callback.summary) for callback in trainer.callbacks if callback.summary),
        ("start", trainer.origin.text),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def human_count(number: int) -> str:
    """124337408 -> "124.3M"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _devices(trainer: TrainerInterface) -> str:
    fabric = trainer.fabric
    nodes = int(os.environ.get("LT_NUM_NODES") or os.environ.get("GROUP_WORLD_SIZE") or 1)
    where = f" on {nodes} nodes" if nodes > 1 else ""
    if fabric.device.type == "cuda":
        device = torch.cuda.get_device_name(fabric.device)
    else:
        threads = torch.get_num_threads()
        device = f"{fabric.device.type}, {threads} thread{'s' * (threads != 1)} each"
    return f"{fabric.world_size} x {device}; {fabric.world_size} process{'es' * (fabric.world_size != 1)}{where}"


def _strategy(trainer: TrainerInterface) -> str:
    strategy = trainer.fabric.strategy
    if isinstance(strategy, Sharded):
        return "fsdp" + (f" ({'; '.join(strategy.notes)})" if strategy.notes else "")
    if isinstance(strategy, DDPStrategy):
        return "ddp"
    return "none (one process: nothing to shard)" if trainer.config.strategy.name == "fsdp" else "none"


def _section(section: Any) -> str:
    """Name and keys of a section of the config, as a command line would set them, without those that are not set."""
    keys = {key: value for key, value in vars(section).items() if value not in (None, [])}
    return ", ".join([keys.pop("name"), *(f"{key}={_written(value)}" for key, value in keys.items())])


def _written(value: Any) -> str:
    if isinstance(value, bool | str | list):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
