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
