"""Memory of a decoder between calls of generation.

`DecoderCache` holds one layer cache per block, made by the block's mixer. A layer cache is a Hugging Face
`CacheLayerMixin`; generation moves its batch axis around (beam search, several samples per prompt) and shortens it
(assisted decoding), so every tensor a mixer stores must follow. Tensors that grow with every token are in buffers with
room to spare (`growing.py`).

A cache may be made static for a while: then none of its tensors moves in memory or changes its shape, and while
`DecodingGraph` computes a single token, a tensor on the device says where it is written (`Slot`). So a CUDA graph of
one token serves many (`graph.py`).

Axes: `forgetting_transformer/ops/__init__.py`. A buffer has room for more positions than N.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from forgetting_transformer.model.generation.growing import GrowingTensor
from forgetting_transformer.ops import context
from forgetting_transformer.ops.forgetting_attention import cumulative_log_fgate

#: Name of the cache in transformers' outputs and in the arguments of `generate`: "cache" since version 5.24.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


class Slot(NamedTuple):
    """Slot of a static cache in which its layers write the next token, counted from the sequence's first token.

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

    def behind(self, count: int) -> "Slot":
        """Returns this slot, counted from the token after the first `count`."""
        if not count:
            return self
        return Slot(self.last - count, self.new - count, self.end_B - count, self.limit - count)


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that is given under one of its two names, or None.

    Raises:
        ValueError: both are given.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("cache and past_key_values are both given; they mean the same, leave one out")
    return past_key_values if cache is None else cache


def cache_of_call(
    decoder: Any, past_key_values: Any, cache: Any, use_cache: bool | None, is_packed: bool
) -> tuple["DecoderCache | None", bool]:
    """The cache of a decoder's call, an empty one where the call shall return one, and whether it shall.

    Raises:
        ValueError, TypeError: both names of the cache are given, or what is given is another kind of cache.
    """
    past = one_cache(past_key_values, cache)
    if past is not None and not isinstance(past, DecoderCache):
        raise TypeError(
            f"past_key_values is a {type(past).__name__}; pass the one a former call returned, model.new_cache(), or "
            "None"
        )
    if past is not None and past.slot is not None and not past.is_writing:
        past.make_dynamic()
    if use_cache is None:
        use_cache = decoder.config.use_cache and not (decoder.training or is_packed or context.active() is not None)
    if use_cache and past is None:
        past = decoder.new_cache()
    return past, use_cache


class DecoderCache(Cache):
    """One layer cache per block, and where each sequence starts.

    Attributes:
        seq_start_B: index of the first real token of each sequence `(B,)`, None without left padding. Kept here so that
            later calls need no attention mask.
        graph: runs single tokens as a CUDA graph (`graph.py`); None without graphs.
        slot: where its graph writes the next token; None while the cache is not static.
        is_writing: whether a token is being written there.
    """

    layers: Any

    def __init__(self, layers: Sequence[CacheLayerMixin]) -> None:
        super().__init__(layers=list(layers))
        self.seq_start_B: Tensor | None = None
        self.graph: Any = None
        self.slot: Slot | None = None
        self.is_writing = False

    @classmethod
    def of_mixers(cls, mixers: Sequence[Any]) -> "DecoderCache":
        """An empty cache for these mixers, one per block."""
        for name in sorted({type(mixer).__name__ for mixer in mixers if not hasattr(mixer, "new_cache")}):
            raise TypeError(
                f"{name} has no new_cache(), so nothing can be generated with a cache: give it one "
                "(docs/extend.md), or generate with use_cache=False"
            )
        return cls([mixer.new_cache() for mixer in mixers])

    @property
    def position_BT(self) -> Tensor | None:
        """Rotary position `(1, 1)` of a token that is written in place; None: tokens count from those that are held."""
        return None if self.slot is None else self.slot.new[None]

    def make_static(self, batch: int, device: torch.device) -> Slot:
        """Make the cache static for the next tokens, one by one; needs cached tokens and mixers with `static_cache`.

        Args:
            batch: B.
            device: of the tokens.
        """
        length = self.get_seq_length()
        limit = length + min(layer.reserve() for layer in self.layers)
        last = torch.tensor([length - 1], device=device)
        self.slot = Slot(last, last + 1, (last + 2).expand(batch).clone(), limit)
        for layer in self.layers:
            layer.make_static()
        if self.seq_start_B is not None:
            self.seq_start_B = self.seq_start_B.clone()
        return self.slot

    def make_dynamic(self) -> None:
        """Undo `make_static`, and keep the tokens since then. Every other change of the cache calls it first."""
        if self.graph is not None:
            self.graph.interrupt()
        self.release()

    def release(self) -> None:
        """Make the cache dynamic for the graph itself, without an interruption of the graph."""
        if self.slot is not None:
            self.slot = None
            for layer in self.layers:
                layer.make_dynamic()

    @contextlib.contextmanager
    def writing_in_place(self) -> Iterator[None]:
        """Let layers write a single token at `slot`, in buffers that keep their addresses; for a static cache."""
        assert self.slot is not None
        # Layers that have dropped their first tokens count from the first that is left.
        behind = functools.cache(self.slot.behind)
        for layer in self.layers:
            layer.begin_writing(behind)
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False
            for layer in self.layers:
                layer.slot = None

    def advance(self) -> None:
        """Count a token that every layer has written in place."""
        for layer in self.layers:
            layer.advance()

    def reset(self) -> None:
        self.make_dynamic()
        if self.graph is not None:
            self.graph.reset()
        super().reset()
        self.seq_start_B = None

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


