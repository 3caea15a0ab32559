"""The Triton kernels of layers against PyTorch in float64, on every device: values, gradients and graphs.

Inputs are slices of something wider, as of a projection that serves several. `test_layouts_of_inputs.py` has others.
"""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import (
    norm,
    norm_triton,  # noqa: F401 (registers the operators)
    shift_norm_triton,
    short_convolution,
    short_convolution_triton,
    swiglu,
    swiglu_triton,
)
from forgetting_transformer.ops.layers import residual_norm_triton as kernels
from forgetting_transformer.ops.layers.shift_norm import shift_norm
from tests.ops.kernels import draws, expect_float64, on_every_device, results

TOLERANCES = {
    "cpu": {torch.float32: 2e-6, torch.float16: 1e-3},
    "cuda": {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3},
}
#: Types of random cases.
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.float16, torch.bfloat16]}


def draw_shape(device, draw):
    if device == "cpu":
        return [draw.randint(1, 5) for _ in range(draw.randint(1, 2))]
    return draw.choice([(1, 16384), (3, 1001), (1024, 2), (2, 2048)])


def draw_strided(draw, shape, dtype=torch.float32):
    """As projections and views leave them: rows apart, the batch behind the positions, or a transposed matrix."""
    wide = torch.randn(*shape[:-1], shape[-1] + draw.choice([0, 3, 8])).to(dtype)[..., : shape[-1]]
    how = draw.choice(["as it is", "turned", "transposed"])
    if how == "turned" and len(shape) == 3:
        return wide.transpose(0, 1).contiguous().transpose(0, 1)
    return wide.mT.contiguous().mT if how == "transposed" else wide


