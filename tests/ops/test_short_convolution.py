"""Short convolution against its definition, and across calls."""

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer.ops.layers.short_convolution import short_convolution


def written_out(x, weight, bias, previous):
    """The definition with Python loops: B, T, C; weight C, 1, W; previous B, C, W - 1."""
    inputs = torch.cat((previous.transpose(1, 2), x), dim=1)
    taps = weight.shape[-1]
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for w in range(taps):
            y[:, t] += weight[:, 0, w] * inputs[:, t + w]
    return F.silu(y if bias is None else y + bias)


def make_inputs(length: int, taps: int = 4):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, length, 6), torch.randn(6, 1, taps), torch.randn(6)
    return (*(tensor.double() for tensor in (x, weight, bias)), torch.randn(2, 6, taps - 1).double())


@pytest.mark.parametrize("length, taps, with_bias", [(1, 4, True), (2, 2, False), (9, 1, True), (9, 4, True)])
def test_it_is_a_causal_filter_per_channel_and_silu(length, taps, with_bias):
    x, weight, bias, previous = make_inputs(length, taps)
    bias = bias if with_bias else None
    y, last = short_convolution(x, weight, bias, previous_BCW=previous)
    torch.testing.assert_close(y, written_out(x, weight, bias, previous), rtol=1e-12, atol=1e-12)
    history = torch.cat((previous, x.transpose(1, 2)), dim=-1)
    assert torch.equal(last, history[..., history.shape[-1] - (taps - 1) :])


def test_a_sequence_may_be_cut_anywhere():
    x, weight, bias, previous = make_inputs(9)
    whole, whole_last = short_convolution(x, weight, bias, previous_BCW=previous)
    for cut in range(1, 9):
        first, last = short_convolution(x[:, :cut], weight, bias, previous_BCW=previous)
        second, last = short_convolution(x[:, cut:], weight, bias, previous_BCW=last)
        torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
        assert torch.equal(last, whole_last)


def test_norms_of_heads_follow():
    x, weight, bias, previous = make_inputs(9)
    plain, _ = short_convolution(x, weight, bias, previous_BCW=previous)
    y, _ = short_convolution(x, weight, bias, previous_BCW=previous, unit_heads=2)
    want = plain.unflatten(-1, (2, 3))
    torch.testing.assert_close(y.unflatten(-1, (2, 3)), want / (want.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def test_what_is_kept_does_not_hold_the_sequence_in_memory():
    x, weight, bias, _ = make_inputs(500)
    _, last = short_convolution(x, weight, bias)
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_it_refuses_shapes_that_do_not_fit():
    x, weight, bias, _ = make_inputs(5)
    with pytest.raises(ValueError, match=r"weight has shape \(6, 4\); it must be \(6, 1, W\)"):
        short_convolution(x, weight[:, 0])
    with pytest.raises(ValueError, match=r"previous has shape \(2, 6, 4\); it must be \(2, 6, 3\)"):
        short_convolution(x, weight, bias, previous_BCW=torch.zeros(2, 6, 4))
    with pytest.raises(ValueError, match="unit_heads is 4; it must be a divisor of x's 6 channels"):
        short_convolution(x, weight, unit_heads=4)
    with pytest.raises(ValueError, match="at least one position"):
        short_convolution(x[:, :0], weight)
