"""The Triton kernels of SwiGLU and of the residual stream's norms, in Triton's interpreter: values, gradients, graphs.

Memory that is handed out unwritten holds NaN there (interpreter.py).
"""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import norm, residual_norm, swiglu
from tests.ops.interpreter import interpret

FILE = "tests/ops/test_layer_kernels.py"


def seeds(test: str) -> list:
    return [0, 1, *(pytest.param(seed, marks=pytest.mark.rare(f"{FILE}::{test}")) for seed in range(2, 8))]


KERNELS = """
import random
from forgetting_transformer.ops import backends, selftest
from forgetting_transformer.ops.layers import norm, residual_norm, shift_norm, swiglu, swiglu_triton
from forgetting_transformer.ops.layers import shift_norm_triton
from forgetting_transformer.ops.layers import residual_norm_triton as kernels

def results(function, leaves, gradients):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    d_outs = [d.to(x.dtype) for d, x in zip(gradients, outs)]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, d_outs)]

def check(function, reference, leaves, gradients, tolerance=2e-6):
    actual = results(function, leaves, gradients)
    again = results(function, leaves, gradients)
    expected = results(reference, [x.double() for x in leaves], gradients)
    for a, b, e in zip(actual, again, expected):
        assert a.shape == e.shape and torch.equal(a, b)
        error = ((a.double() - e).norm() / e.norm()).item()
        assert error < tolerance, error
    return actual

def random_shape():
    return [random.randint(1, 5) for _ in range(random.randint(1, 2))]

def strided(shape, dtype=torch.float32):
    # As projections and views leave them: rows apart, the batch behind the positions, or a transposed matrix.
    wide = torch.randn(*shape[:-1], shape[-1] + random.choice([0, 3])).to(dtype)[..., : shape[-1]]
    how = random.choice(["as it is", "turned", "transposed"])
    if how == "turned" and len(shape) == 3:
        return wide.transpose(0, 1).contiguous().transpose(0, 1)
    return wide.mT.contiguous().mT if how == "transposed" else wide
"""


@pytest.mark.parametrize("seed", seeds("test_swiglu_and_its_gradient_match_float64"))
def test_swiglu_and_its_gradient_match_float64(seed):
    interpret(
        KERNELS
        + f"""
random.seed({seed})
torch.manual_seed({seed})
for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 1e-3)):
    shape, width = random_shape(), random.choice([1, 16, 37, 1024, 1031])
    h, d = strided((*shape, 2 * width), dtype), strided((*shape, width), dtype)
    reference = lambda h: F.silu(h[..., :width]) * h[..., width:]
    out, dh = check(torch.ops.forgetting_transformer.swiglu, reference, [h], [d], tolerance)
    assert out.dtype == dh.dtype == dtype and out.is_contiguous()
"""
    )


def test_gradients_that_are_expanded_and_gates_that_are_large():
    """As `sum().backward()` gives them; exp overflows for the one and not for the other."""
    interpret(
        KERNELS
        + """
h = torch.tensor([[-1e4, 1e4, 0.0, -50.0, 3.0, 4.0, 5.0, 6.0]])
expanded = torch.ones(()).expand(1, 4)
check(torch.ops.forgetting_transformer.swiglu, lambda h: F.silu(h[:, :4]) * h[:, 4:], [h], [expanded])
"""
    )


@pytest.mark.parametrize("seed", seeds("test_norms_and_their_gradients_match_float64"))
@pytest.mark.parametrize("how", ["branch", "stream", "alone"])
def test_norms_and_their_gradients_match_float64(how, seed):
    """Several rows per program, whole programs and a last one with fewer rows."""
    interpret(
        KERNELS
        + f"""
random.seed({seed})
torch.manual_seed({seed})
kernels._PROGRAMS = random.randint(1, 4)
shape, width = random_shape(), random.choice([1, 16, 37, 130])
x, branch, weight = strided((*shape, width)), strided((*shape, width)), torch.randn(width)
dy, d_total = strided((*shape, width)), strided((*shape, width))
apply = kernels.ResidualNorm.apply
if {how!r} == "branch":
    function = lambda x, branch, weight: apply(x, branch, weight, 1e-2, torch.float32, True)
    reference = lambda x, branch, weight: (norm.rms_norm(x + branch, weight, 1e-2), x + branch)
    check(function, reference, [x, branch, weight], [dy, d_total])
elif {how!r} == "stream":
    function = lambda x, weight: apply(x, None, weight, 1e-2, torch.float32, True)
    check(function, lambda x, weight: (norm.rms_norm(x, weight, 1e-2), x * 1), [x, weight], [dy, d_total])
else:
    function = lambda x, weight: apply(x, None, weight, 1e-2, torch.float32, False)
    check(function, lambda x, weight: norm.rms_norm(x, weight, 1e-2), [x, weight], [dy])
"""
    )


