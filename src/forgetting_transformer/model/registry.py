"""Architectures by short name, and with transformers' Auto classes.

>>> from forgetting_transformer.model import registry
>>> config = registry.build_config("forgetting_transformer", hidden_size=256, num_heads=4, vocab_size=50257)
>>> model = registry.get("forgetting_transformer").lm_class(config)
"""

import dataclasses
import difflib
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forgetting_transformer import plugins
from forgetting_transformer.model.arguments import check_fields
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.model.decoder import DecoderForCausalLM, DecoderModel


class Architecture(NamedTuple):
    """The classes of one architecture."""

    config_class: type[DecoderConfig]
    model_class: type[DecoderModel]
    lm_class: type[DecoderForCausalLM]


MODELS: dict[str, Architecture] = {}


def register(
    name: str,
    config_class: type[DecoderConfig],
    model_class: type[DecoderModel],
    lm_class: type[DecoderForCausalLM],
) -> None:
    """Register an architecture under `name` here, and under its `model_type` in transformers.

    Raises:
        ValueError: another architecture has the name or the `model_type`, or there is no `model_type`.
    """
    if name in MODELS:
        raise ValueError(f"an architecture called {name!r} is registered already")
    model_type, whose = config_class.model_type, f"{config_class.__name__}.model_type={config_class.model_type!r}"
    if not model_type:
        raise ValueError(f"{whose} is empty; set one that no other architecture has, as in 'my_mixer-my_lab'")
    for other, known in MODELS.items():
        if known.config_class.model_type == model_type:
            raise ValueError(
                f"{whose} is that of {other!r} ({known.config_class.__name__}), whose exports would be loaded as "
                f"{lm_class.__name__}; set one of its own in {config_class.__name__}, as in 'my_mixer-my_lab'"
            )
    plugins.MODELS.register(name)(lm_class)
    MODELS[name] = Architecture(config_class, model_class, lm_class)
    AutoConfig.register(model_type, config_class)
    # transformers compares class names and has a Mamba2Config too. It stores by class, so both stay usable.
    AutoModel.register(config_class, model_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, lm_class, exist_ok=True)
    # Registering does not add it. Trainer looks here for models whose labels it has to shift when it smooths them.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = lm_class.__name__


def model_names() -> list[str]:
    """Short names of all architectures, sorted."""
    return sorted(MODELS)


def get(name: str) -> Architecture:
    """The classes registered under a short name.

    Raises:
        UnknownComponentError: a ValueError; nothing is registered under it.
    """
    plugins.MODELS.get(name)
    return MODELS[name]


def fields_of(config_class: type[DecoderConfig]) -> set[str]:
    """The fields that an architecture's own classes declare, without those of every transformers configuration."""
    declared, inherited = ({field.name for field in dataclasses.fields(c)} for c in (config_class, PreTrainedConfig))
    return declared - inherited | set(config_class.attribute_map)


def build_config(name: str, **fields: Any) -> DecoderConfig:
    """Build the configuration of architecture `name`.

    transformers' configs keep any keyword they are given; here an unknown field is an error, and so is a value of a
    wrong type, out of its range, or for something that the architecture does not do (`neutral_values`).

    Raises:
        ValueError: naming the field, its value and the fix.
    """
    config_class = get(name).config_class
    known = fields_of(config_class)
    for key in fields:
        if key not in known:
            others = [other for other in model_names() if key in fields_of(MODELS[other].config_class)]
            close = difflib.get_close_matches(key, known, n=1) if not others else []
            hint = f", which is one of {', '.join(others)}" if others else ""
            hint += f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(known))}"
            raise ValueError(f"{config_class.__name__} has no field {key!r}{hint}")
    check_fields(config_class, fields)
    return config_class(**fields)
