"""The Forgetting Transformer (FoX): softmax attention with a forget gate.

Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025.

>>> from forgetting_transformer import forgetting_attention
>>> import forgetting_transformer.model      # registers the models with transformers' Auto classes
>>> import forgetting_transformer.tokenizer  # registers LongCrawl64's tokenizer
"""

from forgetting_transformer.ops.forgetting_attention import (
    cumulative_log_fgate,
    forgetting_attention,
    forgetting_attention_decode,
)

__all__ = ["cumulative_log_fgate", "forgetting_attention", "forgetting_attention_decode"]
