"""The learning rate as a function of tokens: no state, so nothing to save and nothing to get wrong on resume.

A step that starts after x training tokens uses `schedule(x)`. As in the paper's runs the first step of a warm-up from
zero therefore moves nothing but AdamW's moments.
"""

import math
from collections.abc import Callable

from forgetting_transformer.training.config import ConfigError, ScheduleConfig

Schedule = Callable[[int], float]


def build_schedule(config: ScheduleConfig, peak_lr: float) -> Schedule:
    """The schedule that `config` names, as a function from training tokens to the learning rate.

    Let x be tokens, w `warmup_tokens`, T `total_tokens`, and p the position in the decay, 0 at its start and 1 at T.

    - constant: linear warm-up over w, then `peak_lr`.
    - warmup_cosine: warm-up, then end + (peak - end)·(1 + cos(πp))/2.
    - warmup_linear: warm-up, then peak + (end - peak)·p.
    - warmup_stable_decay: warm-up, `peak_lr`, and over the last `decay_tokens` peak + (end - peak)·√p, the "1 − √"
      decay of Hägele et al. 2024 (arXiv:2405.18392).

    After T the rate stays at `end_lr`.

    Raises:
        ConfigError: an unknown name, or lengths that do not fit into each other.
    """
    if config.name not in _DECAYS:
        raise ConfigError(f"schedule.name={config.name!r} is unknown; use one of {', '.join(_DECAYS)}")
    decay, warmup, total = _DECAYS[config.name], config.warmup_tokens, config.total_tokens
    for key, needed_by in {
        "total_tokens": ("warmup_cosine", "warmup_linear", "warmup_stable_decay"),
        "decay_tokens": ("warmup_stable_decay",),
    }.items():
        value = getattr(config, key)
        if value is None and config.name in needed_by:
            raise ConfigError(f"schedule.{key} must be set for schedule.name={config.name}")
        if value is not None and config.name not in needed_by:
            raise ConfigError(f"schedule.{key}={value} has no meaning for schedule.name={config.name}; unset it")
    decay_start = math.inf if decay is None else warmup
    if config.decay_tokens is not None:
        decay_start = total - config.decay_tokens
    if total is not None and not warmup <= decay_start < total:
        raise ConfigError(
            f"schedule.warmup_tokens={warmup:,}, decay_tokens={config.decay_tokens} and total_tokens={total:,} do not "
            "fit: warm-up and decay together may not be longer than the run, and the decay needs at least one token"
        )

    def schedule(tokens: int) -> float:
        if tokens < warmup:
            return config.init_lr + (peak_lr - config.init_lr) * tokens / warmup
        if tokens <= decay_start:
            return peak_lr
        position = min((tokens - decay_start) / (total - decay_start), 1.0)
        return config.end_lr + (peak_lr - config.end_lr) * decay(position)

    return schedule


#: Name -> share of the way from end to peak that is left at position p of the decay; None where nothing decays.
_DECAYS: dict[str, Callable[[float], float] | None] = {
    "constant": None,
    "warmup_cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
    "warmup_linear": lambda p: 1 - p,
    "warmup_stable_decay": lambda p: 1 - math.sqrt(p),
}
