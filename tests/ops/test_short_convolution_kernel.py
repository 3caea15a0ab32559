"""The Triton kernels of the short convolution against PyTorch in float64."""

import random

import pytest
import torch

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import short_convolution as public
from forgetting_transformer.ops.layers import short_convolution_triton as launcher
from tests.ops.kernels import draws, expect_float64, on_every_device

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def take_small_tiles(device):
    if device == "cpu":
        launcher._STEPS, launcher._TILES = 2, {"forward": 128, "backward": 64}


def expect_right(batch, length, channels, taps, heads, has_bias, has_previous, dtype=torch.float32, position=None):
    """For a slice of something wider, as of a projection that serves several."""
    inputs = {
        "wide": torch.randn(batch, length, channels + 8).to(dtype),
        "weight": torch.randn(channels, 1, taps),
        "bias": torch.randn(channels) if has_bias else None,
        "previous": torch.randn(batch, channels, taps - 1).to(dtype) if has_previous else None,
    }

    def kernel(wide, *others):
        return launcher.convolve(wide[..., 3:-5], *others, position, heads, public._EPSILON)

    def reference(wide, *others):
        return public._in_pytorch(wide[..., 3:-5], *others, position, heads)

    expect_float64(lambda **x: kernel(*x.values()), lambda **x: reference(*x.values()), inputs, TOLERANCES[dtype])


KINDS = {"20": (20, 4, 0), "150": (150, 3, 0), "2 heads": (48, 4, 2), "a head": (24, 2, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, kind, has_previous",
    [(33, "20", False), (33, "150", True), (33, "2 heads", True), (3, "a head", False), (1, "2 heads", True)],
)
@on_every_device
def test_it_computes_what_pytorch_does_in_float64(device, length, kind, has_previous):
    """In the interpreter 33 positions are three programs, forward and backward, of which the last has one position."""
    channels, taps, heads = KINDS[kind]
    take_small_tiles(device)
    expect_right(2, length if device == "cpu" else 5 * length, channels, taps, heads, heads == 0, has_previous)


@pytest.mark.slow
@on_every_device
def test_random_shapes(device):
    is_small = device == "cpu"
    for draw in draws(device):
        for dtype in (torch.float32, torch.float32 if is_small else torch.bfloat16):
            heads, taps = draw.choice([0, 1, 3]), draw.randint(1, 4)
            channels = max(1, heads) * draw.choice([8, 16, 31, 96] if is_small else [32, 96, 128, 200])
            flags = draw.random() < 0.5, taps > 1 and draw.random() < 0.5
            length = draw.randint(1, 90 if is_small else 700)
            expect_right(draw.randint(1, 2), length, channels, taps, heads, *flags, dtype)


@pytest.mark.slow
@on_every_device
def test_inputs_of_one_packed_document_do_not_enter_another(device):
    """With inputs before the sequence in every second case."""
    draw, has_previous = random.Random(3), True
    take_small_tiles(device)
    for taps, heads, length in [(4, 0, 37), (4, 2, 20), (3, 0, 19), (2, 1, 5)]:
        begins = torch.rand(2, length) < 0.3
        places = torch.arange(length).expand(2, -1)
        position = places - torch.where(begins, places, -draw.choice([0, 1, 5])).cummax(1).values
        expect_right(2, length, 24, taps, heads, True, has_previous, position=position.int())
        has_previous = not has_previous


@pytest.mark.slow
@on_every_device
def test_sixteen_bits_round_the_results_alone(device):
    expect_right(1, 70, 32, 4, 2, True, True, torch.float16)
