"""The configuration of a training run: every key with its type, meaning and unit, and the rules between keys.

YAML files under `configs/` fill these dataclasses. `parse` refuses what they do not know, `check` refuses numbers out
of range and arithmetic that cannot work, and `changes_that_alter_the_run` says which keys may not differ when a run is
continued. All intervals, budgets and schedule lengths are in training tokens of the whole job.
"""

import copy
import dataclasses
import functools
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from forgetting_transformer import official_names
from forgetting_transformer.hydra_errors import closest_key
from forgetting_transformer.ranges import COUNT, POSITIVE, SIZE, TOKENS, Range, divisors, expected
from forgetting_transformer.redaction import redact, redact_tree

if TYPE_CHECKING:
    from forgetting_transformer.data import DataInfo


class ConfigError(ValueError):
    """The configuration cannot be run; the message names the key, the value and the fix."""


#: Learning rates. Zero is allowed: it trains nothing, which is a way to measure speed and to look at the data.
_RATE = Range(0, 1000)
_WORKERS = Range(0, 1024)
_DEVICES = Range(1, 1024)


def _within(allowed: Range, default: Any = MISSING) -> Any:
    """A numeric key, its range and its default."""
    return field(default=default, metadata={"range": allowed})


@dataclass
class FabricConfig:
    #: Processes on this node: a number or "auto". Under `fabric run` its own --devices decides; leave this alone.
    devices: Any = "auto"
    #: "auto", "cpu" or "cuda". Under `fabric run` its own --accelerator decides.
    accelerator: str = "auto"
    #: "bf16-mixed" (fp32 weights and optimizer, bf16 matrix products) or "32-true".
    precision: str = "bf16-mixed"
    #: Most FLOP/s that one device can do at this precision (dense), the denominator of MFU. null: what
    #: training/hardware.py knows; a device it does not know has no MFU.
    peak_flops: float | None = _within(Range(1, 1e21), None)


@dataclass
class TrainConfig:
    #: Tokens to train on.
    max_tokens: int = _within(TOKENS)
    #: Tokens that one rank puts through the model at a time; a rank's share of the batch is split into such pieces.
    grad_acc_tokens: int = _within(TOKENS)
    #: Gradients are scaled down to this global L2 norm. inf: never.
    max_grad_norm: float = _within(Range(0, math.inf, above=True), 1.0)
    #: An update whose loss or gradient is not finite is left out; after this many in a row the run stops, saved.
    max_bad_steps: int = _within(COUNT, 10)
    #: Also leave out updates whose gradient norm, before clipping, is more than this many times the median of the last
    #: 128. null: never.
    spike_factor: float | None = _within(
        Range(1, 1e9, above=True, otherwise="null for never; 1 and less would leave out ordinary steps, 10 is usual"),
        None,
    )
    #: Recompute each block's activations in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    #: torch.compile blocks and loss: fuses what lies between matrix products; the first step takes longer. true, false
    #: or "auto": on for CUDA, off elsewhere; a run that continues does as it did before.
    compile: Any = "auto"
    #: Whether biases, norm weights and convolution kernels are decayed.
    bias_weight_decay: bool = False
    normalization_weight_decay: bool = False
    conv_weight_decay: bool = True


@dataclass
class EvalConfig:
    #: Loss is reported over prefixes of the sequence: full length, half, a quarter, … down to this many tokens.
    min_val_length: int = _within(COUNT, 512)


@dataclass
class WandbConfig:
    project: str = "forgetting-transformer"
    #: "offline" (files only), "online" or "disabled".
    mode: str = "offline"
    #: Folder for wandb's own files; null is `output_dir`.
    log_dir: str | None = None


