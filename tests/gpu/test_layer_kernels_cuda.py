"""On CUDA: kernels of layers are taken, and are in compiled models; tests/ops has their numbers."""

import pytest
import torch

from forgetting_transformer.model.layers import Embedding
from forgetting_transformer.ops import compiling
from forgetting_transformer.ops.layers import residual_norm, swiglu
from tests.ops.kernels import results

GPU = torch.device("cuda")


def test_few_tokens_stay_in_pytorch():
    h = torch.randn(1023, 64, device=GPU)
    assert not swiglu._takes_kernel(h) and not residual_norm._takes_kernel(h, h.dtype)
    assert not swiglu._takes_kernel(torch.randn(2048, 64, dtype=torch.float64, device=GPU))


def test_a_compiled_layer_gives_the_bits_of_an_eager_one():
    h = torch.randn(2048, 512, device=GPU).bfloat16()
    compiled = results(compiling.compiled(swiglu.swiglu), {"h": h})
    assert all(torch.equal(compiled[name], x) for name, x in results(swiglu.swiglu, {"h": h}).items())


@pytest.mark.parametrize("tokens", [4096, 32768])
def test_the_gradient_of_frequent_words_has_the_same_bits_in_every_run(tokens):
    embedding = Embedding(61, 512, padding_idx=3, device=GPU)
    ids = torch.arange(tokens, device=GPU)[None] % 61
    d = torch.randn(1, tokens, 512, device=GPU)
    first, *others = (torch.autograd.grad(embedding(ids), embedding.weight, d)[0] for _ in range(4))
    assert all(torch.equal(first, x) for x in others)
    want = torch.zeros(61, 512, dtype=torch.float64, device=GPU).index_add_(0, ids[0], d[0].double())
    want[3] = 0
    assert (first - want).norm() < 1e-6 * want.norm()
    assert not torch.are_deterministic_algorithms_enabled()
