"""One block of a decoder, and how it calls its mixer.

A mixer is an `nn.Module` with

    forward(hidden_BTE, span) -> (out_BTE, …)
        The block reads the first result. The `Span` (`span.py`) says where sequences begin, and has the layer's cache.
    new_cache() -> CacheLayerMixin
        An empty layer cache.

It may also have

    init_own_weights()
        Called after the default initialisation of its submodules, to change it. It must write through
        `transformers.initialization`, whose functions leave weights from a checkpoint as they are.
    op_use() -> OpUse
        How it calls its op, so that the op's kernels are tested before the first step on a GPU. Layers in it may have
        one too.
    packs_documents = True
        It keeps packed documents apart.
    static_cache = True
        Then `generate` runs it as a CUDA graph. With a cache, its forward must write a single token in place, where
        `cache.slot` says, and know the number of earlier tokens from tensors alone. States of a recurrent mixer must
        keep their names and shapes.
    context_heads
        It works where processes share a sequence (`ops/context.py`). This is the number of heads that it splits among
        them, 0 if it splits none; the number of processes must divide it. A module in it that reads the last tokens of
        the part before has their number as `tokens_before`.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import contextlib
import functools
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from forgetting_transformer.model.arguments import check_mixed
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.model.layers import ResidualRMSNorm
from forgetting_transformer.model.span import Span


class DecoderBlock(GradientCheckpointingLayer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))` if there is an MLP."""

    # transformers' class would checkpoint around __call__, hooks included. FSDP2 gathers weights in those hooks, so
    # the hooks stay outside and `forward` checkpoints the rest.
    __call__ = nn.Module.__call__

    # Under activation checkpointing: whether block inputs wait for the backward pass in the host's memory.
    inputs_on_host = False
    # `gradient_checkpointing_enable` replaces this by one with the user's arguments.
    _gradient_checkpointing_func = staticmethod(functools.partial(checkpoint, use_reentrant=False))

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm_name, self.mixer_name = config.mixer_norm_name, config.mixer_name
        self.add_module(self.mixer_norm_name, ResidualRMSNorm(config.hidden_size, config.norm_eps))
        mixer = config.build_mixer(layer_idx)
        if not isinstance(mixer, nn.Module):
            raise TypeError(f"{type(config).__name__}.build_mixer returned {mixer!r}; it must return an nn.Module")
        self.add_module(self.mixer_name, mixer)
        mlp = config.build_mlp(layer_idx)
        self.has_mlp = mlp is not None
        if mlp is not None:
            self.mlp_norm = ResidualRMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = mlp

    @property
    def sequence_mixer(self) -> Any:
        return getattr(self, self.mixer_name)

    def forward(self, hidden_BTE: Tensor, span: Span) -> Tensor:
        """Return the new residual stream `(B, T, E)`."""
        if self.gradient_checkpointing and self.training:
            return self._checkpointed(hidden_BTE, span)
        return self._transform(hidden_BTE, span=span)

    def _transform(self, hidden_BTE: Tensor, span: Span) -> Tensor:
        mixer = self.sequence_mixer
        normed_BTE, hidden_BTE = getattr(self, self.mixer_norm_name)(hidden_BTE)
        mixed = mixer(normed_BTE, span)
        check_mixed(mixer, mixed, normed_BTE)
        branch_BTE = mixed[0]
        if self.has_mlp:
            normed_BTE, hidden_BTE = self.mlp_norm(hidden_BTE, branch_BTE)
            branch_BTE = self.mlp(normed_BTE)
        return hidden_BTE + branch_BTE

    def _checkpointed(self, hidden_BTE: Tensor, span: Span) -> Tensor:
        """`_transform`, computed again in the backward pass from the block's input, the one tensor that is kept."""
        if span.cache is not None:
            raise ValueError("gradient checkpointing runs the block twice, so it cannot fill a cache: use_cache=False")
        # Bound first: PyTorch's older kind of checkpointing takes no keywords.
        transform = functools.partial(self._transform, span=span)
        # Tensors saved inside are not kept; the hooks get the block's inputs.
        on_host = save_on_cpu(pin_memory=hidden_BTE.is_cuda) if self.inputs_on_host else contextlib.nullcontext()
        with on_host:
            return self._gradient_checkpointing_func(transform, hidden_BTE)
