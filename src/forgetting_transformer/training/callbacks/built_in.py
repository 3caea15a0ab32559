"""The callbacks that every run has, and those that its config names."""

from forgetting_transformer.plugins import CALLBACKS
from forgetting_transformer.training.callbacks.base import Callback
from forgetting_transformer.training.callbacks.goodput import Goodput
from forgetting_transformer.training.callbacks.losses import BadSteps, HeldOut, Loss, LossByPosition, Norms
from forgetting_transformer.training.callbacks.profile import Profile
from forgetting_transformer.training.callbacks.throughput import Progress, Throughput
from forgetting_transformer.training.callbacks.wandb import Wandb
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.execution.hardware import peak_of
from forgetting_transformer.training.interface import TrainerInterface


def built_in(trainer: TrainerInterface) -> list[Callback]:
    """The callbacks of every run, in their order, of a trainer whose checkpoint is loaded."""
    config, data = trainer.config, trainer.config.datamodule
    peak = peak_of(config.fabric, trainer.fabric.device)
    throughput = Throughput(peak and peak * trainer.fabric.world_size, trainer.counters.as_floats())
    return [
        Wandb(),  # first, so that it has what the others report at the start
        Goodput(),
        BadSteps(),
        LossByPosition(data.train_batch_len, config.eval.min_val_length, trainer.fabric.device),
        Loss(),
        Norms(),
        throughput,
        HeldOut(),
        *([Profile(*config.train.profile_steps)] if config.train.profile_steps else []),
        # last, because it shows results of the others
        Progress(throughput),
    ]


def chosen(config: Config) -> list[Callback]:
    """The callbacks that the config names, in its order.

    Raises:
        ConfigError: the built object is no callback.
    """
    found = []
    for name, keys in vars(config.callbacks).items():
        component = CALLBACKS.get(name)
        callback = component.build() if component.config is None else component.build(keys)
        if not isinstance(callback, Callback):
            base = "forgetting_transformer.training.callbacks.Callback"
            raise ConfigError(f"callbacks.{name}: {type(callback).__name__} does not derive from {base}")
        callback.name = name
        found.append(callback)
    return found
