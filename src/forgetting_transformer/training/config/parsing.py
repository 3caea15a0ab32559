"""Typed `Config` of a composed config: `parse` checks every key with pydantic, by the dataclass that declares it.

`config_class` puts together the dataclasses of a run's components (plugins.py) and those of __init__.py. Every key that
is wrong is one line with the key, its value and the fix.
"""

import contextlib
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic.dataclasses
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer import plugins
from forgetting_transformer.console import redact
from forgetting_transformer.files import LINK_TO_IT, flatten
from forgetting_transformer.training.config import (
    CallbacksConfig,
    Config,
    ConfigError,
    DataModuleConfig,
    OptimizerConfig,
    ScheduleConfig,
    official_names,
)

#: The sections whose keys are those of the component that they name: its registry, and the dataclass to derive from.
_NAMED: dict[str, tuple[plugins.Registry, Any]] = {
    "optimizer": (plugins.OPTIMIZERS, OptimizerConfig),
    "schedule": (plugins.SCHEDULES, ScheduleConfig),
    "datamodule": (plugins.CORPORA, DataModuleConfig),
}
#: Requirement on a value, by pydantic's type of error or its first word. Other errors keep pydantic's words.
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "string_unicode": f"UTF-8; {LINK_TO_IT}",
    "list": "a list, as in [a, b]",
    "dict": "a mapping, as in {name: value}",
}


class Key(NamedTuple):
    """A key of the configuration: its type, and its default or OmegaConf's MISSING."""

    type: Any
    default: Any


def parse(composed: Any, typed: Sequence[str] = ()) -> Config:
    """Turns a composed OmegaConf config into a typed `Config`.

    Args:
        typed: the arguments of the command line it was composed from, which win over official names in files.

    Raises:
        ConfigError: an unknown component or key (with the closest known one), a key without a value, a value of the
            wrong type or out of its range, or what a section's `__post_init__` refuses; a line for each.
    """
    written = typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(composed)))
    sections = [section.name for section in dataclasses.fields(Config) if dataclasses.is_dataclass(section.type)]
    for name in sections:
        if not isinstance(value := written.setdefault(name, {}), dict) and name != "callbacks":
            raise ConfigError(_is_group(name, value, keys_of(Config)))
    tree = OmegaConf.create(written)
    with _explained(written):
        official_names.translate(tree, typed)
        values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    values["model"].pop("sizes", None)  # by scale; fields of model.config refer to them
    callbacks = values["callbacks"] or {}
    if isinstance(callbacks, list):  # as people write it in a file
        callbacks = {str(name): {} for name in callbacks}
    if not isinstance(callbacks, dict):
        raise ConfigError(f"callbacks={redact(str(callbacks))} must be a list of names, as in callbacks=[a,b]")
    for name in callbacks:
        if f"callbacks.{name}=null" in typed:
            raise ConfigError(f"callbacks.{name}=null: leave {name} out of callbacks=[…] to train without it")
    values["callbacks"] = {name: keys or {} for name, keys in callbacks.items()}
    if said := plugins.missing(values.get("plugins")):
        raise ConfigError(said)
    try:
        components_of(values, skip_unknown=False)
    except plugins.UnknownComponentError as error:
        raise ConfigError(str(error)) from error
    return typing.cast(Config, _validated(config_class(values), values, flatten(written)))


def parse_section(section: str, composed: Any) -> Any:
    """One section, such as "datamodule", with the component that its key `name` names; `parse` is for a whole config.

    Raises:
        ConfigError: as `parse`.
    """
    tree = OmegaConf.create({section: composed})
    with _explained(typing.cast(dict[str, Any], OmegaConf.to_container(tree))):
        values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    kind = typing.get_type_hints(config_class(values))[section]
    settings = {"__pydantic_config__": Config.__pydantic_config__}
    alone = dataclasses.make_dataclass("Section", [(section, kind)], namespace=settings)
    return getattr(_validated(alone, values, {}), section)


