"""One token through the whole model as a CUDA graph, replayed for token after token.

A token of a sequence keeps a GPU busy for a few milliseconds, and the host needs ten times as long to launch its
thousands of small kernels one by one. A graph launches them at once. It reads and writes fixed addresses, so the cache
is made static for as long as its buffers have room (`cache.py`); then the next graph is recorded.

The first token after a prompt runs without a graph, so that kernels are compiled; the second is recorded. The
arithmetic is that of calls without a graph, except that attention splits its keys by the size of their buffer, which
changes the last bits.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgetting_transformer.model.cache import DecoderCache
from forgetting_transformer.ops import context


class DecodingGraph:
    """Runs single tokens of one cache, which has it as its `graph`. A copy of the cache gets a graph of its own.

    Args:
        model: a `DecoderForCausalLM`.
        is_asked_for: whether to warn where the model has hooks, and so no graph.
    """

    DEVICE_TYPES: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, model: Any, *, is_asked_for: bool = True) -> None:
        self.model, self.is_asked_for = model, is_asked_for
        self.is_running = False
        self._is_off = self._is_warm = False
        self._replay: Callable[[], None] | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._input_ids: Tensor | None = None
        self._logits: Tensor | None = None
        self._weights: list[nn.Parameter | Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodingGraph":
        return DecodingGraph(self.model, is_asked_for=self.is_asked_for)

    def step(self, cache: DecoderCache, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """The logits `(B, 1, V)` of a token `(B, 1)`, which the cache then holds; None where a graph cannot do it.

        Args:
            cache: always the same, for which `can_be_static`.
            input_ids, attention_mask: as `DecoderForCausalLM.forward` takes them.
        """
        if self._is_off or input_ids is None or not self._takes(cache, input_ids, attention_mask):
            return None
        conditions = self._conditions(input_ids)
        if cache.place is None or cache.get_seq_length() >= cache.place.limit or conditions != self._made_for:
            if not self._begin(cache, input_ids):
                return None
            self._made_for = self._conditions(input_ids)
        assert self._input_ids is not None
        self._input_ids.copy_(input_ids)
        if self._is_warm:
            try:
                self._replay = replay = self._replay or self._record(cache)
            except RuntimeError as error:
                self._turn_off(cache, f"it cannot be recorded ({error})")
                return None
            replay()
        else:
            self._compute(cache)
            self._is_warm = True
        cache.advance()
        assert self._logits is not None
        return self._logits.clone()

    def _takes(self, cache: DecoderCache, input_ids: Tensor, attention_mask: Tensor | None) -> bool:
        model, length = self.model, cache.get_seq_length()
        config = model.config
        return (
            input_ids.device.type in self.DEVICE_TYPES
            and input_ids.ndim == 2
            and input_ids.shape[1] == 1
            and length > 0
            and (attention_mask is None or attention_mask.shape == (len(input_ids), length + 1))
            and not (torch.is_grad_enabled() or model.training or model._is_compiled or cache.has_position_ids)
            and not (config.output_attentions or config.output_hidden_states or torch.compiler.is_compiling())
            and context.active() is None
        )

    def _conditions(self, input_ids: Tensor) -> tuple[Any, ...]:
        """What a recorded graph has fixed; addresses of weights too, which `model.to` changes."""
        kind = input_ids.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        addresses = tuple(weight.data_ptr() for weight in self._weights)
        return input_ids.shape, input_ids.device, precision, torch.is_inference_mode_enabled(), addresses

    def _begin(self, cache: DecoderCache, input_ids: Tensor) -> bool:
        """Make the cache static; False where the next token has to go without."""
        self._forget()
        cache.make_dynamic()
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules()):
            self._turn_off(cache, "modules of the model have hooks, which a graph would not call", self.is_asked_for)
            return False
        place = cache.make_static(len(input_ids), input_ids.device)
        if place.limit <= cache.get_seq_length():
            cache.make_dynamic()
            return False
        self._input_ids = input_ids.clone()
        self._weights = [*self.model.parameters(), *self.model.buffers()]
        return True

    def _forget(self) -> None:
        self._is_warm = False
        self._replay = self._made_for = self._input_ids = self._logits = None
        self._weights = []

    def _turn_off(self, cache: DecoderCache, reason: str, warns: bool = True) -> None:
        self._forget()
        cache.make_dynamic()
        self._is_off = True
        if warns:
            message = f"no CUDA graph is used for this cache: {reason}. Tokens take longer"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _compute(self, cache: DecoderCache) -> None:
        """One token from `_input_ids` to `_logits`, and the place after it."""
        place = cache.place
        assert place is not None
        kind = place.new.device.type
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.is_running = True
        try:
            # Without autocast's cache: what it holds is freed when its context ends, and the graph would still read it.
            with torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False):
                output = self.model.decoder(
                    input_ids=self._input_ids, past_key_values=cache, use_cache=True, return_dict=True
                )
                self._logits = self.model.lm_head(output.last_hidden_state)
            place.advance()
        finally:
            self.is_running = False

    def _record(self, cache: DecoderCache) -> Callable[[], None]:
        """Record `_compute`, which does nothing yet; returns what does it."""
        graph = torch.cuda.CUDAGraph()
        assert self._input_ids is not None
        with torch.cuda.device(self._input_ids.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._compute(cache)
        return graph.replay
