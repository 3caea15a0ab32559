"""Training: `run(config)` trains one model from its config to its last checkpoint. Read trainer.py first.

config/, initialisation/  keys and their ranges; initial weights
checkpoint/, saving.py    format of checkpoints, resume; contents of a run's
faults/                   signals; ranks that die, hang or differ; bad steps; status.json
parallel/, execution/     processes and sharding; compilation, CUDA graphs, choice of kernels, preflight
optimization/             optimizers, schedules, parameter groups
callbacks/, records/      measurements during training; log, metrics, start block and the run's folder
export/                   exports, checkpoints of the authors' code, forget gates for a Transformer
"""

from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.config.checks import check
from forgetting_transformer.training.config.parsing import parse
from forgetting_transformer.training.execution.inductor import hash_beside_imports

__all__ = ["Config", "ConfigError", "check", "parse", "run"]


def run(config: Config) -> str:
    """Train with a config, or with `preflight=true` check that training would work.

    Returns:
        "done", or "preempted" if a signal stopped training; then the same config continues it.
    """
    # PyTorch is loaded here: a mistake in a config is reported before that.
    hash_beside_imports(config)
    if config.preflight:
        from forgetting_transformer.training.execution.preflight import preflight

        preflight(config)
        return "done"
    from forgetting_transformer.training.faults.failures import Supervisor
    from forgetting_transformer.training.trainer import Trainer

    with Supervisor(config) as supervisor:
        Trainer(config, supervisor).fit()
    return str(supervisor.outcome)
