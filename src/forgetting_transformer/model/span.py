"""New tokens of a call, with the facts that layers need.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from forgetting_transformer.model.arguments import check_packing, check_sharing, check_shows_attention
from forgetting_transformer.model.generation.cache import DecoderCache
from forgetting_transformer.model.padding import find_seq_start, padding_mask, positions_in_documents
from forgetting_transformer.ops import context


@dataclass(frozen=True)
class Span:
    """T new tokens `(B, T)` of a layer's input.

    Attributes:
        seq_start_B: index of the first real token, counted from the first cached one; None without left padding.
        padding_BT: where the new tokens are left padding; None without.
        position_BT: rotary positions `(B, T)` or `(1, T)`; None: the number of tokens before each.
        cu_seqlens: of packed documents, as `DecoderModel.forward` passes it, in which position_BT then counts; for
            B = 1 and without a cache. Where processes share sequences (`ops/context.py`), of whole ones, and for any B.
        cache: from the layer's `new_cache`, with the tokens before these. The layer extends it in place.
        attentions: list to which a layer with attention adds its weights `(B, H, T, N)`; None if they are not wanted.
    """

    seq_start_B: Tensor | None = None
    padding_BT: Tensor | None = None
    position_BT: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cache: CacheLayerMixin | None = None
    attentions: list[Tensor] | None = None

    @property
    def position(self) -> Tensor | int:
        """Rotary positions, or that of the first token, from which the others count."""
        if self.position_BT is not None:
            return self.position_BT
        return 0 if self.cache is None else self.cache.get_seq_length()

    @property
    def begins_BT(self) -> Tensor | None:
        """Mask of the tokens that begin a packed document; None where documents are not packed."""
        return None if self.cu_seqlens is None or self.position_BT is None else self.position_BT == 0

    def to(self, device: Any, **options: Any) -> "Span":
        """A span whose tensors are on `device`: accelerate calls it for models on several devices."""
        moved: dict[str, Any] = vars(self).copy()
        moved |= {name: x.to(device, **options) for name, x in moved.items() if isinstance(x, Tensor)}
        return Span(**moved)


def spans_of_call(
    decoder: Any,
    hidden_BTE: Tensor,
    shape: tuple[int, ...],
    attention_mask: Tensor | None,
    cache: DecoderCache | None,
    cu_seqlens: Tensor | None,
    output_attentions: bool,
) -> list[Span]:
    """The tokens of a decoder's call, from its arguments, for each of its layers.

    Args:
        hidden_BTE: the tokens; all rows as one where documents are packed.
        shape: as the caller gave them, `(B, T, E)`.
        output_attentions: whether attention weights are wanted.

    Raises:
        ValueError: arguments do not fit together. The message names the argument.
    """
    shared, others = context.active(), (attention_mask, cache, output_attentions or None)
    seq_start_B = padding_BT = position_BT = None
    if output_attentions:
        check_shows_attention(decoder)
    if shared is not None:
        check_sharing(decoder, shared.size, others)
    if cu_seqlens is not None:
        check_packing(decoder, cu_seqlens, (shape[0], shape[1] * (1 if shared is None else shared.size)), others)
        position_BT = positions_in_documents(cu_seqlens, hidden_BTE)
    elif shared is not None:
        first = shared.rank * shape[1]
        position_BT = torch.arange(first, first + shape[1], device=hidden_BTE.device)[None]
    elif cache is None:
        seq_start_B = find_seq_start(attention_mask, hidden_BTE, allow_right=True)
        padding_BT = padding_mask(hidden_BTE, seq_start_B, cache)
    else:
        seq_start_B = find_seq_start(attention_mask, hidden_BTE, cache.get_seq_length(), cache.seq_start_B)
        padding_BT = padding_mask(hidden_BTE, seq_start_B, cache)
        position_BT = None if cache.slot is None else cache.slot.new[None]
        cache.seq_start_B = seq_start_B
    span = Span(seq_start_B, padding_BT, position_BT, cu_seqlens)
    if cache is None and not output_attentions:
        return [span] * len(decoder.layers)
    caches = [None] * len(decoder.layers) if cache is None else cache.layers
    return [replace(span, cache=layer_cache, attentions=[] if output_attentions else None) for layer_cache in caches]


def span_of_layer(
    layer: Any, hidden_BTE: Tensor, attention_mask: Tensor | None, past_key_values: Any, use_cache: bool, shows: bool
) -> Span:
    """The tokens of a layer that is called by itself, with the arguments of the authors' layer.

    Args:
        layer: has `new_cache` and `layer_idx`.
        attention_mask: `(B, N)`, 0 for left padding; without a cache padding may be on the right too.
        past_key_values: a layer's cache, or a model's, in which the layer has the number `layer_idx`.
        use_cache: with no cache given, start one.
        shows: `output_attentions`.

    Raises:
        ValueError: the mask does not fit, or the layer has no number.
    """
    cache = past_key_values
    if isinstance(cache, DecoderCache):
        if layer.layer_idx is None:
            raise ValueError(
                "past_key_values is a model's cache; make the layer with layer_idx=…, or pass layer.new_cache()"
            )
        if not cache.is_writing:
            cache.make_dynamic()
        cache = cache.layers[layer.layer_idx]
    elif cache is None and use_cache:
        cache = layer.new_cache()
    seq_start_B = None
    if attention_mask is not None:
        # A layer's cache does not store where sequences start, so the mask counts at every call.
        known_B, num_past = (attention_mask == 0).sum(-1), 0 if cache is None else cache.get_seq_length()
        seq_start_B = find_seq_start(attention_mask, hidden_BTE, num_past, known_B, allow_right=cache is None)
    padding_BT = padding_mask(hidden_BTE, seq_start_B, cache)
    return Span(seq_start_B, padding_BT, cache=cache, attentions=[] if shows else None)