def components_of(config: Mapping[str, Any], skip_unknown: bool = True) -> dict[str, plugins.Component]:
    """The components that a config names, by section ("optimizer", "callbacks.lm_eval").

    Raises:
        plugins.UnknownComponentError: one is unknown, unless `skip_unknown`.
    """
    named: dict[str, tuple[plugins.Registry, Any]] = {
        section: (registry, config.get(section, {}).get("name", getattr(base, "name", MISSING)))
        for section, (registry, base) in _NAMED.items()
    }
    named |= {f"callbacks.{name}": (plugins.CALLBACKS, name) for name in config.get("callbacks") or ()}
    return {
        section: registry.get(name)
        for section, (registry, name) in named.items()
        if name != MISSING and (not skip_unknown or (isinstance(name, str) and name in registry))
    }


def config_class(config: Mapping[str, Any]) -> type[Config]:
    """`Config` with the keys of the components that a config names; of unknown ones, those that all have.

    Raises:
        ConfigError: a component registered a dataclass that does not fit.
    """
    return _config_class(tuple((section, component.config) for section, component in components_of(config).items()))


@functools.cache
def _config_class(chosen: tuple[tuple[str, type | None], ...]) -> type[Config]:
    sections: dict[str, type] = {}
    callbacks: dict[str, type] = {}
    for section, keys in chosen:
        base = _NAMED[section][1] if section in _NAMED else object
        keys = keys or (base if section in _NAMED else CallbacksConfig)  # which has no keys
        # One of pydantic's own dataclasses would ignore unknown keys.
        plain = dataclasses.is_dataclass(keys) and not pydantic.dataclasses.is_pydantic_dataclass(keys)
        if not (plain and issubclass(keys, base)):
            derives = f" that derives from {base.__module__}.{base.__name__}" if section in _NAMED else ""
            raise ConfigError(f"{section}: {keys.__name__} cannot type this section; make it a dataclass{derives}")
        _check_types(f"{section}: {keys.__module__}.{keys.__qualname__}", keys)
        (sections if section in _NAMED else callbacks)[section.removeprefix("callbacks.")] = keys
    sections["callbacks"] = dataclasses.make_dataclass("CallbacksConfig", callbacks.items(), bases=(CallbacksConfig,))
    return dataclasses.make_dataclass("Config", sections.items(), bases=(Config,), kw_only=True)


def _check_types(where: str, keys: type) -> None:
    """Raises ConfigError where a key of a component has a type that no file can give back, as a resume needs."""
    try:
        hints = typing.get_type_hints(keys)
        wrong = [key.name for key in dataclasses.fields(keys) if not _is_plain(hints[key.name])]
    except Exception as error:  # an annotation is code of a plug-in
        raise ConfigError(f"{where}: the types of its keys cannot be read ({type(error).__name__}: {error})") from error
    if wrong:
        raise ConfigError(
            f"{where}: {wrong[0]} has the type {hints[wrong[0]]}, which no YAML file has; use bool, int, float, str, "
            "list[…], dict[str, …], Literal[…] or a dataclass of these, perhaps | None"
        )


