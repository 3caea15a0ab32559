"""The values that fields of an architecture's configuration may have, checked before anything uses them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from forgetting_transformer.ranges import COUNT, POSITIVE, SIZE, Range, refusal

_TOKEN_ID = Range(0, COUNT.high)
_RATIO = Range(0, 1024, above=True)
_EPSILON = Range(0, 1, above=True)
#: Tokens. Far more than any text has makes gates that forget nothing.
_DECAY_TIME = Range(0, 1e15, above=True)
#: Names of the kernels of DeltaNet and HGRN2 in the authors' code. They compute the same function.
KERNEL_MODES = ("chunk", "fused_chunk", "fused_recurrent")
#: As YAML and the command line have them.
_SPELLED = {None: "null", True: "true", False: "false"}
#: By field, whatever the architecture. A field of a user's own that is not here may be any finite number.
RANGES = {
    "vocab_size": COUNT,
    "pad_token_id": _TOKEN_ID,
    "bos_token_id": _TOKEN_ID,
    "eos_token_id": _TOKEN_ID,
    "max_position_embeddings": COUNT,
    "window_size": COUNT,
    "hidden_size": SIZE,
    "num_hidden_layers": Range(1, 65536),
    "intermediate_size": SIZE,
    "num_heads": SIZE,
    "num_kv_heads": SIZE,
    "head_dim": SIZE,
    "state_size": SIZE,
    "n_groups": SIZE,
    "conv_kernel": SIZE,
    "conv_size": SIZE,
    "chunk_size": SIZE,
    "expand_ratio": SIZE,
    "time_step_rank": SIZE,
    "w_rank": SIZE,
    "hidden_ratio": _RATIO,
    "attn_hidden_ratio": _RATIO,
    "mamba_hidden_ratio": _RATIO,
    "expand": _RATIO,
    "expand_k": _RATIO,
    "expand_v": _RATIO,
    "initializer_range": Range(0, 1e3),
    "norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "rope_base": Range(0, 1e15, above=True),
    "decay_time_min": _DECAY_TIME,
    "decay_time_max": _DECAY_TIME,
    "time_step_scale": POSITIVE,
    "time_step_min": POSITIVE,
    "time_step_max": POSITIVE,
    "time_step_floor": Range(0, 1e9),
    "log_pruning_tolerance": Range(-1e9, 0, otherwise="null for no pruning"),
}


def check_fields(config_class: type[Any], fields: Mapping[str, Any]) -> None:
    """Check `fields` against the types that `config_class` declares, RANGES and its `neutral_values`.

    Raises:
        ValueError: naming the field, its value and what it must be.
    """
    hints = {field.name: field.type for field in dataclasses.fields(config_class)}
    for name, value in fields.items():
        # transformers' own fields have types that are text, and are not for users to set here.
        if name in hints and not isinstance(hints[name], str):
            check_field(name, value, hints[name])
        neutral = config_class.neutral_values.get(name, (value,))
        if value not in neutral:
            spelled = " or ".join(_SPELLED.get(choice, str(choice)) for choice in neutral)
            raise ValueError(
                f"{name} is {value!r}, which has no effect in {config_class.__name__}; it must be {spelled}"
            )


def check_field(name: str, value: Any, hint: Any) -> None:
    """Check one field of type `hint`, whose range is that of the name behind the last dot."""
    if better := refusal(value, hint, RANGES.get(name.rpartition(".")[2])):
        raise ValueError(f"{name} is {value!r}; it must be {better}")