class LayerCache(CacheLayerMixin):
    """Base of layer caches. A subclass applies a function to its tensors in `_map`, batch axis first.

    Attributes:
        slot: where a token is to be written, counted from the first that is held, while one is written in place;
            otherwise None.
        num_dropped: tokens that came before the first that is held.
    """

    is_sliding = False
    num_dropped = 0
    slot: Slot | None = None

    def reserve(self) -> int:
        """Make room for the next tokens; returns for how many."""
        raise NotImplementedError

    def make_static(self) -> None:
        """Keep tensors at fixed addresses from now on, each its own copy. Called after `reserve`."""

    def make_dynamic(self) -> None:
        """Undo `make_static`."""

    def begin_writing(self, behind: Callable[[int], Slot]) -> None:
        """Note where a token is to be written; `behind` gives the slot behind so many tokens."""
        self.slot = behind(self.num_dropped)

    def advance(self) -> None:
        """Count a token that was written in place."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device of the tensors to cache. The tensors themselves start with the first update."""
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


def log_fgate_of(cum_log_fgate_BHN: Tensor) -> Tensor:
    """The gates `(B, H, N)`, float32, as differences of their running sums; the first is 0, and acts on nothing."""
    return cum_log_fgate_BHN.diff(dim=2, prepend=cum_log_fgate_BHN[:, :, :1]).float()


class Held(NamedTuple):
    """Keys that new tokens read, with their values and gates.

    Attributes:
        keys, values: `(B, G, N, D)`, the new ones included. In a static cache whole buffers.
        cum_log_fgate: running sums of log f `(B, H, N)`, float64 (`cumulative_log_fgate`); None without gates.
        first: number of tokens of the sequence before `keys[:, :, 0]`.
    """

    keys: Tensor
    values: Tensor
    cum_log_fgate: Tensor | None
    first: int


