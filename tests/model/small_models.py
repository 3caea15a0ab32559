"""Small models for the tests in this folder."""

import itertools
from typing import Any

import torch

from forgetting_transformer.model import ForgettingTransformerConfig, ForgettingTransformerForCausalLM

PRO = {
    "use_output_gate": True,
    "use_output_norm": True,
    "qk_norm": True,
    "use_k_shift": True,
    "use_v_shift": True,
    "hidden_ratio": 3.5,
}


def small_model(seed: int = 0, **fields: Any) -> ForgettingTransformerForCausalLM:
    """A two-layer FoX in evaluation mode; large weights make its predictions depend on everything it reads."""
    config = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        **fields,
    }
    torch.manual_seed(seed)
    return ForgettingTransformerForCausalLM(ForgettingTransformerConfig(**config)).eval()


OPTION_COMBINATIONS = [
    {
        "fgate_type": fgate_type,
        **({"fgate_bias_init": True, "decay_time_min": 2.0, "decay_time_max": 64.0} if decay_times else {}),
        "use_rope": use_rope,
        "qk_norm": qk_norm != "none",
        "qk_norm_share_param_across_head": qk_norm == "shared",
        "use_output_gate": gate is not None,
        "ogate_act": gate or "sigmoid",
        "use_output_norm": norm,
        "use_k_shift": k_shift,
        "use_v_shift": v_shift,
    }
    for (fgate_type, decay_times), (use_rope, norm), qk_norm, gate, (k_shift, v_shift) in itertools.product(
        [("full", False), ("bias_only", False), ("bias_only", True), ("fixed", True), ("none", False)],
        [(False, False), (True, True), (False, True)],
        ["none", "per head", "shared"],
        [None, "sigmoid", "silu"],
        [(False, False), (True, False), (False, True)],
    )
]
