"""The Triton kernels of linear attention whose heads share queries and keys, against the definition in float64.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from forgetting_transformer.ops import recurrence
from forgetting_transformer.ops.layers.short_convolution import short_convolution
from forgetting_transformer.ops.recurrence import Gates, convolved_ssd, grouped, reference, ssd
from tests.ops.kernels import draws, expect_float64, on_every_device

pytestmark = pytest.mark.slow


DECAYS = {
    "random": lambda shape: F.logsigmoid(torch.randn(shape)),
    "none": torch.zeros,
    "strong": lambda shape: -30 * torch.rand(shape),
    "resets": lambda shape: torch.where(torch.rand(shape) < 0.1, -1e4, F.logsigmoid(torch.randn(shape) + 4)),
}
FLOAT32 = {"cpu": 2e-6, "cuda": 2e-5}
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_inputs(
    batch, length, heads, groups, keys, values, decay="random", has_skip=True, has_state=True, dtype=torch.float32,
    is_spread=False,
):  # fmt: skip
    q, k = (torch.randn(batch, length, groups, keys).to(dtype) for _ in range(2))
    v = torch.randn(batch, length, heads, values).to(dtype)
    if is_spread:  # slices of wider rows, as a layer passes them
        rows = torch.cat([x.flatten(2) for x in (v, k, q)], dim=-1)
        v, k, q = rows.split([heads * values, groups * keys, groups * keys], dim=-1)
        v = v.unflatten(-1, (heads, values))
        q, k = (x.unflatten(-1, (groups, keys)) for x in (q, k))
    return {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": DECAYS[decay]((batch, length, heads)),
        "step": F.softplus(torch.randn(batch, length, heads)),
        "skip": torch.randn(heads) if has_skip else None,
        "state": torch.randn(batch, heads, keys, values) if has_state else None,
    }


def expect_right(inputs, breaks, scale):
    """With documents that begin at a share of the tokens."""
    q = inputs["q"]
    documents = (torch.rand(q.shape[:2]) < breaks).int().cumsum(1).int() if breaks else None

    def kernel(q, k, v, log_decay, step, skip, state):
        return ssd.ssd(q, k, v, log_decay, step, skip, state, documents, scale)

    def definition(q, k, v, log_decay, step, skip, state):
        q, k = (grouped.for_every_head(x, v.shape[2]) for x in (q, k))
        if documents is not None:
            log_decay = grouped.end_with_documents(log_decay, documents)
        gates = Gates(log_decay=log_decay)
        out, state = reference.linear_recurrence(q, k, v * step[..., None], gates, scale, state)
        return out if skip is None else out + skip[:, None] * v, state

    expect_float64(kernel, definition, inputs, TOLERANCES.get(q.dtype, FLOAT32[q.device.type]))


QUICK = "two chunks and a part"
#: Sizes and options of the inputs, and the share of tokens that begin a document. A chunk has 64 tokens, or 128.
CASES = {
    "one token, no skip": ((2, 1, 2, 1, 16, 16), {"has_skip": False}, 0.0),
    QUICK: ((2, 130, 2, 1, 16, 16), {}, 0.05),
    "three blocks of three heads, no decay": ((1, 40, 9, 1, 16, 16, "none"), {}, 0.0),
    "strong decay, no state": ((1, 70, 4, 2, 16, 32, "strong"), {"has_state": False}, 0.0),
    "resets, slices of wider rows": ((1, 70, 4, 2, 32, 16, "resets"), {"is_spread": True}, 0.0),
    "documents of one token": ((1, 70, 2, 1, 16, 16), {}, 1.0),
    "16 bits, resets, documents": ((1, 130, 2, 1, 32, 16, "resets"), {"dtype": torch.float16}, 0.02),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if x == QUICK else []) for x in CASES])
@on_every_device
def test_it_is_the_definition(device, name):
    sizes, options, breaks = CASES[name]
    expect_right(make_inputs(*sizes, **options), breaks, scale=0.7)


@on_every_device
def test_random_shapes(device):
    is_small = device == "cpu"
    for draw in draws(device):
        groups = draw.choice([1, 2, 3])
        sizes = (
            draw.choice([1, 2]),
            draw.randint(1, 140) if is_small else draw.choice([2, 17, 63, 128, 130, 200, 300, 513, 1100]),
            groups * draw.choice([1, 2, 3] if is_small else [2, 3, 8, 12]),
            groups,
            *(draw.choice([16, 32] if is_small else [16, 32, 64, 128]) for _ in range(2)),
        )
        dtypes = [torch.float32] if is_small else [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
        inputs = make_inputs(
            *sizes, draw.choice([*DECAYS]), draw.random() < 0.5, draw.random() < 0.5, draw.choice(dtypes),
            draw.random() < 0.5,
        )  # fmt: skip
        expect_right(inputs, draw.choice([0.0, 0.0, 0.03]), draw.choice([1.0, 0.3]))


@on_every_device
def test_convolution_and_state_space_as_one_operator(device):
    """Outputs, states and gradients of what the two ops give one after the other."""
    batch, length, heads, groups, keys, values, taps = 1, 70, 4, 2, 16, 16, 4
    channels = heads * values + 2 * groups * keys
    inputs = {
        "x": torch.randn(batch, length, channels + 7)[..., 3:-4],
        "weight": torch.randn(channels, 1, taps),
        "bias": torch.randn(channels),
        "previous": torch.randn(batch, channels, taps - 1),
        "log_decay": F.logsigmoid(torch.randn(batch, length, heads)),
        "step": F.softplus(torch.randn(batch, length, heads)),
        "skip": torch.randn(heads),
        "state": torch.randn(batch, heads, keys, values),
    }

    def apart(x, weight, bias, previous, log_decay, step, skip, state):
        y, last = short_convolution(x, weight, bias, previous_BCW=previous)
        v, k, q = y.split([heads * values, groups * keys, groups * keys], dim=-1)
        q, k = (x.unflatten(-1, (groups, keys)) for x in (q, k))
        v = v.unflatten(-1, (heads, values))
        gates = {"log_decay": log_decay, "step": step, "skip": skip}
        return *recurrence.recurrence(q, k, v, **gates, scale=0.7, state=state), last

    def together(documents, **given):
        return convolved_ssd.convolved_ssd(*given.values(), *documents, groups, keys, 0.7)

    given = inputs | dict.fromkeys(("bias", "previous", "skip", "state"))
    expect_float64(lambda **x: together((None, None), **x), apart, given, FLOAT32[device])

    # Packed documents: each row in parts, of which the first goes on from what came before it.
    bounds = [0, 3, 4, 33, 64, length]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)]).expand(batch, -1).contiguous()
    positions[:, :3] += 9
    documents = (positions.int(), (positions == 0).cumsum(1, dtype=torch.int32))

    def one_by_one(x, weight, bias, previous, log_decay, step, skip, state):
        outs = []
        for a, b in itertools.pairwise(bounds):
            before, initial = (previous, state) if a == 0 else (None, None)
            part = (x[:, a:b], weight, bias, before, log_decay[:, a:b], step[:, a:b], skip, initial)
            out, last_state, _ = apart(*part)
            outs.append(out)
        return torch.cat(outs, dim=1), last_state, x[:, -(taps - 1) :].transpose(1, 2)

    expect_float64(lambda **x: together(documents, **x), one_by_one, inputs, FLOAT32[device])
