"""Names of configuration keys in the authors' code, and here.

`translate` puts this project's keys in their place, whether they come from the command line or from an experiment's
file. No later code knows the official names.
"""

import difflib
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from forgetting_transformer.training.config import ConfigError

_DECAYING = ("warmup_cosine", "warmup_linear")
_STABLE = ("warmup_stable_decay",)
#: Official key of `schedule` -> the key here, and the schedules that have it. Their "steps" are tokens too.
SCHEDULE = {
    "value": ("optimizer.lr", ("constant",)),
    "peak_value": ("optimizer.lr", (*_DECAYING, *_STABLE)),
    "init_value": ("schedule.init_lr", (*_DECAYING, *_STABLE)),
    "end_value": ("schedule.end_lr", (*_DECAYING, *_STABLE)),
    "warmup_steps": ("schedule.warmup_tokens", (*_DECAYING, *_STABLE)),
    "decay_steps": ("schedule.total_tokens", _DECAYING),
    "total_steps": ("schedule.total_tokens", _STABLE),
    "anneal_steps": ("schedule.decay_tokens", _STABLE),
}
#: Names that other frameworks have for a key.
OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "batch_size": "train_batch_size",
    "seq_len": "train_batch_len",
    "max_steps": "max_tokens",
    "num_layers": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_workers": "train_num_workers",
}


def translate(config: DictConfig, typed: Sequence[str] = ()) -> None:
    """Puts this project's keys in the place of the official ones of `schedule`.

    Args:
        typed: arguments of the command line. A key given there wins over its official name in an experiment's file.

    Raises:
        ConfigError: a key that its schedule does not have, or is given under both names.
        OmegaConfBaseException: a value refers to a missing key.
    """
    schedule, given = config.get("schedule") or {}, {one.partition("=")[0].lstrip("+") for one in typed}
    for name in [name for name in SCHEDULE if name in schedule]:
        own, kinds = SCHEDULE[name]
        if {f"schedule.{name}", own} <= given:
            raise ConfigError(f"schedule.{name} is the official name of {own}, and both are given; leave one out")
        if schedule.get("name") not in kinds:
            raise ConfigError(
                f"schedule.{name}={schedule[name]} has no meaning for schedule.name={schedule.get('name')}; it belongs "
                f"to {' and '.join(kinds)}"
            )
        if not OmegaConf.is_missing(schedule, name) and own not in given:
            OmegaConf.update(config, own, schedule[name])
        del schedule[name]


def closest_key(key: str, known: Sequence[str]) -> str:
    """Returns "; did you mean 'optimizer.lr'?" for optimizer.learning_rate and for lr; without a similar key, the keys
    of its section.

    Args:
        known: whole keys, with their sections.
    """
    if key == "experiment":
        return "; the file of an experiment must begin with the line '# @package _global_'"
    known = [*known, *(f"schedule.{name}" for name in SCHEDULE)]
    section, dot, name = key.rpartition(".")
    beside = {k.removeprefix(section + dot).partition(".")[0] for k in known if k.startswith(section + dot)}
    names = {k: k for k in beside} | {other: own for other, own in OTHER_NAMES.items() if own in beside}
    if near := difflib.get_close_matches(name, names, 1):
        return f"; did you mean {section + dot + names[near[0]]!r}?"
    anywhere = {k.rpartition(".")[2]: k for k in known}
    if near := difflib.get_close_matches(OTHER_NAMES.get(name, name), anywhere, 1, cutoff=0.8):
        return f"; did you mean {anywhere[near[0]]!r}?"
    return f"; keys of {section}: {', '.join(sorted(beside))}" if section and beside else "; --help shows all keys"
