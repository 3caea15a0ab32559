"""A composed config becomes a typed `Config`: `parse` holds every key to the dataclass that declares it.

`config_class` puts together the dataclasses of a run's components (plugins.py) and those of __init__.py. `parse` merges
the composed config into them and refuses unknown components and keys, missing values, wrong types and numbers out of
range.
"""

import copy
import dataclasses
import functools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from forgetting_transformer import plugins
from forgetting_transformer.files import flatten
from forgetting_transformer.plugins import (
    CALLBACKS,
    CORPORA,
    OPTIMIZERS,
    SCHEDULES,
    Component,
    Registry,
    UnknownComponentError,
)
from forgetting_transformer.ranges import described, expected
from forgetting_transformer.redaction import redact
from forgetting_transformer.training.config import (
    CallbacksConfig,
    Config,
    ConfigError,
    DataModuleConfig,
    OptimizerConfig,
    ScheduleConfig,
    official_names,
)
from forgetting_transformer.training.config.official_names import SETS_OF_TEXTS, closest_key


class Key(NamedTuple):
    """A key of the configuration: its type, and what `within` or `one_of` say of it."""

    type: Any
    metadata: Mapping[str, Any]


#: The sections whose keys are those of the component that they name: its registry, and the dataclass to derive from.
_NAMED: dict[str, tuple[Registry, Any]] = {
    "optimizer": (OPTIMIZERS, OptimizerConfig),
    "schedule": (SCHEDULES, ScheduleConfig),
    "datamodule": (CORPORA, DataModuleConfig),
}


def components_of(flat: Mapping[str, Any]) -> dict[str, Component | UnknownComponentError]:
    """What a flat config, {"optimizer.name": "adamw", …}, names: section, such as "callbacks.lm_eval" -> component."""
    named: dict[str, tuple[Registry, Any]] = {}
    for section, (registry, base) in _NAMED.items():
        name = flat.get(f"{section}.name", base.name)
        if name != MISSING:
            named[section] = registry, name
    for key in flat:
        section, _, rest = key.partition(".")
        if section == "callbacks" and rest:
            name = rest.partition(".")[0]
            named[f"callbacks.{name}"] = CALLBACKS, name
    found: dict[str, Component | UnknownComponentError] = {}
    for section, (registry, name) in named.items():
        try:
            found[section] = registry.get(name)
        except UnknownComponentError as error:
            found[section] = error
    return found


def config_class(flat: Mapping[str, Any]) -> type[Config]:
    """`Config` with the keys of the components that a flat config names; of unknown ones, those that all have.

    Raises:
        ConfigError: a component registered a dataclass that does not fit.
    """
    known = {section: found for section, found in components_of(flat).items() if isinstance(found, Component)}
    return _config_class(tuple((section, found.config) for section, found in known.items()))


@functools.cache
def _config_class(chosen: tuple[tuple[str, type | None], ...]) -> type[Config]:
    sections: list[tuple[str, type, Any]] = []
    callbacks: list[tuple[str, type, Any]] = []
    for section, keys in chosen:
        base = _NAMED[section][1] if section in _NAMED else object
        keys = keys or (base if section in _NAMED else _NoKeys)
        if not (dataclasses.is_dataclass(keys) and issubclass(keys, base)):
            derives = f" that derives from {base.__module__}.{base.__name__}" if section in _NAMED else ""
            raise ConfigError(f"{section}: {keys.__name__} cannot type this section; make it a dataclass{derives}")
        added = field(default_factory=functools.partial(defaults_of, keys))
        if section in _NAMED:
            sections.append((section, keys, added))
        else:
            callbacks.append((section.partition(".")[2], keys, added))
    if callbacks:
        kind = dataclasses.make_dataclass("CallbacksConfig", callbacks, bases=(CallbacksConfig,))
        sections.append(("callbacks", kind, field(default_factory=kind)))
    return dataclasses.make_dataclass("Config", sections, bases=(Config,))


@dataclass
class _NoKeys:
    """The section of a callback that has no keys."""


