"""Folders of configs: this project's, one that the command line adds, and those of plug-ins."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.errors import CompactHydraException

from forgetting_transformer import files, plugins


def config_dir() -> Path:
    """The folder of this project's configs: beside the code if installed, else at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def config_dirs() -> list[Path]:
    """All folders where choices may be."""
    own = _hydra_options(sys.argv[1:]).config_dir
    of_plugins = [folder for folder in plugins.loaded().values() if folder is not None]
    return [config_dir(), *([Path(own)] if own else []), *of_plugins]


def find_all() -> None:
    """Looks for the folders that the command line names, and loads its plug-ins, before Hydra composes.

    Raises:
        CompactHydraException: there is no such folder; or a plug-in cannot be loaded, has a file that would be taken in
            the place of this project's, or is missing for the run that the command would continue.
    """
    for folder in config_dirs():
        if not folder.is_dir():
            raise CompactHydraException(f"ConfigError: --config-dir={folder}: there is no such folder")
    try:
        plugins.load(plugins.named_in(sys.argv[1:]))
    except plugins.PluginError as error:
        raise CompactHydraException(f"ConfigError: {error}") from error
    for name, of_plugin in plugins.loaded().items():
        for relative in [file.relative_to(of_plugin) for file in of_plugin.rglob("*.yaml")] if of_plugin else ():
            if (config_dir() / relative).exists():
                raise CompactHydraException(
                    f"ConfigError: plugins=[{name}]: configs/{relative} has the name of a file of this project, which "
                    "would be taken in its place; rename it"
                )
    typed = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if (output_dir := typed.get("output_dir", "").strip("'\" ")) and "resume=false" not in sys.argv[1:]:
        recorded = _recorded_plugins(Path(output_dir).expanduser() / "config.yaml")
        if said := plugins.missing(recorded, f"output_dir={output_dir}: this run"):
            raise CompactHydraException(f"ConfigError: {said}")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with Hydra's options in front: its parser takes none between two overrides."""
    overrides = _hydra_options(arguments).overrides
    return [*(argument for argument in arguments if argument not in overrides), *overrides]


def _recorded_plugins(config: Path) -> list[str]:
    """Plug-ins that a run's config.yaml names. None is imported."""
    try:
        config_of_run = files.read_yaml(config)
    except (OSError, files.UnreadableError):
        return []  # none, or damaged: its checkpoints say it again
    recorded = config_of_run.get("plugins") if isinstance(config_of_run, dict) else None
    return recorded if isinstance(recorded, list) else []


def _hydra_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options and overrides of a command line as Hydra's parser reads them, in any order."""
    return get_args_parser().parse_known_intermixed_args(list(arguments))[0]