def _is_plain(hint: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether YAML and JSON have values of a type, without a change such as that of a tuple into a list.

    Args:
        around: dataclasses that the type is a part of, which may be of that type again.
    """
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint in around:
        return True
    if dataclasses.is_dataclass(hint):
        hints, around = typing.get_type_hints(hint), (*around, hint)
        parts = tuple(hints[item.name] for item in dataclasses.fields(hint))
    elif kind is typing.Literal:
        parts = tuple(map(type, parts))
    elif kind not in (bool, int, float, str, list, dict, types.NoneType, types.UnionType, typing.Union, typing.Any):
        return False
    return all(_is_plain(part, around) for part in parts)


def keys_of(kind: Any, prefix: str = "") -> dict[str, Key]:
    """Every key below a dataclass in dotted form."""
    keys: dict[str, Key] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[item.name]):
            keys |= keys_of(hints[item.name], f"{prefix}{item.name}.")
        else:
            made = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
            keys[prefix + item.name] = Key(hints[item.name], MISSING if made is dataclasses.MISSING else made)
    return keys


_adapter = functools.cache(pydantic.TypeAdapter)


def _validated(kind: type, values: dict[str, Any], written: Mapping[str, Any]) -> Any:
    """The dataclass that values fill.

    Args:
        written: the config as it was written, flat, ${…} included.
    """
    keys, wrong, missing = keys_of(kind), {}, set()
    try:
        result = _adapter(kind).validate_python(values)
    except pydantic.ValidationError as refused:
        for error in refused.errors():
            key = ".".join(str(part) for part in error["loc"])
            if error["type"] == "missing":
                missing.add(key)
            elif "${" not in str(written.get(key)):  # else another key, from which it takes its value, is named
                wrong[key] = _line(key, error, keys)
        if missing and not wrong:
            raise ConfigError(_no_value(missing)) from None
        raise ConfigError("\n".join(wrong.values()) or str(refused)) from None
    # Python counts true as 1, and pydantic follows it.
    taken = dict(_leaves(dataclasses.asdict(result)))
    for key, value in _leaves(values):
        if isinstance(value, bool) and type(taken.get(key)) in (int, float):
            raise ConfigError(f"{key}={value} must be a number")
    return result


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested dictionaries and lists, with its dotted key."""
    if isinstance(tree, dict | list):
        for name, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(item, f"{key}.{name}".removeprefix("."))
    else:
        yield key, tree


def _no_value(keys: Iterable[str]) -> str:
    said = f"no value for {', '.join(sorted(keys))}: give it on the command line, as in {min(keys)}=…"
    if min(keys).startswith("callbacks."):
        return f"{said}, or choose the callback, as in callbacks=[{min(keys).split('.')[1]}], for its defaults"
    folders = {*keys} <= {"output_dir", "data_dir"}
    return said if folders else f"{said}, or choose an experiment that sets it (+experiment/demo=fox_pro)"


def _line(key: str, error: Any, keys: Mapping[str, Key]) -> str:
    """One line for an error of pydantic: the key, its value, the fix."""
    kind, value = error["type"], str(error["input"])
    if kind == "value_error":  # of a `__post_init__`
        return str(error["ctx"]["error"])
    if kind == "unexpected_keyword_argument":
        return _unknown(key, keys)
    if kind == "dataclass_type":
        return _is_group(key, value, keys)
    known = keys.get(key)
    null = ", or null" * (known is not None and types.NoneType in typing.get_args(known.type))
    expected = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    if not value.strip():
        wanted = "a path or a name" if kind == "string_pattern_mismatch" else expected or "a value"
        given = repr(value) if value else ""
        return f"{key}={given} is empty (a variable that is not set?); give {wanted}{null}"
    if kind == "too_short" and not error["input"]:
        return f"{key}={redact(value)} is empty; give at least one value{null}"
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace("True", "true").replace("False", "false")
    better = f" must be {expected}" if expected else re.sub("^: (Input|List) should", " must", f": {error['msg']}")
    return f"{key}={redact(value)}{better}{null}"


def _unknown(key: str, keys: Mapping[str, Key]) -> str:
    return f"unknown config key {key!r}{official_names.closest_key(key, list(keys))}"


def _is_group(key: str, value: Any, keys: Mapping[str, Key]) -> str:
    return f"{key}={redact(str(value))} is a group of keys: set {', '.join(k for k in keys if k.startswith(f'{key}.'))}"


@contextlib.contextmanager
def _explained(config: dict[str, Any]) -> Iterator[None]:
    """Raises ConfigError where a ${…} in a config refers to nothing, or a key has no value."""
    try:
        yield
    except OmegaConfBaseException as error:
        known, written = keys_of(config_class(config)), flatten(config)
        listed = [f"{key}." for key in (*known, "model.sizes")]
        wrong = [key for key in written if key != "callbacks" and not f"{key}.".startswith(tuple(listed))]
        if wrong:  # a typo may be the reason why another key has no value
            raise ConfigError("\n".join(_unknown(key, known) for key in wrong)) from error
        key, said = str(error.full_key), str(error).splitlines()[0]
        for _ in written:  # under the key that was set, and not under another that refers to it
            reference = re.fullmatch(r"\$\{([\w.]+)\}", str(written.get(key)))
            if reference is None or reference[1] not in written:
                break
            key = reference[1]
        if written.get(key) == MISSING:
            folders = [name for name in ("output_dir", "data_dir") if written.get(name) == MISSING]
            raise ConfigError(_no_value(folders if key in folders else [key])) from error
        reason = said.rpartition("interpolation: ")[2].strip('"')
        raise ConfigError(
            f"{key}={redact(str(written.get(key)))}: {reason}; give the value itself, or another key as in ${{seed}}, "
            "or a variable of the shell that is set as in ${oc.env:HOME}"
        ) from error
