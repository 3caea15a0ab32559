"""The Triton kernels of linear attention whose heads share queries and keys, in Triton's interpreter, against the
step-by-step reference in float64. Memory that is handed out unwritten holds NaN.
"""

import random

import pytest

pytest.importorskip("triton")

from tests.ops.interpreter import interpret

pytestmark = pytest.mark.slow

HELPERS = """
from forgetting_transformer.ops.recurrence import grouped, reference, ssd
from forgetting_transformer.ops.recurrence.reference import Gates

NAMES = "out state dq dk dv dlog_decay dstep dskip dinitial".split()
DECAYS = {
    "random": lambda shape: F.logsigmoid(torch.randn(shape)),
    "none": torch.zeros,
    "strong": lambda shape: -30 * torch.rand(shape),
    "resets": lambda shape: torch.where(torch.rand(shape) < 0.1, -1e4, F.logsigmoid(torch.randn(shape) + 4)),
}

def definition(q, k, v, log_decay, step, skip, initial_state, documents, scale):
    q, k = (grouped.for_every_head(x, v.shape[2]) for x in (q, k))
    if documents is not None:
        log_decay = grouped.end_with_documents(log_decay, documents)
    gates = Gates(log_decay=log_decay)
    out, state = reference.linear_recurrence(q, k, v * step[..., None], gates, scale, initial_state)
    return out if skip is None else out + skip[:, None] * v, state

def inputs(batch, length, heads, groups, keys, values, decay="random", has_skip=True, has_state=True, breaks=0.0,
           dtype=torch.float32, spread=False):
    q, k = (torch.randn(batch, length, groups, keys).to(dtype) for _ in range(2))
    v = torch.randn(batch, length, heads, values).to(dtype)
    if spread:  # slices of wider rows, as a layer passes them
        rows = torch.cat([x.flatten(2) for x in (v, k, q)], dim=-1)
        v, k, q = rows.split([heads * values, groups * keys, groups * keys], dim=-1)
        v = v.unflatten(-1, (heads, values))
        q, k = (x.unflatten(-1, (groups, keys)) for x in (q, k))
    log_decay, step = DECAYS[decay]((batch, length, heads)), F.softplus(torch.randn(batch, length, heads))
    skip = torch.randn(heads) if has_skip else None
    state = torch.randn(batch, heads, keys, values) if has_state else None
    documents = (torch.rand(batch, length) < breaks).int().cumsum(1).int() if breaks else None
    return [q, k, v, log_decay, step, skip, state], documents

def run(op, arguments, documents, scale, dtype=None):
    leaves = [None if x is None else (x if dtype is None else x.to(dtype)).detach() for x in arguments]
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    out, state = op(*leaves, documents, scale)
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=generator).half().to(out.dtype)
    d_state = torch.randn(state.shape, generator=generator).half().to(state.dtype)
    torch.autograd.backward((out, state), (d_out, d_state))
    return [out.detach(), state.detach(), *(None if x is None else x.grad for x in leaves)]

def check(arguments, documents, scale=1.0, tolerance=2e-6):
    got = run(ssd.ssd, arguments, documents, scale)
    want = run(definition, arguments, documents, scale, torch.float64)
    for name, a, b in zip(NAMES, got, want, strict=True):
        if b is None:
            assert a is None, name
            continue
        assert a.shape == b.shape and a.isfinite().all(), name
        error = ((a.double() - b).norm() / b.norm().clamp(min=0.1)).item()
        assert error < tolerance, f"{name}: {error:.1e}"
"""


def expect(code: str) -> None:
    interpret(HELPERS + code)


@pytest.mark.quick
def test_one_chunk_and_a_part_with_everything():
    expect("check(*inputs(1, 70, 2, 1, 16, 16, breaks=0.05), scale=0.7)")


