"""The configuration of a training run: every key that all runs have, with its type, meaning and unit.

YAML files under `configs/` fill these dataclasses. The keys of a component (an optimizer, a corpus, a callback) are
those of the dataclass that it registers (plugins.py), and `config_class` puts the dataclasses of a run's components
together. `parse` refuses what these do not know, numbers out of range and what a section's own `check` refuses;
`check` refuses what so many processes cannot do; `changes_that_alter_the_run` says which keys may not differ when a run
is continued. All intervals, budgets and schedule lengths are in training tokens of the whole job.
"""

import copy
import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from forgetting_transformer import official_names, plugins
from forgetting_transformer.hydra_errors import closest_key
from forgetting_transformer.plugins import (
    ALL,
    CALLBACKS,
    CORPORA,
    OPTIMIZERS,
    SCHEDULES,
    Component,
    Registry,
    UnknownComponentError,
)
from forgetting_transformer.ranges import COUNT, SIZE, TOKENS, Range, described, divisors, expected, one_of, within
from forgetting_transformer.redaction import redact, redact_tree

if TYPE_CHECKING:
    from forgetting_transformer.data import DataInfo


class ConfigError(ValueError):
    """The configuration cannot be run; the message names the key, the value and the fix."""


#: Learning rates. Zero is allowed: it trains nothing, which is a way to measure speed and to look at the data.
LEARNING_RATE = Range(0, 1000)
_WORKERS = Range(0, 1024)
_DEVICES = Range(1, 1024)


@dataclass
class FabricConfig:
    #: Processes on this node: a number or "auto". Under `fabric run` its own --devices decides; leave this alone.
    devices: Any = "auto"
    #: Under `fabric run` its own --accelerator decides.
    accelerator: str = one_of("auto", "cpu", "cuda", "gpu")
    #: "bf16-mixed": fp32 weights and optimizer, bf16 matrix products.
    precision: str = one_of(
        "bf16-mixed",
        "32-true",
        because="bf16-true would keep weights and AdamW's moments in bf16, too coarse for pretraining",
    )
    #: Most FLOP/s that one device can do at this precision (dense), the denominator of MFU. null: what
    #: training/hardware.py knows; a device it does not know has no MFU.
    peak_flops: float | None = within(Range(1, 1e21), None)

    def check(self) -> None:
        devices, accelerator = self.devices, self.accelerator
        problem = f"fabric.devices={devices!r} must be a number of processes, a list of GPUs, or 'auto'"
        if isinstance(devices, list):
            numbered = all(type(n) is int and 0 <= n < _DEVICES.high for n in devices)
            if not devices or not numbered or len({*devices}) < len(devices):
                raise ConfigError(f"{problem}; GPUs are numbered from 0")
            if accelerator == "cpu":
                raise ConfigError(
                    f"fabric.devices={devices} lists GPUs; with fabric.accelerator=cpu give a number of processes"
                )
        elif devices in (-1, "-1"):
            if accelerator == "cpu":
                raise ConfigError(
                    f"fabric.devices={devices} means all GPUs; with fabric.accelerator=cpu give a number, or 'auto'"
                )
        elif devices != "auto" and not (re.fullmatch(r"[1-9]\d{0,5}", str(devices)) and int(devices) in _DEVICES):
            raise ConfigError(f"{problem}; a number is {expected(int, _DEVICES)}")


@dataclass
class TrainConfig:
    #: Tokens to train on.
    max_tokens: int = within(TOKENS)
    #: Tokens that one rank puts through the model at a time; a rank's share of the batch is split into such pieces.
    grad_acc_tokens: int = within(TOKENS)
    #: Gradients are scaled down to this global L2 norm. inf: never.
    max_grad_norm: float = within(Range(0, math.inf, above=True), 1.0)
    #: An update whose loss or gradient is not finite is left out; after this many in a row the run stops, saved.
    max_bad_steps: int = within(COUNT, 10)
    #: Also leave out updates whose gradient norm, before clipping, is more than this many times the median of the last
    #: 128. null: never.
    spike_factor: float | None = within(
        Range(1, 1e9, above=True, otherwise="null for never; 1 and less would leave out ordinary steps, 10 is usual"),
        None,
    )
    #: Recompute each block's activations in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    #: torch.compile blocks and loss: fuses what lies between matrix products; the first step takes longer. true, false
    #: or "auto": on for CUDA, off elsewhere; a run that continues does as it did before.
    compile: Any = one_of("auto", True, False)
    #: Whether biases, norm weights and convolution kernels are decayed.
    bias_weight_decay: bool = False
    normalization_weight_decay: bool = False
    conv_weight_decay: bool = True


