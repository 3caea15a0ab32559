"""Checks that configuration, corpus and model fit together, before the model has any memory."""

from typing import Any

from forgetting_transformer.data import DataInfo
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.records.run_directory import RunDirectory


def check_budget(config: Config, directory: RunDirectory, info: DataInfo) -> None:
    """
    Raises:
        ConfigError: the corpus has not one batch, or fewer tokens than the run trains on.
    """
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
    """
    Raises:
        ConfigError: `model.config` sets one of the fields that the corpus decides, to another value.
    """
    for key, value in decided.items():
        if fields.get(key) not in (None, value):
            raise ConfigError(
                f"model.config.{key}={fields[key]} is not the corpus's {value}; leave it unset, the data decides it, "
                f"or set datamodule.{key}={fields[key]} if the corpus's manifest is wrong or silent"
            )


def check_sequences(model: Any, config: Config, packed: bool) -> None:
    """
    Raises:
        ConfigError: the corpus packs documents, and the model would carry a state from one into the next; or ranks are
            to share sequences, and the model is not made for so many.
    """
    kind, sharing, data = [type(model).__name__], config.strategy.context, config.datamodule
    if packed and (stateful := model.stateful_mixers() if hasattr(model, "stateful_mixers") else kind):
        raise ConfigError(
            f"datamodule.name={data.name} keeps documents apart, and model.name={config.model.name} would carry a "
            f"state from one into the next ({', '.join(stateful)}); use datamodule=corpus, or FoX, a Transformer, "
            "Mamba-2 or Samba"
        )
    length = min([data.train_batch_len, *([] if config.skip_eval else [data.eval_batch_len])])
    takes_whole = getattr(model, "whole_sequence_mixers", lambda *_: [f"{kind[0]} takes whole sequences only"])
    if sharing > 1 and (reasons := takes_whole(sharing, length)):
        raise ConfigError(
            f"strategy.context={sharing}: that many ranks cannot share a sequence of model.name={config.model.name} "
            f"({', '.join(reasons)}); use strategy.context=1, or a number that divides the heads, or longer sequences"
        )