def activate_in_pytorch(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


@on_every_device
def test_swiglu(device):
    """Gradients may be expanded, as `sum().backward()` gives them, and exp overflows for one of two gates."""
    for draw in draws(device):
        for dtype, tolerance in TOLERANCES[device].items():
            h = draw_strided(draw, (*draw_shape(device, draw), 2 * draw.choice([1, 16, 37, 1024, 1031])), dtype)
            got = expect_float64(swiglu_triton.gated, activate_in_pytorch, {"h": h}, tolerance)
            assert got["out 0"].dtype == got["d h"].dtype == dtype and got["out 0"].is_contiguous()
    h = torch.tensor([[-1e4, 1e4, 0.0, -50.0, 3.0, 4.0, 5.0, 6.0]])
    expect_float64(lambda h: swiglu_triton.gated(h).sum(), lambda h: activate_in_pytorch(h).sum(), {"h": h}, 1e-5)


@pytest.mark.parametrize("how", ["branch", "stream", "alone"])
@on_every_device
def test_residual_norm(device, how):
    """Several rows per program, whole programs and a last one with fewer rows."""
    is_small = device == "cpu"
    for draw in draws(device):
        if is_small:
            kernels._PROGRAMS = draw.randint(1, 4)
        widths = [1, 16, 37, 130] if is_small else [40, 777, 1536, 5000, 8192]
        shape = (*draw_shape(device, draw), draw.choice(widths))
        dtype = draw.choice(DTYPES[device])
        inputs = {"x": draw_strided(draw, shape), "weight": torch.randn(shape[-1])}
        inputs |= {"branch": draw_strided(draw, shape, dtype)} if how == "branch" else {}

        def kernel(x, weight, branch=None, dtype=dtype):
            return kernels.ResidualNorm.apply(x, branch, weight, 1e-2, dtype, how != "alone")

        def reference(x, weight, branch=None):
            total = x * 1 if branch is None else x + branch
            y = norm.rms_norm(total, weight, 1e-2)
            return y if how == "alone" else (y, total)

        # Of one channel the gradient is hardly more than rounding.
        expect_float64(kernel, reference, inputs, TOLERANCES[device][dtype], d_x=1e-6)


@on_every_device
def test_dtypes_of_the_norm(device):
    """The sum has PyTorch's dtype and is rounded before the norm; gradients have those of what they belong to."""
    x, branch, weight = torch.randn(5, 40), torch.randn(5, 40).half(), torch.randn(40)

    def add_and_normalise(x, branch, weight):
        return kernels.ResidualNorm.apply(x, branch, weight, 1e-6, torch.float16, True)

    y, total, *gradients = results(add_and_normalise, {"x": x, "branch": branch, "weight": weight}).values()
    assert [t.dtype for t in (y, total, *gradients)] == [
        torch.float16, torch.float32, torch.float32, torch.float16, torch.float32
    ]  # fmt: skip
    assert torch.equal(total, x + branch)
    assert torch.equal(gradients[1], gradients[0].half())
    y, total, _ = kernels.normalise(x.half(), branch, weight.half(), 1e-6, torch.float16)
    assert torch.equal(total, x.half() + branch)
    torch.testing.assert_close(y, norm.rms_norm(total, weight.half(), 1e-6), rtol=2e-3, atol=1e-3)


def expect_gated_norm(rows, groups, channels, has_gate, gate_first, silu, dtype):
    width = groups * channels

    def parts(wide):
        return wide[..., 4 : 4 + width], wide[..., 4 + width : 4 + 2 * width] if has_gate else None

    def kernel(wide, weight):
        options = weight, groups, gate_first, silu, 1e-6
        return torch.ops.forgetting_transformer.gated_rms_norm(*parts(wide), *options)

    def reference(wide, weight):
        options = {"gate_first": gate_first, "activation": "silu" if silu else "sigmoid"}
        return norm.gated_rms_norm(*parts(wide), weight, 1e-6, groups, **options)

    inputs = {"wide": torch.randn(2, rows, 2 * width + 8).to(dtype), "weight": torch.randn(width)}
    expect_float64(kernel, reference, inputs, TOLERANCES[inputs["wide"].device.type][dtype])


@pytest.mark.slow
@pytest.mark.parametrize("has_gate, gate_first", [(False, False), (True, False), (True, True)])
@on_every_device
def test_gated_norm(device, has_gate, gate_first):
    expect_gated_norm(70, 2, 24, has_gate, gate_first, False, torch.float32)
    expect_gated_norm(70, 2, 24, has_gate, gate_first, True, torch.float16)
    lengths, channels = ([1, 7, 70, 200], [8, 24, 100]) if device == "cpu" else ([1, 70, 700], [64, 96, 1536, 3072])
    for draw in draws(device):
        for dtype in DTYPES[device][::2]:
            shape = draw.choice(lengths), draw.randint(1, 3), draw.choice(channels)
            expect_gated_norm(*shape, has_gate, gate_first, draw.random() < 0.5, dtype)


def expect_shift_norm(batch, length, heads, head_dim, shift, norm, previous, begins, dtype=torch.float32):
    width = heads * head_dim
    inputs = {
        "wide": torch.randn(batch, length, width + 11).to(dtype),
        "shift": torch.randn(batch, length, heads).to(dtype) if shift else None,
        "previous": torch.randn(batch, width).to(dtype) if shift and previous else None,
        "weight": {"own": torch.randn(width), "shared": torch.randn(head_dim), "none": None}[norm],
    }
    begins_BT = torch.rand(batch, length) < 0.3 if shift and begins else None

    def kernel(wide, shift, previous, weight):
        given = shift, previous, begins_BT, weight, heads, 1e-2
        return shift_norm_triton.shift_and_normalise(wide[..., 8:-3], *given)

    def reference(wide, shift, previous, weight):
        options = {"shift_BTH": shift, "previous_BE": previous, "begins_BT": begins_BT, "weight": weight, "eps": 1e-2}
        return shift_norm(wide[..., 8:-3], heads, **options)

    expect_float64(kernel, reference, inputs, TOLERANCES[inputs["wide"].device.type][dtype])


@pytest.mark.slow
@pytest.mark.parametrize("shift, norm", [(True, "own"), (True, "none"), (False, "shared"), (True, "shared")])
@on_every_device
def test_shift_and_norm(device, shift, norm):
    """In the interpreter with stretches of 8 positions: some lie beyond the sequence, and most have a neighbour."""
    if device == "cpu":
        shift_norm_triton._STEPS, shift_norm_triton._TILES = 4, {"forward": 64, "backward": 64}
    for length, begins in ((1, False), (33, True)):
        expect_shift_norm(2, length, 2, 16, shift, norm, True, begins)
    expect_shift_norm(1, 20, 2, 16, shift, norm, False, True, torch.float16)
    for draw in draws(device):
        if device == "cpu":
            shift_norm_triton._STEPS, shift_norm_triton._MAX_PARTS = draw.choice([1, 8]), draw.choice([1, 2, 256])
            shape = draw.randint(1, 2), draw.randint(1, 40), draw.randint(1, 3), draw.choice([8, 24, 100])
        else:
            heads = draw.choice([(24, 64), (12, 128), (5, 96), (3, 256), (7, 40)])
            shape = *draw.choice([(1, 16384), (3, 1001), (2, 2048)]), *heads
        flags = draw.random() < 0.5, draw.random() < 0.5
        expect_shift_norm(*shape, shift, norm, *flags, draw.choice(DTYPES[device]))


@pytest.mark.slow
@on_every_device
def test_what_stands_before_a_document_does_not_matter(device):
    """Not even where it is not finite; and what stands behind it gets no gradient from there."""
    shift, weight = torch.randn(1, 40, 2), torch.randn(32)
    begins = torch.zeros(1, 40, dtype=torch.bool)
    begins[0, 17] = True
    # Backward the same: the last token of a document gets nothing from the first of the next, finite or not.
    for infinite, summed, wanted in ((16, slice(17, 40), slice(17, 40)), (17, slice(0, 40), slice(0, 17))):
        y = torch.randn(1, 40, 32)
        y[0, infinite] = math.inf
        out = shift_norm_triton.shift_and_normalise(y.requires_grad_(), shift, None, begins, weight, 2, 1e-6)
        assert out[:, wanted].isfinite().all()
        (gradient,) = torch.autograd.grad(out[:, summed].sum(), y)
        assert gradient[:, wanted].isfinite().all() and gradient[:, wanted].any()


def expect_convolution(batch, length, channels, taps, heads, has_bias, has_previous, dtype, position=None):
    inputs = {
        "wide": torch.randn(batch, length, channels + 8).to(dtype),
        "weight": torch.randn(channels, 1, taps),
        "bias": torch.randn(channels) if has_bias else None,
        "previous": torch.randn(batch, channels, taps - 1).to(dtype) if has_previous else None,
    }

    def kernel(wide, **others):
        given = *others.values(), position, heads, short_convolution._EPSILON
        return short_convolution_triton.convolve(wide[..., 3:-5], *given)

    def reference(wide, **others):
        return short_convolution._in_pytorch(wide[..., 3:-5], *others.values(), position, heads)

    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    expect_float64(kernel, reference, inputs, tolerance)


@pytest.mark.slow
@on_every_device
def test_convolution(device):
    """In the interpreter 33 positions are three programs, forward and backward, of which the last has one position."""
    is_small = device == "cpu"
    if is_small:
        short_convolution_triton._STEPS, short_convolution_triton._TILES = 2, {"forward": 128, "backward": 64}
    for length, *case in ((33, 150, 3, 0, True, True), (33, 48, 4, 2, False, True), (3, 24, 2, 1, False, False)):
        expect_convolution(2, length if is_small else 5 * length, *case, torch.float32)
    expect_convolution(1, 20, 32, 4, 2, True, True, torch.float16)
    for draw in draws(device):
        heads, taps = draw.choice([0, 1, 3]), draw.randint(1, 4)
        channels = max(1, heads) * draw.choice([8, 16, 31, 96] if is_small else [32, 96, 128, 200])
        flags = draw.random() < 0.5, taps > 1 and draw.random() < 0.5, draw.choice(DTYPES[device][::2])
        expect_convolution(draw.randint(1, 2), draw.randint(1, 40 if is_small else 700), channels, taps, heads, *flags)


@pytest.mark.slow
@on_every_device
def test_convolution_of_packed_documents(device):
    """Inputs of one document do not enter another; half of the sequences have inputs before them."""
    if device == "cpu":
        short_convolution_triton._STEPS, short_convolution_triton._TILES = 2, {"forward": 128, "backward": 64}
    for before, (length, taps, heads) in enumerate(((37, 4, 0), (20, 4, 2), (5, 2, 1))):
        begins, places = torch.rand(2, length) < 0.3, torch.arange(length).expand(2, -1)
        position = places - torch.where(begins, places, -before).cummax(1).values
        expect_convolution(2, length, 24, taps, heads, True, before % 2 == 0, torch.float32, position.int())


Y, ONES = torch.zeros(2, 9, 24), torch.ones(24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu.swiglu(Y[..., :5]), r"h has shape \(2, 9, 5\); its last axis holds gate and up, so it must be"),
        (lambda: shift_norm(Y, 5), "y has 24 channels; they must be a multiple of num_heads = 5"),
        (lambda: shift_norm(Y, 3, shift_BTH=Y[..., :2]), r"shift has shape \(2, 9, 2\); it must be \(2, 9, 3\)"),
        (lambda: shift_norm(Y, 3, weight=ONES), r"eps is 0\.0; it must be positive where there is a weight"),
        # The kernel would take anything else for a sigmoid, and make NaN of rows beyond the end.
        (lambda: norm.gated_rms_norm(Y, Y, ONES, 1e-6, activation="swish"), "activation is 'swish'; it must be one of"),
        (lambda: norm.gated_rms_norm(Y, None, ONES, 0.0), r"eps is 0\.0; it must be positive"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
