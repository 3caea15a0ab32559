"""Hydra plugins: the launcher of `python train.py -m …`, and sources of configs.

Hydra finds plugins by importing what lies in the namespace package `hydra_plugins`, wherever on sys.path a part of it
is, and accepts no class from elsewhere. It does so in every process that uses Hydra, every rank of every run among
them, so this file imports nothing heavy.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer import files, plugins


@dataclass
class FabricLauncherConfig:
    """The arguments of sweep.runner.Machine, which documents them."""

    _target_: str = "hydra_plugins.forgetting_transformer_launchers.FabricLauncher"
    gpus: list[str] | None = None
    jobs_at_once: int | None = None
    jobs_per_gpu: int = 1


class ConfigsOfPlugins(SearchPathPlugin):
    """Adds the folder `configs` of every loaded plug-in to where Hydra looks for choices, behind this project's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, folder in plugins.loaded().items():
            if folder is not None:
                search_path.append(name, f"file://{folder}")


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's source of configs in files, whose own reader takes no byte-order mark and often names no file."""

    def load_config(self, config_path: str) -> ConfigResult:
        """
        Raises:
            UnreadableError: the file cannot be read; in one line.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            text = files.decode(path.read_bytes(), path)
            config: Any = files.parse_yaml(text, path, lambda text: OmegaConf.load(io.StringIO(text)))
            if not isinstance(config, DictConfig):
                raise ValueError("a config holds lines `key: value`; add the key")
            header = self._get_header_dict(text[:512])
        except files.UnreadableError:
            raise
        except (OSError, ValueError, OmegaConfBaseException) as error:  # of a line such as "# @package", or of ${…}
            raise files.UnreadableError(f"{path}: {str(error).splitlines()[0]}") from error
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)


# Its registry keeps the first class of a scheme, which is Hydra's.
SourcesRegistry.instance().types["file"] = FileConfigSource
ConfigStore.instance().store("fabric", FabricLauncherConfig, group="hydra/launcher")


class FabricLauncher(Launcher):
    """Runs the jobs of a sweep on this machine, each in processes of its own.

    A job's output_dir is `output_dir/<what is swept>`, such as `output/sweep/optimizer.lr=0.001,seed=0`. An output_dir
    that differs for every job, because it is swept or because of a `${…}` in it, is taken as it is.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs all jobs, prints a table and writes it to `hydra.sweep.dir`.

        Returns:
            for each job, its final loss (held-out if it was evaluated), or an error if it did not finish.

        Raises:
            SweepError, ConfigError: the jobs cannot be run at all; nothing was started.
        """
        from forgetting_transformer.files import write_atomically
        from forgetting_transformer.sweep import SweepError, runner
        from forgetting_transformer.sweep.jobs import State

        setup_globals()
        folder = Path(self.config.hydra.sweep.dir).absolute()
        results = runner.run_jobs(self._jobs(job_overrides), runner.Machine.of(self.settings), folder)
        table = runner.summary(results)
        write_atomically(folder / f"summary-{initial_job_idx}.md", f"{table}\n")
        print(f"\n{table}\n", flush=True)
        if any(result.state == State.INTERRUPTED for result in results):
            raise SystemExit("stopped; the same command continues the jobs from their last checkpoints")
        bad = [result for result in results if result.state != State.FINISHED]
        failure = SweepError(
            f"{len(bad)} of {len(results)} jobs did not finish: {', '.join(result.job.name for result in bad)}. "
            "The same command runs these again from their last checkpoints"
        )
        return [
            JobReturn(
                overrides=list(overrides),
                status=JobStatus.FAILED if result in bad else JobStatus.COMPLETED,
                _return_value=failure if result in bad else result.run.final_loss(bool(result.run.heldout.values.size)),
            )
            for overrides, result in zip(job_overrides, results, strict=True)
        ]

    def _jobs(self, job_overrides: Sequence[Sequence[str]]) -> list[Any]:
        from forgetting_transformer.sweep.jobs import Job, file_name, of_each_job
        from forgetting_transformer.training import parse

        # Jobs are named by their differences.
        fixed = set.intersection(*map(set, job_overrides)) if len(job_overrides) > 1 else set(*job_overrides)
        sources = self.config.hydra.runtime.config_sources
        options = [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"]
        if self.config.hydra.job.config_name != "config":
            options.append(f"--config-name={self.config.hydra.job.config_name}")
        configs = []
        for overrides in job_overrides:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                del composed["hydra"]
            configs.append(parse(composed, overrides))
        have_folders = len({config.output_dir for config in configs}) == len(configs)
        jobs = []
        for overrides, config in zip(job_overrides, configs, strict=True):
            name = ",".join(override.lstrip("+") for override in overrides if override not in fixed)
            if not have_folders:
                config.output_dir = str(Path(config.output_dir) / file_name(name))
            jobs.append(Job(name or config.tag, (*options, *of_each_job(overrides)), config))
        return jobs