@dataclass
class EvalConfig:
    #: Loss is reported over prefixes of the sequence: full length, half, a quarter, … down to this many tokens.
    min_val_length: int = within(COUNT, 512)


@dataclass
class WandbConfig:
    project: str = "forgetting-transformer"
    #: "offline": files only.
    mode: str = one_of("offline", "online", "disabled")
    #: Folder for wandb's own files; null is `output_dir`.
    log_dir: str | None = None


@dataclass
class StrategyConfig:
    #: "auto" (one process: none; several: ddp), "ddp" or "fsdp" (weights, gradients and moments sharded by block).
    name: str = one_of("auto", "ddp", "fsdp")
    #: Seconds without a step, or without a byte written of a checkpoint that is waited for, after which a rank is stuck
    #: and ends itself; so long it waits for the others in a collective operation. The start has half an hour more.
    timeout_seconds: int = within(Range(1, 10**8), 1800)
    #: ddp: steps between comparisons of all ranks' weights and moments, which hold the same unless memory or a GPU
    #: failed; they are compared before every checkpoint too. null: never.
    compare_steps: int | None = within(Range(1, 10**8), 100)


@dataclass
class OptimizerConfig:
    """What every optimizer has. Those of this package are in training/optimizers.py, with their own keys."""

    name: str = "adamw"
    #: Peak learning rate. 0 trains nothing.
    lr: float = within(LEARNING_RATE)


@dataclass
class ScheduleConfig:
    #: A name in plugins.SCHEDULES; those of this package are in training/schedule.py.
    name: str = MISSING
    #: Tokens of linear warm-up from init_lr to optimizer.lr.
    warmup_tokens: int = within(Range(0, TOKENS.high), 0)
    #: warmup_cosine and warmup_linear: tokens at which end_lr is reached, warm-up included.
    #: warmup_stable_decay: tokens of the whole run; the decay ends there.
    total_tokens: int | None = within(TOKENS, None)
    #: warmup_stable_decay: tokens of the final decay.
    decay_tokens: int | None = within(TOKENS, None)
    init_lr: float = within(LEARNING_RATE, 0.0)
    end_lr: float = within(LEARNING_RATE, 0.0)


@dataclass
class DataModuleConfig:
    """What every corpus has. Those of this package are in training/corpora.py, with their own keys."""

    name: str = "longcrawl64"
    #: Folder of the corpus in `data_dir`.
    dataset: str = "longcrawl64"
    #: Tokens of a sequence, and sequences of a global batch.
    train_batch_len: int = within(COUNT)
    train_batch_size: int = within(COUNT)
    train_num_workers: int = within(_WORKERS, 2)
    #: Held-out tokens that an evaluation reads; null: all.
    eval_tokens: int | None = within(TOKENS, None)
    eval_batch_len: int = within(COUNT)
    eval_local_batch_size: int = within(COUNT)
    eval_num_workers: int = within(_WORKERS, 2)
    #: null: what the corpus itself says.
    vocab_size: int | None = within(COUNT, None)
    bos_token_id: int | None = within(Range(0, COUNT.high), None)
    #: Read the data again, in the same order, when it has been read once.
    repeat: bool = False


@dataclass
class CallbacksConfig:
    """A section for each callback of the run, under its name, which `config_class` adds."""


