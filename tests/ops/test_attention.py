"""Causal attention against its definition in float64: windows, grouped heads, decoding, left padding.

Axes: B batch, T queries, N keys, H query heads, G key and value heads, D channels of a head.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forgetting_transformer.ops import attention
from forgetting_transformer.ops.attention import causal_attention
from tests.ops import kernels
from tests.ops.kernels import results, saved_bytes


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of queries out of short sequences."""
    monkeypatch.setattr(attention, "_MIN_BLOCK_SIZE", 16)
    monkeypatch.setattr(attention, "_MAX_BLOCK_SIZE", 32)


def make_inputs(
    t: int, n: int, g: int = 2, h: int = 4, d: int = 16, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v of 2 sequences."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, t, h, d), (2, n, g, d), (2, n, g, d)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, window_size: int | None = None, seq_start=None) -> Tensor:
    """The definition: every pair's score, the invisible ones -inf. Rows of padding are 0."""
    t, n = q.shape[1], k.shape[1]
    heads_per_group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(heads_per_group, dim=2), v.repeat_interleave(heads_per_group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    i, j = torch.arange(n - t, n, device=q.device)[:, None], torch.arange(n, device=q.device)
    visible = (j <= i) & (j > i - (window_size or n))
    start = torch.zeros(len(q), dtype=torch.long, device=q.device) if seq_start is None else seq_start
    visible = visible & (j >= start[:, None, None, None])
    weights = scores.masked_fill(~visible, -1e300).softmax(-1).masked_fill(~visible, 0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def run(attend, inputs: list[Tensor], **options) -> dict[str, Tensor]:
    """Output and the three gradients for a fixed random output gradient."""
    got = results(lambda **x: attend(*x.values(), **options), dict(zip("qkv", inputs, strict=True)))
    return {"out": got["out 0"], **{f"d{name}": got[f"d {name}"] for name in "qkv"}}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    kernels.assert_close(got, want, tolerance, floor=0.1 * want["out"].norm().item())


SHAPES = [(1, 1), (1, 90), (90, 90), (100, 100), (33, 90), (64, 65)]
WINDOWS = [None, 1, 7, 64, 1000]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", WINDOWS)
def test_equals_the_definition(window):
    for t, n in SHAPES:
        for groups in (4, 2, 1):
            inputs = make_inputs(t, n, groups)
            want = run(reference, inputs, window_size=window)
            assert_close(run(causal_attention, inputs, window_size=window), want, 1e-12)
        single = [x.float() for x in inputs]
        want = run(reference, [x.double() for x in single], window_size=window)
        assert_close(run(causal_attention, single, window_size=window), want, 3e-6)
    for t in (1, 33, 90):
        for start in (torch.tensor([0, 41]), torch.tensor([90, 5])):  # the second: one sequence of padding
            inputs, options = make_inputs(t, 90), {"window_size": window, "seq_start": start}
            assert_close(run(causal_attention, inputs, **options), run(reference, inputs, **options), 1e-12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", WINDOWS)
def test_padding_gives_exact_zeros_whatever_it_holds(window):
    start = torch.tensor([7, 80])
    inputs = make_inputs(90, 90)
    clean = run(causal_attention, inputs, window_size=window, seq_start=start)
    is_padding = torch.arange(90) < start[:, None]
    for x in inputs:
        x[is_padding] = torch.nan
    got = run(causal_attention, inputs, window_size=window, seq_start=start)
    for name, x in got.items():
        assert (x[is_padding] == 0).all(), name
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
@pytest.mark.parametrize("window", [None, 40])
def test_half_precision_runs_in_its_own_dtype_under_autocast_too(dtype, tolerance, window):
    inputs = make_inputs(150, 150, d=64, dtype=dtype)
    want = run(reference, [x.double() for x in inputs], window_size=window)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(causal_attention, inputs, window_size=window)
    assert all(x.dtype == dtype for x in got.values())
    assert_close(got, want, tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": 256, "seq_start": torch.tensor([0, 9])}],
    ids=["triangle", "window and padding"],
)
def test_memory_is_linear_in_the_sequence(options):
    inputs = [x.requires_grad_() for x in make_inputs(4096, 4096, g=1, h=1, dtype=torch.float32)]
    assert saved_bytes(lambda: causal_attention(*inputs, **options)) < 4 * 4096 * 4096 / 8


def attention_flops(n: int, window: int | None) -> int:
    inputs = make_inputs(n, n, g=1, h=1, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        causal_attention(*inputs, window_size=window)
    return counter.get_total_flops()


def test_a_window_costs_its_length_per_token():
    assert attention_flops(8192, 512) == pytest.approx(2 * attention_flops(4096, 512), rel=0.1)
    assert attention_flops(8192, 512) <= 2 * (2 * 2 * 2 * 16 * 8192 * 512)  # at most twice the pairs it needs


def test_inputs_that_do_not_fit_are_refused_by_name():
    """As forgetting attention refuses them, with this op's layout."""
    q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 9, 2, 8)
    with pytest.raises(ValueError, match="k has 2 heads and q 3"):
        causal_attention(q[:, :, :3], k, k)
    with pytest.raises(ValueError, match="window_size is 0"):
        causal_attention(q, k, k, window_size=0)
    with pytest.raises(ValueError, match=r"must lie in \[0, 9\]"):
        causal_attention(q, k, k, seq_start=torch.tensor([0, 10]))
