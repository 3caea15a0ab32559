"""From a command line to what Hydra composes: folders of configs, and arguments as Hydra takes them.

errors.py words the errors of a command line. training/config/ knows all keys and their values.
"""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from forgetting_transformer import plugins
from forgetting_transformer.training.config import ConfigError

#: Options of the programs that start train.py on several devices.
_OF_LAUNCHERS = [f"--{name}" for name in ("accelerator", "devices", "num-nodes", "node-rank", "precision", "strategy")]


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
    """Options and overrides of a command line as Hydra's parser reads them, in any order.

    Raises:
        ConfigError: an option that is not Hydra's.
    """
    parser = get_args_parser()
    read, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        option = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(option, [*parser._option_string_actions, *_OF_LAUNCHERS], 1)
        whose = " of `fabric run` and scripts/launch.py" if close and close[0] in _OF_LAUNCHERS else ""
        hint = f"did you mean {close[0]}{whose}?" if close else "--help lists those there are"
        raise ConfigError(f"train.py has no option {option}; {hint}")
    return read
