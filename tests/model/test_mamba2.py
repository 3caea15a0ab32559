"""Mamba-2 computes its recurrence, agrees with transformers' implementation, and starts as the paper's models did."""

import inspect
import math

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from forgetting_transformer.model import Mamba2Config, Mamba2ForCausalLM
from forgetting_transformer.model.layers import initial_dt_bias
from forgetting_transformer.model.mixers import mamba2
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import counted_flops_per_token, small


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def one_step_per_token(mixer, hidden_BTE: Tensor) -> Tensor:
    """The mixer as the paper writes it, head by head and token by token, in float64."""
    state = {name: x.double() for name, x in mixer.state_dict().items()}
    heads, head_dim, N, groups = mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.n_groups
    inner = heads * head_dim
    projected = hidden_BTE.double() @ state["in_proj.weight"].T
    z, xBC, dt = projected.split([inner, inner + 2 * groups * N, heads], dim=-1)
    taps = state["conv1d.weight"][:, 0]
    padded = torch.cat((torch.zeros_like(xBC[:, : taps.shape[1] - 1]), xBC), dim=1)
    xBC = sum(padded[:, w : w + xBC.shape[1]] * taps[:, w] for w in range(taps.shape[1])) + state["conv1d.bias"]
    xBC = xBC * xBC.sigmoid()
    x, B, C = xBC.split([inner, groups * N, groups * N], dim=-1)
    dt = (dt + state["dt_bias"]).exp().log1p()
    y = torch.zeros_like(x)
    for h in range(heads):
        channels, g = slice(h * head_dim, (h + 1) * head_dim), h // (heads // groups)
        decay_rate = -state["A_log"][h].exp()
        S = torch.zeros(x.shape[0], N, head_dim, dtype=torch.float64)
        for t in range(x.shape[1]):
            x_t, B_t, C_t = x[:, t, channels], B[:, t, g * N : (g + 1) * N], C[:, t, g * N : (g + 1) * N]
            step = dt[:, t, h, None, None]
            S = (step * decay_rate).exp() * S + step * B_t[:, :, None] * x_t[:, None, :]
            y[:, t, channels] = (C_t[:, None, :] @ S)[:, 0] + state["D"][h] * x_t
    y = (y * z * z.sigmoid()).unflatten(-1, (groups, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    return (y * state["norm.weight"]) @ state["out_proj.weight"].T


@pytest.mark.parametrize("n_groups", [1, 2, 4])
def test_the_mixer_is_the_recurrence_of_the_paper(n_groups):
    mixer = small("mamba2", n_groups=n_groups).backbone.layers[0].mixer
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
        mixer.D.uniform_(0.5, 2)
        hidden = torch.randn(2, 75, 32)
        assert relative_error(mixer(hidden)[0], one_step_per_token(mixer, hidden)) < 1e-5


@pytest.mark.parametrize("n_groups", [1, 2])
def test_logits_and_gradients_are_those_of_transformers_mamba2(n_groups):
    if n_groups > 1 and "group_size" not in inspect.signature(MambaRMSNormGated).parameters:
        pytest.skip("this transformers normalises over all groups at once")
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "expand": 2,
        "n_groups": n_groups,
    }
    ours = Mamba2ForCausalLM(Mamba2Config(**fields)).eval()
    theirs = AutoModelForCausalLM.from_config(transformers.Mamba2Config(**fields, chunk_size=32)).eval()
    assert type(theirs) is transformers.Mamba2ForCausalLM  # which has a config class of the same name
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.5 * torch.randn(x.shape, generator=generator) for name, x in ours.state_dict().items()}
    ours.load_state_dict(weights, strict=True)
    theirs.load_state_dict(weights, strict=True)
    ids = torch.randint(0, 61, (2, 150), generator=generator)
    results = []
    for model in (ours, theirs):
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (logits, gradients), (want_logits, want_gradients) = results
    assert relative_error(logits, want_logits) < 1e-5
    for name in want_gradients:
        assert relative_error(gradients[name], want_gradients[name]) < 1e-4, name


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


