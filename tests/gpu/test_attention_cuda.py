"""On CUDA: causal attention against float64; the same bits twice; one compiled graph.

Axes: B batch, T queries, N keys, H query heads, G key and value heads, D channels of a head.
"""

import pytest
import torch

from forgetting_transformer.ops import attention
from forgetting_transformer.ops.attention import causal_attention
from tests.ops.test_attention import assert_close, make_inputs, reference, run


@pytest.fixture
def kernel_calls(monkeypatch):
    """Grows by one with every call that goes through the Triton kernels."""
    calls, attend_with_kernel = [], attention.attend_with_kernel

    def recorded(*args, **options):
        calls.append(options)
        return attend_with_kernel(*args, **options)

    monkeypatch.setattr(attention, "attend_with_kernel", recorded)
    return calls


SEQ_START = (0, 333)  # of each sequence: no padding, and padding past the first window
CASES = (
    (1024, 1024, {}),
    (700, 700, {}),
    (1500, 1500, {"window_size": 200}),
    (300, 300, {"window_size": 1}),
    (384, 384, {"window_size": 385}),
    (700, 700, {"seq_start": SEQ_START}),
    (1500, 1500, {"window_size": 129, "seq_start": SEQ_START}),
    (100, 1500, {}),
    (300, 1500, {"window_size": 513, "seq_start": (1500, 1100)}),
    (1, 700, {"window_size": 300, "seq_start": SEQ_START}),
)


def on_gpu(t, n, dtype, options, **sizes):
    if "seq_start" in options:
        options = options | {"seq_start": torch.tensor(options["seq_start"], device="cuda")}
    return [x.cuda() for x in make_inputs(t, n, dtype=dtype, **sizes)], options


@pytest.mark.parametrize(
    "dtype, tolerance, head_dim",
    [(torch.bfloat16, 8e-3, 64), (torch.bfloat16, 8e-3, 128), (torch.float16, 2e-3, 64), (torch.float32, 1e-4, 128)],
)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_equals_the_definition(groups, dtype, tolerance, head_dim, poisoned, kernel_calls):
    for t, n, options in CASES:
        inputs, options = on_gpu(t, n, dtype, options, g=groups, d=head_dim)
        kernel_calls.clear()
        got = run(causal_attention, inputs, **options)
        assert len(kernel_calls) == (t > 1 and dtype != torch.float32)
        assert_close(got, run(reference, [x.double() for x in inputs], **options), tolerance)


def test_padding_gives_exact_zeros_whatever_it_holds():
    for window in (None, 100):
        inputs, options = on_gpu(700, 700, torch.bfloat16, {"window_size": window, "seq_start": (130, 600)}, d=64)
        clean = run(causal_attention, inputs, **options)
        is_padding = torch.arange(700, device="cuda") < options["seq_start"][:, None]
        for x in inputs:
            x[is_padding] = torch.nan
        for name, x in run(causal_attention, inputs, **options).items():
            assert (x[is_padding] == 0).all(), name
            assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_runs_give_the_same_bits(head_dim):
    for options in ({}, {"window_size": 500}, {"seq_start": SEQ_START}):
        inputs, options = on_gpu(4096, 4096, torch.bfloat16, options, d=head_dim)
        first, second = (run(causal_attention, inputs, **options) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("t", [700, 1])
def test_compiles_into_one_graph(t):
    inputs, options = on_gpu(t, 700, torch.bfloat16, {"window_size": 200, "seq_start": SEQ_START}, d=64)
    compiled = torch.compile(lambda *x: causal_attention(*x, **options), fullgraph=True, dynamic=False)
    eager = run(causal_attention, inputs, **options)
    assert_close(run(compiled, inputs), {name: x.double() for name, x in eager.items()}, 8e-3)
