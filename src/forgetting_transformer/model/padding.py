"""Beginnings of sequences, read from an attention mask, and of packed documents.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor

from forgetting_transformer.model.generation.cache import DecoderCache
from forgetting_transformer.ops import context


def document_positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the number of tokens before each in its own document, `(1, num_tokens)`.

    Args:
        cu_seqlens: where each document begins, and the number of tokens, rising; ends may be repeated.
    """
    token_N = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return (token_N - cu_seqlens[torch.searchsorted(cu_seqlens, token_N, right=True) - 1])[None]


def positions_in_parts(cu_seqlens: Tensor | None, hidden_BTE: Tensor) -> Tensor:
    """Return the position `(B, T)` of each token in its document, or `(1, T)` in its sequence where none are packed.

    Args:
        cu_seqlens: as above, of all rows, one after another; None where rows are not packed.
        hidden_BTE: the tokens; only their number is read. Where processes share sequences, this one's.
    """
    batch, length = hidden_BTE.shape[:2]
    shared = context.active()
    whole = length * (1 if shared is None else shared.size)
    if cu_seqlens is None:
        position_BN = torch.arange(whole, device=hidden_BTE.device)[None]
    else:
        position_BN = document_positions(cu_seqlens, batch * whole).view(batch, whole)
    return position_BN if shared is None else position_BN[:, shared.part(whole)]


def own_documents(cu_seqlens: Tensor | None, hidden_BTE: Tensor) -> Tensor | None:
    """Return where documents begin and end among these tokens, all rows one after another; ends may be repeated.

    They are `cu_seqlens` itself, except where processes share sequences: there a part's first document may have begun
    in the part before it.
    """
    shared = context.active()
    if shared is None or cu_seqlens is None:
        return cu_seqlens
    own = hidden_BTE.shape[1]
    whole = own * shared.size
    # The end of a row is the beginning of the next one, and lies behind the last row once.
    row_N = (cu_seqlens // whole).clamp(max=len(hidden_BTE) - 1)
    return row_N * own + (cu_seqlens - row_N * whole - shared.rank * own).clamp(0, own)


def packed_positions(inputs: dict[str, Tensor]) -> Tensor | None:
    """Position `(B, T)` of each token in its document, by a model's arguments; None unless documents are packed."""
    if "cu_seqlens" not in inputs:
        return None
    shape = inputs["input_ids"].shape
    return document_positions(inputs["cu_seqlens"], shape.numel()).view(shape)


def find_padding(
    attention_mask_BN: Tensor | None, new_BTE: Tensor, cache: DecoderCache | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the index of the first real token of every sequence `(B,)`, which the cache then remembers, and where the
    new positions are left padding `(B, T)`; None and None without left padding.

    Args:
        attention_mask_BN: 1 for tokens, 0 for padding, past tokens included. None means that nothing has changed.
        new_BTE: the new positions; only their number is read.
        cache: holds the tokens before these. Without one there may be padding on the right as well: a causal model need
            not know of it, as long as no further tokens follow.

    Raises:
        ValueError: the shape is wrong, or there is padding where none may be.
    """
    num_past, seq_start_B = (0, None) if cache is None else (cache.get_seq_length(), cache.seq_start_B)
    if attention_mask_BN is not None:
        seq_start_B = _find_seq_start(attention_mask_BN, new_BTE, num_past, seq_start_B, cache is None)
    if cache is not None:
        cache.seq_start_B = seq_start_B
    if seq_start_B is None:
        return None, None
    if cache is not None and cache.slot is not None:
        return seq_start_B, cache.slot.new < seq_start_B[:, None]
    position_T = torch.arange(num_past, num_past + new_BTE.shape[1], device=new_BTE.device)
    return seq_start_B, position_T < seq_start_B[:, None]


def _find_seq_start(
    attention_mask_BN: Tensor, new_BTE: Tensor, num_past: int, known_seq_start_B: Tensor | None, allow_right: bool
) -> Tensor | None:
    num_new = new_BTE.shape[1]
    expected_shape = (new_BTE.shape[0], num_past + num_new)
    if attention_mask_BN.shape != expected_shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask_BN.shape)}; it must be {expected_shape}: one entry per "
            f"token, {num_past} of them cached"
        )
    # While decoding, looking at the mask's values would stall a GPU at every token.
    if num_new == 1 and num_past > 0:
        return None if known_seq_start_B is None else (attention_mask_BN == 0).sum(-1)
    is_token_BN = attention_mask_BN.bool()
    if bool(is_token_BN.all()):
        return None
    has_begun_BN = is_token_BN.cumsum(-1) > 0
    has_ended_BN = has_begun_BN & ~is_token_BN
    if bool(has_ended_BN.any()):
        if bool((has_ended_BN[:, :-1] & is_token_BN[:, 1:]).any()):
            raise ValueError(
                "attention_mask has zeros between ones; only the beginning or the end of a row can be padding "
                "(generate makes a mask from pad_token_id where none is given)"
            )
        if not allow_right:
            raise ValueError(
                "attention_mask has zeros after ones: only left padding is supported where tokens may follow. Pad on "
                "the left (tokenizer.padding_side = 'left'), or pass use_cache=False"
            )
    seq_start_B = (~has_begun_BN).sum(-1)
    return seq_start_B if bool(seq_start_B.any()) else None
