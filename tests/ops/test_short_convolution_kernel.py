"""The Triton kernels of the short convolution in Triton's interpreter, and compiled for every GPU. No GPU is needed."""

import itertools
import os
import re

import pytest

pytest.importorskip("triton")
from tests.ops.interpreter import interpret

FILE = "tests/ops/test_short_convolution_kernel.py"
RARE_SHAPE = pytest.mark.rare(f"{FILE}::test_it_computes_what_pytorch_does_in_float64")
RARE_DOCUMENTS = pytest.mark.rare(f"{FILE}::test_inputs_of_one_packed_document_do_not_enter_another")
RARE_OPERATOR = pytest.mark.rare(f"{FILE}::test_it_is_one_operator_to_torch_compile")
RARE = pytest.mark.rare(f"{FILE}::test_it_compiles_for_every_generation_without_spilling")
GENERATIONS = [90, *(pytest.param(capability, marks=RARE) for capability in (80, 86, 89, 100, 120))]

CHECK = """
import random
from forgetting_transformer.ops.layers import short_convolution as public
from forgetting_transformer.ops.layers import short_convolution_triton as launcher

def gradients(function, x, weight, bias, previous, d_y, d_last):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias, previous)]
    # A slice of something wider, as of a projection that serves several.
    wide = F.pad(leaves[0], (3, 5))
    y, last = function(wide[..., 3:-5], *leaves[1:])
    torch.autograd.backward((y, last), (d_y, d_last))
    return [y.detach(), last.detach(), *(t.grad for t in leaves if t is not None)]

def check(batch, length, channels, taps, heads, silu, with_bias, with_previous, dtype=torch.float32, tolerance=1e-5,
          position=None):
    x, d_y = (torch.randn(batch, length, channels).to(dtype) for _ in range(2))
    weight = torch.randn(channels, 1, taps)
    bias = torch.randn(channels) if with_bias else None
    previous = torch.randn(batch, channels, taps - 1).to(dtype) if with_previous else None
    d_last = torch.randn(batch, channels, taps - 1).to(dtype)
    wide = [None if t is None else t.double() for t in (x, weight, bias, previous, d_y, d_last)]
    want = gradients(lambda *given: public._in_pytorch(*given, position, silu, heads), *wide)
    got = gradients(
        lambda *given: launcher.convolve(*given, position, silu, heads, public._EPSILON),
        x, weight, bias, previous, d_y, d_last,
    )
    for a, e in zip(got, want, strict=True):
        assert a.shape == e.shape
        error = ((a.double() - e).norm() / e.norm().clamp(min=1e-3)).item()
        assert error < tolerance, f"{error:.1e} at {tuple(e.shape)}"
"""


def test_a_bias_may_be_a_column_of_a_wider_tensor():
    interpret(
        CHECK
        + """
x, weight, bias = torch.randn(1, 9, 20), torch.randn(20, 1, 4), torch.randn(20, 2)[:, 1]
def gradient(function, dtype):
    leaf = x.detach().to(dtype).requires_grad_()
    y, _ = function(leaf, weight.to(dtype), bias.to(dtype).clone() if dtype == torch.float64 else bias)
    y.square().sum().backward()
    return y, leaf.grad
got = gradient(lambda *given: launcher.convolve(*given, None, None, True, 0, public._EPSILON), torch.float32)
want = gradient(lambda *given: public._in_pytorch(*given, None, None, True, 0), torch.float64)
for a, e in zip(got, want, strict=True):
    assert (a - e).norm() <= 1e-5 * e.norm()
"""
    )


