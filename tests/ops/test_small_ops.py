"""Layers' small operations, cross-entropy and the look at weights: dtypes, memory, and what is refused.

`tests/model/test_equations.py` has the definitions of the layers' operations.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer.ops import finite
from forgetting_transformer.ops.layers import cross_entropy
from forgetting_transformer.ops.layers.cross_entropy import linear_cross_entropy
from forgetting_transformer.ops.layers.norm import rms_norm
from forgetting_transformer.ops.layers.rotary import rotate
from forgetting_transformer.ops.layers.short_convolution import short_convolution
from forgetting_transformer.ops.layers.token_shift import token_shift


def test_token_shift_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="alpha has shape"):
        token_shift(torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match="previous has shape"):
        token_shift(torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 3), torch.zeros(2, 12))


def test_what_a_short_convolution_keeps_does_not_hold_the_sequence_in_memory():
    _, last = short_convolution(torch.zeros(2, 500, 6), torch.zeros(6, 1, 4))
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_short_convolution_refuses_shapes_that_do_not_fit():
    x, weight = torch.zeros(2, 5, 6), torch.zeros(6, 1, 4)
    with pytest.raises(ValueError, match=r"weight has shape \(6, 4\); it must be \(6, 1, W\)"):
        short_convolution(x, weight[:, 0])
    with pytest.raises(ValueError, match=r"previous has shape \(2, 6, 4\); it must be \(2, 6, 3\)"):
        short_convolution(x, weight, previous_BCW=torch.zeros(2, 6, 4))
    with pytest.raises(ValueError, match="unit_heads is 4; it must be a divisor of x's 6 channels"):
        short_convolution(x, weight, unit_heads=4)
    with pytest.raises(ValueError, match="at least one position"):
        short_convolution(x[:, :0], weight)


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


def test_compiled_logits_that_are_kept_have_longer_slices(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_MAX_LOGITS", 800)
    monkeypatch.setattr(cross_entropy, "_MAX_KEPT_LOGITS", 3200)
    made, original = [], cross_entropy._slice_loss
    monkeypatch.setattr(
        cross_entropy, "_compiled_slice_loss", lambda: lambda *x: made.append(len(x[0])) or original(*x)
    )
    for keeps in (True, False):
        monkeypatch.setattr(cross_entropy, "_keeps_logits", lambda size, device, keeps=keeps: keeps)
        linear_cross_entropy(torch.randn(1, 64, 4), torch.randn(100, 4), torch.zeros(1, 64).long(), compiled=True)
    assert made == [32] * 2 + [8] * 8


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
