"""FoX with grouped keys and windows beside Llama and Mistral.

The table of docs/use_a_model.md, "Grouped keys and windows", is tested where its features are, with `GROUPED` and
`WINDOWS`: training against float64 (test_equations), checkpointing and compiling (test_every_architecture), FLOPs and
refused values (test_sizes_and_laws), export and maps (test_hugging_face), caches, padding, beams, turns and tokens
taken back (test_generation), static caches (test_decoding_graph), packing (test_packed_documents), shared sequences
(test_context), pruning (test_equations, test_cache), figures of gates (tests/evaluation/test_forget_gates.py).
"""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from forgetting_transformer.model import ForgettingAttentionLayer
from tests.model.small_models import GROUPED, WINDOWS, small, small_model

LENGTH = 24


def test_a_hybrid_of_windows_has_one_architecture_and_a_window_where_its_pattern_says():
    model = small("hybrid", **WINDOWS)
    mixers = [block.sequence_mixer for block in model.decoder.layers]
    assert [mixer.window_size for mixer in mixers] == [4, 4, None]
    assert {type(mixer) for mixer in mixers} == {ForgettingAttentionLayer}
    cache = model(input_ids=torch.zeros(1, 300, dtype=torch.long)).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [3 + 128, 3 + 128, 300]
    assert cache.get_seq_length() == 300


@pytest.mark.parametrize("window", [None, 9])
def test_with_open_gates_it_is_llama_and_with_a_window_mistral(window):
    """The same weights under transformers' names give the same logits, with left padding, and the same tokens."""
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    torch.manual_seed(0)
    if window is None:
        other: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, eos_token_id=None))
    else:
        config = MistralConfig(**sizes, **heads, rms_norm_eps=1e-5, eos_token_id=None, sliding_window=window)
        other = MistralForCausalLM(config)
    other.eval()
    options = {"use_rope": True, "rope_base": 1e4, "norm_eps": 1e-5, "window_size": window}
    model = small_model(**sizes, **GROUPED, **options)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    theirs = other.state_dict()
    names = {"model.embeddings": "model.embed_tokens", "model.norm": "model.norm", "lm_head": "lm_head"}
    for layer in (f"model.layers.{i}." for i in range(2)):
        names |= {
            f"{layer}attn_norm": f"{layer}input_layernorm",
            f"{layer}mlp_norm": f"{layer}post_attention_layernorm",
        }
        names |= {f"{layer}attn.{x}_proj": f"{layer}self_attn.{x}_proj" for x in "qkvo"}
        names[f"{layer}mlp.down_proj"] = f"{layer}mlp.down_proj"
        both = [theirs[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        weights[f"{layer}mlp.gate_proj.weight"] = torch.cat(both)
        weights[f"{layer}attn.fgate_proj.weight"].zero_()
        weights[f"{layer}attn.fgate_proj.bias"].fill_(100)  # f = 1
    weights |= {f"{ours}.weight": theirs[f"{name}.weight"] for ours, name in names.items()}
    model.load_state_dict(weights)
    ids = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        got, want = (m(input_ids=ids, attention_mask=mask).logits[mask == 1] for m in (model, other))
        assert (got - want).abs().max() < 1e-5
        greedy = {"attention_mask": mask[:, :12], "max_new_tokens": 20, "do_sample": False}
        assert torch.equal(*(m.generate(ids[:, :12], **greedy) for m in (model, other)))
