"""From a command line to what Hydra composes: folders of configs, and arguments as Hydra takes them.

errors.py words the errors of a command line. training/config/ knows all keys and their values.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from forgetting_transformer import files, plugins
from forgetting_transformer.training.config import ConfigError


def config_dir() -> Path:
    """The folder of this project's configs: beside the code if installed, else at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """All folders where choices may be: this project's, that of --config-dir, and those of the plug-ins.

    Raises:
        ConfigError: there is no such folder; or a plug-in that the arguments name cannot be loaded, or has a file that
            would be taken in the place of this project's.
    """
    own = _hydra_options(arguments).config_dir
    if own and not Path(own).is_dir():
        raise ConfigError(f"--config-dir={own}: there is no such folder")
    try:
        plugins.load(plugins.named_in(arguments))
    except plugins.PluginError as error:
        raise ConfigError(str(error)) from error
    of_plugins = {name: folder for name, folder in plugins.loaded().items() if folder is not None}
    for name, folder in of_plugins.items():
        for relative in (file.relative_to(folder) for file in folder.rglob("*.yaml")):
            if (config_dir() / relative).exists():
                raise ConfigError(
                    f"plugins=[{name}]: configs/{relative} has the name of a file of this project, which would be "
                    "taken in its place; rename it"
                )
    return [config_dir(), *([Path(own)] if own else []), *of_plugins.values()]


def check_recorded_plugins(arguments: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: the run that these arguments would continue needs a plug-in that they do not name.
    """
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    output_dir = given.get("output_dir", "").strip("'\" ")
    if not output_dir or given.get("resume") == "false":
        return
    try:
        recorded = files.read_yaml(Path(output_dir, "config.yaml").expanduser())
    except (OSError, files.UnreadableError):
        return  # none, or damaged: its checkpoints have it too
    # Nothing is imported because a run's folder names it.
    if isinstance(recorded, dict) and (said := plugins.missing(recorded.get("plugins"), f"{output_dir=!s}: this run")):
        raise ConfigError(said)


def for_hydra(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Arguments as Hydra takes them: options in front, and keys with ++, by which it admits those that no YAML lists.

    It would refuse the names that the authors' code has for keys. training/config/ knows all names and refuses others.
    """
    overrides = _hydra_options(arguments).overrides
    options = [argument for argument in arguments if argument not in overrides]
    return [*options, *(f"++{one}" if _sets_a_key(one, folders) else one for one in overrides)]


def _sets_a_key(override: str, folders: Sequence[Path]) -> bool:
    key, equals, _ = override.partition("=")
    chooses = "/" in key or "@" in key or any((folder / key).is_dir() for folder in folders)
    return bool(equals) and not chooses and not key.startswith(("+", "~", "hydra."))


def _hydra_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options and overrides of a command line as Hydra's parser reads them, in any order."""
    return get_args_parser().parse_known_intermixed_args(list(arguments))[0]
