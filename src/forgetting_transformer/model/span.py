"""Facts about the new tokens of a call that layers need: padding, positions, packed documents, the cache.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from forgetting_transformer.model.arguments import check_parts
from forgetting_transformer.model.generation.cache import DecoderCache
from forgetting_transformer.model.padding import find_padding, positions_in_parts
from forgetting_transformer.ops import context


@dataclass(frozen=True)
class Span:
    """Facts about T new tokens of B sequences. In training on whole rows everything is None.

    Attributes:
        seq_start_B: index of the first real token, counted from the first cached one; None without left padding.
        padding_BT: where the new tokens are left padding; None without.
        position_BT: rotary positions `(B, T)` or `(1, T)`; None: the number of tokens before each.
        cu_seqlens: beginnings of packed documents, as in `DecoderModel.forward`; position_BT then counts within each.
            B is 1, and there is no cache. Where processes share sequences (`ops/context.py`), it is that of the whole
            sequences, and B may be any number.
        cache: from the layer's `new_cache`, with the tokens before these. The layer extends it in place.
    """

    seq_start_B: Tensor | None = None
    padding_BT: Tensor | None = None
    position_BT: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cache: CacheLayerMixin | None = None

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
        moved: Any = {name: x.to(device, **options) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def span_of_call(
    decoder: Any,
    hidden_BTE: Tensor,
    attention_mask: Tensor | None,
    cache: DecoderCache | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Span]:
    """Returns the input of the first block, all rows as one where documents are packed, and its span.

    Raises:
        ValueError: arguments do not fit together. The message names the argument.
    """
    if cu_seqlens is not None or context.active() is not None:
        check_parts(decoder, cu_seqlens, hidden_BTE.shape, attention_mask, cache)
        if context.active() is None:
            hidden_BTE = hidden_BTE.flatten(0, 1)[None]
        return hidden_BTE, Span(position_BT=positions_in_parts(cu_seqlens, hidden_BTE), cu_seqlens=cu_seqlens)
    seq_start_B, padding_BT = find_padding(attention_mask, hidden_BTE, cache)
    return hidden_BTE, Span(seq_start_B, padding_BT, None if cache is None else cache.position_BT)
