"""Abilities of mixers, which are checked before a run, and the compilation of blocks.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from collections.abc import Iterator
from typing import Any

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.ops import compiling
from forgetting_transformer.ops.backends import OpUse


class MixerAbilities:
    """Methods of every decoder, with and without an output layer."""

    modules: Any
    _is_compiled = False

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

    def keep_block_inputs_on_host(self) -> None:
        """Keep block inputs in the host's memory until the backward pass, with activation checkpointing.

        Saves the GPU 4·E bytes per token and block (2·E where the residual stream has 16 bits). They go to pinned
        memory and back, through PyTorch's `save_on_cpu`. Nothing changes on a CPU.
        """
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module.inputs_on_host = True