KINDS = {"20": (20, 4, 0, True), "150": (150, 3, 0, False), "2 heads": (48, 4, 2, True), "a head": (24, 2, 1, False)}
USUAL = [(33, "20", False), (33, "150", True), (33, "2 heads", True), (3, "a head", False), (1, "2 heads", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, kind, with_previous",
    [
        pytest.param(*case, marks=[] if case in USUAL else [RARE_SHAPE])
        for case in itertools.product((1, 3, 33, 150), KINDS, (False, True))
    ],
)
def test_it_computes_what_pytorch_does_in_float64(length, kind, with_previous):
    """33 positions are three programs, forward and backward, of which the last has one position."""
    channels, taps, heads, silu = KINDS[kind]
    interpret(
        CHECK
        + f"""
if {length} < 150:
    launcher._STEPS, launcher._TILES = 2, {{"forward": 128, "backward": 64}}
check(2, {length}, {channels}, {taps}, {heads}, {silu}, {heads == 0}, {with_previous})
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=RARE_SHAPE) for seed in range(1, 6))])
def test_random_shapes(seed):
    interpret(
        CHECK
        + f"""
draw = random.Random({seed})
for _ in range(2):
    heads, taps = draw.choice([0, 1, 3]), draw.randint(1, 4)
    channels = max(1, heads) * draw.choice([8, 16, 31, 96])
    previous = taps > 1 and draw.random() < 0.5
    check(draw.randint(1, 2), draw.randint(1, 90), channels, taps, heads, draw.random() < 0.5, draw.random() < 0.5,
          previous)
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=RARE_DOCUMENTS)])
def test_inputs_of_one_packed_document_do_not_enter_another(first):
    """With inputs before the sequence in every second case."""
    interpret(
        CHECK
        + f"""
draw, previous = random.Random(3), {first}
launcher._STEPS, launcher._TILES = 2, {{"forward": 128, "backward": 64}}
for taps, heads, length in [(4, 0, 37), (4, 2, 20), (3, 0, 19), (2, 1, 5)]:
    begins = torch.rand(2, length) < 0.3
    places = torch.arange(length).expand(2, -1)
    position = places - torch.where(begins, places, -draw.choice([0, 1, 5])).cummax(1).values
    check(2, length, 24, taps, heads, True, True, previous, position=position.int())
    previous = not previous
"""
    )


@pytest.mark.slow
def test_sixteen_bits_round_the_results_alone():
    interpret(CHECK + "check(1, 70, 32, 4, 2, True, True, True, torch.float16, 1e-3)")


@pytest.mark.slow
@pytest.mark.parametrize("optional", [True, pytest.param(False, marks=RARE_OPERATOR)])
def test_it_is_one_operator_to_torch_compile(optional):
    """Its fakes have the shapes, strides and dtypes of its results, and its gradients are registered."""
    interpret(
        f"""
from forgetting_transformer.ops.layers import short_convolution_triton as launcher
x, weight = torch.randn(2, 9, 12)[..., 2:8].requires_grad_(), torch.randn(6, 1, 4, requires_grad=True)
bias, previous = torch.randn(6, requires_grad=True), torch.randn(2, 6, 3, requires_grad=True)
given = (bias, previous) if {optional} else (None, None)
torch.library.opcheck(torch.ops.forgetting_transformer.short_convolution, (x, weight, *given, None, True, 2, 1e-6))
"""
    )


def compile_kernel(name: str, capability: int, width: int, norm: bool, previous: bool, packed: bool) -> int:
    """Bytes of shared memory of one program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forgetting_transformer.ops.layers import short_convolution_triton as launcher

    kernel = getattr(launcher, f"convolution_{name}_kernel")
    block = max(16, triton.next_power_of_2(width))
    constants = {
        "TAPS": 4, "HAS_PREVIOUS": previous, "HAS_DOCUMENTS": packed, "SILU": True, "NORM": norm,
        "WIDTH": width, "BLOCK_C": block, "GROUPS": launcher._TILES[name] // block,
    }  # fmt: skip
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
        elif argument == "position_ptr":
            types[argument] = "*i32"
        elif argument in ("weight_ptr", "bias_ptr", "part_ptr"):
            types[argument] = "*fp32"
        else:
            types[argument] = "*bf16" if argument.endswith("_ptr") else "fp32" if argument == "epsilon" else "i32"
        if types[argument] not in ("constexpr", "fp32") and argument != "steps":
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constants, aligned)
    options = {"num_warps": 4, **launcher.FUSED}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "width, norm, previous, packed",
    [
        (128, True, False, False),
        pytest.param(96, True, False, False, marks=RARE),
        pytest.param(128, False, True, False, marks=RARE),
        pytest.param(128, False, False, True, marks=RARE),
    ],
)
@pytest.mark.parametrize("capability", GENERATIONS)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_it_compiles_for_every_generation_without_spilling(
    name, capability, width, norm, previous, packed, tmp_path, monkeypatch, capfd
):
    """Heads of the 760M models: 128 channels of DeltaNet, 96 of Gated DeltaNet, all of Mamba-2. Values of the delta
    rules are those of Mamba-2 without a bias."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    used = compile_kernel(name, capability, width, norm, previous, packed)
    spilled = re.findall(r"(\d+) bytes spill stores", capfd.readouterr().out)
    # ptxas keeps two numbers of the packed kernel outside of the A100's registers.
    assert spilled and max(map(int, spilled)) <= (8 if packed else 0)
    assert used <= 16 * 1024
