"""On CUDA: causal attention, and a Transformer block, against float64; the same bits twice; one compiled graph.

Axes: B batch, T queries, N keys, H query heads, G key and value heads, D channels of a head.
"""

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import cumulative_log_fgate, forgetting_attention, forgetting_attention_decode
from forgetting_transformer.model.mixers.transformer import TransformerConfig, TransformerForCausalLM
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import attention
from forgetting_transformer.ops.attention import causal_attention
from tests.gpu.test_cuda import relative_error
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
CASES = {
    "whole tiles": (1024, 1024, {}),
    "ragged": (700, 700, {}),
    "window": (1500, 1500, {"window_size": 200}),
    "window of one": (300, 300, {"window_size": 1}),
    "window longer than the sequence": (384, 384, {"window_size": 385}),
    "padding": (700, 700, {"seq_start": SEQ_START}),
    "window and padding": (1500, 1500, {"window_size": 129, "seq_start": SEQ_START}),
    "fewer queries than keys": (100, 1500, {}),
    "fewer queries, window and padding": (300, 1500, {"window_size": 513, "seq_start": (1500, 1100)}),
    "single query": (1, 700, {"window_size": 300, "seq_start": SEQ_START}),
}


def on_gpu(t, n, dtype, options, **sizes):
    if "seq_start" in options:
        options = options | {"seq_start": torch.tensor(options["seq_start"], device="cuda")}
    return [x.cuda() for x in make_inputs(t, n, dtype=dtype, **sizes)], options


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 2e-3), (torch.float32, 1e-4)])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, head_dim, groups, dtype, tolerance, poisoned, kernel_calls):
    t, n, options = CASES[case]
    inputs, options = on_gpu(t, n, dtype, options, g=groups, d=head_dim)
    got = run(causal_attention, inputs, **options)
    assert len(kernel_calls) == (t > 1 and dtype != torch.float32)
    assert_close(got, run(reference, [x.double() for x in inputs], **options), tolerance)


@pytest.mark.parametrize("window", [None, 100])
def test_padding_gives_exact_zeros_whatever_it_holds(window):
    inputs, options = on_gpu(700, 700, torch.bfloat16, {"window_size": window, "seq_start": (130, 600)}, d=64)
    clean = run(causal_attention, inputs, **options)
    is_padding = torch.arange(700, device="cuda") < options["seq_start"][:, None]
    for x in inputs:
        x[is_padding] = torch.nan
    for name, x in run(causal_attention, inputs, **options).items():
        assert (x[is_padding] == 0).all(), name
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize(
    "options", [{}, {"window_size": 500}, {"seq_start": SEQ_START}], ids=["plain", "window", "padding"]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_runs_give_the_same_bits(head_dim, options):
    inputs, options = on_gpu(4096, 4096, torch.bfloat16, options, d=head_dim)
    first, second = (run(causal_attention, inputs, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{}, {"window_size": 200}, {"window_size": 200, "seq_start": SEQ_START}])
@pytest.mark.parametrize("t", [700, 1])
def test_compiles_into_one_graph(t, options):
    inputs, options = on_gpu(t, 700, torch.bfloat16, options, d=64)
    compiled = torch.compile(lambda *x: causal_attention(*x, **options), fullgraph=True, dynamic=False)
    eager = run(causal_attention, inputs, **options)
    assert_close(run(compiled, inputs), {name: x.double() for name, x in eager.items()}, 8e-3)


@pytest.mark.parametrize("window_size", [None, 100])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_transformer_block_trains_compiled_with_the_kernel_inside(
    checkpointing, window_size, kernel_calls, monkeypatch
):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=1, num_heads=2, num_kv_heads=1, window_size=window_size
    )
    model = TransformerForCausalLM(config).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    block, x = model.model.layers[0], torch.randn(2, 256, 128, device="cuda")

    def gradients(block):
        block.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = block(x, Span())
        out.float().square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in block.parameters())]

    expected = gradients(block)
    assert kernel_calls
    monkeypatch.undo()
    for a, e in zip(gradients(torch.compile(block, fullgraph=True, dynamic=False)), expected, strict=True):
        assert relative_error(a, e) < 3e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_tensors_on_another_gpu_than_the_current_one():
    """A model that is spread over GPUs does not switch the current one."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    gates = F.logsigmoid(torch.randn(1, 256, 2) + 2)
    results = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [x.to(device).requires_grad_() for x in (*inputs, gates)]
        out = forgetting_attention(*leaves, adaptive_threshold="auto")
        out.square().sum().backward()
        q, k, v, log_fgate = (x.detach() for x in leaves)
        last = forgetting_attention_decode(q[:, -1:], k, v, cumulative_log_fgate(log_fgate))
        results.append([x.cpu() for x in (out, last, *(leaf.grad for leaf in leaves))])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