@pytest.mark.quick
@pytest.mark.parametrize("skip", ["torch.randn(2, 3)[:, 1]", "torch.randn(1).expand(2)"])
def test_skip_may_be_a_column_of_a_wider_tensor_or_one_number_for_all(skip):
    expect(
        f"""
arguments, _ = inputs(1, 20, 2, 1, 16, 16)
arguments[5] = {skip}
check(arguments, None)
"""
    )


RAGGED = pytest.mark.rare("tests/ops/test_ssd_kernel.py::test_ragged_lengths")


@pytest.mark.parametrize("length", [1, 130, *(pytest.param(length, marks=RAGGED) for length in (31, 64, 65, 200))])
def test_ragged_lengths(length):
    """A chunk has 64 tokens."""
    expect(f"check(*inputs(2, {length}, 2, 1, 16, 16))")


@pytest.mark.parametrize("decay", ["none", "strong", "resets"])
def test_strong_and_absent_decay(decay):
    expect(f"check(*inputs(1, 70, 3, 1, 16, 32, {decay!r}))")


@pytest.mark.parametrize(
    "breaks",
    [
        0.3,
        1.0,
        pytest.param(
            0.01,
            marks=pytest.mark.rare(
                "tests/ops/test_ssd_kernel.py::test_no_state_goes_on_from_one_document_into_the_next"
            ),
        ),
    ],
)
def test_no_state_goes_on_from_one_document_into_the_next(breaks):
    expect(f"check(*inputs(2, 70, 2, 1, 16, 16, breaks={breaks}))")


@pytest.mark.parametrize(
    "has_skip, has_state",
    [
        (True, False),
        (False, True),
        pytest.param(
            False,
            False,
            marks=pytest.mark.rare("tests/ops/test_ssd_kernel.py::test_without_skip_or_initial_state"),
        ),
    ],
)
def test_without_skip_or_initial_state(has_skip, has_state):
    expect(f"check(*inputs(1, 70, 4, 2, 16, 16, has_skip={has_skip}, has_state={has_state}))")


def test_slices_of_wider_rows():
    expect("check(*inputs(2, 70, 4, 2, 32, 16, spread=True))")


def test_more_heads_than_one_program_adds_up():
    """18 heads of a group are three blocks of six."""
    expect("check(*inputs(1, 40, 18, 1, 16, 16))")


def test_16_bit_inputs_have_chunks_of_128():
    expect("check(*inputs(1, 140, 2, 1, 32, 16, breaks=0.02, dtype=torch.float16), tolerance=2e-3)")


def test_16_bits_keep_their_digits_through_strong_decay():
    expect("check(*inputs(1, 140, 2, 1, 16, 16, 'resets', dtype=torch.float16), tolerance=2e-3)")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=RAGGED) for seed in range(2, 20))])
def test_random_shapes(seed):
    chosen = random.Random(seed)
    groups = chosen.choice([1, 2, 3])
    sizes = (
        chosen.choice([1, 2]),
        chosen.randint(1, 140),
        groups * chosen.choice([1, 2, 3]),
        groups,
        chosen.choice([16, 32]),
        chosen.choice([16, 32]),
    )
    options = {
        "decay": chosen.choice(["random", "none", "strong", "resets"]),
        "has_skip": chosen.random() < 0.5,
        "has_state": chosen.random() < 0.5,
        "breaks": chosen.choice([0.0, 0.0, 0.03]),
        "spread": chosen.random() < 0.5,
    }
    expect(f"check(*inputs(*{sizes}, **{options}), scale={chosen.choice([1.0, 0.3])})")


def test_a_gradient_of_the_final_state_alone():
    expect("""
arguments, documents = inputs(1, 70, 2, 1, 16, 16)
def gradients(op, dtype):
    leaves = [x.to(dtype).detach().requires_grad_() for x in arguments]
    _, state = op(*leaves, None, 1.0)
    return torch.autograd.grad(state.square().sum(), leaves, allow_unused=True, materialize_grads=True)
for a, b in zip(gradients(ssd.ssd, torch.float32), gradients(definition, torch.float64), strict=True):
    assert (a.double() - b).norm() <= 1e-5 * b.norm().clamp(min=0.1)
""")


