"""Base of mixers with a few states of fixed size as their memory of the past.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from forgetting_transformer.model.generation.cache import LayerCache
from forgetting_transformer.model.span import Span


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
        """Replace the states by those `num_new_tokens` later; in place, only their values, without counting."""
        if self.slot is not None:
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


class RecurrentMixer(nn.Module):
    """A recurrent mixer. Subclasses define `mix`, and set `num_heads` if they call `split_heads`."""

    takes_span = True
    num_heads: int

    def new_cache(self) -> RecurrentCache:
        return RecurrentCache()

    def forward(
        self, hidden_BTE: Tensor, span: Span | None = None, **options: Any
    ) -> tuple[Tensor, RecurrentCache | None]:
        """Return the output `(B, T, E)` and the cache.

        Args:
            hidden_BTE: T new tokens.
            span: facts about them. Default: whole sequences, without a cache.
            options: further arguments of `mix`.
        """
        span = span or Span()
        cache: Any = span.cache
        states = {} if cache is None else cache.states
        packed = {} if span.cu_seqlens is None else {"span": span}
        mixed = self.mix(hidden_BTE, span.padding_BT, states, **options, **packed)
        if not isinstance(mixed, tuple | list) or len(mixed) != 2 or not isinstance(mixed[1], Mapping):
            raise TypeError(
                f"{type(self).__name__}.mix must return a tuple of the output {tuple(hidden_BTE.shape)} and a "
                f"dictionary of states, {{}} if it has none; it returned a {type(mixed).__name__}"
            )
        out_BTE, new_states = mixed
        if cache is not None:
            cache.update(hidden_BTE.shape[1], **new_states)
        return out_BTE, cache

    def mix(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """`mix(hidden_BTE, padding_BT, states)`: the output `(B, T, E)`, and the states after the last token by name,
        batch axis first.

        Args:
            hidden_BTE: T new tokens.
            padding_BT: True for left padding, which must change no state (`zero_padding`); None if there is none.
            states: as the call for the tokens before returned them; empty if there are none.

        A mixer with `packs_documents` also takes the keyword `span`, of packed documents.
        """
        raise NotImplementedError(f"{type(self).__name__} must define mix")

    def split_heads(self, x_BTC: Tensor) -> Tensor:
        """`(B, T, C)` to `(B, T, H, C / H)`."""
        return x_BTC.unflatten(-1, (self.num_heads, -1))


def zero_padding(x_BTC: Tensor, padding_BT: Tensor | None) -> Tensor:
    """Set left-padded positions to 0.

    A recurrence that starts from a state of 0, with inputs of 0 there, meets its first real token as if nothing came
    before it.
    """
    return x_BTC if padding_BT is None else x_BTC.masked_fill(padding_BT[..., None], 0)
