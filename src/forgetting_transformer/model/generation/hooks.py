"""Hooks of transformers' `generate`, through which it gets this project's cache and CUDA graphs.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from forgetting_transformer.model.arguments import check_shape
from forgetting_transformer.model.generation.cache import CACHE_NAME, DecoderCache, one_cache
from forgetting_transformer.model.generation.graph import DecodingGraph

_Forward = TypeVar("_Forward", bound=Callable[..., Any])
#: Arguments of `forward` that a CUDA graph serves, besides ids and mask.
_SERVED = ("past_key_values", "cache", "use_cache", "logits_to_keep")


def through_graph(forward: _Forward) -> _Forward:
    """`DecoderForCausalLM.forward`, run as the cache's CUDA graph where that serves the call."""

    @functools.wraps(forward)
    def call(self: Any, input_ids: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        cache = one_cache(kwargs.get("past_key_values"), kwargs.get("cache"))
        if isinstance(cache, DecoderCache) and cache.graph is not None and isinstance(input_ids, Tensor):
            use_cache, logits_to_keep = kwargs.get("use_cache"), kwargs.get("logits_to_keep", 0)
            keeps_cache = self.config.use_cache if use_cache is None else use_cache
            others = [x for name, x in kwargs.items() if name not in _SERVED and x is not None and x is not False]
            if keeps_cache and isinstance(logits_to_keep, int) and not (args or others):
                logits = cache.graph.step(self, cache, input_ids, attention_mask)
                if logits is not None:
                    kept: dict[str, Any] = {CACHE_NAME: cache}
                    return CausalLMOutputWithPast(logits=logits, **kept)
        return forward(self, input_ids, attention_mask, *args, **kwargs)

    return cast(_Forward, call)


class DecoderGenerationMixin(GenerationMixin):
    """Generation of `DecoderForCausalLM`. transformers looks for "GenerationMixin" in the names of its bases."""

    config: Any
    decoder: Any
    _mixers: Any
    _is_stateful: Any

    def new_cache(self, cuda_graph: bool = False) -> DecoderCache:
        """Make an empty cache for this model.

        Args:
            cuda_graph: where it can be done, run single tokens as a CUDA graph (`graph.py`), under `torch.no_grad()`,
                for the same numbers but for the last bits; as `generate` does without a cache. Do not change the
                model's modules or adapters while the cache is in use. Without a graph go CPUs, mixers without
                `static_cache` (PaTH-FoX), models that have hooks, are compiled or lie on several devices, and other
                threads than the main one, as random numbers that a thread draws during a recording are an error.
        """
        cache = self.decoder.new_cache()
        is_static = all(getattr(mixer, "static_cache", False) for mixer in self._mixers())
        on_gpu = self.decoder.device.type in DecodingGraph.DEVICE_TYPES
        if cuda_graph and is_static and on_gpu and threading.current_thread() is threading.main_thread():
            cache.graph = DecodingGraph()
        return cache

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> Any:
        """Refuse other caches. Here, as transformers takes the word "hybrid" back before it makes a cache."""
        asked_for = [config.cache_implementation for config in (self.generation_config, generation_config) if config]
        for implementation in (*asked_for, kwargs.get("cache_implementation")):
            if implementation not in (None, "dynamic"):
                raise ValueError(f"cache_implementation is {implementation!r}; this model has one cache, leave it out")
        return super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]  # whatever else there is has no use
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Give `generate` this model's cache, not transformers' DynamicCache, which holds keys and values only."""
        if generation_config.is_assistant:
            if self._is_stateful:
                raise ValueError(
                    f"assistant_model is a {type(self).__name__}, whose recurrent state cannot take rejected tokens "
                    "back; draft with FoX or a Transformer, or leave it out"
                )
            # The target's. A model here counts for itself.
            model_kwargs.pop("position_ids", None)
        # Under both names, as `forward` takes it, whatever transformers calls it.
        given = one_cache(model_kwargs.pop("past_key_values", None), model_kwargs.pop("cache", None))
        if generation_mode == GenerationMode.ASSISTED_GENERATION and not getattr(given, "is_croppable", True):
            raise ValueError(
                "assisted generation takes rejected tokens back, and this cache cannot; leave out the cache or the "
                "assistant"
            )
        if given is None and generation_config.use_cache:
            # Assisted generation takes tokens back all the time.
            is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
            given = self.new_cache(cuda_graph=not is_assisted)
        if given is not None:
            model_kwargs[CACHE_NAME] = given

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Refuse a prompt that is no batch of sequences before `generate` looks at its last token."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)  # type: ignore[misc]  # self of a mixin
        embeds = name == "inputs_embeds"
        check_shape(self.decoder, None if embeds else inputs, inputs if embeds else None)
        return inputs, name, model_kwargs

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Any:
        """Make the mask of a prompt without one, as transformers does, except for the draft of assisted generation.

        A draft gets the target's mask if there is padding. transformers would look for padding in its ids again after
        every round, and a target may write the padding token.
        """
        if generation_config.is_assistant:
            return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)
        return super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)

    # `generate` reads the signature to find out whether a model takes inputs_embeds.
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        # generate(stop_strings=…, tokenizer=…) hands the tokenizer on, which other models swallow.
        return {key: value for key, value in inputs.items() if not key.endswith("tokenizer")}
