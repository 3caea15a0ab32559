"""One token through the whole model as a CUDA graph, replayed for token after token.

A token of a sequence keeps a GPU busy for a few milliseconds, and the host takes longer than that to launch its
thousands of small kernels one by one. A graph launches them at once. It reads and writes fixed addresses, so the cache
is made static for as long as its buffers have room (`cache.py`); then the next graph is recorded.

Recording takes time, so it waits until a few single tokens have come in a row, and longer where something else came
between soon after. One more runs eagerly on the static cache, so that kernels are compiled; the next is recorded. The
arithmetic is that of calls without a graph, except that attention splits its keys by the size of their buffer, which
changes the last bits.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from forgetting_transformer.model.generation.cache import DecoderCache
from forgetting_transformer.ops import context

# One recording at a time, whatever the number of threads.
_recording = threading.Lock()
# Models of which no token could be recorded. Nothing is gained from trying again with every new cache.
_unrecordable: "weakref.WeakSet[Any]" = weakref.WeakSet()


class DecodingGraph:
    """Runs single tokens of one cache, which has it as its `graph`. A copy of the cache gets an empty one."""

    DEVICE_TYPES: ClassVar[tuple[str, ...]] = ("cuda",)
    # Single tokens in a row before the first graph. Beam search, which moves rows at every token, never has as many.
    WAIT = 2
    # The wait doubles up to MAX_WAIT where a graph served fewer tokens than WORTH, as it may in assisted generation.
    WORTH, MAX_WAIT = 16, 64
    # A graph needs room for a token that runs eagerly, one that is recorded, and one more.
    LEAST_ROOM = 3

    def __init__(self) -> None:
        self.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodingGraph, ()

    def reset(self) -> None:
        """Return to the initial state."""
        self._is_off = False
        self._wait, self._tokens_in_a_row = self.WAIT, 0
        self._forget()

    def interrupt(self) -> None:
        """Discard the graph, and wait again; called when anything but a single token comes."""
        if self._replay is not None and self._num_replays < self.WORTH:
            self._wait = min(2 * self._wait, self.MAX_WAIT)
        self._tokens_in_a_row = 0
        self._forget()

    def _forget(self) -> None:
        self._num_replays = self._length = 0
        self._is_warm = False
        self._replay: Callable[[], None] | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._model: weakref.ref[Any] | None = None
        self._input_ids: Tensor | None = None
        self._logits: Tensor | None = None
        # Dictionaries of parameters, buffers and hooks, of all modules.
        self._tensors: list[dict[str, Tensor | None]] = []
        self._hooks: list[dict[int, Any]] = []

    def step(self, model: Any, cache: DecoderCache, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """The logits `(B, 1, V)` of a token `(B, 1)`, which the cache then holds; None where it goes without a graph.

        Args:
            model: a `DecoderForCausalLM` whose mixers all have `static_cache`.
            cache: always the same.
            input_ids, attention_mask: as `DecoderForCausalLM.forward` takes them.
        """
        if self._is_off or not self._takes(model, cache, input_ids, attention_mask):
            self._tokens_in_a_row = 0
            return None
        fits = cache.slot is not None and self._length < cache.slot.limit and cache.get_seq_length() == self._length
        if not fits or self._made_for is None or self._conditions(model, input_ids) != self._made_for:
            self._tokens_in_a_row += 1
            if self._tokens_in_a_row <= self._wait or not self._begin(model, cache, input_ids):
                return None
        assert self._input_ids is not None
        self._input_ids.copy_(input_ids)
        if cache.seq_start_B is not None and attention_mask is not None:
            cache.seq_start_B.copy_((attention_mask == 0).sum(-1))
        if self._is_warm:
            try:
                self._replay = replay = self._replay or self._record(model, cache)
            except RuntimeError as error:
                _unrecordable.add(model)
                self._turn_off(cache)
                message = f"no CUDA graph is used for this model: it cannot be recorded ({error}). Tokens take longer"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
                return None
            replay()
            self._num_replays += 1
        else:
            self._compute(model, cache)
            self._is_warm = True
        cache.advance()
        self._length += 1
        assert self._logits is not None
        return self._logits.clone()

    def _takes(self, model: Any, cache: DecoderCache, input_ids: Tensor, attention_mask: Tensor | None) -> bool:
        length, config = cache.get_seq_length(), model.config
        return (
            input_ids.device.type in self.DEVICE_TYPES
            and input_ids.ndim == 2
            and input_ids.shape[1] == 1
            and length > 0
            and (attention_mask is None or attention_mask.shape == (len(input_ids), length + 1))
            and not (torch.is_grad_enabled() or model.training or model._is_compiled)
            and not (config.output_hidden_states or torch.compiler.is_compiling())
            and not (all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks)
            and context.active() is None
        )

    def _conditions(self, model: Any, input_ids: Tensor) -> tuple[Any, ...] | None:
        """Conditions that a graph has fixed, with the addresses of weights; None for another model, or with hooks."""
        if self._model is None or self._model() is not model or any(self._hooks):
            return None
        kind = input_ids.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        addresses = tuple(x.data_ptr() for tensors in self._tensors for x in tensors.values() if x is not None)
        settings = (precision, torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled())
        return input_ids.shape, input_ids.device, settings, addresses

    def _begin(self, model: Any, cache: DecoderCache, input_ids: Tensor) -> bool:
        """Make the cache static; False where the next token has to go without."""
        cache.release()
        self._forget()
        modules = [*model.modules()]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._tensors = [tensors for module in modules for tensors in (module._parameters, module._buffers)]
        if not self._follows(model, modules, input_ids):
            self._turn_off(cache)
            return False
        slot, length = cache.make_static(len(input_ids), input_ids.device), cache.get_seq_length()
        if slot.limit - length < self.LEAST_ROOM:
            cache.release()
            self._forget()
            return False
        self._length = length
        self._model, self._input_ids = weakref.ref(model), input_ids.clone()
        self._made_for = self._conditions(model, input_ids)
        return True

    def _follows(self, model: Any, modules: list[nn.Module], input_ids: Tensor) -> bool:
        """Whether a graph would do what the model does: no hooks, nothing compiled, weights at addresses on one GPU."""
        weights = [x for tensors in self._tensors for x in tensors.values() if x is not None]
        return (
            model not in _unrecordable
            and not any(self._hooks)
            and not any(hasattr(module, "_hf_hook") for module in modules)
            and all(getattr(module, "_compiled_call_impl", None) is None for module in modules)
            and all(type(x) in (Tensor, nn.Parameter) for x in weights)
            and {x.device for x in weights} == {input_ids.device}
        )

    def _turn_off(self, cache: DecoderCache) -> None:
        cache.release()
        self._forget()
        self._is_off = True

    def _compute(self, model: Any, cache: DecoderCache) -> None:
        """One token from `_input_ids` to `_logits`, and the place after it."""
        slot = cache.slot
        assert slot is not None
        kind = slot.new.device.type
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Without autocast's cache: what it holds is freed when its context ends, and the graph would still read it.
        autocast = torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False)
        with cache.writing_in_place(), autocast:
            output = model.decoder(input_ids=self._input_ids, past_key_values=cache, use_cache=True, return_dict=True)
            self._logits = model.lm_head(output.last_hidden_state)
        slot.advance()

    def _record(self, model: Any, cache: DecoderCache) -> Callable[[], None]:
        """Record `_compute` without running it; returns the graph."""
        assert self._input_ids is not None
        device = self._input_ids.device
        graph = torch.cuda.CUDAGraph()
        with _recording, torch.cuda.device(device):
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, stream=_stream(device.index), capture_error_mode="thread_local"):
                    self._compute(model, cache)
            except BaseException:
                # A recording that fails restores neither the stream nor the random numbers: the state of the generator
                # stays one of a recording, and every later random number of this GPU would be an error.
                torch.cuda.set_stream(before)
                generator = torch.cuda.default_generators[device.index]
                generator.graphsafe_set_state(generator.clone_state())
                raise
        return graph.replay


@functools.cache
def _stream(device_index: int) -> Any:
    """Stream of recordings on this GPU. The default one of `torch.cuda.graph` is on the device that first used it."""
    return torch.cuda.Stream(device_index)
