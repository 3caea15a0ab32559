"""What a decoder remembers between calls of generation.

`DecoderCache` holds one layer cache per block, made by the block's mixer. A layer cache is a Hugging Face
`CacheLayerMixin`; generation moves its batch axis around (beam search, several samples per prompt) and shortens it
(assisted decoding), so every tensor a mixer stores must follow.

What grows with every token lives in buffers with room to spare, so that a new token is written beside the old ones and
the old ones are not copied for it.

A cache may be made static for a while: then nothing that it holds moves in memory or changes its shape, and while
`DecodingGraph` computes a single token, it is written where a tensor on the device says (`Place`). So a CUDA graph of
one token serves many (`decoding_graph.py`).

Axes: `forgetting_transformer/ops/__init__.py`. A buffer has room for more positions than N.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from forgetting_transformer.ops.forgetting_attention import cumulative_log_fgate

#: How transformers names the cache in outputs and in the arguments of `generate`: "cache" since version 5.24.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


class Place(NamedTuple):
    """Where the layers of a static cache write the next token, counted from the first token of the sequence.

    Attributes:
        last: `(1,)`, int64, the newest token that is held.
        new: `(1,)`, int64, the one after it.
        end_B: `(B,)`, int64, the one after that.
        limit: tokens up to which there is room.
    """

    last: Tensor
    new: Tensor
    end_B: Tensor
    limit: int

    def advance(self) -> None:
        for x in (self.last, self.new, self.end_B):
            x.add_(1)


class GrowingTensor:
    """A tensor that grows at the end of its third axis and may shrink at both: part of a buffer `(B, G, room, …)`.

    A full buffer is replaced by one with room for half as many positions again. So however many tokens come one by
    one, each is copied three times or less on average. The first positions stay where they came from, and are never
    written to: a cache that nothing is added to costs nothing.

    Args:
        x: the first positions `(B, G, T, …)`.
    """

    GROWTH = 1.5
    MIN_ROOM = 64  # positions
    # Capacities are multiples of this, so that kernels are compiled for one kind of length.
    STEP = 16
    _buffer: Tensor

    def __init__(self, x: Tensor) -> None:
        self._replace(x, is_own=False)

    @property
    def contents(self) -> Tensor:
        """What is held `(B, G, N, …)`, a view. After positions were taken back, new ones overwrite them in it."""
        return self._buffer[:, :, self._start : self._stop]

    @property
    def length(self) -> int:
        """N, positions that are held."""
        return self._stop - self._start

    @property
    def capacity(self) -> int:
        """Positions that `whole` has room for, those that are held included."""
        return self._buffer.shape[2] - self._start

    @property
    def whole(self) -> Tensor:
        """`contents` and the room behind them, a view."""
        return self._buffer[:, :, self._start :]

    def reserve(self) -> int:
        """Make room for a few dozen more positions, in a buffer that may be written; returns for how many."""
        if self.capacity - self.length < self.MIN_ROOM // 2 or self._must_copy():
            self._grow(self.length)
        return self.capacity - self.length

    def write(self, at: Tensor, x: Tensor) -> None:
        """Write a position `(B, G, 1, …)` at `at` `(1,)` in `whole`; `advance` then says that it is held."""
        self.whole.index_copy_(2, at, x.to(self._buffer.dtype))

    def advance(self) -> None:
        self._stop += 1

    def append(self, x: Tensor) -> None:
        """Add positions `(B, G, T, …)` at the end."""
        if torch.is_grad_enabled():
            # Earlier calls saved views of the buffer for their backward pass; writing into it would destroy them.
            self._replace(torch.cat((self.contents, x), dim=2), is_own=False)
            return
        if self._stop + x.shape[2] > self._buffer.shape[2] or self._must_copy():
            self._grow(self.length + x.shape[2])
        self._buffer[:, :, self._stop : self._stop + x.shape[2]] = x
        self._stop += x.shape[2]

    def drop_first(self, count: int) -> None:
        """Forget the first positions. Their memory is given back when the buffer is full."""
        self._start += count
        if count and self._stop == self._buffer.shape[2]:
            self._replace(self.contents.clone(), is_own=True)

    def drop_last(self, count: int) -> None:
        self._stop -= count

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of the batch axis, which returns a new tensor."""
        self._buffer, self._is_own = fn(self._buffer), True

    def _must_copy(self) -> bool:
        # Buffers made in inference mode can be written in inference mode only.
        return not self._is_own or (self._buffer.is_inference() and not torch.is_inference_mode_enabled())

    def _grow(self, needed: int) -> None:
        held = self.contents
        capacity = max(int(needed * self.GROWTH), needed + self.MIN_ROOM) // self.STEP * self.STEP
        buffer = held.new_empty((*held.shape[:2], capacity, *held.shape[3:]))
        buffer[:, :, : held.shape[2]] = held
        self._replace(buffer, is_own=True)
        self._stop = held.shape[2]

    def _replace(self, buffer: Tensor, *, is_own: bool) -> None:
        self._buffer, self._is_own = buffer, is_own
        self._start, self._stop = 0, buffer.shape[2]


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that is given under one of its two names, or None.

    Raises:
        ValueError: both are given.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("cache and past_key_values are both given; they mean the same, leave one out")
    return past_key_values if cache is None else cache


