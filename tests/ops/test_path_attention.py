"""PaTH attention in chunks against its definition, one step per token, in float64.

`tests/model/test_equations.py` has the definition once more, pair by pair.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forgetting_transformer.ops import backends, path_attention_fla
from forgetting_transformer.ops.forgetting_attention import forgetting_attention_reference
from forgetting_transformer.ops.path_attention import (
    path_attention,
    path_attention_flops_per_token,
    path_attention_reference,
)
from tests.model.small_models import small
from tests.ops.kernels import assert_close, poisoned_memory, results


def make_inputs(length: int, gates: str = "random", dim: int = 6, value_dim: int = 5) -> list[Tensor]:
    """q, k, v, w, β and log f in float64: 2 sequences, 3 heads."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator, dtype=torch.float64)

    log_fgate = {"random": F.logsigmoid(normal()), "slow": F.logsigmoid(normal() + 5), "none": 0 * normal()}
    log_fgate["resets"] = log_fgate["slow"].masked_fill(normal() > 1, -torch.inf)
    return [
        normal(dim),
        normal(dim),
        normal(value_dim),
        F.normalize(normal(dim), dim=-1),
        2 * normal().sigmoid(),
        log_fgate[gates],
    ]


def run(function, inputs: list[Tensor]) -> dict[str, Tensor]:
    return results(lambda **x: function(*x.values()), dict(zip("qkvwbf", inputs, strict=True)))


def chunked(*inputs: Tensor) -> Tensor:
    return path_attention(*inputs, scale=0.7)[0]


def reference(*inputs: Tensor) -> Tensor:
    return path_attention_reference(*inputs, 0.7)


@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize("gates", ["random", "none", "resets"])
def test_chunks_give_the_outputs_and_gradients_of_the_definition(length, gates):
    inputs = make_inputs(length, gates)
    assert_close(run(chunked, inputs), run(reference, inputs), 1e-10)
    single = [x.float() for x in inputs]
    assert_close(run(chunked, single), run(reference, [x.double() for x in single]), 2e-5)


def test_without_householder_matrices_it_is_forgetting_attention():
    q, k, v, w, beta, log_fgate = make_inputs(130)
    heads_first = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    want, _ = forgetting_attention_reference(*heads_first, None, 0.7)
    torch.testing.assert_close(chunked(q, k, v, w, 0 * beta, log_fgate), want.transpose(1, 2))


def test_autocast_does_not_round_inside_and_outputs_have_the_dtype_of_values():
    inputs = [x.float() for x in make_inputs(70)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunked(*inputs), chunked(*inputs).float())
        inside = chunked(*inputs)
    assert torch.equal(inside, chunked(*inputs))
    rounded = [x.bfloat16() if x.ndim == 4 else x for x in inputs]
    assert chunked(*rounded).dtype == torch.bfloat16


def test_flops_are_those_pytorch_counts(length=256):
    inputs = make_inputs(length, dim=5)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        chunked(*inputs)
    # PyTorch does not count the triangular system of M.
    counted = counter.get_total_flops() / (2 * length) + 3 * 64**2
    assert path_attention_flops_per_token(3, 5, length) == pytest.approx(counted, rel=1e-12)


@pytest.fixture
def pretend_fla(monkeypatch):
    """FLA's function, which multiplies sums of log gates by the scale. The list gets its calls."""
    calls = []

    def parallel_path_attn(q, k, v, w, beta, g, scale):
        calls.append(q.shape)
        assert w.dtype == beta.dtype == g.dtype == torch.float32 and g.isfinite().all()
        out = path_attention_reference(*(x.double() for x in (q, k, v, w, beta, g * scale)), scale)
        return out.to(v.dtype), None

    monkeypatch.setattr(backends, "_faults", {})
    monkeypatch.setitem(path_attention_fla._loaded, "path_attention", parallel_path_attn)
    monkeypatch.setattr(path_attention_fla, "supports", lambda q, v: q.dtype == torch.bfloat16)
    return calls


def test_kernels_of_fla_get_what_they_expect(pretend_fla):
    inputs = make_inputs(70, "slow")
    rounded = [*(x.bfloat16() for x in inputs[:3]), *(x.float() for x in inputs[3:])]
    got = run(lambda *x: path_attention(*x, has_resets=False)[0], rounded)
    want = run(lambda *x: path_attention_reference(*x, 6**-0.5), [x.double() for x in rounded])
    assert pretend_fla == [(2, 70, 3, 6)]
    assert_close(got, want, 1e-2, floor=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_fla_agree_with_float64():
    """Sequences shorter and longer than the 512 tokens that kernels take at a time."""
    pytest.importorskip("fla.ops")
    if not path_attention_fla.serves(64, 64, torch.bfloat16, 0):
        pytest.skip("FLA does not serve this GPU")
    for length in (1, 63, 200, 512, 777, 1160, 2048):
        inputs = [x.cuda() for x in make_inputs(length, "slow" if length % 2 else "random", 64, 64)]
        rounded = [*(x.bfloat16() for x in inputs[:3]), *(x.float() for x in inputs[3:])]
        with poisoned_memory():
            got = run(lambda *x: path_attention(*x, has_resets=False)[0], rounded)
        want = run(lambda *x: path_attention_reference(*x, 64**-0.5), [x.double() for x in rounded])
        assert_close(got, want, 2e-2, floor=1e-3)
    assert backends.is_usable("path_attention", backends.FLA)


def test_resets_and_pasts_run_in_pytorch(pretend_fla):
    inputs = [x.bfloat16() for x in make_inputs(9)]
    assert path_attention(*inputs)[0].isfinite().all()
    _, past = path_attention(*inputs, has_resets=False, returns_past=True)
    path_attention(*inputs, has_resets=False, past=past)
    assert pretend_fla == []


def test_models_without_padding_promise_that_there_are_no_resets(pretend_fla):
    model = small("path_fox").bfloat16()
    ids = torch.randint(1, 61, (2, 9))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        assert len(pretend_fla) == model.config.num_hidden_layers
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert len(pretend_fla) == model.config.num_hidden_layers