@dataclass
class ModelConfig:
    #: A name in model.registry, such as "forgetting_transformer".
    name: str = MISSING
    #: What tags and comparisons call the model: several models may be one architecture with other fields. "": its name.
    label: str = ""
    #: The fields of that architecture's configuration class. vocab_size and token ids come from the data.
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScaleConfig:
    """A model size and token budget that experiments share; model and schedule files refer to it.

    Sizes that are one architecture's stand in its YAML, by the name of the scale (`model.sizes`).
    """

    name: str = "custom"
    hidden_size: int | None = within(SIZE, None)
    num_hidden_layers: int | None = within(SIZE, None)
    #: Attention heads when each has 64 or 128 dimensions.
    heads_of_64: int | None = within(SIZE, None)
    heads_of_128: int | None = within(SIZE, None)


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    datamodule: DataModuleConfig = field(default_factory=DataModuleConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    #: What is measured or done during training besides: name of the callback -> its keys, in the order of their calls.
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    #: Modules with components that are not of this package (plugins.py). The command line names them.
    plugins: list[str] = field(default_factory=list)
    #: Names recorded with the run, for finding it again.
    exp: str = "debug"
    tag: str = "debug"
    #: Seeds the initial weights and the random numbers of every step.
    seed: int = within(Range(-(2**63), 2**63 - 1), 0)
    #: Everything the run writes goes here; see docs/run_directory.md.
    output_dir: str = MISSING
    #: Folder that holds the corpus folder `datamodule.dataset`.
    data_dir: str = MISSING
    #: true: continue from the newest valid checkpoint in output_dir, if any. false: move what the run in output_dir
    #: wrote aside (into previous/) and start from the beginning.
    resume: bool = True
    #: Start a new run from the checkpoint of another run's output_dir at fork_step tokens.
    fork_dir: str | None = None
    fork_step: int | None = within(TOKENS, None)
    #: Tokens between lines of training loss, throughput and norms.
    log_interval: int = within(TOKENS)
    #: Tokens between reports of the training loss at every position, averaged over the tokens in between.
    train_eval_interval: int = within(TOKENS)
    #: Tokens between evaluations on held-out documents; skip_eval switches these off, final_eval is the one at the end.
    eval_interval: int = within(TOKENS)
    skip_eval: bool = True
    final_eval: bool = True
    #: Tokens between checkpoints; the newest `checkpoint_keep_last` stay, and one every checkpoint_keep_interval for
    #: good.
    checkpoint_interval: int = within(TOKENS)
    checkpoint_keep_interval: int = within(TOKENS)
    checkpoint_keep_last: int = within(COUNT, 2)
    #: true: write checkpoints while training goes on, from a copy in the host's memory (12 bytes per parameter over all
    #: ranks of the job). false: training waits, and needs no such memory.
    checkpoint_background: bool = True
    #: true: check data, disk, memory and links, time a few steps, say what the run will cost, and train nothing.
    preflight: bool = False


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


def _components(flat: Mapping[str, Any]) -> dict[str, Component | UnknownComponentError]:
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
    known = {section: found for section, found in _components(flat).items() if isinstance(found, Component)}
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
        added = field(default_factory=functools.partial(_defaults, keys))
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


def _defaults(keys: type) -> Any:
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
        components = _components(_resolved(composed))
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
    fields = {
        key: value if value == MISSING else composed.model.config[key]
        for key, value in _raw(composed)["model"]["config"].items()
    }
    composed.model.config = fields
    del composed.model["sizes"]
    return composed


def _resolved(composed: Any) -> dict[str, Any]:
    """What `_components` looks at, with the values that ${…} stands for."""
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
PATHS = ("output_dir", "data_dir", "fork_dir", "wandb.log_dir", "datamodule.cache_dir", "datamodule.dataset")


def check_paths(config: Config) -> None:
    """Refuses an empty path, which an unset variable of the shell leaves and pathlib takes for the current folder.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in flatten(dataclasses.asdict(config)).items():
        if key in PATHS and value is not None and not str(value).strip():
            fix = "null for the default" if key in ("fork_dir", "wandb.log_dir", "datamodule.cache_dir") else "a folder"
            fix = "the name of the corpus's folder, or . for data_dir itself" if key == "datamodule.dataset" else fix
            raise ConfigError(f"{key}={value!r} is empty (a variable that is not set?); give {fix}")


def _is_missing(config: Any, key: str) -> bool:
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    return not OmegaConf.is_interpolation(node, name) and OmegaConf.is_missing(node, name)


def known_keys() -> list[str]:
    """Every key of a run that names no component, in dotted form, such as "train.max_tokens"."""
    return list(keys_of(config_class({})))


def _with_whole_numbers(composed: Any, kind: type[Config]) -> Any:
    """With integers for whole floats where those are wanted: 1e9 tokens is how people write it. A copy if there are any."""
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


def check(config: Config, world_size: int) -> None:
    """Refuses what so many processes cannot do, before anything is built.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    data, train = config.datamodule, config.train
    if data.train_batch_size % world_size:
        near = divisors(data.train_batch_size)
        raise ConfigError(
            f"datamodule.train_batch_size={data.train_batch_size} sequences cannot be shared equally by {world_size} "
            f"processes; use a multiple of {world_size}, or a number of processes among {near}"
        )
    local_tokens = data.train_batch_size // world_size * data.train_batch_len
    micro_tokens = min(train.grad_acc_tokens, local_tokens)
    if micro_tokens % data.train_batch_len or local_tokens % micro_tokens:
        fits = [n * data.train_batch_len for n in divisors(local_tokens // data.train_batch_len)]
        raise ConfigError(
            f"train.grad_acc_tokens={train.grad_acc_tokens:,} does not split a rank's {local_tokens:,} tokens "
            f"({data.train_batch_size // world_size} sequences of {data.train_batch_len:,}) into equal pieces of whole "
            f"sequences; choose one of {fits}"
        )
    if (config.fork_dir is None) != (config.fork_step is None):
        raise ConfigError(
            f"fork_dir={config.fork_dir} and fork_step={config.fork_step} belong together: give both or neither"
        )
    if config.fork_dir and not config.resume:
        raise ConfigError("fork_dir starts from a checkpoint, resume=false starts from nothing: choose one")


def _check_values(config: Config) -> None:
    """Every number lies in the range that its key declares, every name is one of its choices, and sections agree.

    Raises:
        ConfigError: naming the key, the value and the range or the choices.
    """
    # Those of `train` first: schedules refer to train.max_tokens, and the key that somebody set is the one to name.
    for key, item in sorted(keys_of(type(config)).items(), key=lambda entry: not entry[0].startswith("train.")):
        allowed, choices = item.metadata.get("range"), item.metadata.get("choices")
        *sections, name = key.split(".")
        value = getattr(functools.reduce(getattr, sections, config), name)
        if allowed is not None and value is not None and value not in allowed:
            raise ConfigError(f"{key}={value} must be {expected(item.type, allowed)}")
        if choices is not None and not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(f"{key}={value!r} is unknown; use {described(choices)}{item.metadata['because']}")
    for section in [*vars(config).values(), *vars(config.callbacks).values()]:
        if hasattr(section, "check"):
            section.check()


#: Keys that may differ between the runs that one output_dir has seen: where things are, how the work is split, what is
#: reported. So may those that a component says are free. Everything else decides what the weights become, so a change of
#: it is refused on resume.
FREE_KEYS = (
    "output_dir", "data_dir", "plugins", "resume", "fork_dir", "fork_step", "exp", "tag", "model.label", "wandb", "fabric.devices",
    "fabric.accelerator", "fabric.peak_flops", "strategy", "scale", "train.max_tokens", "train.grad_acc_tokens",
    "train.gradient_checkpointing", "train.compile",
    "train.max_bad_steps", "checkpoint_background", "preflight", "log_interval", "train_eval_interval", "eval_interval", "skip_eval", "final_eval",
    "checkpoint_interval", "checkpoint_keep_interval", "checkpoint_keep_last", "eval", "datamodule.train_num_workers",
    "datamodule.eval_tokens", "datamodule.eval_batch_len", "datamodule.eval_local_batch_size",
    "datamodule.eval_num_workers", "datamodule.dataset", "datamodule.repeat", "datamodule.missing_chunks",
    "datamodule.cache_dir", "datamodule.cache_gb",
    # Without effect on the model: other tools read it as the training length.
    "model.config.max_position_embeddings",
)  # fmt: skip


def free_keys(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """FREE_KEYS and those that the components of a flat config declare."""
    found = _components(flat)
    of_components = (
        section if key == ALL else f"{section}.{key}"
        for section, component in found.items()
        if isinstance(component, Component)
        for key in component.free
    )
    return (*FREE_KEYS, *of_components)


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the weights of a resolved config: its flat keys without the free ones, with defaults for younger keys."""
    flat = flatten(config)
    values = flatten(dataclasses.asdict(_defaults(config_class(flat)))) | flat
    free = free_keys(flat)
    return {
        key: value
        for key, value in values.items()
        if key != "callbacks" and not any(key == name or key.startswith(f"{name}.") for name in free)
    }


def changes_that_alter_the_run(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines "key: old -> new" for every key that is not free and differs between two resolved configs.

    A key that is younger than the old config counts as its default there.
    """
    old, new = decisive(before), decisive(now)
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, None) != new.get(key, None)
    ]


def recorded(config: Config) -> dict[str, Any]:
    """The configuration as it is kept in files and sent to wandb: without the passwords of URLs."""
    return redact_tree(dataclasses.asdict(config))


def check_continues(
    checkpoint: str, state: dict[str, Any], config: Config, data: "DataInfo", forked: bool = False
) -> None:
    """A changed key that would change the run is refused; a fork may change all but what its position means.

    Args:
        checkpoint: its name, for messages. state: what its trainer.json holds. data: the corpus as it is now.

    Raises:
        ConfigError: naming every such key, its old and its new value.
    """
    before, after = state["config"], dataclasses.asdict(config)
    if said := plugins.missing(before.get("plugins"), f"{checkpoint}: this run"):
        raise ConfigError(said)
    before, after = ({**whole, "model": _with_defaults(whole["model"])} for whole in (before, after))
    if model := state.get("model_config"):
        # Null stands for what the corpus says, so what it came to is compared.
        for key, value in (("vocab_size", data.vocab_size), ("bos_token_id", data.bos_token_id)):
            before = {**before, "datamodule": {**before["datamodule"], key: model.get(key)}}
            after["datamodule"][key] = value
    changes = changes_that_alter_the_run(before, after)
    if forked:
        shape = ("datamodule.train_batch_len", "datamodule.train_batch_size", "model.")
        changes = [change for change in changes if change.startswith(shape)]
    fork, now = (before["fork_dir"], before["fork_step"]), (config.fork_dir, config.fork_step)
    if not forked and config.fork_dir and fork != now:
        changes.append(f"fork_dir, fork_step: {fork} -> {now}")
    listed = state.get("data_checksums")
    if listed and data.checksums and listed != data.checksums:
        changes.append(f"the corpus's list of checksums (its hash {listed} -> {data.checksums}): {data.path}")
    # A checkpoint that was imported from the authors' code does not say which corpus it was.
    if state["data_fingerprint"] not in (None, data.fingerprint):
        changes.append(f"the corpus (fingerprint {state['data_fingerprint']} -> {data.fingerprint}): {data.path}")
    if changes:
        raise ConfigError(
            f"{checkpoint} was trained with other settings:\n  " + "\n  ".join(changes) + "\n"
            "Undo these changes to continue it, or choose another output_dir"
            + ("" if forked else " (with fork_dir and fork_step to start from its weights)")
            + ("" if config.fork_dir else ", or start over with resume=false")
        )


def _with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """A section `model` in which every field of the architecture's configuration has its value, listed or not."""
    from forgetting_transformer.model import registry  # loads PyTorch, which a run that continues has done

    fields = dataclasses.fields(registry.MODELS[model["name"]].config_class) if model["name"] in registry.MODELS else ()
    defaults = {item.name: item.default for item in fields if item.default is not dataclasses.MISSING}
    return {**model, "config": defaults | model["config"]}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