def test_dtypes_of_the_norm():
    """The sum has PyTorch's dtype and is rounded before the norm; gradients have those of what they belong to."""
    interpret(
        KERNELS
        + """
x, branch, weight = torch.randn(5, 40), torch.randn(5, 40).half(), torch.randn(40)
y, total, *gradients = results(
    lambda *leaves: kernels.ResidualNorm.apply(*leaves, 1e-6, torch.float16, True), [x, branch, weight], [x, x]
)
assert [t.dtype for t in (y, total, *gradients)] == [
    torch.float16, torch.float32, torch.float32, torch.float16, torch.float32
]
assert torch.equal(total, x + branch)
assert torch.equal(gradients[1], gradients[0].half())
y, total, _ = kernels.normalise(x.half(), branch, weight.half(), 1e-6, torch.float16)
assert torch.equal(total, x.half() + branch)
assert (y - norm.rms_norm(total, weight.half(), 1e-6)).abs().max() < 4e-3
"""
    )


def test_the_weight_of_a_norm_may_be_a_column_of_a_wider_tensor():
    interpret(
        KERNELS
        + """
x, weight = torch.randn(5, 32), torch.randn(32, 2)[:, 1]
function = lambda x: kernels.ResidualNorm.apply(x, None, weight, 1e-6, torch.float32, False)
check(function, lambda x: norm.rms_norm(x, weight.to(x.dtype), 1e-6), [x], [torch.randn(5, 32)])
"""
    )


def test_no_rows_are_no_error():
    interpret(
        KERNELS
        + """
h = torch.zeros(0, 8, requires_grad=True)
torch.ops.forgetting_transformer.swiglu(h).sum().backward()
x, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
kernels.ResidualNorm.apply(x, x * 1, weight, 1e-6, torch.float32, True)[0].sum().backward()
assert weight.grad.eq(0).all()
"""
    )


# Calls take the way that they take on a GPU, through what torch.compile reads there too.
SERVED = """
backends.MIN_KERNEL_TOKENS = 7

def has_triton(op, module, device_index):
    return served

has_triton._dynamo_marked_constant = backends.has_triton._dynamo_marked_constant
backends.has_triton = has_triton
residual_norm._takes_kernel = lambda x, dtype: residual_norm.kernel_serves(
    dtype, x.shape[-1], x.shape[:-1].numel(), 0
)
swiglu._takes_kernel = lambda h: swiglu.kernel_serves(h.dtype, h.shape[:-1].numel(), 0)
shift_norm._takes_kernel = lambda y, head_dim: shift_norm.kernel_serves(y.dtype, head_dim, y.shape[:-1].numel(), 0)
served = True
"""


def test_the_self_tests_pass_and_find_a_wrong_kernel():
    interpret(
        KERNELS
        + SERVED
        + """
def error(op, dtype):
    use = backends.OpUse(op, 3, 24, 24)
    return selftest.check(use, dtype, torch.device("cpu"), None)[0]
for dtype in (torch.float32, torch.float16):
    for op in ("swiglu", "residual_norm", "shift_norm"):
        assert error(op, dtype) < selftest.ELEMENTWISE_TOLERANCES[dtype]
backends.attempt = lambda op, launch, h: h[..., :24] * 1
assert error("swiglu", torch.float32) > 0.1
unchanged = lambda y, others: y + sum(0 * x.sum() for x in others if torch.is_tensor(x))
backends.attempt = lambda op, launch, y, *others: unchanged(y, others)
assert error("shift_norm", torch.float32) > 0.1
"""
    )