def defaults_of(keys: type) -> Any:
    """A section without a value where there is no default."""
    missing = [
        item.name
        for item in dataclasses.fields(keys)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    return keys(**dict.fromkeys(missing, MISSING))


def parse(composed: Any, typed: Sequence[str] = ()) -> Config:
    """Turns a composed OmegaConf config into a typed `Config`.

    Args:
        typed: the arguments of the command line it was composed from, which win over official names in files.

    Raises:
        ConfigError: an unknown component or key (with the closest known one), a key without a value, a value of the
            wrong type or out of its range, or what a section's `check` refuses.
    """
    kind, written = Config, _raw(composed)
    try:
        composed = _with_callbacks(official_names.translate(composed, typed))
        if said := plugins.missing(_raw(composed).get("plugins")):
            raise ConfigError(said)
        components = components_of(_resolved(composed))
        for found in components.values():
            if isinstance(found, UnknownComponentError):
                raise found
        kind = config_class(_resolved(composed))
        _check_sections(written)
        merged = OmegaConf.merge(_schema(typing.cast(Any, kind)), _without_sizes(_with_whole_numbers(composed, kind)))
        missing = sorted(key for key in keys_of(kind) if _is_missing(merged, key))
        if missing:
            folders = set(missing) <= {"output_dir", "data_dir"}
            raise ConfigError(
                f"no value for {', '.join(missing)}: give it on the command line, as in {missing[0]}=…"
                + ("" if folders else ", or choose an experiment that sets it (+experiment/demo=fox_pro)")
            )
        config = typing.cast(Config, OmegaConf.to_object(merged))
        used = {found.plugin for found in components.values() if isinstance(found, Component)} | {
            plugins.MODELS.plugin_of(config.model.name)
        }
        config.plugins += sorted(used - {*config.plugins, ""})
        check_paths(config)
        _check_values(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, kind, composed, written)) from error
    except ConfigError:
        raise
    except ValueError as error:  # of the translation, a registry, or the `check` of a component
        raise ConfigError(str(error)) from error
    return config


def parse_section(section: str, values: Any) -> Any:
    """One section, such as "datamodule", with the component that its key `name` names; `parse` is for a whole config.

    Raises:
        ConfigError: as `parse`.
    """
    composed = OmegaConf.create({section: values})
    kind = config_class(flatten(_raw(composed)))
    try:
        merged: Any = OmegaConf.merge(_schema(typing.cast(Any, kind)), composed)
        found: Any = OmegaConf.to_object(merged[section])
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, kind, composed, _raw(composed))) from error
    for key, item in keys_of(type(found)).items():
        _check_value(f"{section}.{key}", item, getattr(found, key))
    if hasattr(found, "check"):
        found.check()
    return found


def _explain(error: OmegaConfBaseException, kind: type[Config], composed: Any, written: dict[str, Any]) -> str:
    """One line for an error of OmegaConf."""
    key = getattr(error, "full_key", None)
    keys = keys_of(kind)
    if isinstance(error, InterpolationResolutionError | UnsupportedInterpolationType):
        return _unresolved(written, str(key), error)
    if key and "not in" in str(error):
        return f"unknown config key {key!r}{closest_key(key, list(keys))}"
    if isinstance(error, MissingMandatoryValue):
        return f"no value for {key}: give it on the command line, as in {key}=…"
    if key in keys:
        value = str(OmegaConf.select(composed, key, throw_on_resolution_failure=False))
        better = expected(keys[key].type, keys[key].metadata.get("range"))
        if not value.strip():
            return f"{key}={value} is empty (a variable that is not set?); give {better}"
        return f"{key}={redact(value)} must be {better}"
    for name, item in keys.items() if not key else ():  # OmegaConf does not say where it was to merge a list
        value = OmegaConf.select(composed, name, throw_on_resolution_failure=False)
        if typing.get_origin(item.type) is dict and not isinstance(value, DictConfig | dict | None):
            return f"{name}={redact(str(value))} must be a mapping, as in {name}={{a: 1, b: 1}}"
    return f"config key {key!r}: {str(error).splitlines()[0]}"


