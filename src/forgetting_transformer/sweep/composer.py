"""Configurations of searches and studies from overrides of a command line. train.py composes its own."""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from forgetting_transformer import composition
from forgetting_transformer.command_line import one_line
from forgetting_transformer.composition import errors
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.runner import Machine
from forgetting_transformer.training import Config, parse


def compose_config(overrides: Sequence[str]) -> Config:
    """The config that `python train.py` composes from these overrides.

    Raises:
        SweepError: Hydra cannot compose them; in one line.
        ConfigError: they compose to something that train.py refuses.
    """
    return parse(_compose(overrides), overrides)


def machine(overrides: Sequence[str]) -> Machine:
    """This machine, with the settings of `hydra.launcher`.

    Raises:
        SweepError: `hydra/launcher` is not fabric.
    """
    composed = _compose(overrides, return_hydra_config=True)
    if (chosen := composed.hydra.runtime.choices["hydra/launcher"]) != "fabric":
        raise SweepError(f"hydra/launcher={chosen}: the runs of a search share this machine; leave it out")
    settings: Any = OmegaConf.to_container(composed.hydra.launcher)
    del settings["_target_"]
    return Machine.of(settings)


def _compose(overrides: Sequence[str], **options: bool) -> DictConfig:
    folders = composition.config_dirs(overrides)
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            composed = compose("config", overrides=composition.for_hydra(overrides, folders), **options)
    except HydraException as error:
        raise SweepError(errors.explain(error, folders)) from error
    errors.check_groups(map(str, composed), folders)
    return composed


def search_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Splits overrides into those with a value and those with a range, in Hydra's sweep syntax.

    Returns:
        the overrides with a value; config key -> Optuna distribution; config key -> the range as it was written.

    Raises:
        SweepError: a range that cannot be searched.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    fixed: list[str] = []
    space: dict[str, Any] = {}
    text: dict[str, str] = {}
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise SweepError(one_line(error)) from error
    for override, written in zip(parsed, overrides, strict=True):
        key = override.get_key_element()
        if not override.is_sweep_override():
            fixed.append(written)
            continue
        values: Any = override.value()
        text[key] = written.partition("=")[2]
        if override.is_choice_sweep():
            choices: list[Any] = list(override.sweep_iterator())
            space[key] = CategoricalDistribution(choices)
        elif override.is_interval_sweep():
            integers = isinstance(values.start, int) and isinstance(values.end, int)  # int(interval(…))
            kind = IntDistribution if integers else FloatDistribution
            try:
                space[key] = kind(values.start, values.end, log="log" in values.tags)
            except ValueError as error:
                raise SweepError(f"{written}: {error}") from error
        else:
            raise SweepError(f"{written}: give choices (a,b), interval(low, high) or tag(log, interval(low, high))")
    return fixed, space, text
