"""On CUDA: SwiGLU, shifts and norms match float64, bitwise reproducible; compiled models have them."""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer.ops import backends, compiling, selftest
from forgetting_transformer.ops.layers import (
    norm,
    residual_norm,
    residual_norm_triton,
    shift_norm,
    swiglu,
    swiglu_triton,
)
from tests.model.small_models import PRO, small

LIMITS = selftest.ELEMENTWISE_TOLERANCES
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_faults(monkeypatch):
    monkeypatch.setattr(backends, "_faults", {})
    yield
    assert not backends.faults()


def results(function, leaves, gradients):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    d_outs = [d.to(x.dtype) for d, x in zip(gradients, outs, strict=False)]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, d_outs)]


def check(function, reference, leaves, gradients, limit):
    actual, again = results(function, leaves, gradients), results(function, leaves, gradients)
    expected = results(reference, [x.double() for x in leaves], gradients)
    for a, b, e in zip(actual, again, expected, strict=True):
        assert a.shape == e.shape and torch.equal(a, b)
        assert ((a.double() - e).norm() / e.norm()).item() < limit


def strided(generator, shape, dtype):
    """Rows that are apart, a batch that lies behind the positions, or channels that are apart."""
    wide = torch.randn(*shape[:-1], shape[-1] + generator.choice([0, 8, 3]), device=GPU).to(dtype)[..., : shape[-1]]
    how = generator.choice(["as it is", "turned", "transposed"])
    if how == "turned":
        return wide.transpose(0, 1).contiguous().transpose(0, 1)
    return wide.mT.contiguous().mT if how == "transposed" else wide


@pytest.mark.parametrize("seed", range(20))
def test_random_cases_match_float64(seed, poisoned):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    dtype = generator.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    limit = LIMITS[dtype]
    shape = generator.choice([(1, 16384), (3, 1001), (1024, 2), (2, 2048)])
    width = generator.choice([1, 64, 100, 1031, 1536, 4096])
    h, d = strided(generator, (*shape, 2 * width), dtype), strided(generator, (*shape, width), dtype)
    assert swiglu._takes_kernel(h)
    check(swiglu.swiglu, lambda h: F.silu(h[..., :width]) * h[..., width:], [h], [d], limit)

    width = generator.choice([40, 777, 1536, 2048, 5000, 8192])
    x, d_total = (strided(generator, (*shape, width), torch.float32) for _ in range(2))
    branch, dy = (strided(generator, (*shape, width), dtype) for _ in range(2))
    weight = torch.randn(width, device=GPU)
    assert residual_norm._takes_kernel(x, x.dtype)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        check(
            lambda x, branch, weight: residual_norm.add_rms_norm(x, branch, weight, 1e-4),
            lambda x, branch, weight: (norm.rms_norm(x + branch, weight, 1e-4), x + branch),
            [x, branch, weight],
            [dy, d_total],
            limit,
        )
        check(
            lambda x, weight: residual_norm.add_rms_norm(x, None, weight, 1e-4),
            lambda x, weight: (norm.rms_norm(x, weight, 1e-4), x * 1),
            [x, weight],
            [dy, d_total],
            limit,
        )
        check(
            lambda x, weight: residual_norm.wide_rms_norm(x, weight, 1e-4),
            lambda x, weight: norm.rms_norm(x, weight, 1e-4),
            [x, weight],
            [d_total],
            LIMITS[torch.float32],
        )