@dataclass
class StrategyConfig:
    #: "auto" (one process: none; several: ddp), "ddp" or "fsdp" (weights, gradients and moments sharded by block).
    name: str = "auto"
    #: Seconds without a step, or without a byte written of a checkpoint that is waited for, after which a rank is stuck
    #: and ends itself; so long it waits for the others in a collective operation. The start has half an hour more.
    timeout_seconds: int = _within(Range(1, 10**8), 1800)
    #: ddp: steps between comparisons of all ranks' weights and moments, which hold the same unless memory or a GPU
    #: failed; they are compared before every checkpoint too. null: never.
    compare_steps: int | None = _within(Range(1, 10**8), 100)


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    #: Peak learning rate. 0 trains nothing.
    lr: float = _within(_RATE)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = _within(Range(0, 1, above=True), 1e-8)
    weight_decay: float = _within(Range(0, 1000), 0.1)


@dataclass
class ScheduleConfig:
    #: "constant", "warmup_cosine", "warmup_linear" or "warmup_stable_decay"; see training/schedule.py.
    name: str = MISSING
    #: Tokens of linear warm-up from init_lr to optimizer.lr.
    warmup_tokens: int = _within(Range(0, TOKENS.high), 0)
    #: warmup_cosine and warmup_linear: tokens at which end_lr is reached, warm-up included.
    #: warmup_stable_decay: tokens of the whole run; the decay ends there.
    total_tokens: int | None = _within(TOKENS, None)
    #: warmup_stable_decay: tokens of the final decay.
    decay_tokens: int | None = _within(TOKENS, None)
    init_lr: float = _within(_RATE, 0.0)
    end_lr: float = _within(_RATE, 0.0)


@dataclass
class DataModuleConfig:
    #: The arguments of data.LongCrawl64DataModule, which documents them.
    name: str = "longcrawl64"
    dataset: str = "longcrawl64"
    train_batch_len: int = _within(COUNT)
    train_batch_size: int = _within(COUNT)
    train_num_workers: int = _within(_WORKERS, 2)
    eval_tokens: int | None = _within(TOKENS, None)
    eval_batch_len: int = _within(COUNT)
    eval_local_batch_size: int = _within(COUNT)
    eval_num_workers: int = _within(_WORKERS, 2)
    vocab_size: int | None = _within(COUNT, None)
    bos_token_id: int | None = _within(Range(0, COUNT.high), None)
    repeat: bool = False
    missing_chunks: str = "error"
    cache_dir: str | None = None
    cache_gb: float = _within(POSITIVE, 20.0)


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
    """A model size and token budget that experiments share; model and schedule files refer to it."""

    name: str = "custom"
    hidden_size: int | None = _within(SIZE, None)
    num_hidden_layers: int | None = _within(SIZE, None)
    #: Attention heads when each has 64 or 128 dimensions.
    heads_of_64: int | None = _within(SIZE, None)
    heads_of_128: int | None = _within(SIZE, None)
    #: Heads of a Transformer with rotary embeddings: the paper gives them 64 dimensions up to 360M, 128 at 760M.
    transformer_heads: int | None = _within(SIZE, None)
    #: Blocks of Mamba-2, which have no MLP and so are twice as many; heads of 64 in its inner width, 2 x hidden_size.
    mamba2_layers: int | None = _within(SIZE, None)
    mamba2_heads: int | None = _within(SIZE, None)


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
    #: Names recorded with the run, for finding it again.
    exp: str = "debug"
    tag: str = "debug"
    #: Seeds the initial weights and the random numbers of every step.
    seed: int = _within(Range(-(2**63), 2**63 - 1), 0)
    #: Everything the run writes goes here; see docs/run_directory.md.
    output_dir: str = MISSING
    #: Folder that holds the corpus folder `datamodule.dataset`.
    data_dir: str = MISSING
    #: true: continue from the newest valid checkpoint in output_dir, if any. false: move what the run in output_dir
    #: wrote aside (into previous/) and start from the beginning.
    resume: bool = True
    #: Start a new run from the checkpoint of another run's output_dir at fork_step tokens.
    fork_dir: str | None = None
    fork_step: int | None = _within(TOKENS, None)
    #: Tokens between lines of training loss, throughput and norms.
    log_interval: int = _within(TOKENS)
    #: Tokens between reports of the training loss at every position, averaged over the tokens in between.
    train_eval_interval: int = _within(TOKENS)
    #: Tokens between evaluations on held-out documents; skip_eval switches these off, final_eval is the one at the end.
    eval_interval: int = _within(TOKENS)
    skip_eval: bool = True
    final_eval: bool = True
    #: Tokens between checkpoints; the newest `checkpoint_keep_last` stay, and one every checkpoint_keep_interval for
    #: good.
    checkpoint_interval: int = _within(TOKENS)
    checkpoint_keep_interval: int = _within(TOKENS)
    checkpoint_keep_last: int = _within(COUNT, 2)
    #: true: write checkpoints while training goes on, from a copy in the host's memory (12 bytes per parameter over all
    #: ranks of the job). false: training waits, and needs no such memory.
    checkpoint_background: bool = True
    #: true: check data, disk, memory and links, time a few steps, say what the run will cost, and train nothing.
    preflight: bool = False


