"""Errors of a command line in one line with the closest name, where Hydra prints ten."""

import contextlib
import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import (
    CompactHydraException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer.training.config import Config
from forgetting_transformer.training.config.official_names import OFFICIAL, closest_key
from forgetting_transformer.training.config.parsing import keys_of


def explain(error: Exception, *config_dirs: Path) -> str:
    """One line for an error of Hydra or OmegaConf in a sweep, or in composing the configuration from these folders."""
    if type(error) is CompactHydraException:
        return str(error)  # of this project's launchers
    return f"ConfigError: {_explain(error, config_dirs)}"


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Within it Hydra raises what it would print."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def is_of_hydra(error: Exception) -> bool:
    """Whether Hydra, or a library it parses with, raised this: then the command line is at fault."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].partition(".")[0] in ("hydra", "omegaconf", "antlr4")


def _explain(error: Exception, config_dirs: Sequence[Path]) -> str:
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and "Cannot merge DictConfig" in str(cause):
        return f"{cause.full_key} must be a mapping, as in '{cause.full_key}={{name: value}}'"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and "not in struct" in str(cause):
        return _unknown_key(str(cause.full_key), cause.parent_node or (), str(error), config_dirs)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        said = _unknown_choice(*error.missing_cfg_file.rpartition("/")[::2], error.options or (), config_dirs)
        if said:
            return said
    lines = [line.strip() for line in f"{error}\n{cause or ''}".splitlines()]
    return "; ".join(dict.fromkeys(line.rstrip(".;") for line in lines if line)) or type(error).__name__


def _unreadable(error: OverrideParseException) -> str:
    """An argument that is no key=value to Hydra's grammar."""
    key, equals, value = error.override.removeprefix("++").partition("=")
    if equals and re.fullmatch(r"[a-zA-Z0-9_@/.+~:-]+", key):
        return (
            f"{key}={value} cannot be read; give text that holds a space, = , : ; ~ quotes, brackets or letters such "
            f"as ä in two pairs of quotes: '{key}=\"…\"'"
        )
    return f"{error.override!r} is not of the form key=value"


def _unknown_key(key: str, beside: Iterable[Any], said: str, config_dirs: Sequence[Path]) -> str:
    """A key that no YAML lists.

    Args:
        beside: the keys of its section. said: Hydra's message.
    """
    if key == "callbacks" or (key.startswith("callbacks.") and key.count(".") == 1):
        # Without any callback the section is not there, and Hydra's own message has what was typed.
        typed = re.search(r"Could not override '([^']+)'", said)
        key = typed[1] if typed else key
        chosen = key.split(".")[1] if "." in key else "a,b"
        return f"unknown config key {key!r}; choose the callback first, as in callbacks=[{chosen}]"
    section, dot, name = key.rpartition(".")
    names = [str(name) for name in beside]
    known = [section + dot + name for name in (*names, *sorted(OFFICIAL.get(section, ())))]
    close = closest_key(key, [*known, *(k for k in keys_of(Config) if k != key)]) or _in_other_choices(
        config_dirs, section, name
    )
    if not close and section == "model.config":
        close = f"; a field that the model's YAML does not list is added with +{key}=…"
    elif not close and section:
        close = f"; keys of {section}: {', '.join(names)}"
    return f"unknown config key {key!r}{close}"


def _unknown_choice(group: str, option: str, listed: Sequence[str], config_dirs: Sequence[Path]) -> str | None:
    """A choice that its group does not have.

    Args:
        listed: Hydra's choices. It lists none of a group of which several may be chosen.
    """
    if not group:
        names = " or ".join(sorted(file.stem for folder in config_dirs for file in folder.glob("*.yaml")))
        searched = " or ".join(map(str, config_dirs))
        return f"--config-name={option}: there is no such file in {searched}; leave it out, or name {names}"
    choices = listed or sorted({file.stem for folder in config_dirs for file in (folder / group).glob("*.yaml")})
    if not option and choices:
        return f"{group}= is empty (a variable that is not set?); choices: {', '.join(choices)}"
    below = "" if closest(option, choices) else _in_groups_below(config_dirs, group, option, only_close=bool(choices))
    if below or choices:
        return f"there is no {group}={option}{below or _closest_choice(option, choices)}"
    return None


def _closest_choice(option: str, choices: Sequence[str]) -> str:
    said = closest(option, choices, "choices")
    return f"{said}, or those of a plug-in, which is named first: plugins=[…]" if said.startswith("; choices") else said


def _in_groups_below(config_dirs: Sequence[Path], group: str, option: str, only_close: bool = False) -> str:
    """Where choices of groups inside of a group are: experiment=fox_pro is +experiment/demo=fox_pro.

    Args:
        only_close: do not list the groups where nothing in them is called so.
    """
    files = sorted(
        {
            path.relative_to(folder).with_suffix("")
            for folder in config_dirs
            for path in (folder / group).rglob("*.yaml")
        }
    )
    if found := [file for file in files if file.name == option]:
        return f"; did you mean +{found[0].parent}={option}?"
    if only_close:
        return ""
    groups = sorted({str(file.parent) for file in files})
    return f"; choices are in the groups {', '.join(groups)}, as in +{files[0].parent}={files[0].name}" if files else ""


def _in_other_choices(config_dirs: Sequence[Path], group: str, name: str) -> str:
    """Which choices of a group have a key that the chosen one lacks: strategy.keep_gathered is one of strategy=fsdp."""
    has_key = re.compile(rf"^{re.escape(name)}:", re.MULTILINE)
    files = [file for folder in config_dirs if group for file in (folder / group).glob("*.yaml")]
    choices = sorted({file.stem for file in files if has_key.search(file.read_text(encoding="utf-8"))})
    return f"; it is a key of {group}={' and '.join(choices)}" if choices else ""


def unknown_group(keys: Iterable[str], *config_dirs: Path) -> str | None:
    """Message for `+experiment/dmo=fox_pro`: Hydra takes a group that does not exist for a key of the config.

    Args:
        keys: top-level keys of the composed config.
    """
    wrong = next((key for key in keys if "/" in str(key)), None)
    if wrong is None:
        return None
    groups = {str(path.relative_to(folder)) for folder in config_dirs for path in folder.rglob("*") if path.is_dir()}
    close = closest(wrong, sorted(groups), "groups")
    return f"there is no group {wrong!r}{close} (or name the plug-in that has it: plugins=[…])"


def closest(name: str, known: Sequence[str], title: str = "") -> str:
    """ "; did you mean …?", or where nothing known is like `name`, under `title` if there is one, all that is known."""
    if found := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"; did you mean {found[0]!r}?"
    return f"; {title}: {', '.join(known)}" if title else ""