def test_a_long_prompt_in_pieces_equals_the_whole():
    """Pieces longer than a chunk, which start from a state."""
    model = small("mamba2", n_groups=2)
    ids = torch.randint(0, 61, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache, pieces = model.new_cache(), []
        for piece in ids.split([130, 100, 1, 69], dim=1):
            pieces.append(model(input_ids=piece, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(input_ids=ids).logits, rtol=1e-3, atol=1e-4)


def test_initial_weights_follow_the_papers_laws():
    config = Mamba2Config(
        vocab_size=4000, hidden_size=256, num_heads=32, head_dim=16, num_hidden_layers=4, initializer_range=0.02
    )
    model = Mamba2ForCausalLM(config)
    mixer, embedding = model.backbone.layers[2].mixer, model.backbone.embeddings.weight
    assert embedding.std().item() == pytest.approx(0.02, rel=0.02) and embedding[0].abs().max() > 0
    uniform = {  # parameter: largest value
        "in_proj.weight": 1 / 16,
        "conv1d.weight": 0.5,
        "conv1d.bias": 0.5,
        "out_proj.weight": 1 / math.sqrt(512) / math.sqrt(4),
    }
    for name, bound in uniform.items():
        weight = mixer.get_parameter(name)
        assert bound * 0.98 < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert 0.98 / 16 < model.lm_head.weight.abs().max() <= 1 / 16
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 33.0))
    assert torch.equal(mixer.D, torch.ones(32)) and torch.equal(mixer.norm.weight, torch.ones(512))
    steps = torch.cat([torch.nn.functional.softplus(layer.mixer.dt_bias) for layer in model.backbone.layers])
    assert steps.min() >= 0.99e-3 and steps.max() <= 0.101
    assert steps.log().mean().item() == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, abs=0.4)
    unscaled = Mamba2ForCausalLM(Mamba2Config(**{**config.to_dict(), "rescale_prenorm_residual": False}))
    assert unscaled.backbone.layers[0].mixer.out_proj.weight.abs().max() > 0.98 / math.sqrt(512)


SIZES = {  # hidden, layers, heads: parameters without the input embedding
    (768, 24, 24): 128_965_824,
    (1024, 48, 32): 368_314_880,
    (1536, 48, 48): 780_113_664,
}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_the_papers(size):
    hidden, layers, heads = size
    config = Mamba2Config(
        vocab_size=50257, hidden_size=hidden, num_hidden_layers=layers, num_heads=heads, state_size=128
    )
    with torch.device("meta"):
        model = Mamba2ForCausalLM(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(sizes.values()) - 50257 * hidden == SIZES[size]
    if hidden == 1536:
        undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
        assert sum(sizes[name] for name in undecayed) == 389_376


def test_step_sizes_start_where_they_should():
    for dt, floor, want in ((0.1, 1e-4, 0.1), (2.0, 1e-4, 2.0), (1e-5, 1e-4, 1e-4)):
        bias = initial_dt_bias(3, dt, dt, floor)
        torch.testing.assert_close(torch.nn.functional.softplus(bias), torch.full((3,), want))


def test_step_sizes_are_clamped_to_their_limits():
    free, fixed = small("mamba2").backbone.layers[0].mixer, small("mamba2", time_step_limit=[0.2, 0.2])
    fixed = fixed.backbone.layers[0].mixer
    hidden = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative_error(fixed(hidden)[0], free(hidden)[0]) > 1e-3
        # A constant step size: the projection to dt has no effect any more.
        for mixer, changes in ((free, True), (fixed, False)):
            before = mixer(hidden)[0]
            mixer.in_proj.weight[-4:].mul_(-1)
            assert (relative_error(mixer(hidden)[0], before) > 1e-3) == changes


def test_tied_embeddings_keep_the_embeddings_law():
    config = Mamba2Config(
        vocab_size=500, hidden_size=64, num_heads=8, head_dim=16, num_hidden_layers=1, tie_word_embeddings=True
    )
    model = Mamba2ForCausalLM(config)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("n_groups", [1, 2])
def test_flops_are_those_pytorch_counts(n_groups):
    model = small("mamba2", n_groups=n_groups)
    assert model.config.flops_per_token(256, training=False) == counted_flops_per_token(model)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_heads": 3}, r"num_heads · head_dim is 3 · 16 = 48; it must equal expand · hidden_size"),
        ({"n_groups": 3}, "num_heads is 4; it must be a multiple of n_groups = 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"rms_norm": False}, "rms_norm is False"),
        ({"time_step_limit": [0.1, 0.0]}, "time_step_limit is .*0 <= lower <= upper"),
    ],
)
def test_options_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small("mamba2", **fields)
