"""Train a model: compose the configuration, check it, run it.

    python train.py +experiment/demo=fox_pro output_dir=output/demo data_dir=data
    fabric run train.py --devices 4 +experiment/longcrawl64/forgetting_transformer=pro_760m_48b \\
        output_dir=… data_dir=… wandb.log_dir=…
    python train.py -m +experiment/demo=fox_pro seed=0,1 optimizer.lr=1e-3,2e-3 output_dir=output/sweep data_dir=data
    python -m forgetting_transformer.train …    the same from any folder, without a copy of the repository
    … --config-dir=mine +experiment=my_model    with your own groups, in mine/experiment/my_model.yaml

The same command again continues an interrupted run; -m makes a run of every combination (docs/sweep.md). The exit code
is 0 when the run is done, 75 when a signal (Ctrl-C, SIGTERM, SIGUSR1) stopped it, 1 after an error;
output_dir/status.json agrees. Ranks of `fabric run` and torchrun, which take 75 for a failure, end with 0 after
a signal; scripts/launch.py ends with 75. `python train.py --help` lists the choices of every config group, `--cfg job`
prints the composed config without training. `preflight=true` trains nothing either: it checks whether everything fits,
states the cost of the run, and proposes the fastest settings that fit.
"""

import contextlib
import io
import logging
import os
import sys
import warnings

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from forgetting_transformer import command_line, composition, console, training
from forgetting_transformer.composition import errors
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.training.errors import DeviceError

log = logging.getLogger(__name__)
_composed: list[DictConfig] = []


def main() -> None:
    """Runs the command line of this process. Whatever fails is one line, and ends the process with code 1."""
    console.end_on_signals()  # until training handles them itself
    command_line.take_any_text()
    # Read when PyTorch is loaded. By default threads of OpenMP spin at the end of every operation until all are there.
    # Beside other work one of them has to wait for a core, and a step takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    keep_compiled_code()
    console.die_with_launcher()
    config = compose_or_explain()
    if config is None:
        return
    console.start_log()
    if "torch" not in sys.modules:  # as after a plug-in's import
        log.info("loading PyTorch")
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # Silences DDP's warning about find_unused_parameters, which parallel/launch.py sets on purpose. With several
        # nodes, warnings of this level stay: one says that a node cannot be reached.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    train(config)


def compose_or_explain() -> training.Config | None:
    """The validated config; None where Hydra has printed something instead, or has run a sweep."""
    folders = [composition.config_dir()]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print
    try:
        folders = composition.config_dirs(sys.argv[1:])
        if console.has_launcher() and {"-m", "--multirun"} & {*sys.argv}:  # every rank would start the whole sweep
            raise SweepError(
                "-m under `fabric run` is not possible; start `python train.py -m …`, which starts the processes of "
                "each job"
            )
        sys.argv[1:] = composition.for_hydra(sys.argv[1:], folders)
        # Hydra prints --help and --cfg.
        with contextlib.nullcontext() if console.first_of_node() else contextlib.redirect_stdout(io.StringIO()):
            compose()
        if not _composed:
            return None
        errors.check_groups(map(str, _composed[0]), folders)
        return training.parse(_composed.pop(), sys.argv[1:])
    except command_line.CommandError as error:
        console.fail(f"{type(error).__name__}: {error}")
    except Exception as error:
        if (said := errors.explain(error, folders)) is None:
            console.fail(f"{type(error).__name__}: {error}", trace=True)
        console.fail(f"ConfigError: {said}")


@hydra.main(version_base="1.3", config_path=str(composition.config_dir()), config_name="config")
def compose(composed: DictConfig) -> None:
    """Keeps the config that Hydra has composed, for `compose_or_explain`."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        # Another launcher than this project's calls this function for each job.
        train(training.parse(composed, sys.argv[1:]))
    else:
        _composed.append(composed)


def train(config: training.Config) -> None:
    """Trains; exits with a code other than 0 unless the run is done."""
    # Lightning advises srun inside of any SLURM job; launch.py needs none.
    warnings.filterwarnings("ignore", message=".*srun.*")
    try:
        code = console.exit_code(training.run(config))
    except DeviceError as error:
        console.fail(f"{type(error).__name__}: {error}", once=False, skip_cleanup=True)
    except command_line.CommandError as error:
        # It has the fix, which a traceback would bury. The run's log gets it too, if there is one yet.
        console.fail(f"{type(error).__name__}: {error}")
    except Exception as error:
        console.fail(f"{type(error).__name__}: {error}", trace=True, once=False)
    if code:
        sys.exit(code)


def keep_compiled_code() -> None:
    """Keeps compiled code for the next start, unless the user has chosen a place. Call it before PyTorch is loaded.

    PyTorch's own folder, in /tmp, is often gone after a job, and has another one for each GPU for Triton.
    """
    home, cache = os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.access(cache if os.path.isdir(cache) else home, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(cache, "forgetting_transformer", "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(os.environ.get("TRITON_HOME") or home, ".triton/cache"))


if __name__ == "__main__":  # jobs of a sweep run this file where there is no train.py beside it
    main()
