"""Small models for the tests in this folder."""

from typing import Any

import torch

from forgetting_transformer.model import DecoderForCausalLM, ForgettingTransformerForCausalLM, registry

PRO = {
    "use_output_gate": True,
    "use_output_norm": True,
    "qk_norm": True,
    "use_k_shift": True,
    "use_v_shift": True,
    "hidden_ratio": 3.5,
}

#: Grouped keys, and the pattern [window, window, full] of one architecture.
GROUPED = {"num_heads": 4, "num_kv_heads": 2}
_FOX = {"architecture": "forgetting_transformer", **GROUPED, "qk_norm": True, "use_v_shift": True}
WINDOWS = {
    "num_hidden_layers": 3,
    "pattern": ["window", "window", "full"],
    "mixers": {"window": {**_FOX, "window_size": 4}, "full": _FOX},
}

# Where weights start from N(0, initializer_range²), large ones make predictions depend on everything that is read.
SMALL_FIELDS = {
    "delta_net": {"num_heads": 2, "initializer_range": 0.4},
    "forgetting_transformer": {"num_heads": 2, "initializer_range": 0.4},
    "gated_delta_net": {"num_heads": 2, "initializer_range": 0.4},
    "hgrn2": {"expand_ratio": 16, "initializer_range": 0.4},
    "hybrid": {
        "num_hidden_layers": 3,
        "initializer_range": 0.4,
        "pattern": ["gated_delta_net", "forgetting_attention"],
        "mixers": {
            "gated_delta_net": {"architecture": "gated_delta_net", "num_heads": 2},
            "forgetting_attention": {"architecture": "forgetting_transformer", "num_heads": 2, "qk_norm": True},
        },
    },
    "kda": {"num_heads": 2, "initializer_range": 0.4},
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "initializer_range": 1.0,
        "time_step_min": 0.1,
        "time_step_max": 1.0,
        "pad_token_id": None,
    },
    "path_fox": {"num_heads": 2, "initializer_range": 0.4},
    "samba": {
        "num_hidden_layers": 4,
        "state_size": 4,
        "pad_token_id": None,
        "attn": {"num_heads": 2, "num_kv_heads": 2, "window_size": 4, "layers": None},
    },
    "transformer": {"num_heads": 2, "initializer_range": 0.4},
}


def small(name: str, seed: int = 0, **fields: Any) -> DecoderForCausalLM:
    """A small model of architecture `name` in evaluation mode."""
    config = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        **SMALL_FIELDS[name],
        **fields,
    }
    torch.manual_seed(seed)
    return registry.get(name).lm_class(registry.build_config(name, **config)).eval()


def small_model(seed: int = 0, **fields: Any) -> ForgettingTransformerForCausalLM:
    """A two-layer FoX in evaluation mode."""
    return small("forgetting_transformer", seed, **fields)
