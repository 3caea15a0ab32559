"""Hugging Face models. Importing this package registers them with transformers' Auto classes.

Files, from the call down:
    decoder, block, span      the decoder, one of its blocks, facts about the new tokens
    mixers/, hybrid           an architecture per file; blocks of several architectures
    attention, layers         attention for all mixers that have it; norms, token shift, convolution, MLP
    arguments, padding        calls that are refused; where sequences and documents begin
    config, registry          fields and FLOPs; architectures by name
    pretrained                loading, initial weights, what mixers can do, how blocks are compiled
    generation/               caches and attention to them, CUDA graphs, the hooks of `generate`
    checks                    checks of an architecture from another package
"""

from forgetting_transformer.model import registry
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.model.decoder import DecoderForCausalLM, DecoderModel
from forgetting_transformer.model.hybrid import HybridConfig, HybridForCausalLM, HybridModel
from forgetting_transformer.model.mixers.delta_net import DeltaNetConfig, DeltaNetForCausalLM, DeltaNetModel
from forgetting_transformer.model.mixers.forgetting_attention import ForgettingAttentionLayer
from forgetting_transformer.model.mixers.forgetting_transformer import (
    ForgettingTransformerConfig,
    ForgettingTransformerForCausalLM,
    ForgettingTransformerModel,
)
from forgetting_transformer.model.mixers.gated_delta_net import (
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GatedDeltaNetModel,
)
from forgetting_transformer.model.mixers.hgrn2 import HGRN2Config, HGRN2ForCausalLM, HGRN2Model
from forgetting_transformer.model.mixers.kda import KDAConfig, KDAForCausalLM, KDAModel
from forgetting_transformer.model.mixers.mamba2 import Mamba2Config, Mamba2ForCausalLM, Mamba2Model
from forgetting_transformer.model.mixers.path_fox import PathFoxConfig, PathFoxForCausalLM, PathFoxModel
from forgetting_transformer.model.mixers.samba import SambaConfig, SambaForCausalLM, SambaModel
from forgetting_transformer.model.mixers.transformer import TransformerConfig, TransformerForCausalLM, TransformerModel

registry.register(
    "forgetting_transformer",
    ForgettingTransformerConfig,
    ForgettingTransformerModel,
    ForgettingTransformerForCausalLM,
)
registry.register("samba", SambaConfig, SambaModel, SambaForCausalLM)
registry.register("transformer", TransformerConfig, TransformerModel, TransformerForCausalLM)
registry.register("mamba2", Mamba2Config, Mamba2Model, Mamba2ForCausalLM)
registry.register("hgrn2", HGRN2Config, HGRN2Model, HGRN2ForCausalLM)
registry.register("delta_net", DeltaNetConfig, DeltaNetModel, DeltaNetForCausalLM)
registry.register("gated_delta_net", GatedDeltaNetConfig, GatedDeltaNetModel, GatedDeltaNetForCausalLM)
registry.register("kda", KDAConfig, KDAModel, KDAForCausalLM)
registry.register("path_fox", PathFoxConfig, PathFoxModel, PathFoxForCausalLM)
registry.register("hybrid", HybridConfig, HybridModel, HybridForCausalLM)

__all__ = [
    "DecoderConfig",
    "DecoderForCausalLM",
    "DecoderModel",
    "ForgettingAttentionLayer",
    "ForgettingTransformerConfig",
    "ForgettingTransformerForCausalLM",
    "ForgettingTransformerModel",
    "registry",
]