def parse(composed: Any, typed: Sequence[str] = ()) -> Config:
    """Turns a composed OmegaConf config into a typed `Config`.

    Args:
        typed: the arguments of the command line it was composed from, which win over official names in files.

    Raises:
        ConfigError: an unknown key (with the closest known one), a value of the wrong type, or a key without a value.
    """
    written = _raw(composed)
    for section in dataclasses.fields(Config):
        value = written.get(section.name, {})
        if dataclasses.is_dataclass(section.type) and not isinstance(value, dict):
            keys = ", ".join(f"{section.name}.{item.name}" for item in dataclasses.fields(section.type))
            raise ConfigError(f"{section.name}={redact(str(value))} is a group of keys: set {keys}")
    try:
        composed = official_names.translate(composed, typed)
        merged = OmegaConf.merge(_schema(), _with_whole_numbers(composed))
        missing = sorted(key for key in known_keys() if _is_missing(merged, key))
        if missing:
            folders = set(missing) <= {"output_dir", "data_dir"}
            raise ConfigError(
                f"no value for {', '.join(missing)}: give it on the command line, as in {missing[0]}=…"
                + ("" if folders else ", or choose an experiment that sets it (+experiment/demo=fox_pro)")
            )
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        if isinstance(error, InterpolationResolutionError | UnsupportedInterpolationType):
            raise ConfigError(_unresolved(written, str(key), error)) from error
        if key and "not in" in str(error):
            raise ConfigError(f"unknown config key {key!r}{closest_key(key, known_keys())}") from error
        if isinstance(error, MissingMandatoryValue):
            raise ConfigError(f"no value for {key}: give it on the command line, as in {key}=…") from error
        if key in _fields():
            item = _fields()[key]
            value = str(OmegaConf.select(composed, key, throw_on_resolution_failure=False))
            better = expected(item.type, item.metadata.get("range"))
            if not value.strip():
                raise ConfigError(f"{key}={value} is empty (a variable that is not set?); give {better}") from error
            raise ConfigError(f"{key}={redact(value)} must be {better}") from error
        raise ConfigError(f"config key {key!r}: {str(error).splitlines()[0]}") from error
    except ValueError as error:  # of the translation
        raise ConfigError(str(error)) from error
    check_paths(config)
    return config


def _raw(composed: Any) -> dict[str, Any]:
    """The configuration as it was written, ${…} included."""
    return OmegaConf.to_container(composed) if OmegaConf.is_config(composed) else composed


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


