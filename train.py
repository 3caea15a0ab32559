"""Train a model: compose the configuration, check it, run it.

    python train.py +experiment/demo=fox_pro output_dir=output/demo data_dir=data
    fabric run train.py --devices 4 +experiment/longcrawl64/forgetting_transformer=pro_760m_48b \
        output_dir=… data_dir=… wandb.log_dir=…
    python train.py -m +experiment/demo=fox_pro seed=0,1 optimizer.lr=1e-3,2e-3 output_dir=output/sweep data_dir=data

The same command again continues an interrupted run; -m makes a run of every combination (docs/sweep.md). The exit code
is 0 when the run is done, 75 when a signal (Ctrl-C, SIGTERM, SIGUSR1) stopped it, 1 after an error;
output_dir/status.json says the same. `python train.py --help` lists the
choices of every config group, `--cfg job` prints the composed config without training, `preflight=true` checks whether
everything fits and says what the run will cost.
"""

import logging
import os
import sys
import warnings

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(composed: DictConfig) -> None:
    import torch.distributed as dist

    from forgetting_transformer import training
    from forgetting_transformer.data import DataError
    from forgetting_transformer.training.checkpoint import CheckpointError
    from forgetting_transformer.training.preflight import PreflightError
    from forgetting_transformer.training.run_directory import RunDirectoryError
    from forgetting_transformer.training.status import PREEMPTED_EXIT_CODE
    from forgetting_transformer.training.trainer import TrainingError

    warnings.filterwarnings("ignore", message=".*tensorboardX.*|.*srun.*")
    try:
        if HydraConfig.get().mode == RunMode.MULTIRUN and os.environ.get("LT_CLI_USED") == "1":
            # All jobs would share one process group and mix their gradients.
            raise training.ConfigError("-m under `fabric run` is not possible; start one `fabric run` per job")
        outcome = training.run(training.parse(composed))
        # The other ranks end with 0: launchers take anything else for a failure, and kill whoever is not done yet.
        if outcome == "preempted" and not (dist.is_initialized() and dist.get_rank() > 0):
            sys.exit(PREEMPTED_EXIT_CODE)
    except (
        training.ConfigError, DataError, CheckpointError, RunDirectoryError, TrainingError, PreflightError
    ) as error:  # fmt: skip
        # These say what to do; a traceback would bury it. The run's log gets them too, if there is one yet.
        logging.getLogger(__name__).critical("%s: %s", type(error).__name__, error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command continues from the last checkpoint\n")


if __name__ == "__main__":
    main()
