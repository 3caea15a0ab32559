"""The Triton kernels of the selective scan in Triton's interpreter, against float64; and that they compile everywhere.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import os

import pytest

from tests.ops.interpreter import interpret
from tests.ops.test_forgetting_attention_compiles import SHARED_KIB

pytest.importorskip("triton")

FLOAT64 = "tests/ops/test_selective_scan_kernel.py::test_outputs_states_and_gradients_equal_float64"
SCHEMAS = "tests/ops/test_selective_scan_kernel.py::test_the_operators_keep_to_their_schemas"

#: Chunks of 8 tokens instead of 128, so that few tokens make several.
SETUP = """
from forgetting_transformer.ops import recurrence
from forgetting_transformer.ops.recurrence import scan_triton

scan_triton.CHUNK = 8
recurrence.scan_takes_kernel = lambda states, dtype, device: dtype != torch.float64

def make(batch, length, channels, states, decay="usual", dtype=torch.float32, D=True, bias=True, state=True):
    rate = {"none": 0.0, "usual": 1.0, "strong": 50.0}[decay]
    both = torch.randn(batch, length, 3 + 2 * states).to(dtype)[..., 3:]  # as slices of one projection
    dt = torch.randn(batch, length, channels)
    return {
        "x": torch.randn(batch, length, channels).to(dtype),
        "dt": dt.to(dtype) if bias else F.softplus(dt - 2),
        "A": -rate * (0.1 + torch.rand(channels, states)),
        "B": both[..., :states],
        "C": both[..., states:],
        "D": torch.randn(channels) if D else None,
        "dt_bias": torch.randn(channels) - 2 if bias else None,
        "initial_state": torch.randn(batch, channels, states) if state else None,
    }

def scan(x, dt, A, B, C, D, dt_bias, initial_state, cu_seqlens=None):
    return recurrence.selective_scan(
        x, dt, A, B, C, D_I=D, dt_bias_I=dt_bias, initial_state_BIK=initial_state, cu_seqlens=cu_seqlens,
        output_final_state=True,
    )

def results(inputs, function=scan, **options):
    leaves = {name: None if x is None else x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y, state = function(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).half().to(x.dtype) for x in (y, state)]
    torch.autograd.backward((y, state), grads)
    given = {name: x.grad for name, x in leaves.items() if x is not None}
    return {"y": y.detach(), "state": state.detach(), **{f"d_{name}": x for name, x in given.items()}}

def check_scan(inputs, tolerance, **options):
    got = results(inputs, **options)
    want = results({name: None if x is None else x.double() for name, x in inputs.items()}, **options)
    assert got["y"].dtype == inputs["x"].dtype and got["state"].dtype == torch.float32
    for name, x in want.items():
        assert got[name].isfinite().all(), name
        error = ((got[name].double() - x).norm() / (x.norm() + 1e-3)).item()
        assert error < tolerance, f"{name}: {error:.1e}"
"""


def test_numbers_per_channel_may_be_a_column_of_a_wider_tensor_or_one_number_for_all():
    interpret(
        SETUP
        + """
inputs = make(1, 9, 8, 4)
def spread(D, dt_bias, **rest):
    columns = torch.stack((D, dt_bias), dim=1)
    assert columns[:, 0].stride() == (2,)
    return scan(D=columns[:, 0], dt_bias=columns[:, 1], **rest)
def one(D, dt_bias, **rest):
    return scan(D=D[:1].expand(8), dt_bias=dt_bias[:1].expand(8), **rest)
for function in (spread, one):
    got = results(inputs, function)
    want = results({name: x.double() for name, x in inputs.items()}, function)
    for name, x in want.items():
        assert (got[name] - x).norm() <= 1e-5 * x.norm(), name
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["none", "usual", "strong"])
def test_outputs_states_and_gradients_equal_float64(decay):
    """Two and a part of a third chunk of eight, blocks of channels that are not full, a number of states not of 2ⁿ."""
    interpret(SETUP + f"check_scan(make(1, 18, 40, 3, {decay!r}), 1e-6)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "1, 9, 8, 16, D=False",
        "1, 9, 8, 16, bias=False",
        "1, 9, 8, 16, state=False",
        "3, 2, 70, 1, bias=False, D=False, state=False",
    ],
)
def test_what_may_be_left_out(what):
    interpret(SETUP + f"check_scan(make({what}), 1e-6)")


@pytest.mark.slow
def test_half_precision_costs_no_more_than_rounding():
    interpret(SETUP + "check_scan(make(1, 13, 33, 16, dtype=torch.float16), 1e-3)")


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["none", "usual"])
def test_packed_documents_are_the_documents_one_by_one(decay):
    """Documents of one token and of several chunks; one begins with a chunk, ends are repeated."""
    bounds = [0, 1, 2, 16, 18, 27, 36, 36]
    interpret(SETUP + f"check_scan(make(2, 18, 8, 5, {decay!r}, state=False), 1e-6, cu_seqlens=torch.tensor({bounds}))")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rare(FLOAT64)) for seed in range(1, 6))])
