"""The Triton kernels of the gated RMS norm in Triton's interpreter, and compiled for every GPU. No GPU is needed."""

import os

import pytest

pytest.importorskip("triton")
from forgetting_transformer.ops.layers import norm
from tests.ops.interpreter import interpret

FILE = "tests/ops/test_gated_norm_kernel.py"
RARE_SHAPE = pytest.mark.rare(f"{FILE}::test_it_computes_what_pytorch_does_in_float64")
RARE_OPERATOR = pytest.mark.rare(f"{FILE}::test_it_is_one_operator_to_torch_compile")
RARE = pytest.mark.rare(f"{FILE}::test_it_compiles_for_every_generation_without_spilling")
GENERATIONS = [90, *(pytest.param(capability, marks=RARE) for capability in (80, 86, 89, 100, 120))]

CHECK = """
import random
from forgetting_transformer.ops.layers import norm
from forgetting_transformer.ops.layers import norm_triton as launcher

def gradients(function, wide, weight, d_y, width, has_gate):
    leaves = [wide.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    # Slices of something wider, as of a projection that serves several.
    x, gate = leaves[0][..., 4 : 4 + width], leaves[0][..., 4 + width : 4 + 2 * width] if has_gate else None
    y = function(x, gate, leaves[1])
    return [y.detach(), *torch.autograd.grad(y, leaves, d_y)]

def check(rows, groups, channels, has_gate, gate_first, silu=True, dtype=torch.float32, tolerance=1e-5):
    width = groups * channels
    wide, d_y = torch.randn(2, rows, 2 * width + 8).to(dtype), torch.randn(2, rows, width).to(dtype)
    weight = torch.randn(width)
    got = gradients(
        lambda x, gate, weight: launcher.normalise(x, gate, weight, groups, gate_first, silu, 1e-6),
        wide, weight, d_y, width, has_gate,
    )
    want = gradients(
        lambda x, gate, weight: norm.gated_rms_norm(
            x, gate, weight, 1e-6, groups, gate_first=gate_first, activation="silu" if silu else "sigmoid"
        ),
        wide.double(), weight.double(), d_y.double(), width, has_gate,
    )
    for a, e in zip(got, want, strict=True):
        error = ((a.double() - e).norm() / e.norm().clamp(min=1e-3)).item()
        assert error < tolerance, f"{error:.1e} at {tuple(e.shape)}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_gate, gate_first", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=RARE_SHAPE) for seed in range(1, 5))])
def test_it_computes_what_pytorch_does_in_float64(seed, has_gate, gate_first):
    interpret(
        CHECK
        + f"""
draw = random.Random({seed})
check(70, 2, 24, {has_gate}, {gate_first}, False)
for _ in range(2):
    rows, groups, channels = draw.choice([1, 7, 70, 200]), draw.randint(1, 3), draw.choice([8, 24, 100])
    check(rows, groups, channels, {has_gate}, {gate_first}, draw.random() < 0.5)
check(70, 2, 24, {has_gate}, {gate_first}, True, torch.float16, 1e-3)
check(70, 2, 24, {has_gate}, {gate_first}, False, torch.float16, 1e-3)
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("has_gate", [True, pytest.param(False, marks=RARE_OPERATOR)])
def test_it_is_one_operator_to_torch_compile(has_gate):
    interpret(
        f"""
from forgetting_transformer.ops.layers import norm_triton
x, gate = torch.randn(2, 9, 24, requires_grad=True), torch.randn(2, 9, 30)[..., 2:-4].requires_grad_()
weight = torch.randn(24, requires_grad=True)
given = gate if {has_gate} else None
torch.library.opcheck(torch.ops.forgetting_transformer.gated_rms_norm, (x, given, weight, 3, True, True, 1e-6))
"""
    )


def test_an_unknown_activation_and_an_epsilon_of_zero_are_refused():
    """The kernel would take anything else for a sigmoid, and make NaN of rows beyond the end."""
    import torch

    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="activation is 'swish'; it must be one of sigmoid, silu"):
        norm.gated_rms_norm(x, x, torch.ones(8), 1e-6, activation="swish")
    with pytest.raises(ValueError, match=r"eps is 0\.0; it must be positive"):
        norm.gated_rms_norm(x, None, torch.ones(8), 0.0)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "width, gate, gate_first",
    [
        (64, True, False),
        pytest.param(128, False, False, marks=RARE),
        pytest.param(192, True, False, marks=RARE),
        pytest.param(3072, True, True, marks=RARE),
    ],
)
@pytest.mark.parametrize("capability", GENERATIONS)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_it_compiles_for_every_generation_without_spilling(
    name, capability, width, gate, gate_first, tmp_path, monkeypatch, capfd
):
    """Heads of FoX, DeltaNet and Gated DeltaNet, and the inner width of Mamba-2, at 760M."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forgetting_transformer.ops.layers import norm_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    # Rows of FoX's gates, slices of one product, are 6,216 elements apart: 8 divides that, not 16.
    x, gates = torch.empty(1, width, device="meta"), torch.empty(1, 6216, device="meta")
    constants = norm_triton._options(name, x, gates if gate else None, 1, gate_first, width != 64)
    options = {key: constants.pop(key) for key in ("num_warps", *norm_triton.FUSED)}
    kernel = getattr(norm_triton, f"norm_{name}_kernel")
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in ("weight_ptr", "part_ptr"):
            types[argument] = "*fp32"
        else:
            types[argument] = "*bf16" if argument.endswith("_ptr") else "fp32" if argument == "epsilon" else "i32"
        if types[argument] not in ("constexpr", "fp32") and argument not in ("steps", "gate_row"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "0 bytes spill stores" in capfd.readouterr().out
    assert compiled.metadata.shared <= 32 * 1024
    # Sixteen bytes at a time, to registers or, ahead of their use, to shared memory.
    assert "ld.global.v4.b32" in compiled.asm["ptx"] or "cp.async.cg" in compiled.asm["ptx"]
