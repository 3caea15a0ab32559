"""On a Hopper GPU: its kernels of forgetting attention against float64, and that they are the ones that run.

Axes: B batch, H query heads, G key and value heads, M queries, N keys, D channels of a head.
"""

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import forgetting_attention
from forgetting_transformer.ops import backends
from tests.gpu.test_cuda import assert_like_reference, relative_error

triton_attention = pytest.importorskip("forgetting_transformer.ops.forgetting_attention.triton")

KERNELS = ("forward", "key_gradient", "query_gradient")


@pytest.fixture
def kernels(monkeypatch):
    """Names of Hopper's kernels, in the order they are launched."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert triton_attention.has_gluon(torch.cuda.current_device(), 64), backends.faults()
    hopper, names = triton_attention._hopper(), []

    def record(name, launch):
        def recorded(*args):
            names.append(name)
            return launch(*args)

        monkeypatch.setattr(hopper, name, recorded)

    for name in KERNELS:
        record(name, getattr(hopper, name))
    return names


def expected(head_dim: int) -> list[str]:
    tiles = triton_attention._hopper().TILES
    return [name for name in KERNELS if (name, head_dim) in tiles]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
@pytest.mark.parametrize("gates", ["half", "slow", "resets"])
@pytest.mark.parametrize("queries, keys", [(128, 128), (256, 256), (384, 1024), (128, 640), (1920, 1920)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_outputs_and_gradients_agree_with_float64(kernels, dtype, tolerance, gates, queries, keys, head_dim, poisoned):
    assert_like_reference(queries, keys, head_dim, dtype, tolerance, gates)
    assert kernels == expected(head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads, groups", [(6, 2), (8, 1)])
@pytest.mark.parametrize("queries, keys", [(768, 768), (256, 768)])
def test_query_heads_that_share_keys_agree_with_float64(kernels, queries, keys, heads, groups, head_dim, poisoned):
    assert_like_reference(queries, keys, head_dim, torch.bfloat16, 8e-3, "half", heads=heads, groups=groups)
    assert kernels == expected(head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [4096, 1024])
def test_what_pruning_leaves_out_does_not_show(kernels, queries, head_dim, poisoned):
    """With gates of about ½ nearly all tiles are left out, for the first keys all of them."""
    q, d_out = (torch.randn(2, queries, 4, head_dim, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 4096, 2, head_dim, device="cuda").bfloat16() for _ in range(2))
    log_fgate = F.logsigmoid(torch.randn(2, 4096, 4, device="cuda"))

    def run(**options):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
        out = forgetting_attention(*leaves, **options)
        out.backward(d_out)
        return [out.detach(), *(x.grad for x in leaves)]

    whole, pruned = run(), run(adaptive_threshold=-60.0)
    assert kernels == 2 * expected(head_dim)
    for a, b in zip(whole, pruned, strict=True):
        assert relative_error(b, a) < 1e-5


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_runs_give_the_same_bits(kernels, head_dim):
    leaves = [torch.randn(1, 4096, 4, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    leaves.append(F.logsigmoid(torch.randn(1, 4096, 4, device="cuda") + 4).requires_grad_())

    def run():
        out = forgetting_attention(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
    assert kernels == 2 * expected(head_dim)


def test_slices_of_one_projection_are_read_where_they_lie(kernels):
    """Heads within wider rows, as a joint projection writes them."""
    q, k, v = torch.randn(2, 512, 3, 4, 128, device="cuda").bfloat16().unbind(2)
    log_fgate = F.logsigmoid(torch.randn(2, 512, 4, device="cuda"))
    out = forgetting_attention(q, k, v, log_fgate)
    assert kernels == ["forward"]
    assert torch.equal(out, forgetting_attention(*(x.contiguous() for x in (q, k, v)), log_fgate))


@pytest.mark.parametrize("length, head_dim", [(500, 64), (512, 96), (512, 256)])
def test_other_shapes_stay_with_triton(kernels, length, head_dim):
    q, k, v = (torch.randn(1, length, 2, head_dim, device="cuda").bfloat16() for _ in range(3))
    forgetting_attention(q, k, v, F.logsigmoid(torch.randn(1, length, 2, device="cuda")))
    assert not kernels