class AttentionCache(LayerCache):
    """Keys and values of past tokens, running sums of their log forget gates, last outputs of shifted projections.

    With a window of w tokens the next query sees w - 1 past keys. These and CROP_HISTORY more are kept, so that `crop`
    can take back that many tokens.

    Args:
        window: keys that a query sees; None is all.

    Attributes (None before the first update):
        keys, values: `(B, G, N, D)`, after normalisation and rotation, ready for attention. Views of buffers
            (`GrowingTensor`).
        cum_log_fgate: running sums of log f `(B, H, N)`, float64; None without gates.
        num_dropped: tokens that came before `keys[:, :, 0]` and are no longer held.
    """

    CROP_HISTORY = 128
    SHIFT_HISTORY = 128
    is_croppable = True
    keys: Any
    values: Any
    cum_log_fgate: Tensor | None

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.reset()

    def reset(self) -> None:
        self._tensors: tuple[GrowingTensor, ...] = ()
        self.is_initialized = False
        self.num_dropped = 0
        # Outputs of each `ShiftLinear` before mixing, at the last tokens: one to go on from, and others for `crop`.
        self._shifts: dict[str, GrowingTensor] = {}
        self._refresh()

    def update(  # type: ignore[override]  # says too where keys begin
        self, key_states: Tensor, value_states: Tensor, log_fgate: Tensor | None = None
    ) -> Held:
        """Append keys and values `(B, G, T, D)` and gates `(B, H, T)` of new tokens; return all that these can see."""
        new = [key_states, value_states]
        if log_fgate is not None:
            new.append(cumulative_log_fgate(log_fgate, self._last_sum(), head_first=True))
        if self.slot is not None:
            for x, new_x in zip(self._tensors, new, strict=True):
                x.write(self.slot.new, new_x)
            return self._held(0)
        if not self._tensors:
            self.lazy_initialization(key_states, value_states)
            self._tensors = tuple(GrowingTensor(x) for x in new)
        else:
            for x, new_x in zip(self._tensors, new, strict=True):
                x.append(new_x)
        length, kept = self._tensors[0].length, sys.maxsize if self.window is None else self.window - 1
        held = self._held(max(0, length - kept - key_states.shape[2]))
        surplus = max(0, length - kept - self.CROP_HISTORY)
        for x in self._tensors:
            x.drop_first(surplus)
        self.num_dropped += surplus
        self._refresh()
        return held

    def _held(self, hidden: int) -> Held:
        """All cached positions but the first `hidden`, which no new token sees."""
        tensors = [x.contents if self.slot is None else x.whole for x in self._tensors]
        keys, values, *sums = [x[:, :, hidden:] for x in tensors] if hidden else tensors
        return Held(keys, values, sums[0] if sums else None, self.num_dropped + hidden)

    def _last_sum(self) -> Tensor | None:
        if self.cum_log_fgate is None:
            return None
        if self.slot is None:
            return self.cum_log_fgate[:, :, -1:]
        return self._tensors[2].whole.index_select(2, self.slot.last)

    def reserve(self) -> int:
        return min(x.reserve() for x in self._growing())

    def begin_writing(self, behind: Callable[[int], Slot]) -> None:
        super().begin_writing(behind)
        for x in self._shifts.values():  # all hold as many tokens
            self._shift_slot = behind(self.get_seq_length() - x.length)

    def advance(self) -> None:
        for x in self._growing():
            x.advance()
        self._refresh()

    def _growing(self) -> list[GrowingTensor]:
        return [*self._tensors, *self._shifts.values()]

    def last_shift_state(self, name: str) -> Tensor | None:
        """The un-mixed output `(B, E)` of the shifted projection `name` at the last cached token."""
        if (x := self._shifts.get(name)) is None:
            return None
        if self.slot is None:
            return x.contents[:, 0, -1]
        return x.whole.index_select(2, self._shift_slot.last)[:, 0, 0]

    def update_shift_state(self, name: str, y_BTE: Tensor) -> None:
        """Append un-mixed outputs of the shifted projection `name`."""
        y_B1TE, x = y_BTE[:, None], self._shifts.get(name)
        if x is None:
            # A copy: a view of the last rows would keep the whole prompt alive.
            self._shifts[name] = GrowingTensor(y_B1TE[:, :, -self.SHIFT_HISTORY :].clone())
        elif self.slot is not None:
            x.write(self._shift_slot.new, y_B1TE)
        else:
            x.append(y_B1TE)
            x.drop_first(max(0, x.length - self.SHIFT_HISTORY))

    def get_seq_length(self) -> int:
        return self.num_dropped + (self._tensors[0].length if self._tensors else 0)

    def _drop_last(self, count: int) -> None:
        if self.window is not None and self.num_dropped and self.keys.shape[2] - count < self.window - 1:
            raise ValueError(
                f"cannot remove {count} tokens from the cache: a sliding window of {self.window} keeps "
                f"{self.CROP_HISTORY} more tokens than it needs. Reset the cache and run the prompt again"
            )
        for x in self._shifts.values():
            if x.length <= count:
                raise ValueError(
                    f"cannot remove {count} tokens from the cache: the token shift remembers {x.length} tokens, "
                    "and needs one that stays. Reset the cache and run the prompt again"
                )
        for x in self._growing():
            x.drop_last(count)
        self._refresh()

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for x in self._growing():
            x.map(fn)
        self._refresh()

    def _refresh(self) -> None:
        held: list[Any] = [x.contents for x in self._tensors]
        self.keys, self.values, self.cum_log_fgate = held + [None] * (3 - len(held))
