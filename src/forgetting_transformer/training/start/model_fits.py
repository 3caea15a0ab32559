"""Whether a model can be trained as the config asks: with packed documents, with sequences that ranks share."""

from typing import Any

from forgetting_transformer.training.config import Config, ConfigError


def check_packs(model: Any, config: Config) -> None:
    """
    Raises:
        ConfigError: the corpus packs documents, and the model would carry a state from one into the next.
    """
    stateful = model.stateful_mixers() if hasattr(model, "stateful_mixers") else [type(model).__name__]
    if stateful:
        raise ConfigError(
            f"datamodule.name={config.datamodule.name} keeps documents apart, and model.name={config.model.name} would "
            f"carry a state from one into the next ({', '.join(stateful)}); use "
            "datamodule=corpus, or FoX, a Transformer, Mamba-2 or Samba"
        )


def check_shares(model: Any, config: Config) -> None:
    """
    Raises:
        ConfigError: ranks are to share sequences, and the model is not made for so many.
    """
    if (sharing := config.strategy.context) == 1:
        return
    data = config.datamodule
    length = min([data.train_batch_len, *([] if config.skip_eval else [data.eval_batch_len])])
    takes_whole = [f"{type(model).__name__} takes whole sequences only"]
    reasons_for = getattr(model, "whole_sequence_mixers", lambda size, length=None: takes_whole)
    if reasons := reasons_for(sharing, length):
        # 1 divides all heads: what is left then has none to divide.
        if reasons_for(1):
            fix = "use strategy.context=1"
        elif reasons_for(sharing):
            fix = "use a number that divides the heads, or strategy.context=1"
        else:
            fix = "use longer sequences, or a smaller strategy.context"
        raise ConfigError(
            f"strategy.context={sharing}: that many ranks cannot share a sequence of model.name={config.model.name} "
            f"({', '.join(reasons)}); {fix}"
        )
