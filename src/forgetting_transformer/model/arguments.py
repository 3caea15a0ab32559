"""Checks of a decoder's arguments and of a configuration's fields; errors have the name, the value and the fix.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from forgetting_transformer.ops import context
from forgetting_transformer.ops.layers.norm import ACTIVATIONS
from forgetting_transformer.ranges import COUNT, POSITIVE, SIZE, Range, refusal

FGATE_TYPES = ("full", "bias_only", "fixed", "none")
_FIELDS = {
    COUNT: ("vocab_size", "max_position_embeddings", "window_size"),
    Range(0, COUNT.high): ("pad_token_id", "bos_token_id", "eos_token_id"),
    Range(1, 65536): ("num_hidden_layers",),
    SIZE: (
        "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "state_size", "n_groups",
        "conv_kernel", "conv_size", "chunk_size", "expand_ratio", "time_step_rank", "w_rank",
    ),
    Range(0, 1024, above=True): (
        "hidden_ratio", "attn_hidden_ratio", "mamba_hidden_ratio", "expand", "expand_k", "expand_v",
    ),
    Range(0, 1e3): ("initializer_range",),
    Range(0, 1, above=True): ("norm_eps", "layer_norm_epsilon", "qk_norm_eps"),
    POSITIVE: ("rope_factor", "time_step_scale", "time_step_min", "time_step_max"),
    Range(0, 1e9): ("time_step_floor",),
    # Tokens. Far more than any text has makes gates that forget nothing.
    Range(0, 1e15, above=True): ("rope_base", "decay_time_min", "decay_time_max"),
    Range(-1e9, 0): ("log_pruning_tolerance",),
}  # fmt: skip
#: By field, whatever the architecture. A field of a user's own that is not here may be any finite number.
RANGES = {name: allowed for allowed, names in _FIELDS.items() for name in names}


def check_shape(decoder: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Refuse anything but a batch of sequences; each mixer would fail in another place.

    Raises:
        ValueError, TypeError: naming the argument, its shape and the right one.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of input_ids and inputs_embeds")
    name, given = "input_ids", input_ids
    last: tuple[int, ...] = ()
    if inputs_embeds is not None:
        name, given, last = "inputs_embeds", inputs_embeds, (decoder.config.hidden_size,)
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is a {type(given).__name__}; it must be a tensor")
    shape = tuple(given.shape)
    if len(shape) != 2 + len(last) or 0 in shape or shape[2:] != last:
        axes = ", ".join(("B", "T", *map(str, last)))
        cure = f"; one sequence is a batch too: {name}[None]" if len(shape) == 1 + len(last) else ""
        raise ValueError(f"{name} has shape {shape}; it must be ({axes}), at least one token in each row{cure}")


def check_no_maps(output_attentions: bool | None) -> None:
    if output_attentions:
        raise ValueError("output_attentions is given; no kernel makes attention weights. eval/forget_gates draws them")


def check_parts(
    decoder: Any, cu_seqlens: Tensor | None, shape: tuple[int, ...], attention_mask: Tensor | None, cache: Any
) -> None:
    """Refuse what packed documents, and processes that share sequences, do not take."""
    shared = context.active()
    if shared is not None and (reasons := decoder.whole_sequence_mixers(shared.size)):
        raise ValueError(f"{shared.size} processes cannot share sequences: {', '.join(reasons)}")
    if cu_seqlens is not None and (stateful := decoder.stateful_mixers()):
        raise ValueError(
            f"cu_seqlens: {decoder.config.model_type.partition('-')[0]} carries a state from one document into the "
            f"next ({', '.join(stateful)}); give every document its own row, or use FoX, a Transformer, Mamba-2 "
            "or Samba"
        )
    if attention_mask is not None or cache is not None:
        who = "processes that share sequences" if cu_seqlens is None else "packed documents (cu_seqlens)"
        raise ValueError(f"attention_mask or past_key_values is given, which {who} do not take; leave it out")
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    if cu_seqlens.device.type == "cpu":  # looking at values would make a GPU wait
        batch, length = shape[0], shape[1] * (1 if shared is None else shared.size)
        starts = {*cu_seqlens.tolist()}
        if not starts.issuperset(range(0, batch * length + 1, length)):
            raise ValueError(
                f"cu_seqlens must name the beginning of each of the {batch} rows of {length} tokens, and the end, "
                f"{batch * length}; it has {sorted(starts)[:8]}, …"
            )


def check_mixed(mixer: nn.Module, mixed: Any, hidden_BTE: Tensor) -> None:
    """Refuse the result of a mixer unless it is a tuple that begins with the block's branch.

    A tensor alone would be unpacked into the sequences of the batch, and one of a smaller shape broadcast.
    """
    in_tuple = isinstance(mixed, tuple | list)
    first: Any = next(iter(mixed), None) if in_tuple else mixed
    is_tensor = isinstance(first, Tensor)
    if in_tuple and is_tensor and first.shape == hidden_BTE.shape and first.is_floating_point():
        return
    what = f"{first.dtype} {tuple(first.shape)}" if is_tensor else type(first).__name__
    raise TypeError(
        f"{type(mixer).__name__}.forward returned {'a tuple of ' if in_tuple else ''}{what}. It must return a tuple: "
        f"the output, a floating-point tensor of its input's shape {tuple(hidden_BTE.shape)}, and the cache"
    )


def check_loss_arguments(
    model: Any, cu_seqlens: Tensor | None, logits_to_keep: int | Tensor, num_items_in_batch: int | Tensor | None
) -> None:
    """Refuse arguments that the convention for labels does not use."""
    if model.config.loss == "per_token":
        if num_items_in_batch is not None:
            raise ValueError(
                "num_items_in_batch is given, as transformers' Trainer does, but config.loss is 'per_token': a loss "
                "(B, T) of labels that are not shifted. Set model.config.loss = 'causal_lm'"
            )
        return
    if context.active() is not None:
        raise ValueError(
            "config.loss is 'causal_lm', whose shift loses the first label of each process's part where "
            "processes share sequences; set it to 'per_token'"
        )
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens is given and config.loss is 'causal_lm', whose shift crosses documents")
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        raise ValueError("logits_to_keep is given with labels; the loss needs all logits, leave it out")


def check_attention_options(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, window_size: int | None, use_rope: bool
) -> None:
    """Refuse options that do not fit together, naming the key and what to do."""
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size is {hidden_size}; it must be a multiple of num_heads = {num_heads}")
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}; it must divide num_heads = {num_heads}, or be None for num_heads of them"
        )
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size is {window_size}; a token sees itself, so at least 1, or None for no window")
    if use_rope and (hidden_size // num_heads) % 2:
        raise ValueError(
            f"use_rope needs an even head dimension; hidden_size / num_heads is {hidden_size // num_heads}"
        )


def check_forgetting_options(options: Any, head_dim: int | None) -> None:
    """Refuse options of FoX's layer, or fields of its configuration, that do not fit together."""
    width = options.hidden_size if head_dim is None else options.num_heads * head_dim
    check_attention_options(width, options.num_heads, options.num_kv_heads, options.window_size, options.use_rope)
    if not options.use_rope and (options.rope_factor != 1 or options.rope_llama3 is not None):
        raise ValueError(
            f"rope_factor, rope_llama3 are {options.rope_factor}, {options.rope_llama3}, which have no effect without "
            "use_rope=True; leave them 1 and None"
        )
    if options.rope_llama3 is not None and len(options.rope_llama3) != 3:
        raise ValueError(
            f"rope_llama3 is {options.rope_llama3}; it must be [low, high, length], as in [1, 4, 8192], or None"
        )
    if options.ogate_act not in ACTIVATIONS:
        raise ValueError(f"ogate_act is {options.ogate_act!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if options.fgate_type not in FGATE_TYPES:
        raise ValueError(f"fgate_type is {options.fgate_type!r}; it must be one of {', '.join(FGATE_TYPES)}")
    if options.fgate_bias_init and options.fgate_type not in ("bias_only", "fixed"):
        raise ValueError(
            f"fgate_bias_init is for fgate_type bias_only and fixed; with {options.fgate_type!r} set it to False"
        )
    if options.fgate_type == "fixed" and not options.fgate_bias_init:
        raise ValueError("fgate_type 'fixed' takes its gates from decay times: set fgate_bias_init=True")
    shortest, longest = options.decay_time_min, options.decay_time_max
    if options.fgate_bias_init:
        if shortest is None or longest is None or not 0 < shortest <= longest:
            raise ValueError(
                f"decay_time_min, decay_time_max are {shortest}, {longest} (tokens); fgate_bias_init needs "
                "0 < decay_time_min <= decay_time_max"
            )
    elif shortest is not None or longest is not None:
        raise ValueError(
            "decay_time_min and decay_time_max have no effect without fgate_bias_init=True; leave them None"
        )
    if options.log_pruning_tolerance is not None and not options.log_pruning_tolerance < 0:
        raise ValueError(
            f"log_pruning_tolerance is {options.log_pruning_tolerance}; it is ln ε of a small ε, so negative (-10), "
            "or None for off"
        )


def check_silu(hidden_act: str) -> None:
    """Refuse other activations than SiLU."""
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {hidden_act!r}; it must be 'silu' or 'swish', which is the same")


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
            spelled = " or ".join(json.dumps(choice).strip('"') for choice in neutral)  # as YAML has them
            raise ValueError(
                f"{name} is {value!r}, which has no effect in {config_class.__name__}; it must be {spelled}"
            )


def check_field(name: str, value: Any, hint: Any) -> None:
    """Check one field of type `hint`, whose range is that of the name behind the last dot."""
    if better := refusal(value, hint, RANGES.get(name.rpartition(".")[2])):
        raise ValueError(f"{name} is {value!r}; it must be {better}")
