"""The learning rate as a function of tokens: no state, so nothing to save and nothing to get wrong on resume.

A step that starts after x training tokens uses `schedule(x)`. As in the paper's runs the first step of a warm-up from
zero therefore moves nothing but AdamW's moments.
"""

import math
from collections.abc import Callable

from forgetting_transformer.plugins import SCHEDULES
from forgetting_transformer.training.config import ConfigError, ScheduleConfig

Schedule = Callable[[int], float]


def build_schedule(config: ScheduleConfig, peak_lr: float) -> Schedule:
    """The schedule that `config` names, as a function from training tokens to the learning rate.

    Raises:
        ConfigError: lengths that do not fit into each other.
    """
    return SCHEDULES.get(config.name).build(config, peak_lr)


def _with_warmup(config: ScheduleConfig, peak_lr: float, decay: Callable[[float], float] | None) -> Schedule:
    """Linear warm-up over `warmup_tokens`, `peak_lr`, then a decay that ends at `total_tokens` with `end_lr`.

    Args:
        decay: position in the decay, 0 at its start and 1 at its end -> share of the way from end to peak that is left;
            None where nothing decays.
    """
    warmup, total = config.warmup_tokens, config.total_tokens
    for key, needed_by in {
        "total_tokens": ("warmup_cosine", "warmup_linear", "warmup_stable_decay"),
        "decay_tokens": ("warmup_stable_decay",),
    }.items():
        value = getattr(config, key)
        if value is None and config.name in needed_by:
            raise ConfigError(f"schedule.{key} must be set for schedule.name={config.name}")
        if value is not None and config.name not in needed_by:
            raise ConfigError(f"schedule.{key}={value} has no meaning for schedule.name={config.name}; unset it")
    decay_start: float = math.inf if decay is None else warmup
    if config.decay_tokens is not None and total is not None:
        decay_start = total - config.decay_tokens
    if total is not None and not warmup <= decay_start < total:
        tenth = total // 10
        fits = f"schedule.warmup_tokens={tenth}"
        if config.decay_tokens is not None and not 0 < config.decay_tokens <= total - tenth:
            fits += f" schedule.decay_tokens={max(1, 2 * tenth)}"
        raise ConfigError(
            f"schedule.warmup_tokens={warmup:,}, decay_tokens={config.decay_tokens} and total_tokens={total:,} do not "
            "fit: warm-up and decay together may not be longer than the run, and the decay needs at least one token; "
            f"what fits is {fits}"
        )

    def schedule(tokens: int) -> float:
        if tokens < warmup:
            return config.init_lr + (peak_lr - config.init_lr) * tokens / warmup
        if decay is None or total is None or tokens <= decay_start:
            return peak_lr
        position = min((tokens - decay_start) / (total - decay_start), 1.0)
        return config.end_lr + (peak_lr - config.end_lr) * decay(position)

    return schedule


@SCHEDULES.register("constant")
def constant(config: ScheduleConfig, peak_lr: float) -> Schedule:
    """Warm-up, then `peak_lr`."""
    return _with_warmup(config, peak_lr, None)


@SCHEDULES.register("warmup_cosine")
def warmup_cosine(config: ScheduleConfig, peak_lr: float) -> Schedule:
    """Warm-up, then end + (peak - end)·(1 + cos(πp))/2 at position p of the decay."""
    return _with_warmup(config, peak_lr, lambda p: 0.5 * (1 + math.cos(math.pi * p)))


@SCHEDULES.register("warmup_linear")
def warmup_linear(config: ScheduleConfig, peak_lr: float) -> Schedule:
    """Warm-up, then peak + (end - peak)·p at position p of the decay."""
    return _with_warmup(config, peak_lr, lambda p: 1 - p)


@SCHEDULES.register("warmup_stable_decay")
def warmup_stable_decay(config: ScheduleConfig, peak_lr: float) -> Schedule:
    """Warm-up, `peak_lr`, and over the last `decay_tokens` peak + (end - peak)·√p, the "1 − √" decay of Hägele et al.
    2024 (arXiv:2405.18392)."""
    return _with_warmup(config, peak_lr, lambda p: 1 - math.sqrt(p))
