"""On CUDA: decoding through the public op against float64, the same bits twice, from graphs, in a model.

`tests/ops/test_forgetting_attention_decode.py` has the kernels.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import forgetting_attention_decode
from forgetting_transformer.model import ForgettingTransformerConfig, ForgettingTransformerForCausalLM
from forgetting_transformer.ops.forgetting_attention import cumulative_log_fgate, decode, forgetting_attention_reference
from tests.gpu.test_cuda import relative_error


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def kernel_only(monkeypatch):
    """Nothing may fall back to the portable backend unseen."""
    monkeypatch.setattr(decode, "forgetting_attention_decode_portable", None)


def make_inputs(queries=1, keys=3000, heads=6, groups=6, head_dim=64, batch=2, dtype=torch.bfloat16, shift=2.0):
    """Head first: queries, keys, values and log gates."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    q = normal(batch, heads, queries, head_dim).to(dtype)
    k, v = (normal(batch, groups, keys, head_dim).to(dtype) for _ in range(2))
    return q, k, v, F.logsigmoid(normal(batch, heads, keys) + shift)


def attend(q, k, v, log_fgate, **options):
    running = cumulative_log_fgate(log_fgate, head_first=True)
    return forgetting_attention_decode(q, k, v, running, head_first=True, **options)


def test_agrees_with_float64_and_has_the_same_bits_twice(poisoned, kernel_only):
    """With resets, and NaN in the padding."""
    for sizes, tolerance in (
        ({"queries": 2, "keys": 70_000, "heads": 3, "groups": 3, "dtype": torch.float32}, 1e-5),
        ({"queries": 16, "keys": 3000, "heads": 24, "groups": 4}, 4e-3),
        ({"queries": 1, "keys": 30_000, "heads": 8, "groups": 1, "dtype": torch.float16}, 1e-3),
    ):
        inputs = make_inputs(**sizes)
        q, k, v, log_fgate = inputs
        start = torch.tensor([0, sizes["keys"] * 6 // 7], device="cuda")
        log_fgate[:, :, ::1001] = -torch.inf
        k[1, :, : start[1]] = v[1, :, : start[1]] = torch.nan
        got = attend(*inputs, seq_start=start)
        want, _ = forgetting_attention_reference(*(x.double() for x in inputs), start, q.shape[-1] ** -0.5)
        assert relative_error(got, want) < tolerance and torch.equal(got, attend(*inputs, seq_start=start)), sizes


def test_buffers_that_fill_up_are_served_by_one_cuda_graph(kernel_only):
    """`seq_end` says on the device how much of the buffers is filled."""
    q, k, v, log_fgate = make_inputs(keys=5000)
    running = cumulative_log_fgate(log_fgate, head_first=True)
    ends = torch.tensor([5000, 5000], device="cuda")
    call = functools.partial(
        forgetting_attention_decode, q, k, v, running, head_first=True, seq_end=ends, adaptive_threshold=-1e3
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for filled in ([5000, 5000], [1, 64], [1000, 4999]):
        ends.copy_(torch.tensor(filled))
        graph.replay()
        for i, end in enumerate(filled):
            one = [x[i : i + 1, :, :end] for x in (k, v, running)]
            want = forgetting_attention_decode(q[i : i + 1], *one, head_first=True)
            assert relative_error(out[i : i + 1], want) < 4e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_a_model_decodes_what_a_full_pass_computes(dtype, tolerance):
    torch.manual_seed(0)
    config = ForgettingTransformerConfig(
        vocab_size=61, hidden_size=128, num_heads=2, num_hidden_layers=2, qk_norm=True, use_k_shift=True,
        use_v_shift=True, log_pruning_tolerance=-10.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = ForgettingTransformerForCausalLM(config).to("cuda", dtype).eval()
    ids = torch.randint(0, 61, (2, 700), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :233] = 0
    full = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    cache, logits = model.new_cache(), []
    for start, stop in [(0, 300), (300, 600), (600, 610), *((i, i + 1) for i in range(610, 700))]:
        out = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        logits.append(out.logits)
    got = torch.cat(logits, 1)
    assert relative_error(got[0, 233:], full[0, 233:]) < tolerance
    assert relative_error(got[1], full[1]) < tolerance
