"""Configurations of searches and studies from overrides of a command line. `train.py` composes its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from forgetting_transformer import plugins
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.runner import Machine
from forgetting_transformer.train import hydra_errors
from forgetting_transformer.training import Config, parse
from forgetting_transformer.training.config import official_names


class Composer:
    """Composes configs of train.py from overrides, as `python train.py` does.

    Args:
        config_dir: the repository's `configs`.
        overrides: of the command line. Those of hydra itself (hydra.launcher.…=…) say how jobs share the machine.

    Raises:
        SweepError: a plug-in that they name cannot be loaded.
    """

    def __init__(self, config_dir: Path, overrides: Sequence[str]) -> None:
        self._config_dir = config_dir
        try:
            plugins.load(plugins.named_in(overrides))
        except plugins.PluginError as error:
            raise SweepError(str(error)) from error
        self._all = list(overrides)
        self.task_overrides = [o for o in overrides if not o.startswith(("hydra.", "hydra/"))]

    def compose(self, overrides: Sequence[str]) -> Config:
        """
        Raises:
            SweepError: Hydra cannot compose these overrides; in one line.
            ConfigError: they compose to something that train.py refuses.
        """
        composed = self._compose(overrides)
        if problem := hydra_errors.unknown_group((str(key) for key in composed), self._config_dir):
            raise SweepError(problem)
        return parse(composed, overrides)

    def machine(self) -> Machine:
        """This machine, with the settings of `hydra.launcher`.

        Raises:
            SweepError: `hydra/launcher` is another one than fabric, or a setting is unknown.
        """
        composed = self._compose(self._all, return_hydra_config=True)
        if (chosen := composed.hydra.runtime.choices["hydra/launcher"]) != "fabric":
            raise SweepError(f"hydra/launcher={chosen}: the runs of a search share this machine; leave it out")
        settings: Any = OmegaConf.to_container(composed.hydra.launcher)
        del settings["_target_"]
        return Machine(**settings)

    def _compose(self, overrides: Sequence[str], **options: bool) -> DictConfig:
        try:
            with initialize_config_dir(str(self._config_dir), version_base="1.3"):
                return compose("config", overrides=official_names.admit(overrides), **options)
        except HydraException as error:
            message = hydra_errors.explain(error, self._config_dir).removeprefix("ConfigError: ")
            raise SweepError(message) from error


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
        raise SweepError(str(error)) from error
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
            space[key] = kind(values.start, values.end, log="log" in values.tags)
        elif override.is_range_sweep() and all(isinstance(x, int) for x in (values.start, values.stop, values.step)):
            # Hydra leaves the end out, Optuna wants the last value.
            last = values.start + (values.stop - 1 - values.start) // values.step * values.step
            space[key] = IntDistribution(values.start, last, step=values.step)
        else:
            raise SweepError(
                f"{written}: give choices (a,b), interval(low, high), tag(log, interval(low, high)) or range(a, b)"
            )
    return fixed, space, text
