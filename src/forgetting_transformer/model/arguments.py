"""Checks of a decoder's arguments; errors have the name of the argument, its value and the fix.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any

from torch import Tensor, nn

from forgetting_transformer.model.generation.cache import DecoderCache, one_cache
from forgetting_transformer.ops import context


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


def checked_cache(past_key_values: Any, cache: Any) -> DecoderCache | None:
    """The cache of a call, under whichever name it is given; static only while a token is written in place."""
    past = one_cache(past_key_values, cache)
    if past is not None and not isinstance(past, DecoderCache):
        raise TypeError(
            f"past_key_values is a {type(past).__name__}; pass the one a former call returned, model.new_cache(), or "
            "None"
        )
    if past is not None and past.slot is not None and not past.is_writing:
        past.make_dynamic()
    return past


def check_shows_attention(decoder: Any) -> None:
    if not any(getattr(block.sequence_mixer, "shows_attention", False) for block in decoder.layers):
        raise ValueError(
            f"output_attentions: {type(decoder).__name__} has no attention layers that give their weights; leave it out"
        )


def check_sharing(decoder: Any, size: int, others: tuple[Any, ...]) -> None:
    if reasons := decoder.whole_sequence_mixers(size):
        raise ValueError(f"{size} processes cannot share sequences: {', '.join(reasons)}")
    if any(x is not None for x in others):
        raise ValueError(
            "attention_mask, past_key_values or output_attentions is given, which a model does not "
            "take where processes share sequences; leave them out, or give it whole sequences"
        )


def check_packing(decoder: Any, cu_seqlens: Tensor, shape: tuple[int, ...], others: tuple[Any, ...]) -> None:
    if stateful := decoder.stateful_mixers():
        raise ValueError(
            f"cu_seqlens: {decoder.config.model_type.partition('-')[0]} carries a state from one document into the "
            f"next ({', '.join(stateful)}); give every document its own row, or use FoX, a Transformer, Mamba-2 "
            "or Samba"
        )
    if any(x is not None for x in others):
        raise ValueError(
            "cu_seqlens is given with attention_mask, past_key_values or output_attentions, which "
            "packed documents do not take; leave them out"
        )
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    if cu_seqlens.device.type == "cpu":  # looking at values would make a GPU wait
        batch, length = shape
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
