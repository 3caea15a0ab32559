"""Token shift, rotary embedding, norms, cross-entropy and the look at weights against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer.ops import finite
from forgetting_transformer.ops.layers import cross_entropy
from forgetting_transformer.ops.layers.cross_entropy import linear_cross_entropy
from forgetting_transformer.ops.layers.norm import rms_norm
from forgetting_transformer.ops.layers.rotary import rotate
from forgetting_transformer.ops.layers.token_shift import token_shift


def test_token_shift_weighs_the_previous_token_by_the_current_alpha():
    torch.manual_seed(0)
    y, alpha, previous = torch.randn(2, 5, 3, 4), torch.rand(2, 5, 3), torch.randn(2, 3, 4)
    for first in (None, previous):
        out = token_shift(y, alpha, first)
        before = torch.zeros(2, 3, 4) if first is None else first
        for t in range(5):
            a = alpha[:, t, :, None]
            torch.testing.assert_close(out[:, t], a * before + (1 - a) * y[:, t])
            before = y[:, t]


def test_token_shift_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="alpha has shape"):
        token_shift(torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match="previous has shape"):
        token_shift(torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 3), torch.zeros(2, 12))


def test_rotary_turns_halves_of_a_head_against_each_other():
    torch.manual_seed(0)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64)
    out = rotate(x, 3, base=100.0)
    for t in range(4):
        for d in range(3):
            angle = (3 + t) * 100.0 ** (-2 * d / 6)
            a, b = x[0, t, :, d], x[0, t, :, d + 3]
            torch.testing.assert_close(out[0, t, :, d], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(out[0, t, :, d + 3], a * math.sin(angle) + b * math.cos(angle))


def test_rotary_angles_are_float32_for_bfloat16_inputs():
    x = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(rotate(x, 16_383), rotate(x.float(), 16_383).bfloat16())


def test_rotary_tables_are_one_operation_for_a_compiler():
    """Otherwise each kernel computes a sine and a cosine for every channel of every head, which took 10 % of a step."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    x, position = torch.randn(2, 6, 3, 8), torch.tensor([[0, 1, 2, 0, 1, 2]])
    for where in (5, position):
        torch.compiler.reset()
        compiled = torch.compile(lambda x, where=where: rotate(x, where), backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), rotate(x, where))
    assert len(graphs) == 2
    for graph in graphs:
        called = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        assert sum("rotary_tables" in name for name in called) == 1
        assert not any(name in ("cos", "sin") for name in called)
    torch.library.opcheck(torch.ops.forgetting_transformer.rotary_tables.default, (position.float(), 8, 100.0, [2.0]))


def test_rotary_refuses_odd_heads():
    with pytest.raises(ValueError, match="head_dim is 3"):
        rotate(torch.zeros(1, 1, 1, 3))


@pytest.mark.parametrize("num_groups", [1, 3])
def test_rms_norm_normalises_each_group(num_groups):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 12), torch.randn(12)
    want = F.rms_norm(x.unflatten(-1, (num_groups, -1)), (12 // num_groups,), eps=1e-5).flatten(-2) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, num_groups), want)


def test_rms_norm_statistics_are_float32_for_half_inputs():
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # 300² overflows float16
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-6), torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("max_logits, vocab_multiple", [(2**27, 1), (50, 4), (1, 1)])
def test_cross_entropy_in_slices_is_cross_entropy(max_logits, vocab_multiple, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_vocab_multiple", lambda _: vocab_multiple)
    monkeypatch.setattr(cross_entropy, "_MAX_LOGITS", max_logits)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 7, 6, requires_grad=True), torch.randn(10, 6, requires_grad=True)
    labels = torch.randint(0, 10, (2, 7))
    labels[0, 3] = -100
    loss = linear_cross_entropy(hidden, weight, labels)
    want = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none").view(2, 7)
    torch.testing.assert_close(loss, want)
    assert loss.dtype == torch.float32 and loss[0, 3] == 0
    grad_loss = torch.randn(2, 7)
    got_grads = torch.autograd.grad(loss, (hidden, weight), grad_loss)
    for got, expected in zip(got_grads, torch.autograd.grad(want, (hidden, weight), grad_loss), strict=True):
        torch.testing.assert_close(got, expected)
    assert (got_grads[0][0, 3] == 0).all()


def test_cross_entropy_never_saves_all_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_MAX_LOGITS", 800)
    hidden, weight = torch.randn(1, 64, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(hidden, weight, torch.zeros(1, 64, dtype=torch.long))
    assert max(saved, default=0) <= 800


@pytest.mark.parametrize("autocast", [False, True])
def test_cross_entropy_with_logits_that_are_kept_is_bitwise_that_with_logits_made_again(monkeypatch, autocast):
    monkeypatch.setattr(cross_entropy, "_MAX_LOGITS", 800)
    made, original = [], cross_entropy._slice_loss
    monkeypatch.setattr(cross_entropy, "_slice_loss", lambda *x: made.append(len(x[0])) or original(*x))
    labels, found = torch.randint(0, 100, (2, 32)), {}
    start = torch.randn(2, 32, 16), torch.randn(100, 16)
    for keeps in (False, True):
        monkeypatch.setattr(cross_entropy, "_keeps_logits", lambda size, device, keeps=keeps: keeps)
        hidden, weight = (x.clone().requires_grad_() for x in start)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(hidden, weight, labels)
        loss.mean().backward()
        found[keeps] = loss, hidden.grad, weight.grad
    assert made == [8] * 8 * 3, "twice, and once"
    for kept, again in zip(found[True], found[False], strict=True):
        assert torch.equal(kept, again)


def test_cross_entropy_is_float32_for_bfloat16():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 7, 6).bfloat16(), torch.randn(10, 6).bfloat16()
    assert linear_cross_entropy(hidden, weight, torch.zeros(1, 7, dtype=torch.long)).dtype == torch.float32


def test_cross_entropy_refuses_labels_out_of_range_or_of_another_shape():
    for label in (10, -1):
        with pytest.raises(ValueError, match=rf"label {label} is out of range.*\[0, 10\).*-100"):
            linear_cross_entropy(torch.zeros(1, 2, 4), torch.zeros(10, 4), torch.tensor([[0, label]]))
    with pytest.raises(ValueError, match="labels have shape"):
        linear_cross_entropy(torch.zeros(1, 2, 4), torch.zeros(10, 4), torch.zeros(2, dtype=torch.long))


def test_weights_that_are_not_finite_are_found_by_name():
    big = torch.finfo(torch.float32).max
    weights = {
        "large": torch.tensor([big, -big, big]),
        "half": torch.full((3, 2), -65504, dtype=torch.float16),
        "eight bits": torch.ones(3).to(torch.float8_e4m3fn),
        "counts": torch.arange(3),
        "empty": torch.empty(0),
        "elsewhere": torch.empty(2, device="meta"),
    }
    finite.check_finite(weights.items(), "file")
    finite.check_finite([], "file")
    for value in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
            wrong = weights | {"wrong": torch.tensor([0, value, 1, value]).to(dtype)}
            with pytest.raises(finite.NotFiniteError, match=r"^file: wrong holds 2 of 4 values that are not finite; "):
                finite.check_finite(wrong.items(), "file")
    more = wrong | {"too": torch.tensor([math.nan])}
    with pytest.raises(finite.NotFiniteError, match=r"^file: wrong holds .* finite, and so do 1 other tensors; "):
        finite.check_finite(more.items(), "file")
