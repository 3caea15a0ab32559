"""Hugging Face models. Importing this package registers them with transformers' Auto classes."""

from forgetting_transformer.model import registry
from forgetting_transformer.model.decoder import DecoderConfig, DecoderForCausalLM, DecoderModel
from forgetting_transformer.model.forgetting_transformer import (
    ForgettingAttentionLayer,
    ForgettingTransformerConfig,
    ForgettingTransformerForCausalLM,
    ForgettingTransformerModel,
)

registry.register(
    "forgetting_transformer",
    ForgettingTransformerConfig,
    ForgettingTransformerModel,
    ForgettingTransformerForCausalLM,
)

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
