"""The Triton kernels of token shift and norms of heads against PyTorch in float64."""

import math

import pytest
import torch

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import norm
from forgetting_transformer.ops.layers import shift_norm_triton as launcher
from forgetting_transformer.ops.layers.shift_norm import shift_norm
from forgetting_transformer.ops.layers.token_shift import token_shift
from tests.ops.kernels import draws, expect_float64, on_every_device

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def expect_right(batch, length, heads, head_dim, shift, norm, previous, begins, dtype=torch.float32):
    """For slices of something wider, as of a projection that serves several."""
    width = heads * head_dim
    inputs = {
        "wide": torch.randn(batch, length, width + 11).to(dtype),
        "shift": torch.randn(batch, length, heads).to(dtype) if shift else None,
        "previous": torch.randn(batch, width).to(dtype) if previous else None,
        "weight": {"own": torch.randn(width), "shared": torch.randn(head_dim), "none": None}[norm],
    }
    begins_BT = torch.rand(batch, length) < 0.3 if begins else None

    def kernel(wide, shift, previous, weight):
        return launcher.shift_and_normalise(wide[..., 8:-3], shift, previous, begins_BT, weight, heads, 1e-2)

    def reference(wide, shift, previous, weight):
        options = {"shift_BTH": shift, "previous_BE": previous, "begins_BT": begins_BT, "weight": weight, "eps": 1e-2}
        return shift_norm(wide[..., 8:-3], heads, **options)

    expect_float64(kernel, reference, inputs, TOLERANCES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("shift, norm", [(True, "own"), (True, "none"), (False, "shared"), (True, "shared")])
@on_every_device
def test_it_computes_what_pytorch_does_in_float64(device, shift, norm):
    """In the interpreter with stretches of 8 positions: some lie beyond the sequence, and most have a neighbour."""
    if device == "cpu":
        launcher._STEPS, launcher._TILES = 2, {"forward": 64, "backward": 64}
    for length, previous, begins in ((1, shift, False), (33, False, shift), (33, shift, False)):
        expect_right(2, length, 2, 16, shift, norm, previous, begins)


@pytest.mark.slow
@on_every_device
def test_random_shapes(device):
    for draw in draws(device):
        shift = draw.random() < 0.7
        norm = draw.choice(["own", "shared"] + ["none"] * shift)
        options = shift, norm, shift and draw.random() < 0.5, shift and draw.random() < 0.5
        if device == "cpu":
            launcher._STEPS, launcher._MAX_PARTS = draw.choice([1, 2, 8]), draw.choice([1, 2, 256])
            heads = draw.randint(1, 3), draw.choice([8, 16, 24, 100])
            expect_right(draw.randint(1, 2), draw.randint(1, 100), *heads, *options)
        else:
            sequences = draw.choice([(1, 16384), (3, 1001), (2, 2048)])
            heads = draw.choice([(24, 64), (12, 128), (5, 96), (3, 256), (7, 40)])
            dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
            expect_right(*sequences, *heads, *options, dtype)


@pytest.mark.slow
@on_every_device
def test_sixteen_bits_round_the_results_alone(device):
    expect_right(1, 70, 2, 16, True, "own", True, True, torch.float16)


@pytest.mark.slow
@on_every_device
def test_what_stands_before_a_document_does_not_matter(device):
    """Not even where it is not finite; and what stands behind it gets no gradient from there."""
    shift, weight = torch.randn(1, 40, 2), torch.randn(32)
    begins = torch.zeros(1, 40, dtype=torch.bool)
    begins[0, 17] = True
    y = torch.randn(1, 40, 32)
    y[0, 16] = math.inf
    leaf = y.requires_grad_()
    out = launcher.shift_and_normalise(leaf, shift, None, begins, weight, 2, 1e-6)
    assert out[:, 17:].isfinite().all()
    (gradient,) = torch.autograd.grad(out[:, 17:].sum(), leaf)
    assert gradient[:, 17:].isfinite().all() and gradient[:, 17:].any()
    # Backward the same: the last token of a document gets nothing from the first of the next, finite or not.
    y = torch.randn(1, 40, 32)
    y[0, 17] = math.inf
    leaf = y.requires_grad_()
    out = launcher.shift_and_normalise(leaf, shift, None, begins, weight, 2, 1e-6)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert gradient[:, :17].isfinite().all() and gradient[:, :17].any()


def test_without_a_gpu_it_is_pytorch():
    """The same bits as shift and norm one after the other."""
    y, shift, weight = torch.randn(2, 9, 24), torch.randn(2, 9, 3), torch.randn(24)
    shifted = token_shift(y.unflatten(-1, (3, -1)), shift.sigmoid())
    assert torch.equal(shift_norm(y, 3, shift_BTH=shift), shifted.flatten(-2))
    both = shift_norm(y, 3, shift_BTH=shift, weight=weight, eps=1e-5)
    assert torch.equal(both, norm.rms_norm(shifted.flatten(-2), weight, 1e-5, 3))
    shared = shift_norm(y, 3, weight=weight[:8], eps=1e-5)
    assert torch.equal(shared, norm.rms_norm(y.unflatten(-1, (3, -1)), weight[:8], 1e-5).flatten(-2))
    assert shift_norm(y, 3) is y


def test_what_does_not_fit_is_named():
    y = torch.randn(2, 9, 24)
    with pytest.raises(ValueError, match="y has 24 channels; they must be a multiple of num_heads = 5"):
        shift_norm(y, 5)
    with pytest.raises(ValueError, match=r"shift has shape \(2, 9, 2\); it must be \(2, 9, 3\)"):
        shift_norm(y, 3, shift_BTH=torch.ones(2, 9, 2))
    with pytest.raises(ValueError, match=r"eps is 0\.0; it must be positive where there is a weight"):
        shift_norm(y, 3, weight=torch.ones(24))
