"""The Forgetting Transformer (FoX): softmax attention with a forget gate.

Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025.

>>> from forgetting_transformer import forgetting_attention
>>> import forgetting_transformer.model      # registers the models with transformers' Auto classes
>>> import forgetting_transformer.tokenizer  # registers LongCrawl64's tokenizer
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgetting_transformer.ops.forgetting_attention import (
        cumulative_log_fgate,
        forgetting_attention,
        forgetting_attention_decode,
    )

__version__ = "0.2.0"

__all__ = ["cumulative_log_fgate", "forgetting_attention", "forgetting_attention_decode"]


def __getattr__(name: str) -> Any:
    """Imports the operators, and PyTorch with them, at first use: train.py reports a typo before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forgetting_transformer.ops import forgetting_attention as operators

    globals()[name] = getattr(operators, name)
    return globals()[name]
