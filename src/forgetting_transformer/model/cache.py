"""What a decoder remembers between calls of generation.

`DecoderCache` holds one layer cache per block, made by the block's mixer. A layer cache is a Hugging Face
`CacheLayerMixin`; generation moves its batch axis around (beam search, several samples per prompt) and shortens it
(assisted decoding), so every tensor a mixer stores must follow.

Axes: B batch, H heads, G key and value heads, N cached positions, T new positions, D channels of a head, E model width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class DecoderCache(Cache):
    """One layer cache per block, and where each sequence starts.

    Attributes:
        seq_start_B: index of the first real token of each sequence `(B,)`, None without left padding. Kept here so that
            later calls need no attention mask.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin]) -> None:
        super().__init__(layers=list(layers))
        self.seq_start_B: Tensor | None = None

    def reset(self) -> None:
        super().reset()
        self.seq_start_B = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B.index_select(0, beam_idx.to(self.seq_start_B.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B[indices]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. As in transformers, the argument is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; pass a negative number to remove that many tokens from the end"
            )
        if tokens_to_remove < 0:
            super().crop(tokens_to_remove)


class LayerCache(CacheLayerMixin):
    """What the layer caches share. A subclass says in `_map` which tensors it holds, batch axis first."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device of what is to be cached. The tensors themselves start with the first update."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def get_max_length(self) -> int:
        return -1  # transformers' word for "no limit"

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices])

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to every tensor held."""
        raise NotImplementedError


class AttentionCache(LayerCache):
    """Keys and values of the past tokens, all of them or those a sliding window can still reach.

    Attributes (None before the first update):
        keys, values: `(B, G, N, D)`, after rotation, ready for attention.
        num_dropped: tokens that came before `keys[:, :, 0]` and are no longer held.

    With a window of w tokens the next query sees w - 1 past keys. Those and CROP_HISTORY more are kept, so that `crop`
    can take back that many tokens.
    """

    CROP_HISTORY = 128
    is_croppable = True

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None
        self.num_dropped = 0
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions `(B, G, T, D)`; return all the new ones can see, themselves included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys is not None:
            key_states = torch.cat((self.keys, key_states), dim=2)
            value_states = torch.cat((self.values, value_states), dim=2)
        self.keys, self.values = key_states, value_states
        if self.window is not None:
            num_kept = self.window - 1 + self.CROP_HISTORY
            surplus = key_states.shape[2] - num_kept
            if surplus > 0:
                # Copies: views of the last rows would keep the whole prompt alive.
                self.keys, self.values = key_states[:, :, surplus:].clone(), value_states[:, :, surplus:].clone()
                self.num_dropped += surplus
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.num_dropped + self.keys.shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        length = self.get_seq_length()
        if tokens_to_remove == 0 or length == 0:
            return
        if length + tokens_to_remove <= 0:
            self.reset()
            return
        num_held = self.keys.shape[2] + tokens_to_remove
        if self.num_dropped and num_held < self.window - 1:
            raise ValueError(
                f"cannot remove {-tokens_to_remove} tokens from the cache: a sliding window of {self.window} keeps "
                f"{self.CROP_HISTORY} more tokens than it needs. Reset the cache and run the prompt again"
            )
        self.keys, self.values = self.keys[:, :, :num_held], self.values[:, :, :num_held]

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None:
            self.keys, self.values = fn(self.keys), fn(self.values)


class RecurrentCache(LayerCache):
    """States of a recurrent mixer, whose size does not depend on the number of tokens.

    Attributes:
        states: name → tensor, batch axis first. Empty before the first update.
        num_tokens: how many tokens the states sum up.

    A state cannot be taken back in time, so `crop` can only empty the cache.
    """

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, Tensor] = {}
        self.num_tokens = 0
        self.is_initialized = False

    def update(self, num_new_tokens: int, **states: Tensor) -> None:
        """Replace the states by those `num_new_tokens` later."""
        self.states = states
        self.num_tokens += num_new_tokens
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        if self.num_tokens + tokens_to_remove <= 0:
            self.reset()
        elif tokens_to_remove < 0:
            raise ValueError(
                f"cannot remove {-tokens_to_remove} tokens from the cache: a recurrent state cannot be taken back. "
                "Reset the cache and run the prompt again"
            )

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.states = {name: fn(state) for name, state in self.states.items()}


class ForgettingAttentionCache(LayerCache):
    """Keys, values and forget gates of all past tokens, and the last outputs of shifted projections.

    Attributes (None before the first update):
        keys, values: `(B, H, N, D)`, after normalisation and rotation, ready for attention.
        log_fgate: `(B, H, N)`, float32.
        shift_states: name → `(B, up to SHIFT_HISTORY, E)`, what a `ShiftLinear` computed before mixing at the last
            tokens. One token is enough to go on; more of them allow `crop`.
    """

    SHIFT_HISTORY = 128
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = self.log_fgate = None
        self.shift_states: dict[str, Tensor] = {}
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, log_fgate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append new positions (keys and values `(B, H, T, D)`, gates `(B, H, T)`); return past and new together."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys is None:
            self.keys, self.values, self.log_fgate = key_states, value_states, log_fgate
        else:
            self.keys = torch.cat((self.keys, key_states), dim=2)
            self.values = torch.cat((self.values, value_states), dim=2)
            self.log_fgate = torch.cat((self.log_fgate, log_fgate), dim=2)
        return self.keys, self.values, self.log_fgate

    def last_shift_state(self, name: str) -> Tensor | None:
        """The un-mixed output `(B, E)` of the shifted projection `name` at the last cached token."""
        return self.shift_states[name][:, -1] if name in self.shift_states else None

    def update_shift_state(self, name: str, y_BTE: Tensor) -> None:
        """Append un-mixed outputs of the shifted projection `name`."""
        if name in self.shift_states:
            y_BTE = torch.cat((self.shift_states[name], y_BTE), dim=1)
        # A copy: a view of the last rows would keep the whole prompt alive.
        self.shift_states[name] = y_BTE[:, -self.SHIFT_HISTORY :].clone()

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        length = self.get_seq_length()
        kept = length + tokens_to_remove
        if tokens_to_remove == 0 or length == 0:
            return
        if kept <= 0:
            self.reset()
            return
        for name, y_BNE in self.shift_states.items():
            kept_states = y_BNE.shape[1] + tokens_to_remove
            if kept_states < 1:
                raise ValueError(
                    f"cannot remove {-tokens_to_remove} tokens from the cache: the token shift remembers "
                    f"{y_BNE.shape[1]} tokens, and needs one that stays. Reset the cache and run the prompt again"
                )
            self.shift_states[name] = y_BNE[:, :kept_states]
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.log_fgate = self.log_fgate[:, :, :kept]

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.keys is None:
            return
        self.keys, self.values, self.log_fgate = fn(self.keys), fn(self.values), fn(self.log_fgate)
        self.shift_states = {name: fn(y) for name, y in self.shift_states.items()}
