"""Forgetting attention: every backend against the float64 reference, and the reference against its definition.

Axes: B batch, H heads, M queries, N keys, D channels of a head. Tensors are head first unless said otherwise.
"""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer import forgetting_attention
from forgetting_transformer.ops import forgetting_attention as package
from forgetting_transformer.ops.forgetting_attention import (
    forgetting_attention_portable,
    forgetting_attention_reference,
    portable,
)
from tests.ops.kernels import assert_close, results, saved_bytes


def reference(*args: Any) -> Tensor:
    return forgetting_attention_reference(*args)[0]


# Small blocks make several of them out of short sequences.
BACKENDS = {
    "reference": reference,
    "portable": forgetting_attention_portable,
    "portable, blocks of 32": functools.partial(forgetting_attention_portable, block_size=32),
}
# In float32 the bias is rounded at the size it reaches within a block of queries: 6 nats per token if gates are strong,
# 256 per hard reset. With strong gates, gradients other than dv are also the small difference of larger terms.
FLOAT32_TOLERANCE = {"random": 5e-5, "slow": 1e-5, "absent": 1e-5, "resets": 2e-4, "strong": 1e-2}


def make_gates(kind: str, *shape: int) -> Tensor:
    """Log forget gates in float64."""
    logit = torch.randn(shape, dtype=torch.float64)
    if kind == "absent":
        return torch.zeros_like(logit)
    log_fgate = F.logsigmoid(logit + {"random": 0, "slow": 5, "strong": -6, "resets": 3}[kind])
    if kind == "resets":
        log_fgate[torch.rand(shape) < 0.1] = -torch.inf
    return log_fgate


