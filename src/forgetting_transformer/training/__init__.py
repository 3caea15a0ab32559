"""Training: `run(config)` trains one model from its config to its last checkpoint. Read trainer.py first."""

from forgetting_transformer.training.config import Config, ConfigError, check, parse
from forgetting_transformer.training.trainer import Trainer, train

__all__ = ["Config", "ConfigError", "Trainer", "check", "parse", "run"]


def run(config: Config) -> str:
    """What `train.py` does with its config: trains, or with `preflight=true` looks whether training would work.

    Returns:
        "done", or "preempted" if a signal stopped training; then the same config continues it.
    """
    if not config.preflight:
        return train(config)
    from forgetting_transformer.training.preflight import preflight

    preflight(config)
    return "done"
