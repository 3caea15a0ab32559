"""Training: `run(config)` trains one model from its config to its last checkpoint. Read trainer.py first."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgetting_transformer.training.config import Config, ConfigError
    from forgetting_transformer.training.config.checks import check
    from forgetting_transformer.training.config.parsing import parse
    from forgetting_transformer.training.trainer import Trainer

_PLACES = {
    "Config": "config",
    "ConfigError": "config",
    "Trainer": "trainer",
    "check": "config.checks",
    "parse": "config.parsing",
}

__all__ = ["Config", "ConfigError", "Trainer", "check", "parse", "run"]


def __getattr__(name: str) -> Any:
    """What loads PyTorch comes when it is first asked for: a run's folder and its status are read without it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def run(config: "Config") -> str:
    """What `train.py` does with its config: trains, or with `preflight=true` looks whether training would work.

    Returns:
        "done", or "preempted" if a signal stopped training; then the same config continues it.
    """
    if config.preflight:
        from forgetting_transformer.training.start.preflight import preflight

        preflight(config)
        return "done"
    from forgetting_transformer.training.faults.failures import Start
    from forgetting_transformer.training.trainer import Trainer

    with Start(config) as start:
        Trainer(config, start).fit()
    return str(start.outcome)
