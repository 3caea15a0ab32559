"""What the sweep scripts share as entry points: Hydra overrides in, configs and a machine out."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import OmegaConf

from forgetting_transformer.sweep import SweepError, machines
from forgetting_transformer.sweep.runner import Machine
from forgetting_transformer.training import Config, parse


class Composer:
    """Composes configs of train.py from overrides, as `python train.py` does.

    Args:
        config_dir: the repository's `configs`.
        overrides: of the command line. Those of hydra itself (hydra/launcher=…, hydra.launcher.…=…) say where jobs run.
    """

    def __init__(self, config_dir: Path, overrides: Sequence[str]) -> None:
        self._config_dir = config_dir
        self._all = list(overrides)
        self.task_overrides = [o for o in overrides if not o.startswith(("hydra.", "hydra/"))]

    def compose(self, overrides: Sequence[str]) -> Config:
        """
        Raises:
            SweepError: Hydra cannot compose these overrides.
            ConfigError: they compose to something that train.py refuses.
        """
        try:
            with initialize_config_dir(str(self._config_dir), version_base="1.3"):
                return parse(compose("config", overrides=list(overrides)))
        except HydraException as error:
            raise SweepError(str(error)) from error

    def machine(self) -> Machine:
        """Where `hydra/launcher` sends the jobs.

        Raises:
            SweepError: it names another launcher, one with unknown settings, or one that does not wait for its jobs.
        """
        try:
            with initialize_config_dir(str(self._config_dir), version_base="1.3"):
                composed = compose("config", overrides=self._all, return_hydra_config=True)
        except HydraException as error:
            raise SweepError(str(error)) from error
        settings = OmegaConf.to_container(composed.hydra.launcher)
        name = getattr(get_class(settings.pop("_target_")), "machine", None)
        if name is None:
            raise SweepError(f"hydra/launcher={composed.hydra.runtime.choices['hydra/launcher']}: use fabric or slurm")
        if not settings.get("wait", True):
            raise SweepError("hydra.launcher.wait=false: a search needs the results of its jobs; leave it at true")
        return getattr(machines, name)(**settings)