class DecoderCache(Cache):
    """One layer cache per block, and where each sequence starts.

    Attributes:
        seq_start_B: index of the first real token of each sequence `(B,)`, None without left padding. Kept here so that
            later calls need no attention mask.
        has_position_ids: whether the caller gave positions of the last tokens. Then the next ones need them too.
        graph: runs single tokens as a CUDA graph (`decoding_graph.py`); None where none was asked for.
        place: where its graph writes the next token; None while the cache is not static.
        is_writing: whether a token is being written there.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin]) -> None:
        super().__init__(layers=list(layers))
        self.seq_start_B: Tensor | None = None
        self.has_position_ids = False
        self.graph: Any = None
        self.place: Place | None = None
        self.is_writing = False

    def make_static(self, batch: int, device: torch.device) -> Place:
        """Hold still for the next tokens, one by one; only where tokens are held, for mixers with `static_cache`.

        Args:
            batch: B.
            device: of the tokens.
        """
        layers: Sequence[Any] = self.layers
        length = self.get_seq_length()
        limit = length + min(layer.reserve() for layer in layers)
        last = torch.tensor([length - 1], device=device)
        self.place = Place(last, last + 1, (last + 2).expand(batch).clone(), limit)
        for layer in layers:
            layer.make_static()
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B.clone()
        return self.place

    def make_dynamic(self) -> None:
        """Be as before `make_static`, with the tokens that have come. All that changes other things calls it first."""
        if self.graph is not None:
            self.graph.interrupt()
        self.release()

    def release(self) -> None:
        """`make_dynamic` for the graph itself, which nothing interrupts."""
        if self.place is not None:
            self.place = None
            layers: Sequence[Any] = self.layers
            for layer in layers:
                layer.make_dynamic()

    @contextlib.contextmanager
    def writing_in_place(self) -> Iterator[None]:
        """For a single token of a static cache: layers write it at `place`, in buffers that keep their addresses."""
        layers: Sequence[Any] = self.layers
        for layer in layers:
            layer.place = self.place
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False
            for layer in layers:
                layer.place = None

    def holds(self, length: int) -> bool:
        """Whether every layer has so many tokens."""
        layers: Sequence[Any] = self.layers
        return all(layer.get_seq_length() == length for layer in layers)

    def advance(self) -> None:
        """Count a token that every layer has written in place."""
        layers: Sequence[Any] = self.layers
        for layer in layers:
            layer.advance()

    def reset(self) -> None:
        self.make_dynamic()
        if self.graph is not None:
            self.graph.reset()
        super().reset()
        self.seq_start_B = None
        self.has_position_ids = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.make_dynamic()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B.index_select(0, beam_idx.to(self.seq_start_B.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.make_dynamic()
        super().batch_repeat_interleave(repeats)
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.make_dynamic()
        super().batch_select_indices(indices)
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B[indices]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. As in transformers, the argument is minus their number."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor, and lengths are numbers
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; pass a negative number, -n, to remove the last n tokens"
            )
        if tokens_to_remove < 0:
            self.make_dynamic()
            super().crop(tokens_to_remove)
            if self.get_seq_length() == 0:
                self.seq_start_B = None
                self.has_position_ids = False


class LayerCache(CacheLayerMixin):
    """What the layer caches share. A subclass says in `_map` which tensors it holds, batch axis first.

    Attributes:
        place: where a token is to be written, while one is written in place; otherwise None.
    """

    is_sliding = False
    place: Place | None = None

    def reserve(self) -> int:
        """Make room for the next tokens; returns for how many."""
        raise NotImplementedError

    def make_static(self) -> None:
        """Hold still from now on, and let no tensor be another's. `reserve` came before."""

    def make_dynamic(self) -> None:
        """Be as before `make_static`."""

    def advance(self) -> None:
        """Count a token that was written in place."""
        raise NotImplementedError

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

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        length = self.get_seq_length()
        if tokens_to_remove == 0 or length == 0:
            return
        if length + tokens_to_remove <= 0:
            self.reset()
        else:
            self._drop_last(-tokens_to_remove)

    def _drop_last(self, count: int) -> None:
        """Forget the last `count` tokens, of more."""
        raise NotImplementedError

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to every tensor held."""
        raise NotImplementedError


class GrowingCache(LayerCache):
    """A layer cache of tensors that grow with every token, under the names that `growing` lists: views of buffers."""

    is_croppable = True
    growing: ClassVar[tuple[str, ...]] = ("keys", "values")
    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self._tensors: tuple[GrowingTensor, ...] = ()
        self.is_initialized = False
        self._refresh()

    def reserve(self) -> int:
        return min(x.reserve() for x in self._tensors)

    def advance(self) -> None:
        for x in self._tensors:
            x.advance()
        self._refresh()

    def _in_use(self, index: int) -> Tensor:
        """What attention gets of a growing tensor: what it holds, or, written in place, its whole buffer."""
        x = self._tensors[index]
        return x.contents if self.place is None else x.whole

    def _append(self, *new: Tensor) -> None:
        """Add new positions at the end of the growing tensors, or make these of them."""
        if self.place is not None:
            for x, new_x in zip(self._tensors, new, strict=True):
                x.write(self.place.new, new_x)
            return
        if not self._tensors:
            self.lazy_initialization(*new[:2])
            self._tensors = tuple(GrowingTensor(x) for x in new)
        else:
            for x, new_x in zip(self._tensors, new, strict=True):
                x.append(new_x)
        self._refresh()

    def _drop_last(self, count: int) -> None:
        for x in self._tensors:
            x.drop_last(count)
        self._refresh()

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for x in self._tensors:
            x.map(fn)
        self._refresh()

    def _refresh(self) -> None:
        for i, name in enumerate(self.growing):
            setattr(self, name, self._tensors[i].contents if self._tensors else None)

    @property
    def num_held(self) -> int:
        """N, positions of the growing tensors that are in use."""
        return self._tensors[0].length if self._tensors else 0


class AttentionCache(GrowingCache):
    """Keys and values of the past tokens, all of them or those a sliding window can still reach.

    Attributes (None before the first update):
        keys, values: `(B, G, N, D)`, after rotation, ready for attention. Views of buffers: see `GrowingTensor`.
        num_dropped: tokens that came before `keys[:, :, 0]` and are no longer held.

    With a window of w tokens the next query sees w - 1 past keys. Those and CROP_HISTORY more are kept, so that `crop`
    can take back that many tokens.
    """

    CROP_HISTORY = 128

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def reset(self) -> None:
        super().reset()
        self.num_dropped = 0

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions `(B, G, T, D)`; return all the new ones can see, themselves included.

        Written in place, the whole buffers.
        """
        self._append(key_states, value_states)
        key_states, value_states = self._in_use(0), self._in_use(1)
        if self.window is not None:
            surplus = max(0, key_states.shape[2] - (self.window - 1 + self.CROP_HISTORY))
            for x in self._tensors:
                x.drop_first(surplus)
            self.num_dropped += surplus
            self._refresh()
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.num_dropped + self.num_held

    def _drop_last(self, count: int) -> None:
        if self.window is not None and self.num_dropped and self.keys.shape[2] - count < self.window - 1:
            raise ValueError(
                f"cannot remove {count} tokens from the cache: a sliding window of {self.window} keeps "
                f"{self.CROP_HISTORY} more tokens than it needs. Reset the cache and run the prompt again"
            )
        super()._drop_last(count)


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

    def reserve(self) -> int:
        return sys.maxsize

    def make_static(self) -> None:
        self.states = {name: state.clone() for name, state in self.states.items()}

    def advance(self) -> None:
        self.num_tokens += 1

    def update(  # type: ignore[override]  # states instead of keys and values
        self, num_new_tokens: int, **states: Tensor
    ) -> None:
        """Replace the states by those `num_new_tokens` later; written in place, what they hold, and count nothing."""
        if self.place is not None:
            shapes, old = ({name: tuple(x.shape) for name, x in of.items()} for of in (states, self.states))
            if shapes != old:
                raise ValueError(
                    f"the states of a mixer were {old} and are {shapes} after one more token; a mixer with "
                    "static_cache = True must keep their names and shapes. Leave static_cache out"
                )
            for name, state in states.items():
                self.states[name].copy_(state)
            return
        self.states = states
        self.num_tokens += num_new_tokens
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.num_tokens

    def _drop_last(self, count: int) -> None:
        raise ValueError(
            f"cannot remove {count} tokens from the cache: a recurrent state cannot be taken back. Reset the cache and "
            "run the prompt again"
        )

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.states = {name: fn(state) for name, state in self.states.items()}


