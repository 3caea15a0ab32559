"""Linear attention whose heads share queries and keys, on CUDA: the Triton kernels against float64.

Axes: B batch, T positions, H heads, G groups of heads, K key channels, V value channels.
"""

import torch
from torch import Tensor

from forgetting_transformer.model.mixers.mamba2 import Mamba2Mixer
from forgetting_transformer.ops import backends, recurrence
from forgetting_transformer.ops.recurrence import grouped
from tests.ops.kernels import expect_float64
from tests.ops.test_ssd_kernel import DECAYS, make_inputs

INPUTS = ("q_BTGK", "k_BTGK", "v_BTHV", "log_decay", "step", "skip", "state")


def mix(q, k, v, log_decay, step, skip, state):
    given = (q, k, v, log_decay, step, skip, state)
    return recurrence.recurrence(**dict(zip(INPUTS, given, strict=True)), scale=1.0)


def test_the_shape_of_the_760m_model(poisoned):
    """What a model calls; `tests/ops/test_ssd_kernel.py` has other shapes."""
    assert grouped.serves(48, 1, 128, 64, torch.bfloat16, 0)
    for decay in DECAYS:
        with torch.device("cuda"):
            inputs = make_inputs(1, 700, 48, 1, 128, 64, decay, dtype=torch.bfloat16)
        expect_float64(mix, mix, inputs, 1e-2)
    assert not backends.faults()


def layer_results(mixer: Mamba2Mixer, hidden_BTE: Tensor) -> list[Tensor]:
    hidden_BTE = hidden_BTE.detach().clone().requires_grad_()
    mixer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        out, states = mixer.mix(hidden_BTE, None, {})
    out.float().square().sum().backward()
    gradients = [hidden_BTE.grad, *(p.grad.clone() for p in mixer.parameters())]
    return [out.detach(), *(x.detach() for x in states.values()), *gradients]


def test_a_layer_gives_what_it_gives_in_pytorch_and_the_same_bits_twice():
    torch.manual_seed(0)
    mixer = Mamba2Mixer(128, 8, 32, 64, n_groups=2).cuda()
    mixer.init_own_weights()
    hidden_BTE = torch.randn(2, 300, 128, device="cuda")
    got, again = layer_results(mixer, hidden_BTE), layer_results(mixer, hidden_BTE)
    with backends.without("simple_gla", backends.TRITON, backends.FLA):
        want = layer_results(mixer, hidden_BTE)
    for a, b, c in zip(got, again, want, strict=True):
        assert torch.equal(a, b)
        assert (a.float() - c.float()).norm() <= 3e-2 * c.float().norm()


def test_a_layer_keeps_the_output_of_its_input_projection_and_y():
    """Beside the layer's input and output and what is as small as a step size."""
    tokens, width = 4096, 512
    mixer = Mamba2Mixer(width, 16, 64, 128).cuda()
    hidden_BTE = torch.randn(1, tokens, width, device="cuda", requires_grad=True)
    layer_results(mixer, hidden_BTE)
    mixer.zero_grad()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        out, _ = mixer.mix(hidden_BTE, None, {})
    kept = torch.cuda.memory_allocated() - before
    numbers = 2 * width + sum(mixer.projected_sizes) + mixer.inner_size
    weights = sum(p.numel() for p in mixer.parameters())
    assert kept <= 2 * (tokens * numbers + weights) + 4 * tokens * 8 * mixer.num_heads
    assert out.isfinite().all()
