"""Arguments that a decoder refuses, each in one place, with the name of the argument, its value and the fix.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgetting_transformer.model.generation.cache import DecoderCache, one_cache


def has_rope(block: nn.Module) -> bool:
    return getattr(block.sequence_mixer, "use_rope", False)


def check_shape(decoder: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Refuse what is no batch of sequences; each mixer would fail in another place.

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


def check_sharing(decoder: Any, size: int, others: tuple[Any, ...]) -> None:
    if reasons := decoder.whole_sequence_mixers(size):
        raise ValueError(f"{size} processes cannot share sequences: {', '.join(reasons)}")
    if any(x is not None for x in others):
        raise ValueError(
            "attention_mask, past_key_values, position_ids or output_attentions is given, which a model does not "
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
            "cu_seqlens is given with attention_mask, past_key_values, position_ids or output_attentions, which "
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


def check_position_ids(
    decoder: Any, position_ids: Tensor, hidden_BTE: Tensor, seq_start_B: Tensor | None, num_past: int
) -> None:
    batch, length = hidden_BTE.shape[:2]
    if not any(has_rope(block) for block in decoder.layers):
        raise ValueError(
            f"position_ids: this {type(decoder).__name__} has no rotary positions, so they would change nothing; "
            "leave them out (packed documents are kept apart by cu_seqlens)"
        )
    if position_ids.is_floating_point() or position_ids.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)} and dtype {position_ids.dtype}; it must be "
            f"integers of shape {(batch, length)} or {(1, length)}"
        )
    # Reading values breaks a compiled graph and makes the host wait for a GPU, so this is not done while decoding.
    if length == 1 or torch.compiler.is_compiling():
        return
    falls_BT = position_ids.diff(dim=1) <= 0
    if seq_start_B is not None:
        index_T = torch.arange(num_past, num_past + length - 1, device=falls_BT.device)
        falls_BT = falls_BT & (index_T >= seq_start_B[:, None])
    if bool(falls_BT.any()):
        raise ValueError(
            "position_ids must rise along a sequence; where they start again, packed documents would see each "
            "other. Give cu_seqlens in their place"
        )


def layers_to_show(decoder: Any, output_attentions: bool | Sequence[int] | None) -> Sequence[int]:
    """The numbers of the blocks whose attention is asked for."""
    if output_attentions is None:
        output_attentions = decoder.config.output_attentions
    if output_attentions is False:
        return ()
    able = [i for i, block in enumerate(decoder.layers) if getattr(block.sequence_mixer, "gives_attentions", False)]
    if not able:
        raise ValueError(f"output_attentions: {type(decoder).__name__} has no attention layers; leave it out")
    if output_attentions is True:
        return able
    if isinstance(output_attentions, int | str):
        raise TypeError(
            f"output_attentions is {output_attentions!r}; give True, or a list of layers such as [{able[0]}]"
        )
    for layer in output_attentions:
        if layer not in able:
            raise ValueError(f"output_attentions has {layer!r}; layers with attention are {', '.join(map(str, able))}")
    return output_attentions


def check_mixed(mixer: nn.Module, mixed: Any, hidden_BTE: Tensor) -> None:
    """Refuse what a mixer returned unless it is a tuple that begins with the block's branch.

    A tensor alone would be unpacked into the sequences of the batch, and one of a smaller shape broadcast.
    """
    in_tuple = isinstance(mixed, tuple | list)
    first: Any = (mixed[0] if mixed else None) if in_tuple else mixed
    is_tensor = isinstance(first, Tensor)
    if in_tuple and is_tensor and first.shape == hidden_BTE.shape and first.is_floating_point():
        return
    what = type(first).__name__
    if is_tensor:
        what = f"{str(first.dtype).removeprefix('torch.')} tensor {tuple(first.shape)}"
    returned = (f"a tuple with a {what} first" if mixed else "an empty tuple") if in_tuple else f"a {what} and no tuple"
    raise TypeError(
        f"{type(mixer).__name__}.forward returned {returned}. It must return a tuple: the output, a floating-point "
        f"tensor of its input's shape {tuple(hidden_BTE.shape)}, and the cache"
    )