class ForgettingAttentionCache(GrowingCache):
    """Keys, values and running sums of log forget gates of past tokens, and the last outputs of shifted projections.

    Args:
        keeps_key_norm: also keep the largest norm of each head's keys, for pruning bounds.

    Attributes (None before the first update):
        keys, values: `(B, H, N, D)`, after normalisation and rotation, ready for attention. Views of
            buffers (`GrowingTensor`).
        cum_log_fgate: running sums of log f `(B, H, N)`, float64: see `cumulative_log_fgate`.
        max_key_norm: `(B, H)`, float32, no less than the norm of any key. None unless wanted.
        shift_states: name → `(B, up to SHIFT_HISTORY, E)`, what a `ShiftLinear` computed before mixing at the last
            tokens. One token is enough to go on; more of them allow `crop`.
    """

    SHIFT_HISTORY = 128
    growing = ("keys", "values", "cum_log_fgate")
    cum_log_fgate: Tensor | None

    def __init__(self, keeps_key_norm: bool = False) -> None:
        super().__init__()
        self.keeps_key_norm = keeps_key_norm

    def reset(self) -> None:
        super().reset()
        self.max_key_norm: Tensor | None = None
        self.shift_states: dict[str, Tensor] = {}
        # Of a static cache: the first entries of its shift states that are of no token.
        self._num_missing = 0

    @property
    def log_fgate(self) -> Tensor | None:
        """The gates `(B, H, N)`, float32, as differences of their running sums; the first is 0, and acts on nothing."""
        if self.cum_log_fgate is None:
            return None
        return self.cum_log_fgate.diff(dim=2, prepend=self.cum_log_fgate[:, :, :1]).float()

    def update(self, key_states: Tensor, value_states: Tensor, log_fgate: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions (keys and values `(B, H, T, D)`, gates `(B, H, T)`); return all keys and values.

        Written in place, the whole buffers.
        """
        if self.cum_log_fgate is None:
            previous = None
        elif self.place is None:
            previous = self.cum_log_fgate[:, :, -1:]
        else:
            previous = self.running.index_select(2, self.place.last)
        running = cumulative_log_fgate(log_fgate, previous, head_first=True)
        self._append(key_states, value_states, running)
        if self.keeps_key_norm:
            norm = key_states.detach().float().norm(dim=-1).amax(-1)
            if self.max_key_norm is None:
                self.max_key_norm = norm
            elif self.place is None:
                self.max_key_norm = torch.maximum(self.max_key_norm, norm)
            else:
                torch.maximum(self.max_key_norm, norm, out=self.max_key_norm)
        return self._in_use(0), self._in_use(1)

    @property
    def running(self) -> Tensor:
        """`cum_log_fgate`, or the whole buffer, as the keys that `update` returns."""
        return self._in_use(2)

    def make_static(self) -> None:
        if self.max_key_norm is not None:
            self.max_key_norm = self.max_key_norm.clone()
        if self.shift_states:
            # Of one length, however few tokens are remembered.
            missing = self.SHIFT_HISTORY - next(iter(self.shift_states.values())).shape[1]
            padded = {name: F.pad(y_BNE, (0, 0, missing, 0)).clone() for name, y_BNE in self.shift_states.items()}
            self.shift_states, self._num_missing = padded, missing

    def make_dynamic(self) -> None:
        self.shift_states = {name: y_BNE[:, self._num_missing :] for name, y_BNE in self.shift_states.items()}
        self._num_missing = 0

    def advance(self) -> None:
        super().advance()
        self._num_missing = max(0, self._num_missing - 1)

    def last_shift_state(self, name: str) -> Tensor | None:
        """The un-mixed output `(B, E)` of the shifted projection `name` at the last cached token."""
        return self.shift_states[name][:, -1] if name in self.shift_states else None

    def update_shift_state(self, name: str, y_BTE: Tensor) -> None:
        """Append un-mixed outputs of the shifted projection `name`."""
        if name in self.shift_states:
            y_BTE = torch.cat((self.shift_states[name], y_BTE), dim=1)
        if self.place is not None:
            self.shift_states[name].copy_(y_BTE[:, 1:])
            return
        # A copy: a view of the last rows would keep the whole prompt alive.
        self.shift_states[name] = y_BTE[:, -self.SHIFT_HISTORY :].clone()

    def get_seq_length(self) -> int:
        return self.num_held

    def _drop_last(self, count: int) -> None:
        for name, y_BNE in self.shift_states.items():
            if y_BNE.shape[1] <= count:
                raise ValueError(
                    f"cannot remove {count} tokens from the cache: the token shift remembers {y_BNE.shape[1]} tokens, "
                    "and needs one that stays. Reset the cache and run the prompt again"
                )
            self.shift_states[name] = y_BNE[:, :-count]
        super()._drop_last(count)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        super()._map(fn)
        if self.max_key_norm is not None:
            self.max_key_norm = fn(self.max_key_norm)
        self.shift_states = {name: fn(y) for name, y in self.shift_states.items()}
