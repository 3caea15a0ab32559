"""Base of mixers with a few states of fixed size as their memory of the past; their layers and initial weights.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.generation.cache import LayerCache
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.layers.short_convolution import short_convolution

#: Names of the kernels of DeltaNet and HGRN2 in the authors' code. They compute the same function.
KERNEL_MODES = ("chunk", "fused_chunk", "fused_recurrent")


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


class ShortConvolution(nn.Conv1d):
    """Causal convolution of every channel by itself over the last few tokens, and SiLU.

    Weight `(C, 1, W)`. Weight and bias start as PyTorch starts them, U(±1/√W), whatever the
    architecture's initializer_range.

    Args:
        channels: C.
        width: W, the taps.
        bias: add a bias.
        unit_heads: then divide each of so many equal slices of the channels by its length; 0 for none.
    """

    def __init__(self, channels: int, width: int, *, bias: bool, unit_heads: int = 0) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=bias)
        self.unit_heads = unit_heads

    @property
    def tokens_before(self) -> int:
        """Tokens before a part of a sequence that its first token reads."""
        return self.weight.shape[-1] - 1

    def op_use(self) -> OpUse:
        return OpUse("short_convolution", self.unit_heads, self.weight.shape[-1], self.in_channels)

    def init_own_weights(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[-1])
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(  # type: ignore[override]  # the state goes in and out too
        self, x_BTC: Tensor, previous_BCW: Tensor | None = None, position_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output `(B, T, C)` and the last W - 1 inputs `(B, C, W - 1)`, for the next call.

        Args:
            x_BTC: the sequence.
            previous_BCW: inputs that the call for the tokens before returned. Default 0, or what another process has
                of the sequence.
            position_BT: of packed documents, the number of tokens before each in its own.
        """
        if previous_BCW is None and (before_BWC := context.before(x_BTC, self.weight.shape[-1] - 1)) is not None:
            previous_BCW = before_BWC.transpose(1, 2)
        return short_convolution(
            x_BTC,
            self.weight,
            self.bias,
            previous_BCW=previous_BCW,
            position_BT=position_BT,
            unit_heads=self.unit_heads,
        )


def init_xavier(*linears: nn.Linear | None) -> None:
    """Start weights from Xavier's uniform law with gain 2^-2.5, as HGRN2 and DeltaNet in the paper's runs."""
    for linear in linears:
        if linear is not None:
            init.xavier_uniform_(linear.weight, gain=2**-2.5)


def init_uniform(linear: nn.Linear, scale: float = 1.0) -> None:
    """Start a linear layer's weight from U(±scale/√fan_in); with scale 1, PyTorch's own law."""
    bound = scale / math.sqrt(linear.in_features)
    init.uniform_(linear.weight, -bound, bound)


def initial_dt_bias(size: int, dt_min: float, dt_max: float, dt_floor: float) -> Tensor:
    """Biases `(size,)` whose softplus, the step size of a state space model, is log-uniform in [dt_min, dt_max].

    Step sizes below dt_floor are raised to it. The inverse of softplus is x + log(1 - exp(-x)).
    """
    log_dt = torch.empty(size).uniform_(math.log(dt_min), math.log(dt_max))
    dt = log_dt.exp().clamp(min=dt_floor)
    return dt + torch.log(-torch.expm1(-dt))
