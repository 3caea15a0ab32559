"""Hydra plugins: the launcher of `python train.py -m …`, and how configs are found and read.

Hydra finds plugins by importing what lies in the namespace package `hydra_plugins`, wherever on sys.path a part of it
is, and accepts no class from elsewhere. It does so in every process that uses Hydra, every rank of every run among
them, so this file imports nothing heavy. The launcher itself is in _fabric_launcher.py: Hydra imports a module with
such a name only when its class is asked for.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer import files, plugins


@dataclass
class FabricLauncherConfig:
    """The arguments of sweep.runner.Machine, which documents them."""

    _target_: str = "hydra_plugins._fabric_launcher.FabricLauncher"
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
    """Hydra's source of configs in files, whose own reader takes no byte-order mark and ends in PyYAML's errors."""

    def load_config(self, config_path: str) -> ConfigResult:
        """
        Raises:
            CompactHydraException: the file cannot be read; in one line.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            text = files.decode(path.read_bytes(), path)
            config: Any = files.parse_yaml(text, path, lambda text: OmegaConf.load(io.StringIO(text)))
            if not isinstance(config, DictConfig):
                raise ValueError("a config holds lines `key: value`; give what stands here a key")
            header = self._get_header_dict(text[:512])
        except files.UnreadableError as error:
            raise CompactHydraException(f"ConfigError: {error}") from error
        except (OSError, ValueError, OmegaConfBaseException) as error:  # of a line such as "# @package", or of ${…}
            raise CompactHydraException(f"ConfigError: {path}: {str(error).splitlines()[0]}") from error
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)


# Its registry keeps the first class of a scheme, which is Hydra's.
SourcesRegistry.instance().types["file"] = FileConfigSource
ConfigStore.instance().store("fabric", FabricLauncherConfig, group="hydra/launcher")
