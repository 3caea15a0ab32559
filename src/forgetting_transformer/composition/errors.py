"""Errors of a command line, each in one line with the closest name. Hydra prints ten lines."""

import difflib
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer.files import UnreadableError
from forgetting_transformer.training.config import ConfigError


def explain(error: Exception, folders: Sequence[Path]) -> str | None:
    """One line for an error of Hydra, or of a library that it reads with; None for others.

    Args:
        folders: of the configs that were to be composed.
    """
    if isinstance(error, UnreadableError):
        return str(error)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = modules[-1].partition(".")[0] if modules else ""
    of_hydra = isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError)
    if not of_hydra and raised_in not in ("hydra", "omegaconf", "antlr4", "codecs"):
        return None
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override.removeprefix("++"))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return _unknown_choice(group, option, error.options or (), folders)
    said = f"{error}\n{error.__cause__ or ''}".replace("'++", "'")  # as it was typed
    if "Could not override 'callbacks'" in said:
        return "callbacks is a list of names, as in callbacks=[needle]; keys follow, as in callbacks.needle.lengths=…"
    lines = [line.strip() for line in said.splitlines()]
    return "; ".join(dict.fromkeys(line.rstrip(".;") for line in lines if line)) or type(error).__name__


def _unreadable(override: str) -> str:
    """An argument that is no key=value to Hydra's grammar."""
    key, equals, value = override.partition("=")
    if equals and re.fullmatch(r"[a-zA-Z0-9_@/.+~:-]+", key):
        return (
            f"{key}={value} cannot be read; give text that holds a space, = , : ; ~ quotes, brackets or letters such "
            f"as ä in two pairs of quotes: '{key}=\"…\"'"
        )
    return f"{override!r} is not of the form key=value"


def _unknown_choice(group: str, option: str, known: Sequence[str], folders: Sequence[Path]) -> str:
    """A choice that its group does not have. It may be one of a group below, as in +experiment/demo=fox_pro."""
    choices = sorted({*known, *(path.stem for folder in folders for path in (folder / group).glob("*.yaml"))})
    below = {path.relative_to(folder) for folder in folders for path in (folder / group).glob("*/**/*.yaml")}
    if not group:
        return f"--config-name={option}: there is no such file; leave it out, or name {' or '.join(choices)}"
    if not option:
        return f"{group}= is empty (a variable that is not set?); choices: {', '.join(choices)}"
    if found := difflib.get_close_matches(option, choices, 1, 0.7):
        hint = f"did you mean {found[0]!r}?"
    elif found := [str(path.parent) for path in sorted(below) if path.stem == option]:
        hint = f"did you mean +{found[0]}={option}?"
    elif choices:
        hint = f"choices: {', '.join(choices)}, or those of a plug-in, which is named first: plugins=[…]"
    else:
        hint = f"choices are in the groups {', '.join(sorted({str(path.parent) for path in below}))}"
    return f"there is no {group}={option}; {hint}"


def check_groups(keys: Iterable[str], folders: Sequence[Path]) -> None:
    """Raises ConfigError where a top-level key is a group that does not exist, as in +experiment/dmo=fox_pro, which
    Hydra takes for a key."""
    groups = sorted({str(p.relative_to(folder)) for folder in folders for p in folder.rglob("*") if p.is_dir()})
    for wrong in (str(key) for key in keys if "/" in str(key)):
        found = difflib.get_close_matches(wrong, groups, 1, 0.7)
        hint = f"did you mean {found[0]!r}?" if found else f"groups: {', '.join(groups)}"
        raise ConfigError(f"there is no group {wrong!r}; {hint} (or name the plug-in that has it: plugins=[…])")
