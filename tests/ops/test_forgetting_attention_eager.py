"""Eager calls go straight to the kernels, with the bits of the operators; these run where something looks on."""

import pytest
import torch

from forgetting_transformer import forgetting_attention
from forgetting_transformer.ops.arguments import checked_scale
from tests.ops.interpreter import interpret

layout = pytest.importorskip("forgetting_transformer.ops.forgetting_attention.layout")

#: `same` compares a call with the same call under a mode that sees operators.
COMPARE = """
import contextlib
from forgetting_transformer.ops import forgetting_attention as package
from forgetting_transformer.ops.forgetting_attention import forgetting_attention
from torch.utils._python_dispatch import TorchDispatchMode

class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "forgetting_transformer":
            self.names.append(function.__name__.split(".")[0].removeprefix("forgetting_attention_"))
        return function(*args, **(kwargs or {}))

package.takes_kernel = lambda q: True

def results(tensors, d_out, mode, needs=(True,) * 4, **options):
    leaves = [x.detach().clone().requires_grad_(need) for x, need in zip(tensors, needs)]
    with mode:
        out = forgetting_attention(*leaves, **options)
        (out * d_out).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]

def same(tensors, d_out, **options):
    seen = Names()
    eager = results(tensors, d_out, contextlib.nullcontext(), **options)
    observed = results(tensors, d_out, seen, **options)
    assert seen.names[-3:] == ["decay", "forward", "backward"], seen.names
    for a, b in zip(eager, observed, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.stride() == b.stride() and a.dtype == b.dtype and torch.equal(a, b))
    return eager
"""


@pytest.mark.parametrize("head_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_eager_calls_have_the_bits_of_the_operators(head_first):
    """Every kind of call with heads last, which is the default, and the plain one with heads first."""
    interpret(
        f"""
{COMPARE}
head_first = {head_first}
q, k, v, f, d_out = inputs(20, 16, queries=18, batch=2)
tensors, d_out = [[x if head_first else x.transpose(1, 2).contiguous() for x in y] for y in ((q, k, v, f), (d_out,))]
d_out, same_as = d_out[0], functools.partial(same, head_first=head_first)
whole = same_as(tensors, d_out)
if head_first:
    os._exit(0)
# Gradients of some inputs are those that they have among all.
some = same_as(tensors, d_out, needs=(True, False, True, False))
assert some[2] is None and some[4] is None and torch.equal(some[1], whole[1]) and torch.equal(some[3], whole[3])
same_as(tensors, d_out, window_size=9, seq_start=torch.tensor([0, 11]))
same_as(tensors, d_out, adaptive_threshold=-2.0)
# Other strides: slices of one projection, and channels that do not lie side by side.
wider = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in tensors[:3]]
assert all(torch.equal(a, b) for a, b in zip(same_as([*wider, tensors[3]], d_out), whole, strict=True))
apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors[:3]]
assert all(torch.equal(a, b) for a, b in zip(same_as([*apart, tensors[3]], d_out), whole, strict=True))
""".replace("import contextlib\n", "import contextlib, functools, os\n", 1)
    )


def test_tensors_of_checked_shapes_are_not_taken_for_others():
    q, (k, v) = torch.randn(1, 5, 2, 4), torch.randn(2, 1, 5, 1, 4)
    log_fgate = -torch.rand(1, 5, 2)
    for _ in range(2):
        forgetting_attention(q, k, v, log_fgate)
        with pytest.raises(ValueError, match=r"k is torch\.float64 and q torch\.float32"):
            forgetting_attention(q, k.double(), v, log_fgate)
        with pytest.raises(ValueError, match=r"log_fgate has shape .*\(B, H, N\) = \(1, 5, 1\)"):
            forgetting_attention(q, k, v, log_fgate, head_first=True)
        with pytest.raises(ValueError, match="v is on meta and q on cpu"):
            forgetting_attention(q, k, v.to("meta"), log_fgate)
        with pytest.raises(ValueError, match="v has shape"):
            forgetting_attention(q, k, v[:, :4], log_fgate)
    assert isinstance(checked_scale(1, 64), float)  # integers that are 1 would be compiled into the kernel