def test_random_shapes(seed):
    code = f"""
import random
rng = random.Random({seed})
for _ in range(2):
    flags = {{name: rng.random() < 0.5 for name in ("D", "bias", "state")}}
    shape = rng.randint(1, 2), rng.randint(2, 18), rng.randint(1, 40), rng.randint(1, 16)
    check_scan(make(*shape, rng.choice(["none", "usual", "strong"]), **flags), 1e-6)
"""
    interpret(SETUP + code)


@pytest.mark.slow
def test_the_comparison_notices_a_token_too_late():
    code = """
inputs = make(1, 10, 8, 4)
want = results(inputs)
for name in ("x", "dt", "B", "C"):
    got = results(inputs | {name: inputs[name].roll(1, dims=1)})
    assert any(((got[key] - x).norm() / x.norm()).item() > 1e-2 for key, x in want.items()), name
"""
    interpret(SETUP + code)


@pytest.mark.slow
def test_a_compiled_graph_holds_the_scan_whole():
    code = """
inputs = make(1, 11, 8, 4)
compiled = torch.compile(scan, backend="aot_eager", fullgraph=True, dynamic=False)
want, got = results(inputs), results(inputs, compiled)
assert all(torch.equal(got[name], x) for name, x in want.items())
packed = inputs | {"initial_state": None}
bounds = torch.tensor([0, 3, 11])
want, got = results(packed, cu_seqlens=bounds), results(packed, compiled, cu_seqlens=bounds)
assert all(torch.equal(got[name], x) for name, x in want.items())
"""
    interpret(SETUP + code)


@pytest.mark.slow
@pytest.mark.parametrize("optional", [True, pytest.param(False, marks=pytest.mark.rare(SCHEMAS))])
def test_the_operators_keep_to_their_schemas(optional):
    code = f"""
from torch.library import opcheck
inputs = make(1, 11, 8, 4)
x, dt, A, B, C, D, dt_bias, state = (x.requires_grad_() for x in inputs.values())
optional = (D, dt_bias, None, state) if {optional} else (None,) * 4
opcheck(torch.ops.forgetting_transformer.scan_forward, (x, dt, A, B, C, *optional))
"""
    interpret(SETUP + code)


BFLOAT16 = {"x_ptr", "dt_ptr", "B_ptr", "C_ptr", "y_ptr", "dy_ptr", "dx_ptr", "d_dt_ptr"}
KERNELS = ("forward_kernel", "carry_kernel", "state_gradient_kernel", "backward_kernel")
COMPILES = pytest.mark.rare("tests/ops/test_selective_scan_kernel.py::test_kernels_compile_for_every_generation")


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", [pytest.param(c, marks=[] if c == 90 else [COMPILES]) for c in SHARED_KIB])
def test_kernels_compile_for_every_generation(capability, name, tmp_path, monkeypatch):
    """At the sizes of Samba 760M, in bfloat16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forgetting_transformer.ops.recurrence import scan_kernels, scan_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(scan_kernels, name)
    tile = {"state_gradient_kernel": scan_triton.GRADIENT_TILE, "backward_kernel": scan_triton.BACKWARD_TILE}
    constants = {
        "starts_ptr": None, "first_ptr": None, "STATES": 16, "STATES_ONLY": False, "HAS_D": True, "SOFTPLUS": True,
        "HAS_STARTS": False, "HAS_FIRST": False, "REVERSE": False, "CHUNK": scan_triton.CHUNK,
        "STEPS": scan_triton._STEPS, "BLOCK": scan_triton._CARRY_BLOCK,
        **tile.get(name, scan_triton.FORWARD_TILE).sizes(16),
    }  # fmt: skip
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
            continue
        is_pointer = argument.endswith("_ptr")
        types[argument] = "*bf16" if argument in BFLOAT16 else "*fp32" if is_pointer else "i32"
        if is_pointer or argument.endswith(("_stride_b", "_stride_t")) or argument in ("channels", "size"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    known = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    options = scan_triton._BACKWARD_LAUNCH if name == "backward_kernel" else scan_triton._LAUNCH
    compiled = triton.compile(
        ASTSource(kernel, types, known, aligned), target=GPUTarget("cuda", capability, 32), options=dict(options)
    )
    assert compiled.metadata.shared <= SHARED_KIB[capability] * 1024
    # States belong in registers. What a lane exchanges is what its tile says, and not every state with every lane.
    assert compiled.asm["ptx"].count("shfl.sync") <= 4 * 40 + 32