@pytest.mark.parametrize("seed", range(20))
def test_shifts_and_norms_of_heads_match_float64(seed, poisoned):
    """Of slices of wider projections, in packed documents and behind tokens that another process has."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    dtype = generator.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    batch, length = generator.choice([(1, 16384), (3, 1001), (2, 2048)])
    heads, head_dim = generator.choice([(24, 64), (12, 128), (5, 96), (3, 256), (7, 40)])
    width, apart = heads * head_dim, generator.choice([0, 8, 3])
    wide = torch.randn(batch, length, width + apart, device=GPU).to(dtype)
    begins = torch.rand(batch, length, device=GPU) < 0.01 if generator.random() < 0.5 else None
    weight = torch.randn(generator.choice([width, head_dim]), device=GPU)
    d = torch.randn(batch, length, width, device=GPU).to(dtype)
    shift = torch.randn(batch, length, heads, device=GPU).to(dtype)
    previous = torch.randn(batch, width, device=GPU).to(dtype)
    assert shift_norm._takes_kernel(wide, head_dim)

    def shifted(wide, shift, previous, *weight):
        options = {"shift_BTH": shift, "previous_BE": previous, "begins_BT": begins}
        options |= {"weight": weight[0], "eps": 1e-5} if weight else {}
        return shift_norm.shift_norm(wide[..., :width], heads, **options)

    def normalised(wide, weight):
        return shift_norm.shift_norm(wide[..., :width], heads, weight=weight, eps=1e-5)

    for function, leaves in (
        (shifted, [wide, shift, previous, weight]),
        (shifted, [wide, shift, previous]),
        (normalised, [wide, weight]),
    ):
        check(function, function, leaves, [d], LIMITS[dtype])


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(poisoned):
    """The last rows, whose offsets need 64 bits."""
    rows, width = 2**31 // 8192 + 3, 8192
    h = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device=GPU)
    h[-1].normal_()
    out = swiglu_triton.gated(h)
    assert torch.equal(out[-1:], swiglu_triton.gated(h[-1:])) and not out[0].any()
    dh = swiglu_triton.gated_backward(out, h)
    assert torch.equal(dh[-1:], swiglu_triton.gated_backward(out[-1:], h[-1:]))
    del out, dh
    x, weight = h[:, :width], torch.ones(width, device=GPU)
    y, _, scale = residual_norm_triton.normalise(x, None, weight, 1e-6, torch.bfloat16)
    one, _, _ = residual_norm_triton.normalise(x[-1:], None, weight, 1e-6, torch.bfloat16)
    assert torch.equal(y[-1:], one)
    dx, _, _ = residual_norm_triton.normalise_backward(y, None, x, weight, scale, torch.bfloat16, None)
    one, _, _ = residual_norm_triton.normalise_backward(y[-1:], None, x[-1:], weight, scale[-1:], torch.bfloat16, None)
    assert torch.equal(dx[-1:], one)


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_self_tests_pass(dtype):
    model = small("forgetting_transformer", **PRO)
    found = selftest.choose_backends(model.op_uses(), dtype, torch.device("cuda", 0), [2048])
    for op in ("swiglu", "residual_norm", "shift_norm"):
        assert found[op].name == backends.TRITON and "from 1,024 tokens on" in found[op].text


def test_few_tokens_stay_in_pytorch():
    h = torch.randn(1023, 64, device=GPU)
    assert not swiglu._takes_kernel(h) and not residual_norm._takes_kernel(h, h.dtype)
    assert not swiglu._takes_kernel(torch.randn(2048, 64, dtype=torch.float64, device=GPU))


@pytest.mark.parametrize("name", ["forgetting_transformer", "transformer"])
def test_a_compiled_block_has_the_kernels_and_no_breaks(name):
    """Gradients under autocast agree with those of the same model without the kernels."""
    ids = torch.arange(2048, device=GPU)[None] % 61

    def train(served):
        torch._dynamo.reset()
        model = small(name, **(PRO if name == "forgetting_transformer" else {})).to(GPU).train()
        graphs = []

        def keep(graph, inputs):
            graphs.append(graph.print_readable(print_output=False))
            return graph

        for block in model.decoder.layers:
            block._transform = torch.compile(block._transform, backend=keep, fullgraph=True)
        with contextlib.ExitStack() as stack:
            for op in ("swiglu", "residual_norm", "shift_norm", "gated_norm"):
                stack.enter_context(backends.without(op, *served))
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids.roll(-1, 1)).loss.mean()
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())], "".join(graphs)

    got, graphs = train(())
    want, plain = train((backends.TRITON,))
    of_fox = ["shift_norm", "gated_rms_norm"] if name == "forgetting_transformer" else []
    for op in ("residual_norm", "swiglu", *of_fox):
        assert f"forgetting_transformer.{op}" in graphs and f"forgetting_transformer.{op}" not in plain
    norms = [x.float().norm() for x in want]
    for a, b, size in zip(got, want, norms, strict=True):
        assert (a.float() - b.float()).norm() <= 0.1 * size + 1e-2 * max(norms)


def test_a_compiled_layer_gives_the_bits_of_an_eager_one():
    h = torch.randn(2048, 512, device=GPU).bfloat16()
    d = torch.randn(2048, 256, device=GPU).bfloat16()
    compiled = results(compiling.compiled(swiglu.swiglu), [h], [d])
    for a, b in zip(compiled, results(swiglu.swiglu, [h], [d]), strict=True):
        assert torch.equal(a, b)