def _check_sections(written: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a section has a value instead of keys.
    """
    for section in dataclasses.fields(Config):
        value = written.get(section.name, {})
        if section.name == "callbacks" and not isinstance(value, dict | list):
            raise ConfigError(f"callbacks={redact(str(value))} must be a list of names, as in callbacks=[a,b]")
        if section.name == "eval_sets" and not (
            isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        ):
            raise ConfigError(f"eval_sets={redact(str(value))} must be {SETS_OF_TEXTS}")
        if dataclasses.is_dataclass(section.type) and not isinstance(value, dict | list):
            keys = ", ".join(f"{section.name}.{item.name}" for item in dataclasses.fields(section.type))
            raise ConfigError(f"{section.name}={redact(str(value))} is a group of keys: set {keys}")


def _with_callbacks(composed: Any) -> Any:
    """With `callbacks: [a, b]`, as people write it in a file, spelled as it is kept: `callbacks: {a: {}, b: {}}`."""
    listed = _raw(composed).get("callbacks") or {}
    if isinstance(listed, list) or (isinstance(listed, dict) and None in listed.values()):
        composed = OmegaConf.create(copy.deepcopy(composed))
        OmegaConf.set_readonly(composed, False)
        OmegaConf.set_struct(composed, False)
        sections: dict[str, dict] = {str(name): {} for name in listed}
        composed.callbacks = (
            sections
            if isinstance(listed, list)
            else OmegaConf.merge(sections, {name: value for name, value in listed.items() if value is not None})
        )
    return composed


def _without_sizes(composed: Any) -> Any:
    """With the fields of `model.config` as numbers, and without the `model.sizes` by scale that they may refer to."""
    if "sizes" not in (_raw(composed).get("model") or {}):
        return composed
    composed = OmegaConf.create(copy.deepcopy(composed))
    OmegaConf.set_readonly(composed, False)
    OmegaConf.set_struct(composed, False)
    composed.model.config = _values(composed.model.config)
    del composed.model["sizes"]
    return composed


def _values(node: Any) -> Any:
    """What a node holds, with the values that ${…} stands for; what is missing stays so."""
    if not isinstance(node, DictConfig):
        return node
    return {key: MISSING if OmegaConf.is_missing(node, key) else _values(node[key]) for key in node}


def _resolved(composed: Any) -> dict[str, Any]:
    """What `components_of` looks at, with the values that ${…} stands for."""
    flat = flatten(_raw(composed))
    names = [key for key in flat if key.endswith(".name")]
    return flat | {key: OmegaConf.select(OmegaConf.create(composed), key) for key in names if "${" in str(flat[key])}


def _raw(composed: Any) -> dict[str, Any]:
    """The configuration as it was written, ${…} included."""
    return typing.cast(dict, OmegaConf.to_container(composed)) if OmegaConf.is_config(composed) else composed


def _unresolved(configuration: dict[str, Any], key: str, error: Exception) -> str:
    """What is wrong with a ${…}, named by the key that was given it and not by another that refers to that one."""
    written = flatten(configuration)
    for _ in written:
        reference = re.fullmatch(r"\$\{([\w.]+)\}", str(written.get(key)))
        if reference is None or reference[1] not in written:
            break
        key = reference[1]
    reason = str(error).splitlines()[0].rpartition("interpolation: ")[2].strip('"')
    return (
        f"{key}={redact(str(written.get(key)))}: {reason}; give the value itself, or another key as in ${{seed}}, or a "
        "variable of the shell that is set as in ${oc.env:HOME}"
    )


#: Keys that name a folder.
PATHS = (
    "output_dir", "data_dir", "fork_dir", "init_from", "wandb.log_dir", "datamodule.cache_dir", "datamodule.dataset",
)  # fmt: skip
#: Those of them that need none.
_OPTIONAL_PATHS = ("fork_dir", "init_from", "wandb.log_dir", "datamodule.cache_dir")


def check_paths(config: Config) -> None:
    """Refuses an empty path, which an unset variable of the shell leaves and pathlib takes for the current folder.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in flatten(dataclasses.asdict(config)).items():
        if key in PATHS and value is not None and not str(value).strip():
            fix = "null for the default" if key in _OPTIONAL_PATHS else "a folder"
            fix = "the name of the corpus's folder, or . for data_dir itself" if key == "datamodule.dataset" else fix
            raise ConfigError(f"{key}={value!r} is empty (a variable that is not set?); give {fix}")


def _is_missing(config: Any, key: str) -> bool:
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    return not OmegaConf.is_interpolation(node, name) and OmegaConf.is_missing(node, name)


def _with_whole_numbers(composed: Any, kind: type[Config]) -> Any:
    """Whole floats become integers where those are wanted, as in 1e9 tokens. Returns a copy if there are any."""
    values, whole = flatten(_raw(composed)), {}
    for key, item in keys_of(kind).items():
        value = values.get(key)
        if item.type in (int, int | None) and isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
            whole[key] = int(value)
    if whole:
        composed = OmegaConf.create(copy.deepcopy(composed))
        OmegaConf.set_readonly(composed, False)
        for key, value in whole.items():
            OmegaConf.update(composed, key, value)
    return composed


@functools.cache
def _schema(kind: type[Config]) -> DictConfig:
    return OmegaConf.structured(kind)


def keys_of(kind: type) -> dict[str, Key]:
    """Every key below a dataclass in dotted form."""
    return _keys_below(typing.cast(Any, kind), "")


@functools.cache
def _keys_below(kind: Any, prefix: str) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    types = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types[item.name]):
            keys |= _keys_below(types[item.name], f"{prefix}{item.name}.")
        else:
            keys[prefix + item.name] = Key(types[item.name], item.metadata)
    return keys


def _check_values(config: Config) -> None:
    """Every number lies in the range that its key declares, every name is one of its choices, and sections agree.

    Raises:
        ConfigError: naming the key, the value and the range or the choices.
    """
    # Those of `train` first: schedules refer to train.max_tokens, and the key that somebody set is the one to name.
    for key, item in sorted(keys_of(type(config)).items(), key=lambda entry: not entry[0].startswith("train.")):
        *sections, name = key.split(".")
        _check_value(key, item, getattr(functools.reduce(getattr, sections, config), name))
    for section in [config, *vars(config).values(), *vars(config.callbacks).values()]:
        if hasattr(section, "check"):
            section.check()


def _check_value(key: str, item: Key, value: Any) -> None:
    allowed, choices = item.metadata.get("range"), item.metadata.get("choices")
    if allowed is not None and value is not None and value not in allowed:
        raise ConfigError(f"{key}={value} must be {expected(item.type, allowed)}")
    if choices is not None and not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{key}={value!r} is unknown; use {described(choices)}{item.metadata['because']}")
