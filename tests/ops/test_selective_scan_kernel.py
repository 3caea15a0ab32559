"""The Triton kernels of the selective scan against PyTorch in float64.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from forgetting_transformer.ops import recurrence
from tests.ops.kernels import draws, expect_float64, on_every_device

pytestmark = pytest.mark.slow

TOLERANCES = {
    "cpu": {torch.float32: 1e-6, torch.float16: 1e-3},
    "cuda": {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3},
}


def make_inputs(batch, length, channels, states, decay="usual", dtype=torch.float32, D=True, bias=True, state=True):
    rate = {"none": 0.0, "usual": 1.0, "strong": 50.0}[decay]
    dt = torch.randn(batch, length, channels)
    return {
        "x": torch.randn(batch, length, channels).to(dtype),
        "dt": dt.to(dtype) if bias else F.softplus(dt - 2),
        "A": -rate * (0.1 + torch.rand(channels, states)),
        "both": torch.randn(batch, length, 3 + 2 * states).to(dtype),
        "D": torch.randn(channels) if D else None,
        "dt_bias": torch.randn(channels) - 2 if bias else None,
        "state": torch.randn(batch, channels, states) if state else None,
    }


def scan(x, dt, A, both, D, dt_bias, state, cu_seqlens=None):
    """B and C are slices of one projection."""
    B, C = both[..., 3:].chunk(2, dim=-1)
    return recurrence.selective_scan(
        x, dt, A, B, C, D_I=D, dt_bias_I=dt_bias, initial_state_BIK=state, cu_seqlens=cu_seqlens
    )


def expect_right(device, inputs, **options):
    """In the interpreter with chunks of 8 tokens instead of 128, so that few tokens make several."""
    from forgetting_transformer.ops.recurrence import scan_triton  # which registers the operators

    if device == "cpu":
        scan_triton.CHUNK = 8
        recurrence.scan_takes_kernel = lambda states, dtype, device: dtype != torch.float64
    states, dtype = inputs["A"].shape[1], inputs["x"].dtype
    assert recurrence.scan_takes_kernel(states, dtype, torch.device(device))
    tolerance = TOLERANCES[device][dtype]
    floor = 1e-5 * inputs["A"].numel() ** 0.5 if device == "cuda" else 0  # of strong decays hardly anything is left
    got = expect_float64(
        lambda **x: scan(**x, **options), lambda **x: scan(**x, **options), inputs, tolerance, d_A=floor
    )
    assert got["out 0"].dtype == dtype and got["out 1"].dtype == torch.float32


#: Sizes and options of the inputs, and boundaries of documents: of one token, of several chunks of eight, and none.
CASES = {
    "whole": ((1, 18, 40, 3), {}, None),
    "strong decay, no D, no bias": ((1, 18, 8, 16, "strong"), {"D": False, "bias": False}, None),
    "no decay, nothing else": ((3, 2, 70, 1, "none"), {"D": False, "bias": False, "state": False}, None),
    "16 bits": ((1, 13, 33, 16), {"dtype": torch.float16}, None),
    "documents": ((2, 18, 8, 5), {"state": False}, [0, 1, 2, 16, 18, 27, 36, 36]),
    "documents without decay": ((2, 18, 8, 5, "none"), {"state": False}, [0, 1, 2, 16, 18, 27, 36, 36]),
}


@pytest.mark.parametrize("name", CASES)
@on_every_device
def test_outputs_states_and_gradients_equal_float64(device, name):
    """Two chunks of eight and a part, blocks of channels that are not full, a number of states not of 2ⁿ."""
    sizes, options, bounds = CASES[name]
    expect_right(device, make_inputs(*sizes, **options), cu_seqlens=None if bounds is None else torch.tensor(bounds))


@on_every_device
def test_random_shapes(device):
    for draw in draws(device):
        flags = {name: draw.random() < 0.5 for name in ("D", "bias", "state")}
        decay = draw.choice(["none", "usual", "strong"])
        if device == "cpu":
            shape = draw.randint(1, 2), draw.randint(2, 18), draw.randint(1, 40), draw.randint(1, 16)
            expect_right(device, make_inputs(*shape, decay, **flags))
            continue
        batch, length = draw.choice([1, 2, 3]), draw.choice([2, 127, 128, 129, 515, 1000])
        dtype, bounds = draw.choice([torch.bfloat16, torch.float16, torch.float32]), None
        if not flags["state"]:
            inside = [draw.randrange(batch * length) for _ in range(4)]
            bounds = torch.tensor(sorted([*range(0, batch * length + 1, length), *inside]), dtype=torch.int32)
        shape = batch, length, draw.choice([8, 40, 192]), draw.choice([16, 16, 5, 1])
        expect_right(device, make_inputs(*shape, decay, dtype, **flags), cu_seqlens=bounds)
