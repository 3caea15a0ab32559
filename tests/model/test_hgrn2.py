"""HGRN2 computes its recurrence, with and without lower bounds, and starts as the paper's models did."""

import math

import pytest
import torch
from torch import Tensor

from forgetting_transformer.model import HGRN2Config, HGRN2ForCausalLM
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import counted_flops_per_token, small


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def one_step_per_token(mixer, hidden_BTE: Tensor, bound_E: Tensor | float) -> Tensor:
    """The mixer as the paper writes it, head by head and token by token, in float64."""
    weights = {name: x.double() for name, x in mixer.state_dict().items()}
    x = hidden_BTE.double()
    q, f, v = (x @ weights[f"{name}_proj.weight"].T for name in "qfi")
    q, f = q * q.sigmoid(), bound_E + (1 - bound_E) * f.sigmoid()
    out = torch.zeros_like(v)
    for channels in torch.arange(x.shape[-1]).split(mixer.head_dim):
        S = torch.zeros(x.shape[0], mixer.head_dim, mixer.head_dim, dtype=torch.float64)
        for t in range(x.shape[1]):
            f_t, v_t, q_t = f[:, t, channels], v[:, t, channels], q[:, t, channels]
            S = f_t[:, :, None] * S + (1 - f_t)[:, :, None] * v_t[:, None, :]
            out[:, t, channels] = (q_t[:, None, :] @ S)[:, 0] / math.sqrt(mixer.head_dim)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["g_norm.weight"]
    return out @ weights["o_proj.weight"].T


@pytest.mark.parametrize("bounded", [False, True])
def test_the_mixer_is_the_recurrence_of_the_paper(bounded):
    mixer = small("hgrn2").model.layers[0].attn
    with torch.no_grad():
        mixer.f_proj.weight.mul_(20)
        mixer.g_norm.weight.uniform_(0.5, 2)
        hidden = torch.randn(2, 75, 32)
        bound_E = torch.linspace(0.01, 0.99, 32) if bounded else None
        got = mixer(hidden, None, None, bound_E)[0]
        want = one_step_per_token(mixer, hidden, bound_E.double() if bounded else 0.0)
        assert relative_error(got, want) < 1e-5


def test_gates_near_0_and_1_keep_their_precision():
    """A float32 1 - sigmoid(20) has lost every digit of a key that matters after many tokens."""
    mixer = small("hgrn2").model.layers[0].attn
    with torch.no_grad():
        mixer.f_proj.weight.copy_(torch.eye(32))
        hidden = torch.full((1, 30, 32), 20.0)
        hidden[:, 15:, ::2] = -200.0
        got = mixer(hidden)[0]
        assert got.isfinite().all()
        # float64's 1 - sigmoid(20) has 7 digits left.
        assert relative_error(got, one_step_per_token(mixer, hidden, 0.0)) < 1e-5


def test_bounds_grow_with_depth_from_0_to_less_than_1():
    model = small("hgrn2", num_hidden_layers=4, apply_lower_bounds=True).model
    assert [bounds for bounds in model.mixer_inputs() if not bounds] == [()]
    zeros = torch.stack([bound_E for (bound_E,) in model.mixer_inputs()[1:]])
    torch.testing.assert_close(zeros, torch.tensor([0.25, 0.5, 0.75])[:, None].expand(3, 32))
    with torch.no_grad():
        model.lower_bounds.normal_()
    bounds = torch.stack([bound_E for (bound_E,) in model.mixer_inputs()[1:]])
    share = model.lower_bounds.exp() / model.lower_bounds.exp().sum(0)
    torch.testing.assert_close(bounds, torch.stack([share[1], share[1] + share[2], 1 - share[0]]))


def test_bounds_reach_the_mixers_and_are_learned_only_when_asked_for():
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    ignoring, applying = small("hgrn2"), small("hgrn2", apply_lower_bounds=True)
    assert ignoring.state_dict().keys() == applying.state_dict().keys()
    applying.load_state_dict(ignoring.state_dict())
    with torch.no_grad():
        logits, want = applying(input_ids=ids).logits, ignoring(input_ids=ids).logits
        assert relative_error(logits, want) > 1e-3
        ignoring.model.lower_bounds.normal_()
        assert torch.equal(ignoring(input_ids=ids).logits, want)
        applying.model.lower_bounds.normal_()
        assert relative_error(applying(input_ids=ids).logits, logits) > 1e-3
    assert not ignoring.model.lower_bounds.requires_grad
    applying(input_ids=ids, labels=ids).loss.mean().backward()
    # The first layer's row counts too: it is the share of the softmax that no bound gets.
    assert (applying.model.lower_bounds.grad.norm(dim=1) > 0).all()


def test_a_model_without_the_parameter():
    assert "model.lower_bounds" not in small("hgrn2", use_lower_bound=False).state_dict()


def test_initial_weights_follow_the_papers_laws():
    model = HGRN2ForCausalLM(HGRN2Config(vocab_size=1000, hidden_size=512, num_hidden_layers=4))
    block = model.model.layers[1]
    for name in "qfio":
        weight = block.attn.get_submodule(f"{name}_proj").weight
        assert weight.std().item() == pytest.approx(2**-2.5 * math.sqrt(2 / 1024), rel=0.02)
        assert weight.abs().max() <= 2**-2.5 * math.sqrt(6 / 1024)
    assert block.mlp.gate_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(model.model.lower_bounds, torch.zeros(4, 512))


SIZES = {  # hidden, layers: parameters without the input embedding
    (768, 12): 123_569_664,
    (1024, 24): 359_843_840,
    (1536, 24): 756_820_992,
}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_the_papers(size):
    hidden, layers = size
    config = HGRN2Config(vocab_size=50257, hidden_size=hidden, num_hidden_layers=layers)
    with torch.device("meta"):
        model = HGRN2ForCausalLM(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(sizes.values()) - 50257 * hidden == SIZES[size]
    if hidden == 1536:
        undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
        assert sum(sizes[name] for name in undecayed) == 148_992


def test_heads_follow_from_either_option():
    by_size, by_number = small("hgrn2", expand_ratio=8), small("hgrn2", expand_ratio=None, num_heads=4)
    for model in (by_size, by_number):
        mixer = model.model.layers[0].attn
        assert (mixer.num_heads, mixer.head_dim) == (4, 8)


def test_flops_are_those_pytorch_counts():
    model = small("hgrn2")
    # A token's own key and value enter its output without a matrix product: 2 (K + V) per head.
    uncounted = 2 * 2 * 2 * (16 + 16)
    assert model.config.flops_per_token(256, training=False) - uncounted == counted_flops_per_token(model)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"expand_ratio": 12}, "hidden_size must be expand_ratio · num_heads"),
        ({"expand_ratio": 128}, "hidden_size is 32, expand_ratio 128"),
        ({"num_heads": 4}, "set one of the two to a divisor"),
        ({"expand_ratio": None}, "expand_ratio and num_heads are both None"),
        ({"use_short_conv": True}, "use_short_conv is True"),
        ({"apply_lower_bounds": True, "use_lower_bound": False}, "apply_lower_bounds needs the parameter"),
    ],
)
def test_options_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small("hgrn2", **fields)
