"""What is peculiar to one architecture; what holds for all is in the files beside this one."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from forgetting_transformer.model import (
    ForgettingAttentionLayer,
    layers,
)
from forgetting_transformer.model.mixers import mamba2
from forgetting_transformer.model.mixers.forgetting_attention import decay_time_bias
from forgetting_transformer.model.mixers.samba import MambaMixer, SambaAttention
from tests.docs.commands import blocks, section
from tests.model.small_models import small, small_model

ROOT = Path(__file__).parents[2]


# FoX


def test_decay_times_give_gates_that_decay_to_one_over_e():
    bias = decay_time_bias(4, 2, 256)
    assert bias.tolist() == pytest.approx([0.43275, 2.26047, 3.91797, 5.54322], abs=1e-5)
    assert (-1 / torch.nn.functional.logsigmoid(bias.double())).tolist() == pytest.approx(
        [2, 10.0794, 50.7968, 256], rel=1e-4
    )
    model = small_model(num_heads=4, fgate_type="bias_only", fgate_bias_init=True, decay_time_min=2, decay_time_max=256)
    assert torch.equal(model.model.layers[1].attn.fgate_bias, bias)
    assert (small_model(fgate_type="bias_only").model.layers[1].attn.fgate_bias == 0).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_pruning_bound_holds_and_pruning_changes_nothing(qk_norm, shared):
    options = {"qk_norm": qk_norm, "qk_norm_share_param_across_head": shared}
    model = small_model(**options, log_pruning_tolerance=-10.0)
    layer = model.model.layers[0].attn
    if qk_norm:
        torch.nn.init.normal_(layer.q_norm.weight)
    norms = [layer.q_norm or torch.nn.Identity(), layer.k_norm or torch.nn.Identity()]
    q, k = (norm(torch.randn(2, 9, 32)).unflatten(-1, (2, 16)) for norm in norms)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if qk_norm:
        largest_score = (q @ k.transpose(-1, -2)).abs().amax((-1, -2)) / math.sqrt(16)
        bound = -(layer.pruning().threshold(9) + 10 + math.log(9)) / 2
        assert (largest_score <= bound + 1e-5).all()
    else:
        assert layer.pruning().threshold(9) is None
    ids = torch.arange(20)[None]
    exact = small_model(**options)
    exact.load_state_dict(model.state_dict())
    assert torch.equal(model(input_ids=ids).logits, exact(input_ids=ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "separate", "together"),
    [
        (ForgettingAttentionLayer(64, 4, use_output_gate=True, use_k_shift=True, use_v_shift=True, qk_norm=True), 8, 2),
        (ForgettingAttentionLayer(64, 4, 2, fgate_type="none", use_rope=True), 4, 2),
    ],
    ids=["Pro", "no gates, grouped keys"],
)
def test_projections_of_one_input_are_one_product_for_a_compiler(monkeypatch, layer, separate, together):
    torch.manual_seed(0)
    layer.double()  # its weights are random, and sums in another order must not decide
    if isinstance(getattr(layer, "fgate_proj", None), nn.Linear):
        nn.init.normal_(layer.fgate_proj.bias)
    x, weight = torch.randn(2, 2, 40, 64, dtype=torch.float64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def products(function) -> tuple[int, list[torch.Tensor]]:
        torch.compiler.reset()
        graphs.clear()
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        out = function(inputs)[0]
        (out * weight).sum().backward()
        called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        found = sum("linear" in name for name in called)
        return found, [out.detach(), inputs.grad, *(p.grad.clone() for p in layer.parameters())]

    _, plain = products(layer)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert products(compiled)[0] == separate  # few tokens: the weights would cost more than what is computed
    monkeypatch.setattr(layers, "MIN_TOKENS_TOGETHER", 80)
    count, values = products(compiled)
    assert count == together
    for value, expected in zip(values, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    handle = layer.q_proj.register_forward_hook(lambda *_: None)
    assert products(compiled)[0] == separate  # a hook must get its calls
    handle.remove()


# Mamba-2


def test_what_watches_or_adapts_the_convolution_is_not_passed_by(monkeypatch):
    """The kernel of convolution and recurrence reads the weights of the convolution, and calls no layer."""
    asked = []
    monkeypatch.setattr(mamba2, "run_convolved", lambda *_, **__: asked.append(1))
    mixer = small("mamba2").decoder.layers[0].sequence_mixer
    hidden = torch.randn(1, 5, mixer.in_proj.in_features)
    mixer(hidden)
    assert len(asked) == 1
    called = []
    mixer.conv1d.register_forward_hook(lambda *_: called.append(1))
    mixer(hidden)
    assert len(asked) == 1 and len(called) == 1


# Samba


@pytest.mark.parametrize(
    "attn, kinds",
    [
        ({"num_heads": 2}, "MAMA"),
        ({"num_heads": 2, "layers": [0, 3]}, "AMMA"),
        ({"num_heads": 2, "layers": []}, "MMMM"),
        (None, "MMMM"),
    ],
)
def test_which_blocks_have_attention(attn, kinds, ids):
    model = small("samba", attn=attn)
    classes = {"M": MambaMixer, "A": SambaAttention}
    assert [type(block.sequence_mixer) for block in model.backbone.layers] == [classes[kind] for kind in kinds]
    widths = {"M": 256, "A": 512}  # of the two MLPs
    model = small("samba", attn=attn, mamba_hidden_ratio=8, attn_hidden_ratio=16)
    assert [block.mlp.down_proj.in_features for block in model.backbone.layers] == [widths[kind] for kind in kinds]
    assert model(input_ids=ids, labels=ids).loss.isfinite().all()


# Gated DeltaNet


def test_the_documentation_shows_the_code_as_it_is():
    page = section((ROOT / "docs/extend.md").read_text(), "The parts of a mixer")
    model = ROOT / "src/forgetting_transformer/model"
    sources = [model / f"mixers/{name}.py" for name in ("delta_net", "gated_delta_net")]
    code = {line.strip() for source in sources for line in source.read_text().splitlines()}
    shown = blocks(page, "python")
    assert len(shown) > 5
    for line in "".join(shown).splitlines():
        assert not line.strip() or line.strip() in code, line