def make_inputs(m: int, n: int, d: int, gates: str = "random", seed: int = 0) -> list[Tensor]:
    """q, k, v, log_fgate in float64 for 2 sequences of 3 heads."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 3, length, d, dtype=torch.float64) for length in (m, n, n))
    return [q, k, v, make_gates(gates, 2, 3, n)]


def run(attend, inputs: list[Tensor], seq_start: Tensor | None = None) -> dict[str, Tensor]:
    """Output and the four gradients for a fixed random output gradient."""
    scale, names = inputs[0].shape[-1] ** -0.5, ("q", "k", "v", "log_fgate")
    got = results(lambda **x: attend(*x.values(), seq_start, scale), dict(zip(names, inputs, strict=True)))
    return {"out": got["out 0"], **{f"d{name}": got[f"d {name}"] for name in names}}


def written_out(q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, scale: float) -> Tensor:
    """The definition with Python loops, one head."""
    rows = []
    first_query = len(k) - len(q)
    for m in range(len(q)):
        i = first_query + m
        scores = torch.stack([scale * q[m] @ k[j] + log_fgate[j + 1 : i + 1].sum() for j in range(i + 1)])
        rows.append(scores.softmax(0) @ v[: i + 1])
    return torch.stack(rows)


@pytest.mark.parametrize("m, gates", [(7, "resets"), (3, "random")])
def test_reference_is_the_definition(m, gates):
    q, k, v, log_fgate = make_inputs(m, 7, 4, gates)
    out = reference(q, k, v, log_fgate, None, 0.7)
    for b in range(2):
        for h in range(3):
            want = written_out(q[b, h], k[b, h], v[b, h], log_fgate[b, h], 0.7)
            torch.testing.assert_close(out[b, h], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gates", FLOAT32_TOLERANCE)
@pytest.mark.parametrize("backend", list(BACKENDS)[1:])
def test_portable_equals_reference(backend, gates):
    for m, n, d in ((1, 1, 16), (1, 63, 60), (100, 100, 16), (40, 100, 64), (33, 65, 128)):
        inputs = make_inputs(m, n, d, gates)
        want = run(reference, inputs)
        assert_close(run(BACKENDS[backend], inputs), want, 1e-11)
        single = [x.float() for x in inputs]
        want = run(reference, [x.double() for x in single])
        assert_close(run(BACKENDS[backend], single), want, FLOAT32_TOLERANCE[gates])


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_half_precision_costs_no_more_than_rounding_inputs_and_outputs(dtype, tolerance):
    inputs = make_inputs(150, 150, 64)
    inputs = [*(x.to(dtype) for x in inputs[:3]), inputs[3].float()]
    want = run(reference, [x.double() for x in inputs])
    got = run(forgetting_attention_portable, inputs)
    assert got["out"].dtype == got["dq"].dtype == dtype and got["dlog_fgate"].dtype == torch.float32
    assert_close(got, want, tolerance)
    assert_close({"dlog_fgate": got["dlog_fgate"]}, {"dlog_fgate": want["dlog_fgate"]}, 5e-5)


def test_three_bfloat16_channels_carry_the_bias(monkeypatch):
    monkeypatch.setattr(portable, "_choose_compute_dtype", lambda q: q.dtype)
    inputs = make_inputs(200, 200, 64)
    inputs = [*(x.bfloat16() for x in inputs[:3]), inputs[3].float()]
    want = run(reference, [x.double() for x in inputs])
    got = run(forgetting_attention_portable, inputs)
    assert_close({"out": got["out"]}, {"out": want["out"]}, 4e-3)
    gradients = ("dq", "dk", "dv")
    assert_close({name: got[name] for name in gradients}, {name: want[name] for name in gradients}, 1e-2)


def test_near_pairs_are_exact_however_long_the_sequence():
    """Two keys 16 apart after 20,000 strongly forgetting positions: the ratio of their weights is their decay."""
    n, head_dim = 20_000, 2
    torch.manual_seed(0)
    log_fgate = F.logsigmoid(torch.randn(1, 1, n, dtype=torch.float64) - 0.5)
    positions = torch.arange(n - 40, n)
    near, far = positions[-1].item(), positions[-17].item()
    # Scores of the two keys are equalised, all others are pushed out of sight, values tell the two apart.
    k = torch.zeros(1, 1, n, head_dim, dtype=torch.float64)
    k[..., 0] = -200.0
    k[0, 0, near, 0] = 0.0
    k[0, 0, far, 0] = -log_fgate[0, 0, far + 1 : near + 1].sum()
    v = torch.zeros(1, 1, n, head_dim, dtype=torch.float64)
    v[0, 0, near, 0] = v[0, 0, far, 1] = 1.0
    q = torch.zeros(1, 1, 1500, head_dim, dtype=torch.float64)
    q[..., 0] = 1.0
    inputs = [x.float() for x in (q, k, v, log_fgate)]
    out = forgetting_attention_portable(*inputs, None, 1.0)[0, 0, -1]
    assert abs(math.log(out[0] / out[1])) < 1e-4
    whole_cumsum_error = (inputs[3].cumsum(-1).double() - inputs[3].double().cumsum(-1)).abs().max()
    assert whole_cumsum_error > 1e-4, "the case is too easy: one float32 running sum would do"


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_nothing_is_seen_across_a_hard_reset(backend):
    inputs = [x.float() for x in make_inputs(80, 80, 16)]
    inputs[3][..., 50] = -torch.inf
    got = run(backend, inputs)
    tail = [x[:, :, 50:] for x in inputs]
    tail[3] = tail[3].clone()
    tail[3][..., 0] = 0
    assert_close({"out": got["out"][:, :, 50:]}, {"out": run(backend, tail)["out"].double()}, 1e-4)
    assert all(x.isfinite().all() for x in got.values())
    assert (got["dlog_fgate"][..., 50] == 0).all()


@pytest.mark.parametrize("m", [60, 90])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_left_padding_equals_no_padding_whatever_it_holds(backend, m):
    n = 90
    seq_start = torch.tensor([0, 37])
    inputs = [x.float() for x in make_inputs(m, n, 16)]
    for x, first in zip(inputs, (n - m, 0, 0, 0), strict=True):
        x[1, :, : max(0, 37 - first)] = torch.nan
    got = run(backend, inputs, seq_start)
    assert all(x.isfinite().all() for x in got.values())
    hidden_queries = max(0, 37 - (n - m))
    for name, num_hidden in zip(got, (hidden_queries, hidden_queries, 37, 37, 38), strict=True):
        assert (got[name][1, :, :num_hidden] == 0).all(), name
    want = run(functools.partial(short_alone, backend, hidden_queries), inputs)
    assert_close(got, want, 5e-5)


def short_alone(backend, hidden_queries, q, k, v, log_fgate, _, sm_scale) -> Tensor:
    """Attend in the first sequence as it is, and in the second without its 37 tokens of padding."""
    first = backend(q[:1], k[:1], v[:1], log_fgate[:1], None, sm_scale)
    second = backend(q[1:, :, hidden_queries:], k[1:, :, 37:], v[1:, :, 37:], log_fgate[1:, :, 37:], None, sm_scale)
    return torch.cat((first, F.pad(second, (0, 0, hidden_queries, 0))))


def test_layouts_scale_autocast_and_a_sequence_of_padding():
    q, k, v, log_fgate = inputs = [x.float() for x in make_inputs(9, 12, 16)]
    out = forgetting_attention(*inputs, head_first=True)
    torch.testing.assert_close(forgetting_attention(*(x.transpose(1, 2) for x in inputs)), out.transpose(1, 2))
    assert torch.equal(out, forgetting_attention(*inputs, head_first=True, sm_scale=0.25))
    assert not torch.equal(out, forgetting_attention(*inputs, head_first=True, sm_scale=0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(forgetting_attention(*inputs, head_first=True), out)
    padded = forgetting_attention(*inputs, head_first=True, seq_start=torch.tensor([12, 0]))
    assert (padded[0] == 0).all()
    torch.testing.assert_close(padded[1], out[1])
    plain = forgetting_attention(q, k[:, :, :9], v[:, :, :9], 0 * log_fgate[:, :, :9], head_first=True)
    want = F.scaled_dot_product_attention(q, k[:, :, :9], v[:, :, :9], is_causal=True)
    torch.testing.assert_close(plain, want)


def test_exact_backends_skip_nothing():
    inputs = [x.float() for x in make_inputs(9, 9, 16)]  # read as (B, T, H, D): 3 positions of 9 heads
    want = forgetting_attention(*inputs)
    for threshold in ("auto", -5, torch.tensor(-3.0), torch.full((2, 1), -3.0), torch.zeros(9)):
        assert torch.equal(forgetting_attention(*inputs, adaptive_threshold=threshold), want)


def test_memory_for_the_backward_pass_grows_with_length_not_its_square():
    def saved(n: int) -> int:
        inputs = [x.float().requires_grad_() for x in make_inputs(n, n, 8)]
        return saved_bytes(lambda: forgetting_attention_portable(*inputs, None, 1.0, block_size=64))

    assert saved(512) < 2.5 * saved(256)


@pytest.mark.parametrize("block", [1024, 32])
@pytest.mark.parametrize(
    ("m", "window", "bounds"),
    [
        *((70, window, None) for window in (None, 1, 7, 64, 70, 1000)),
        *((m, 20, None) for m in (9, 1)),
        *((70, window, bounds) for window in (None, 10) for bounds in ([0, 70], [0, 1, 2, 40, 70], [0, 33, 33, 70])),
    ],
)
def test_windows_packed_documents_and_shared_keys(m, window, bounds, block, monkeypatch):
    """Six heads share two keys, in order."""
    attend = functools.partial(forgetting_attention_portable, block_size=block)
    monkeypatch.setattr(package, "forgetting_attention_portable", attend)
    q, k, v, log_fgate = (x[:1] if bounds else x for x in make_inputs(m, 70, 8))
    inputs = [torch.cat((q, -q), 1), k[:, :2], v[:, :2], torch.cat((log_fgate, log_fgate.flip(2)), 1)]
    packed = None if bounds is None else torch.tensor(bounds)
    starts = [max((b for b in bounds or [0] if b <= i), default=0) for i in range(70 - m, 70)]
    first_key = [max(start, i - (window or 70) + 1) for i, start in zip(range(70 - m, 70), starts, strict=True)]
    first_key = torch.tensor(first_key).expand(len(q), -1)

    def public(q, k, v, log_fgate, seq_start, scale):
        return forgetting_attention(q, k, v, log_fgate, head_first=True, window_size=window, cu_seqlens=packed)

    def definition(q, k, v, log_fgate, seq_start, scale):
        return forgetting_attention_reference(q, k, v, log_fgate, None, scale, first_key_BT=first_key)[0]

    assert_close(run(public, inputs), run(definition, inputs), 1e-11)


GOOD = {
    "q": torch.zeros(2, 5, 3, 8),
    "k": torch.zeros(2, 6, 3, 8),
    "v": torch.zeros(2, 6, 3, 8),
    "log_fgate": torch.zeros(2, 6, 3),
}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": torch.zeros(2, 7, 3, 8)}, ValueError, "q has 7 positions and k only 6"),
        ({"q": torch.zeros(2, 5, 24)}, ValueError, r"q has shape .* must be \(B, T, H, D\), each"),
        ({"q": torch.zeros(2, 0, 3, 8)}, ValueError, "q has shape .* each at least 1"),
        ({"q": torch.zeros(2, 5, 3, 8, dtype=torch.long)}, TypeError, "q has dtype torch.int64"),
        ({"q": [1.0]}, TypeError, "q is a list"),
        ({"k": torch.zeros(2, 6, 3, 8).half()}, ValueError, "k is torch.float16 and q torch.float32"),
        ({"v": torch.zeros(2, 5, 3, 8)}, ValueError, "v has shape"),
        (
            {"k": torch.zeros(2, 6, 2, 8), "v": torch.zeros(2, 6, 2, 8)},
            ValueError,
            r"k has 2 heads and q 3; .* multiple .*\(axes \(B, T, H, D\), head_first=False\)",
        ),
        ({"log_fgate": torch.full((2, 6, 3), 0.5)}, ValueError, r"log_fgate has entries up to 0\.5;.*logsigmoid"),
        ({"log_fgate": torch.zeros(2, 3, 6)}, ValueError, r"log_fgate has shape .* \(B, N, H\) = \(2, 6, 3\)"),
        ({"window_size": 0}, ValueError, "window_size is 0"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "batch size 1 .got 2."),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens has dtype torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, "cu_seqlens is .* rise from 0 to the 6 tokens"),
        ({"seq_start": torch.tensor([0, 7])}, ValueError, r"seq_start is \[0, 7\].* \[0, 6\]"),
        ({"seq_start": torch.tensor([0])}, ValueError, "seq_start has shape"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale is nan"),
        ({"adaptive_threshold": "fast"}, ValueError, "'auto'"),
        ({"adaptive_threshold": 1.0}, ValueError, "adaptive_threshold is 1.0"),
        ({"adaptive_threshold": True}, ValueError, "adaptive_threshold is True"),
        ({"adaptive_threshold": torch.zeros(6)}, ValueError, r"broadcast to \(B, H\) = \(2, 3\)"),
        ({"adaptive_threshold": torch.ones(3)}, ValueError, "positive or NaN"),
    ],
)
def test_refused_inputs_name_the_argument(change, error, message):
    forgetting_attention(**GOOD)
    with pytest.raises(error, match=message):
        forgetting_attention(**{**GOOD, **change})


def test_padding_may_hold_gates_above_one():
    log_fgate = torch.zeros(2, 6, 3)
    log_fgate[0, :2], log_fgate[0, 2] = 3.0, -torch.inf
    seq_start = torch.tensor([2, 0])
    assert forgetting_attention(**{**GOOD, "log_fgate": log_fgate}, seq_start=seq_start).isfinite().all()
    log_fgate[1, 2] = 0.1
    with pytest.raises(ValueError, match=r"log_fgate has entries up to 0\.1;"):
        forgetting_attention(**{**GOOD, "log_fgate": log_fgate}, seq_start=seq_start)