TRAIN = pytest.mark.rare(f"{FILE}::test_models_train_through_the_kernels")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, how",
    [
        pytest.param("forgetting_transformer", "plain", marks=TRAIN),
        ("forgetting_transformer", "compiled and checkpointed"),
        ("mamba2", "checkpointed"),
        pytest.param("mamba2", "compiled", marks=TRAIN),
    ],
)
def test_models_train_through_the_kernels(name, how):
    """Blocks with and without an MLP give the loss and the gradients of PyTorch; compiled, in one graph each."""
    interpret(
        KERNELS
        + SERVED
        + f"""
from tests.model.small_models import PRO, small
def run(how):
    model = small({name!r}, **(PRO if {name!r} == "forgetting_transformer" else {{}})).train()
    if "checkpointed" in how:
        model.gradient_checkpointing_enable()
    if "compiled" in how:
        for block in model.decoder.layers:
            block._transform = torch.compile(block._transform, backend="aot_eager", fullgraph=True)
    ids = torch.arange(14).view(2, 7)
    loss = model(input_ids=ids, labels=ids + 1).loss.mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]

launched, shifted = [], []
for module, calls in ((kernels, launched), (shift_norm_triton, shifted)):
    module._options = lambda *of, calls=calls, options=module._options: calls.append(of) or options(*of)
served = False
expected = run("plain")
assert not launched and not shifted
served = True
for a, e in zip(run({how!r}), expected):
    assert (a - e).norm() <= 1e-4 * e.norm() + 1e-7
assert {{kernel for kernel, _ in launched}} == {{"forward", "backward"}}
assert {{kernel for kernel, *_ in shifted}} == ({{"forward", "backward"}} if "forgetting" in {name!r} else set())
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


# KiB of shared memory a program may have on every generation of GPU (test_forgetting_attention_compiles.py).
GENERATIONS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
COMPILES = pytest.mark.rare(f"{FILE}::test_kernels_compile_for_every_generation")


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "capability",
    [pytest.param(c, marks=[] if c == 90 else [COMPILES]) for c in GENERATIONS],
)
def test_kernels_compile_for_every_generation(capability, tmp_path, monkeypatch):
    """In bfloat16 at the widths of the 760M models, 1,536 and 4,096 of the MLP; float32 and the widest rows."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forgetting_transformer.ops.forgetting_attention.layout import FUSED
    from forgetting_transformer.ops.layers import residual_norm_triton, swiglu_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rounded = {"h_ptr", "out_ptr", "d_out_ptr", "dh_ptr", "branch_ptr", "y_ptr", "dy_ptr", "d_branch_ptr"}
    flags = {"HAS_BRANCH": True, "HAS_TOTAL": True}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (swiglu_triton.swiglu_forward_kernel, swiglu_triton._options(4096), "bf16"),
        (swiglu_triton.swiglu_backward_kernel, swiglu_triton._options(4096), "bf16"),
        (residual_norm_triton.sum_kernel, {"PARTS": 512, "BLOCK": 32, "num_warps": 8, **FUSED}, "bf16"),
        (
            residual_norm_triton.residual_norm_forward_kernel,
            flags | residual_norm_triton._options("forward", 1536),
            "bf16",
        ),
        *(
            (
                residual_norm_triton.residual_norm_backward_kernel,
                flags | residual_norm_triton._options("backward", width),
                dtype,
            )
            for width, dtype in ((1536, "bf16"), (2048, "fp32"), (4096, "fp32"), (8192, "fp32"))
        ),
    ]
    for kernel, given, dtype in cases:
        constants = {name: value for name, value in given.items() if name in kernel.arg_names}
        types, aligned = {}, {}
        for i, argument in enumerate(kernel.arg_names):
            if argument.endswith("_ptr"):
                types[argument] = f"*{dtype}" if argument in rounded else "*fp32"
            else:
                types[argument] = "constexpr" if argument in constants else "fp32" if argument == "eps" else "i32"
            if argument.endswith(("_ptr", "_row", "width")):
                aligned[(i,)] = [["tt.divisibility", 16]]
        launch = {name: value for name, value in given.items() if name not in {*constants, *flags}}
        source = ASTSource(kernel, types, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
        assert compiled.metadata.shared <= GENERATIONS[capability] * 1024
        # 16 bytes at a time, which masks and strides must not prevent.
        assert "v4.b32" in compiled.asm["ptx"]
