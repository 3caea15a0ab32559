"""Training: `run(config)` trains one model from its config to its last checkpoint. Read trainer.py first."""

from forgetting_transformer.training.config import Config, ConfigError, check, parse
from forgetting_transformer.training.trainer import Trainer, run

__all__ = ["Config", "ConfigError", "Trainer", "check", "parse", "run"]
