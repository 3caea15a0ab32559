"""Base of all decoders: loading, initial weights, abilities of mixers, compilation of blocks, losses that training
here does not use.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.ops import compiling
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.finite import check_finite
from forgetting_transformer.ops.layers.cross_entropy import linear_cross_entropy


class DecoderPreTrainedModel(PreTrainedModel):
    """Methods of every decoder, with and without an output layer."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embeddings"
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012 (as in the base class)
    _is_compiled = False
    lm_head: Any

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and refuse weights that are not finite."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_finite(model.named_parameters(), pretrained_model_name_or_path)
        return loaded

    def _init_weights(self, module: Any) -> None:
        """Linear and embedding weights from N(0, initializer_range²), biases 0, norm weights 1; then mixers' own."""
        super()._init_weights(module)
        if hasattr(module, "init_own_weights"):
            module.init_own_weights()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For classes from outside its package transformers skips modules that hold no parameters directly, as a guard
        # against initialisers that overwrite loaded weights. Ours do not, and a mixer's own initialisation must run.
        super()._initialize_weights(module, is_custom_code=False)

    def _mixers(self) -> list[Any]:
        decoder: Any = getattr(self, "decoder", self)
        return [block.sequence_mixer for block in decoder.layers]

    def op_uses(self) -> list[OpUse]:
        """Calls of ops by mixers and layers in them, whose kernels can be tested before use; see `ops/selftest.py`."""
        modules: Iterator[Any] = self.modules()
        return [module.op_use() for module in modules if hasattr(module, "op_use")]

    def stateful_mixers(self) -> list[str]:
        """Classes of mixers that cannot keep packed documents apart."""
        mixers = self._mixers()
        return sorted({type(mixer).__name__ for mixer in mixers if not getattr(mixer, "packs_documents", False)})

    def whole_sequence_mixers(self, size: int, length: int | None = None) -> list[str]:
        """Mixers for which `size` processes cannot share sequences (`ops/context.py`), with the reason.

        Args:
            length: of the shortest sequences; None: any.
        """
        reasons = set()
        for mixer in self._mixers():
            heads, name = getattr(mixer, "context_heads", None), type(mixer).__name__
            before = max(getattr(module, "tokens_before", 0) for module in mixer.modules())
            if heads is None:
                reasons.add(f"{name} takes whole sequences only")
            elif heads % size:
                reasons.add(f"{name} has {heads} heads")
            elif size > 1 and length is not None and length // size < before:
                reasons.add(f"{name} needs {before} tokens of the part before, and parts have {length // size}")
        return sorted(reasons)

    def run_compiled(self) -> None:
        """Run blocks and loss through torch.compile from now on.

        Block by block: one compilation serves all blocks, and FSDP2 can gather each block's weights separately.
        Activation checkpointing stays outside of the compiled function: inside, a mixer that breaks the graph (FLA's
        kernels do) would make PyTorch give up on the whole block without a warning. Each new length or batch size
        compiles again. Blocks may be recorded as CUDA graphs (`ops/compiling.recording`); the loss is not, because each
        of its slices would get the weight as a copy.
        """
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module._transform = compiling.compiled(module._transform, recordable=True)  # type: ignore[method-assign]
        self._is_compiled = True

    def checkpoint_activations(self, on: bool) -> None:
        """Recompute each block's activations in the backward pass, or keep them."""
        if not on:
            self.gradient_checkpointing_disable()
            return
        self.gradient_checkpointing_enable()
        # Meant for frozen embeddings. Without gradients, in an evaluation, the first block would get another kind of
        # input, for which torch.compile compiles everything once more.
        self.disable_input_require_grads()

    def keep_block_inputs_on_host(self) -> None:
        """Keep block inputs in the host's memory until the backward pass, with activation checkpointing.

        Saves the GPU 4·E bytes per token and block (2·E where the residual stream has 16 bits). They go to pinned
        memory and back, through PyTorch's `save_on_cpu`. Nothing changes on a CPU.
        """
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module.inputs_on_host = True

    def mean_loss(
        self, logits: Any, labels: Tensor, attention_mask: Tensor | None, num_items_in_batch: int | Tensor | None
    ) -> Tensor:
        """The loss of "causal_lm", a mean over the labels that count. Padding predicts nothing: after a 0 of
        `attention_mask` a label does not count.

        Args:
            num_items_in_batch: divide the summed loss by this instead of taking the mean: the labels that count in all
                micro-batches of a step, as transformers' Trainer passes them. Trainer counts from the labels alone, so
                with left padding the first token of a row too, unless its label is -100: the loss is then too small by
                this factor, 1 in the length of a row, and its gradient's direction is right.
        """
        if labels.shape != logits.shape[:2]:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}; they must be {tuple(logits.shape[:2])}, one per token"
            )
        if attention_mask is not None:
            is_padding_BT = attention_mask[:, -labels.shape[1] : -1] == 0
            labels = labels.masked_fill(F.pad(is_padding_BT, (1, 0)), -100)
        return self.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
        )

    def loss_of_other_head(self, hidden_BTE: Tensor, labels_BT: Tensor, compiled: bool) -> Tensor:
        """The loss per token `(B, T)` where something stands in the place of the decoder's output layer."""
        if isinstance(self.lm_head, nn.Linear):  # transformers puts one there when the vocabulary is resized
            return linear_cross_entropy(hidden_BTE, self.lm_head.weight, labels_BT, compiled=compiled)
        # An adapter replaced it, and computes with more than this weight.
        logits_BTV = self.lm_head(hidden_BTE).float()
        return F.cross_entropy(logits_BTV.transpose(1, 2), labels_BT, reduction="none")
