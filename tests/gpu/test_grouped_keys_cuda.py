"""On CUDA: FoX with grouped keys and windows against the paper's equations in float64."""

import copy

import pytest
import torch

from forgetting_transformer.model import ForgettingAttentionLayer
from tests.model.test_grouped_keys_and_windows import by_equations

OPTIONS = {
    "grouped": {"num_kv_heads": 2, "qk_norm": True},
    "window": {"window_size": 129, "qk_norm": True, "use_k_shift": True, "use_v_shift": True},
    "both, pruned": {"num_kv_heads": 1, "window_size": 70, "qk_norm": True, "log_pruning_tolerance": -10.0},
    "both, pruned by norms": {"num_kv_heads": 2, "window_size": 70, "log_pruning_tolerance": -10.0},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_layer_computes_the_equations_and_their_gradients(options, dtype):
    torch.manual_seed(0)
    exact = ForgettingAttentionLayer(256, 4, **options, initializer_range=0.1).to(dtype).double()
    layer = copy.deepcopy(exact).to("cuda", dtype)
    x, weight = (torch.randn(2, 300, 256).to(dtype) for _ in range(2))
    results = []
    for function, inputs in ((lambda x: layer(x)[0], x.cuda()), (lambda x: by_equations(exact, x), x.double())):
        inputs.requires_grad_()
        out = function(inputs)
        (out * weight.to(out)).sum().backward()
        results.append([out.detach(), inputs.grad])
    results[0] += [p.grad for p in layer.parameters()]
    results[1] += [p.grad for p in exact.parameters()]
    for got, want in zip(*results, strict=True):
        error = (got.cpu().double() - want).norm() / want.norm()
        assert error < (3e-2 if dtype == torch.bfloat16 else 2e-3), error
