"""The keys of a run's configuration, for tests that hold texts and lists to them."""

from forgetting_transformer.training.config.parsing import config_class, keys_of


def known_keys() -> list[str]:
    """Every key of a run that names no component, in dotted form, such as "train.max_tokens"."""
    return list(keys_of(config_class({})))
