"""FoX with grouped keys and windows: what the layer computes, by the paper's equations in float64, pair by pair."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from forgetting_transformer.model import ForgettingAttentionLayer
from forgetting_transformer.model.mixers.transformer import AttentionLayer
from forgetting_transformer.ops.layers.rotary import rotate
from tests.model.small_models import GROUPED, PRO, WINDOWS, small, small_model

LENGTH = 24
LAYERS = {
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "use_k_shift": True, "use_v_shift": True},
    "window": {"window_size": 7, "use_rope": True},
    "window of one token": {"window_size": 1},
    "window as long as the sequence": {"window_size": LENGTH},
    "pro": {"num_kv_heads": 2, "window_size": 7, "qk_norm": True, "use_k_shift": True, "use_v_shift": True},
    "pro, shared norms, pruned": {
        "num_kv_heads": 2,
        "window_size": 7,
        "qk_norm": True,
        "qk_norm_share_param_across_head": True,
        "log_pruning_tolerance": -10.0,
        "use_output_gate": True,
        "use_output_norm": True,
    },
    "pruned by norms": {"num_kv_heads": 2, "window_size": 7, "log_pruning_tolerance": -10.0},
    "no gates": {"num_kv_heads": 2, "window_size": 7, "fgate_type": "none", "use_rope": True},
    "transformer": None,
}


def by_equations(layer: nn.Module, x_BTE: Tensor) -> Tensor:
    """The output of a layer, from its weights alone, with a loop over heads and queries."""
    weights = dict(layer.named_parameters())
    heads, size, q_norm = layer.num_heads, layer.head_dim, getattr(layer, "q_norm", None)
    key_heads = next(len(x) for name, x in weights.items() if name in ("k_proj.weight", "k_proj.linear.weight")) // size

    def project(name: str, number: int) -> Tensor:
        if f"{name}.weight" in weights:
            y = x_BTE @ weights[f"{name}.weight"].T
        else:
            y = x_BTE @ weights[f"{name}.linear.weight"].T
            alpha = (x_BTE @ weights[f"{name}.shift_proj.weight"].T).sigmoid().repeat_interleave(size, -1)
            y = alpha * F.pad(y, (0, 0, 1, 0))[:, :-1] + (1 - alpha) * y
        return y.unflatten(-1, (number, size))

    def normalise(y: Tensor, weight: Tensor, eps: float) -> Tensor:
        per_head = weight.view(-1, size) if len(weight) > size else weight
        return y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * per_head

    q, k, v = project("q_proj", heads), project("k_proj", key_heads), project("v_proj", key_heads)
    if q_norm is not None:
        q, k = normalise(q, weights["q_norm.weight"], 1e-5), normalise(k, weights["k_norm.weight"], 1e-5)
    if layer.use_rope:
        q, k = rotate(q, 0, layer.rope_base), rotate(k, 0, layer.rope_base)
    log_f = torch.zeros(*x_BTE.shape[:2], heads, dtype=x_BTE.dtype)
    if "fgate_proj.weight" in weights:
        log_f = F.logsigmoid(x_BTE @ weights["fgate_proj.weight"].T + weights["fgate_proj.bias"])
    out = []
    for h in range(heads):
        for i in range(x_BTE.shape[1]):
            first = 0 if layer.window_size is None else max(0, i - layer.window_size + 1)
            keys, values = (x[:, first : i + 1, h // (heads // key_heads)] for x in (k, v))
            # Σ_{l=j+1..i} log f_l for j = first … i
            decay = log_f[:, first + 1 : i + 1, h].flip(1).cumsum(1).flip(1)
            scores = (keys @ q[:, i, h, :, None])[..., 0] / math.sqrt(size) + F.pad(decay, (0, 1))
            out.append((scores.softmax(-1)[..., None] * values).sum(1))
    o = torch.stack(out, 1).unflatten(1, (heads, -1)).transpose(1, 2)
    if "output_norm.weight" in weights:
        o = normalise(o, weights["output_norm.weight"], 1e-6)
    o = o.flatten(-2)
    if "ogate_proj.weight" in weights:
        o = o * (x_BTE @ weights["ogate_proj.weight"].T).sigmoid()
    return o @ weights["o_proj.weight"].T


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_the_layer_computes_the_equations_and_their_gradients(options):
    torch.manual_seed(0)
    if options is None:
        layer: nn.Module = AttentionLayer(32, 4, num_kv_heads=2, window_size=7).double()
    else:
        layer = ForgettingAttentionLayer(32, 4, **options, initializer_range=0.4).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    results = []
    for function in (lambda: layer(x)[0], lambda: by_equations(layer, x)):
        layer.zero_grad()
        x.grad = None
        out = function()
        (out * weight).sum().backward()
        results.append([out.detach(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
    for got, want in zip(*results, strict=True):
        # Gates are float32 in the layer, also where it is float64.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-10 + 1e-5 * want.abs().max().item())


def test_a_window_and_groups_that_change_nothing_give_the_same_bits():
    ids = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    plain = small_model(**PRO, num_heads=4, log_pruning_tolerance=-10.0)
    same = small_model(**PRO, num_heads=4, num_kv_heads=4, log_pruning_tolerance=-10.0, window_size=None)
    assert torch.equal(same(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_two_layers_of_a_window_see_two_windows_back():
    model = small_model(**PRO, window_size=3)
    ids = torch.randint(0, 61, (1, 14), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 2] = (ids[:, 2] + 1) % 61
    is_reached = ~torch.isclose(model(input_ids=changed).logits, model(input_ids=ids).logits, atol=1e-6).all(-1)[0]
    # The shift of keys and values reaches one token further in every layer.
    assert is_reached.nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_names_and_shapes_of_grouped_weights():
    shapes = {name: tuple(x.shape) for name, x in ForgettingAttentionLayer(
        64, 4, 2, use_k_shift=True, qk_norm=True, use_output_norm=True
    ).state_dict().items()}  # fmt: skip
    assert shapes == {
        "q_proj.weight": (64, 64), "k_proj.linear.weight": (32, 64), "k_proj.shift_proj.weight": (2, 64),
        "v_proj.weight": (32, 64), "o_proj.weight": (64, 64), "fgate_proj.weight": (4, 64), "fgate_proj.bias": (4,),
        "output_norm.weight": (64,), "q_norm.weight": (64,), "k_norm.weight": (32,),
    }  # fmt: skip


def test_a_hybrid_of_windows_has_one_architecture_and_a_window_where_its_pattern_says():
    model = small("hybrid", **WINDOWS)
    mixers = [block.sequence_mixer for block in model.decoder.layers]
    assert [mixer.window_size for mixer in mixers] == [4, 4, None]
    assert {type(mixer) for mixer in mixers} == {ForgettingAttentionLayer}
    cache = model(input_ids=torch.zeros(1, 300, dtype=torch.long)).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [3 + 128, 3 + 128, 300]
    assert cache.get_seq_length() == 300


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{**PRO, **GROUPED, "window_size": 7}, {}], ids=["all options", "norms at hand"])
def test_a_pruned_block_compiles_into_one_graph(fields):
    torch.compiler.reset()
    model = small_model(**fields, num_hidden_layers=1, log_pruning_tolerance=-10.0).train()
    ids = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids.roll(-1, 1), "cu_seqlens": torch.tensor([0, 5, LENGTH, 2 * LENGTH])}
    want = model(**inputs).loss
    (block,) = model.decoder.layers
    block._transform = torch.compile(block._transform, fullgraph=True, backend="eager")
    assert torch.equal(model(**inputs).loss, want)
    torch.compiler.reset()


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