def _is_missing(config: DictConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    return not OmegaConf.is_interpolation(node, name) and OmegaConf.is_missing(node, name)


def known_keys() -> list[str]:
    """Every key of the schema in dotted form, such as "train.max_tokens"."""
    return list(_fields())


def _with_whole_numbers(composed: Any) -> Any:
    """With integers for whole floats where those are wanted: 1e9 tokens is how people write it. A copy if there are any."""
    values, whole = flatten(_raw(composed)), {}
    for key, item in _fields().items():
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
def _schema() -> DictConfig:
    return OmegaConf.structured(Config)


@functools.cache
def _fields(config_class: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    fields = {}
    for item in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(item.type):
            fields |= _fields(typing.cast(type, item.type), f"{prefix}{item.name}.")
        else:
            fields[prefix + item.name] = item
    return fields


def check(config: Config, world_size: int) -> None:
    """Refuses what cannot work, before anything is built.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    check_choices(config)
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


def check_ranges(config: Config) -> None:
    """Every number lies in the range that its key declares.

    Raises:
        ConfigError: naming the key, the value and the range.
    """
    # Those of `train` first: schedules refer to train.max_tokens, and the key that somebody set is the one to name.
    for key, item in sorted(_fields().items(), key=lambda entry: not entry[0].startswith("train.")):
        allowed = item.metadata.get("range")
        value = _value(config, key)
        if allowed is not None and value is not None and value not in allowed:
            raise ConfigError(f"{key}={value} must be {expected(item.type, allowed)}")
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas={betas} must be two numbers in [0, 1), such as [0.9, 0.95]")


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def check_choices(config: Config) -> None:
    """The part of `check` that needs no processes: numbers in a range, names out of a list.

    Raises:
        ConfigError: naming the key, the value and the choices.
    """
    check_ranges(config)
    if config.fabric.precision not in ("bf16-mixed", "32-true"):
        raise ConfigError(
            f"fabric.precision={config.fabric.precision!r} is not supported; use 'bf16-mixed' or '32-true'. "
            "bf16-true would keep weights and AdamW's moments in bf16, too coarse for pretraining"
        )
    if config.fabric.accelerator not in ("auto", "cpu", "cuda", "gpu"):
        raise ConfigError(f"fabric.accelerator={config.fabric.accelerator!r} is unknown; use 'auto', 'cpu' or 'cuda'")
    _check_devices(config.fabric.devices, config.fabric.accelerator)
    if config.strategy.name not in ("auto", "ddp", "fsdp"):
        raise ConfigError(f"strategy.name={config.strategy.name!r} is unknown; use 'auto', 'ddp' or 'fsdp'")
    if config.wandb.mode not in ("online", "offline", "disabled"):
        raise ConfigError(f"wandb.mode={config.wandb.mode!r} is unknown; use 'online', 'offline' or 'disabled'")
    if config.train.compile not in (True, False, "auto") or not isinstance(config.train.compile, bool | str):
        raise ConfigError(f"train.compile={config.train.compile!r} is unknown; use auto, true or false")
    if config.optimizer.name != "adamw":
        raise ConfigError(f"optimizer.name={config.optimizer.name!r} is unknown; use 'adamw'")
    if config.datamodule.missing_chunks not in ("error", "skip"):
        raise ConfigError(
            f"datamodule.missing_chunks={config.datamodule.missing_chunks!r} is unknown; use 'error' or 'skip'"
        )
    if config.datamodule.name != "longcrawl64":
        raise ConfigError(f"datamodule.name={config.datamodule.name!r} is unknown; use 'longcrawl64'")


def _check_devices(devices: Any, accelerator: str) -> None:
    problem = f"fabric.devices={devices!r} must be a number of processes, a list of GPUs, or 'auto'"
    if isinstance(devices, list):
        if (
            not devices
            or not all(type(n) is int and 0 <= n < _DEVICES.high for n in devices)
            or len({*devices}) < len(devices)
        ):
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


#: Keys that may differ between the runs that one output_dir has seen: where things are, how the work is split, what is
#: reported. Everything else decides what the weights become, so a change of it is refused on resume.
FREE_KEYS = (
    "output_dir", "data_dir", "resume", "fork_dir", "fork_step", "exp", "tag", "model.label", "wandb", "fabric.devices",
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


def changes_that_alter_the_run(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines "key: old -> new" for every key outside FREE_KEYS that differs between two resolved configs.

    A key that is younger than the old config counts as its default there.
    """
    defaults = flatten(dataclasses.asdict(Config()))
    old, new = defaults | flatten(before), defaults | flatten(now)
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, None) != new.get(key, None)
        and not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
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
