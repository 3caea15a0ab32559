"""The Triton kernels of SwiGLU and of the residual stream's norms: values, gradients and graphs."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import norm, residual_norm, swiglu, swiglu_triton
from forgetting_transformer.ops.layers import residual_norm_triton as kernels
from tests.ops.interpreter import interpret
from tests.ops.kernels import draws, expect_float64, on_every_device, results

TOLERANCES = {
    "cpu": {torch.float32: 2e-6, torch.float16: 1e-3},
    "cuda": {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3},
}


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


def activate(h):
    return swiglu_triton.gated(h)


def activate_in_pytorch(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


@on_every_device
def test_swiglu_and_its_gradient_match_float64(device):
    for draw in draws(device, on_cpu=2):
        for dtype, tolerance in TOLERANCES[device].items():
            shape, width = draw_shape(device, draw), draw.choice([1, 16, 37, 1024, 1031])
            h = draw_strided(draw, (*shape, 2 * width), dtype)
            got = expect_float64(activate, activate_in_pytorch, {"h": h}, tolerance)
            assert got["out 0"].dtype == got["d h"].dtype == dtype and got["out 0"].is_contiguous()


@on_every_device
def test_gradients_that_are_expanded_and_gates_that_are_large(device):
    """As `sum().backward()` gives them; exp overflows for the one and not for the other."""
    h = torch.tensor([[-1e4, 1e4, 0.0, -50.0, 3.0, 4.0, 5.0, 6.0]])
    expect_float64(lambda h: activate(h).sum(), lambda h: activate_in_pytorch(h).sum(), {"h": h}, 1e-5)


@pytest.mark.parametrize("how", ["branch", "stream", "alone"])
@on_every_device
def test_norms_and_their_gradients_match_float64(device, how):
    """Several rows per program, whole programs and a last one with fewer rows."""
    is_small = device == "cpu"
    for draw in draws(device, on_cpu=2):
        if is_small:
            kernels._PROGRAMS = draw.randint(1, 4)
        widths = [1, 16, 37, 130] if is_small else [40, 777, 1536, 5000, 8192]
        shape, width = draw_shape(device, draw), draw.choice(widths)
        dtype, tolerance = draw.choice([*TOLERANCES[device].items()][: 1 if is_small else 3])
        x, branch = draw_strided(draw, (*shape, width)), draw_strided(draw, (*shape, width), dtype)
        inputs = {"x": x, "weight": torch.randn(width)} | ({"branch": branch} if how == "branch" else {})

        def kernel(x, weight, branch=None, dtype=dtype):
            return kernels.ResidualNorm.apply(x, branch, weight, 1e-2, dtype, how != "alone")

        def reference(x, weight, branch=None):
            total = x * 1 if branch is None else x + branch
            y = norm.rms_norm(total, weight, 1e-2)
            return y if how == "alone" else (y, total)

        # Of one channel the gradient is hardly more than rounding.
        expect_float64(kernel, reference, inputs, tolerance, d_x=1e-6)


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


# Calls take the way that they take on a GPU, through what torch.compile reads there too.
SERVED = """
from forgetting_transformer.ops import backends
from forgetting_transformer.ops.layers import residual_norm, shift_norm, shift_norm_triton, swiglu, swiglu_triton
from forgetting_transformer.ops.layers import residual_norm_triton as kernels
backends.MIN_KERNEL_TOKENS = 7

def has_triton(op, module, device_index):
    return has_kernels

has_triton._dynamo_marked_constant = backends.has_triton._dynamo_marked_constant
backends.has_triton = has_triton
residual_norm._takes_kernel = lambda x, dtype: residual_norm.kernel_serves(
    dtype, x.shape[-1], x.shape[:-1].numel(), 0
)
swiglu._takes_kernel = lambda h: swiglu.kernel_serves(h.dtype, h.shape[:-1].numel(), 0)
shift_norm._takes_kernel = lambda y, head_dim: shift_norm.kernel_serves(y.dtype, head_dim, y.shape[:-1].numel(), 0)
"""


@pytest.mark.slow
def test_a_model_trains_through_the_kernels():
    """A compiled and checkpointed block, in one graph, gives the loss and the gradients of PyTorch."""
    interpret(
        SERVED
        + """
from tests.model.small_models import PRO, small
def run(served):
    global has_kernels
    has_kernels = served
    model = small("forgetting_transformer", **PRO).train()
    if served:
        model.gradient_checkpointing_enable()
        for block in model.decoder.layers:
            block._transform = torch.compile(block._transform, backend="aot_eager", fullgraph=True)
    ids = torch.arange(14).view(2, 7)
    loss = model(input_ids=ids, labels=ids + 1).loss.mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]

launched, shifted = [], []
for module, calls in ((kernels, launched), (shift_norm_triton, shifted)):
    module._options = lambda *of, calls=calls, options=module._options: calls.append(of) or options(*of)
expected = run(served=False)
assert not launched and not shifted
for a, e in zip(run(served=True), expected):
    assert (a - e).norm() <= 1e-4 * e.norm() + 1e-7
assert {kernel for kernel, *_ in launched} == {kernel for kernel, *_ in shifted} == {"forward", "backward"}
"""
    )


def test_without_a_gpu_it_is_pytorch():
    """The same bits as the expressions, whatever the number of tokens, and no import of Triton."""
    h, x, branch, weight = torch.randn(2000, 8), torch.randn(2000, 8), torch.randn(2000, 8), torch.randn(8)
    assert torch.equal(swiglu.swiglu(h), F.silu(h[:, :4]) * h[:, 4:])
    y, total = residual_norm.add_rms_norm(x, branch, weight, 1e-6)
    assert torch.equal(total, x + branch) and torch.equal(y, norm.rms_norm(total, weight, 1e-6))
    y, same = residual_norm.add_rms_norm(x, None, weight, 1e-6)
    assert same is x and torch.equal(y, norm.rms_norm(x, weight, 1e-6))
    assert torch.equal(residual_norm.wide_rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))


def test_gate_and_up_must_be_as_wide():
    with pytest.raises(ValueError, match=r"h has shape \(2, 5\); its last axis holds gate and up, so it must be even"):
        swiglu.swiglu(torch.zeros(2, 5))
