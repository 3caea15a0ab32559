"""Rules between sections of a configuration, processes, corpus and model, before the model has any memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forgetting_transformer.ranges import divisors
from forgetting_transformer.training.config import Config, ConfigError

if TYPE_CHECKING:
    from forgetting_transformer.data import DataInfo
    from forgetting_transformer.training.records.run_directory import RunDirectory


def check(config: Config, world_size: int) -> None:
    """Refuses a config that so many processes cannot run, before anything is built.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    data, train, size = config.datamodule, config.train, config.strategy.context
    _check_context(config, world_size)
    groups, called = world_size // size, "processes" if size == 1 else f"groups of {size} processes"
    if data.train_batch_size % groups:
        near = divisors(data.train_batch_size)
        raise ConfigError(
            f"datamodule.train_batch_size={data.train_batch_size} sequences cannot be shared equally by {groups} "
            f"{called}; use a multiple of {groups}, or a number of {called} among {near}"
        )
    local_tokens = data.train_batch_size // groups * data.train_batch_len
    micro_tokens = min(train.grad_acc_tokens, local_tokens)
    if micro_tokens % data.train_batch_len or local_tokens % micro_tokens:
        whose = "a rank's" if size == 1 else f"{size} ranks'"
        fits = [n * data.train_batch_len for n in divisors(local_tokens // data.train_batch_len)]
        raise ConfigError(
            f"train.grad_acc_tokens={train.grad_acc_tokens:,} does not split {whose} {local_tokens:,} tokens "
            f"({data.train_batch_size // groups} sequences of {data.train_batch_len:,}) into equal pieces of whole "
            f"sequences; choose one of {fits}"
        )
    if (config.fork_dir is None) != (config.fork_step is None):
        raise ConfigError(
            f"fork_dir={config.fork_dir or 'null'} and fork_step={config.fork_step or 'null'} belong together: "
            "give both or neither"
        )
    if config.fork_step is not None and config.train.max_tokens <= config.fork_step:
        raise ConfigError(
            f"train.max_tokens={config.train.max_tokens:,} counts the tokens before the fork too, and "
            f"fork_step={config.fork_step:,}: nothing would be trained; set train.max_tokens above fork_step"
        )
    if config.fork_dir and not config.resume:
        raise ConfigError("fork_dir starts from a checkpoint, resume=false starts from nothing: choose one")
    if config.fork_dir and config.init_from:
        raise ConfigError(
            f"fork_dir={config.fork_dir} and init_from={config.init_from} both say what to begin with: choose fork_dir "
            "to take moments, counters and position in the data along, or init_from for the weights alone"
        )
    if config.init_allow and not config.init_from:
        raise ConfigError(f"init_allow={config.init_allow} has no effect without init_from; give both or neither")


def _check_context(config: Config, world_size: int) -> None:
    """Raises ConfigError where the ranks cannot share sequences by `strategy.context`."""
    if (size := config.strategy.context) == 1:
        return
    if world_size % size:
        raise ConfigError(
            f"strategy.context={size} ranks share a sequence, and {world_size} process"
            f"{' is' if world_size == 1 else 'es are'} not a multiple of {size}; use one of {divisors(world_size)}, "
            "or another number of processes"
        )
    keys = ("train_batch_len", *(() if config.skip_eval else ("eval_batch_len",)))
    for key in keys:
        if (length := getattr(config.datamodule, key)) % size:
            raise ConfigError(
                f"datamodule.{key}={length:,} tokens have no equal parts for strategy.context={size} ranks; use a "
                f"multiple of {size}"
            )


def check_budget(config: Config, directory: RunDirectory, info: DataInfo) -> None:
    """Raises ConfigError where the corpus has not one batch, or fewer tokens than the run trains on."""
    data = config.datamodule
    if info.total_batches < 1:
        again = (
            "" if data.repeat else " (where parts of a mixture end: set datamodule.repeat=true to read the data again)"
        )
        raise ConfigError(
            f"{info.path} has no batch of {data.train_batch_size} sequences of {data.train_batch_len:,} tokens; "
            f"lower datamodule.train_batch_size or datamodule.train_batch_len, or use a larger corpus{again}"
        )
    if config.train.max_tokens > info.total_tokens and not data.repeat:
        # A continued run needs the corpus that it began with.
        from forgetting_transformer.data.tools.download import fetching

        goes_on = config.resume and any(directory.checkpoints.glob("step-*"))
        more = None if goes_on else fetching(info, config.train.max_tokens)
        raise ConfigError(
            f"train.max_tokens={config.train.max_tokens:,} is more than the {info.total_tokens:,} tokens of "
            f"{info.path} at this batch shape; lower it, or set datamodule.repeat=true to read the data again"
            + (f", or fetch {more}" if more else "")
        )


def check_decided(fields: dict[str, Any], decided: dict[str, int]) -> None:
    """Raises ConfigError where `model.config` sets a field that the corpus decides to another value."""
    for key, value in decided.items():
        if fields.get(key) not in (None, value):
            raise ConfigError(
                f"model.config.{key}={fields[key]} is not the corpus's {value}; leave it unset, the data decides it, "
                f"or set datamodule.{key}={fields[key]} if the corpus's manifest is wrong or silent"
            )


def check_sequences(model: Any, config: Config, packed: bool) -> None:
    """Raises ConfigError where the corpus packs documents, and the model would carry a state from one into the next; or
    where ranks are to share sequences, and the model is not made for so many."""
    kind, size, data = [type(model).__name__], config.strategy.context, config.datamodule
    if packed and (stateful := model.stateful_mixers() if hasattr(model, "stateful_mixers") else kind):
        raise ConfigError(
            f"datamodule.name={data.name} keeps documents apart, and model.name={config.model.name} would carry a "
            f"state from one into the next ({', '.join(stateful)}); use datamodule=corpus, or FoX, a Transformer, "
            "Mamba-2 or Samba"
        )
    length = min([data.train_batch_len, *([] if config.skip_eval else [data.eval_batch_len])])
    takes_whole = getattr(model, "whole_sequence_mixers", lambda *_: [f"{kind[0]} takes whole sequences only"])
    if size > 1 and (reasons := takes_whole(size, length)):
        raise ConfigError(
            f"strategy.context={size}: that many ranks cannot share a sequence of model.name={config.model.name} "
            f"({', '.join(reasons)}); use strategy.context=1, or a number that divides the heads, or longer sequences"
        )