def test_the_operators_keep_what_pytorch_asks_of_them():
    """Fake tensors have the shapes, dtypes and strides of real ones, and autograd is registered as torch.compile
    wants it."""
    expect("""
arguments, documents = inputs(1, 40, 2, 1, 16, 16, breaks=0.1)
leaves = [x.requires_grad_() for x in arguments]
tests = ("test_schema", "test_autograd_registration", "test_faketensor")
torch.library.opcheck(torch.ops.forgetting_transformer.ssd.default, (*leaves, documents, 1.0), test_utils=tests)
""")


def test_convolution_and_state_space_as_one_operator():
    """Outputs, states and gradients of what the two ops give one after the other."""
    expect("""
from forgetting_transformer.ops import recurrence
from forgetting_transformer.ops.recurrence import convolved_ssd
from forgetting_transformer.ops.layers.short_convolution import short_convolution

batch, length, heads, groups, keys, values, taps = 1, 70, 4, 2, 16, 16, 4
channels = heads * values + 2 * groups * keys
arguments = [
    torch.randn(batch, length, channels + 7)[..., 3:-4], torch.randn(channels, 1, taps), torch.randn(channels),
    torch.randn(batch, channels, taps - 1), F.logsigmoid(torch.randn(batch, length, heads)),
    F.softplus(torch.randn(batch, length, heads)), torch.randn(heads), torch.randn(batch, heads, keys, values),
]
def apart(x, weight, bias, previous, log_decay, step, skip, state):
    y, last = short_convolution(x, weight, bias, previous_BCW=previous, silu=True)
    v, k, q = y.split([heads * values, groups * keys, groups * keys], dim=-1)
    q, k = (x.unflatten(-1, (groups, keys)) for x in (q, k))
    out, state = recurrence.recurrence(
        q, k, v.unflatten(-1, (heads, values)), log_decay=log_decay, step=step, skip=skip, scale=0.7, state=state
    )
    return out, state, last
def together(*tensors):
    return convolved_ssd.convolved_ssd(*tensors, *documents, groups, keys, 0.7)
documents = (None, None)
def results(op, given, dtype):
    leaves = [None if x is None else x.to(dtype).detach().requires_grad_() for x in given]
    outs = op(*leaves)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outs, [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outs])
    return [*outs, *(x.grad for x in leaves if x is not None)]
for absent in ((), (2, 3), (6, 7)):
    given = [None if i in absent else x for i, x in enumerate(arguments)]
    got, want = results(together, given, torch.float32), results(apart, given, torch.float64)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= 2e-6 * b.norm()
leaves = [x.detach().clone().requires_grad_() for x in arguments]
tests = ("test_schema", "test_autograd_registration", "test_faketensor")
operator = torch.ops.forgetting_transformer.convolved_ssd.default
torch.library.opcheck(operator, (*leaves, None, None, groups, keys, 0.7), test_utils=tests)

# Packed documents: each row in parts, of which the first goes on from what came before it.
bounds = [0, 3, 4, 33, 64, length]
positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:])]).expand(batch, -1).contiguous()
positions[:, :3] += 9
documents = (positions.int(), (positions == 0).cumsum(1, dtype=torch.int32))
def one_by_one(x, weight, bias, previous, log_decay, step, skip, state):
    outs = []
    for a, b in zip(bounds, bounds[1:]):
        own = (previous, state) if a == 0 else (None, None)
        out, last_state, _ = apart(
            x[:, a:b], weight, bias, own[0], log_decay[:, a:b], step[:, a:b], skip, own[1]
        )
        outs.append(out)
    return torch.cat(outs, dim=1), last_state, x[:, -(taps - 1):].transpose(1, 2)
got, want = results(together, arguments, torch.float32), results(one_by_one, arguments, torch.float64)
for a, b in zip(got, want, strict=True):
    assert (a.double() - b).norm() <= 2e-6 * b.norm()
""")
