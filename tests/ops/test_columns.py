"""Slices whose gradients are joined by one kernel: the same numbers as `Tensor.split`, also compiled and recomputed."""

import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from forgetting_transformer.ops import columns

SIZES = (3, 1, 8)


def test_slices_are_views_of_the_whole():
    x = torch.randn(2, 5, 12)
    for ours, theirs in zip(columns.split_columns(x, SIZES), x.split(SIZES, -1), strict=True):
        assert ours.data_ptr() == theirs.data_ptr() and ours.stride() == theirs.stride() and ours.equal(theirs)


@pytest.mark.slow
def test_the_operator_says_the_truth_about_its_output():
    parts = [torch.randn(2, 5, size)[:, ::2] for size in SIZES]
    torch.library.opcheck(torch.ops.forgetting_transformer.join_columns, (parts,))
    assert columns.join_columns(parts).equal(torch.cat(parts, -1))
    images = [torch.randn(2, 3, 4, size).to(memory_format=torch.channels_last) for size in SIZES]
    torch.library.opcheck(torch.ops.forgetting_transformer.join_columns, (images,))


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_gradients_are_joined_to_the_same_bits(recomputed):
    """What runs on a GPU; where there is none, the choice of it is skipped."""
    weight = torch.randn(12, 6)

    def loss(split, x, weight):
        a, b, c = split(torch.nn.functional.linear(x, weight), SIZES)
        return (a.exp().sum(-1, keepdim=True) * b + c.square()).sum()

    def leaves():
        return [torch.arange(60.0).reshape(2, 5, 6).sin().requires_grad_(), weight.clone().requires_grad_()]

    graphs = []
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, bw_compiler=lambda graph, _: graphs.append(graph) or graph
    )
    run = torch.compile(functools.partial(loss, columns._Split.apply), dynamic=False, backend=backend)
    got = leaves()
    (checkpoint(run, *got, use_reentrant=False) if recomputed else run(*got)).backward()
    assert "join_columns" in graphs[0].code
    want = leaves()
    loss(lambda x, sizes: x.split(sizes, -1), *want).backward()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
