"""On CUDA: kernels of layers are taken, and are in compiled models; tests/ops has their numbers."""

import contextlib

import pytest
import torch

from forgetting_transformer.model.layers import Embedding
from forgetting_transformer.ops import backends, compiling
from forgetting_transformer.ops.layers import residual_norm, swiglu
from tests.model.small_models import PRO, small
from tests.ops.kernels import results

GPU = torch.device("cuda")


def test_few_tokens_stay_in_pytorch():
    h = torch.randn(1023, 64, device=GPU)
    assert not swiglu._takes_kernel(h) and not residual_norm._takes_kernel(h, h.dtype)
    assert not swiglu._takes_kernel(torch.randn(2048, 64, dtype=torch.float64, device=GPU))


@pytest.mark.parametrize("name", ["forgetting_transformer", "transformer"])
def test_a_compiled_block_has_the_kernels_and_no_breaks(name):
    """Gradients under autocast agree with those of the same model without the kernels."""
    ids = torch.arange(2048, device=GPU)[None] % 61

    def train(served):
        torch._dynamo.reset()
        model = small(name, **(PRO if name == "forgetting_transformer" else {})).to(GPU).train()
        graphs = []

        def keep(graph, inputs):
            graphs.append(graph.print_readable(print_output=False))
            return graph

        for block in model.decoder.layers:
            block._transform = torch.compile(block._transform, backend=keep, fullgraph=True)
        with contextlib.ExitStack() as stack:
            for op in ("swiglu", "residual_norm", "shift_norm", "gated_norm"):
                stack.enter_context(backends.without(op, *served))
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids.roll(-1, 1)).loss.mean()
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())], "".join(graphs)

    got, graphs = train(())
    want, plain = train((backends.TRITON,))
    of_fox = ["shift_norm", "gated_rms_norm"] if name == "forgetting_transformer" else []
    for op in ("residual_norm", "swiglu", *of_fox):
        assert f"forgetting_transformer.{op}" in graphs and f"forgetting_transformer.{op}" not in plain
    assert not backends.faults()
    norms = [x.float().norm() for x in want]
    for a, b, size in zip(got, want, norms, strict=True):
        assert (a.float() - b.float()).norm() <= 0.1 * size + 1e-2 * max(norms)


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
