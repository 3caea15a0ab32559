"""The Triton kernels of the gated RMS norm against PyTorch in float64."""

import pytest
import torch

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import norm, norm_triton  # noqa: F401 (registers the operators)
from tests.ops.kernels import draws, expect_float64, on_every_device

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def expect_right(rows, groups, channels, has_gate, gate_first, silu=True, dtype=torch.float32):
    """For slices of something wider, as of a projection that serves several."""
    width = groups * channels

    def parts(wide):
        return wide[..., 4 : 4 + width], wide[..., 4 + width : 4 + 2 * width] if has_gate else None

    def kernel(wide, weight):
        x, gate = parts(wide)
        return torch.ops.forgetting_transformer.gated_rms_norm(x, gate, weight, groups, gate_first, silu, 1e-6)

    def reference(wide, weight):
        activation = "silu" if silu else "sigmoid"
        return norm.gated_rms_norm(*parts(wide), weight, 1e-6, groups, gate_first=gate_first, activation=activation)

    inputs = {"wide": torch.randn(2, rows, 2 * width + 8).to(dtype), "weight": torch.randn(width)}
    expect_float64(kernel, reference, inputs, TOLERANCES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("has_gate, gate_first", [(False, False), (True, False), (True, True)])
@on_every_device
def test_it_computes_what_pytorch_does_in_float64(device, has_gate, gate_first):
    expect_right(70, 2, 24, has_gate, gate_first, False)
    expect_right(70, 2, 24, has_gate, gate_first, True, torch.float16)
    lengths, channels = ([1, 7, 70, 200], [8, 24, 100]) if device == "cpu" else ([1, 70, 700], [64, 96, 1536, 3072])
    for draw in draws(device):
        for dtype in (torch.float32, torch.float32 if device == "cpu" else torch.bfloat16):
            shape = draw.choice(lengths), draw.randint(1, 3), draw.choice(channels)
            expect_right(*shape, has_gate, gate_first, draw.random() < 0.5, dtype)


def test_an_unknown_activation_and_an_epsilon_of_zero_are_refused():
    """The kernel would take anything else for a sigmoid, and make NaN of rows beyond the end."""
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="activation is 'swish'; it must be one of sigmoid, silu"):
        norm.gated_rms_norm(x, x, torch.ones(8), 1e-6, activation="swish")
    with pytest.raises(ValueError, match=r"eps is 0\.0; it must be positive"):
        norm.gated_rms_norm(x, None, torch.ones(8), 0.0)
