"""Linear attention whose heads share queries and keys, on CUDA: the Triton kernels against float64.

Axes: B batch, T positions, H heads, G groups of heads, K key channels, V value channels.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.model.mixers.mamba2 import Mamba2Mixer
from forgetting_transformer.ops import backends, recurrence, selftest
from forgetting_transformer.ops.recurrence import grouped

DECAYS = ("random", "none", "strong", "resets")


def make_log_decay(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, device="cuda")
    uniform = torch.rand(shape, generator=generator, device="cuda")
    if kind == "resets":
        return torch.where(uniform < 0.1, -1e4, F.logsigmoid(normal + 4))
    return {"random": F.logsigmoid(normal + 2), "none": 0 * normal, "strong": -30 * uniform}[kind]


def make_inputs(
    seed: int, sizes: tuple[int, int, int, int, int, int], decay: str = "random", dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    batch, length, heads, groups, keys, values = sizes
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    return {
        "q_BTGK": normal(batch, length, groups, keys).to(dtype),
        "k_BTGK": F.normalize(normal(batch, length, groups, keys), dim=-1).to(dtype),
        "v_BTHV": normal(batch, length, heads, values).to(dtype),
        "log_decay": make_log_decay(decay, (batch, length, heads), generator),
        "step": F.softplus(normal(batch, length, heads)),
        "skip": normal(heads),
        "state": normal(batch, heads, keys, values),
    }


def run(inputs: dict[str, Tensor], cu_seqlens: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
    """Output, final state and gradients, for fixed random gradients of output and final state."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, state = recurrence.recurrence(**leaves, scale=scale, cu_seqlens=cu_seqlens)
    generator = torch.Generator("cuda").manual_seed(1)
    gradients = [torch.randn(x.shape, generator=generator, device="cuda").bfloat16().to(x.dtype) for x in (out, state)]
    torch.autograd.backward((out, state), gradients)
    return {"out": out.detach(), "state": state.detach(), **{f"d {name}": x.grad for name, x in leaves.items()}}


def expect_right(inputs: dict[str, Tensor], cu_seqlens: Tensor | None = None, scale: float = 1.0) -> None:
    """Within the rounding of the inputs' dtype of what PyTorch computes in float64, and the same bits twice."""
    got, again = run(inputs, cu_seqlens, scale), run(inputs, cu_seqlens, scale)
    want = run({name: x.double() for name, x in inputs.items()}, cu_seqlens, scale)
    assert not backends.faults()
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[inputs["q_BTGK"].dtype]
    for name, expected in want.items():
        assert got[name].isfinite().all(), name
        error, size = (got[name].double() - expected).norm().item(), expected.norm().item()
        assert error <= tolerance * (size + 1e-3), f"{name}: {error / max(size, 1e-30):.1e}"
        assert torch.equal(got[name], again[name]), name


def served(inputs: dict[str, Tensor]) -> bool:
    (groups, keys), (heads, values) = inputs["q_BTGK"].shape[2:], inputs["v_BTHV"].shape[2:]
    return grouped.serves(heads, groups, keys, values, inputs["q_BTGK"].dtype, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_cases_agree_with_float64(seed, poisoned):
    chosen = random.Random(seed)
    groups = chosen.choice([1, 1, 2, 3])
    sizes = (
        chosen.choice([1, 2]),
        chosen.choice([2, 17, 63, 128, 130, 200, 300, 513, 1100]),
        groups * chosen.choice([2, 3, 8, 12]),
        groups,
        chosen.choice([16, 32, 64, 128]),
        chosen.choice([16, 32, 64, 128]),
    )
    dtype = chosen.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    inputs = make_inputs(seed, sizes, chosen.choice(DECAYS), dtype)
    assert served(inputs)
    cu_seqlens = None
    if chosen.random() < 0.4:
        tokens = sizes[0] * sizes[1]
        inside = [chosen.randrange(tokens) for _ in range(4)]
        cu_seqlens = torch.tensor(sorted([0, *inside, *range(sizes[1], tokens, sizes[1]), tokens]), device="cuda")
    expect_right(inputs, cu_seqlens, chosen.choice([1.0, 0.3]))


@pytest.mark.parametrize("decay", DECAYS)
def test_the_shape_of_the_760m_model(decay):
    inputs = make_inputs(0, (1, 700, 48, 1, 128, 64), decay)
    assert served(inputs)
    expect_right(inputs)


def test_a_sequence_may_be_cut_anywhere():
    inputs = make_inputs(0, (2, 300, 4, 1, 64, 64))
    whole, parts, state = run(inputs), [], inputs["state"]
    for start, stop in [(0, 130), (130, 131), (131, 300)]:
        part = {name: x[:, start:stop] if name not in ("skip", "state") else x for name, x in inputs.items()}
        out, state = recurrence.recurrence(**part | {"state": state}, scale=1.0)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole["out"], rtol=0.05, atol=0.05)
    torch.testing.assert_close(state, whole["state"], rtol=0.02, atol=0.02)


def test_the_self_test_finds_the_kernels_right():
    use = backends.OpUse("simple_gla", 24, 128, 64, key_heads=1)
    found = selftest.choose_backends([use], torch.bfloat16, torch.device("cuda"), [4096])["simple_gla"]
    assert found.name == backends.TRITON and not backends.faults()


def layer_results(mixer: Mamba2Mixer, hidden_BTE: Tensor) -> list[Tensor]:
    hidden_BTE = hidden_BTE.detach().clone().requires_grad_()
    mixer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        out, states = mixer.mix(hidden_BTE, None, {})
    out.float().square().sum().backward()
    gradients = [hidden_BTE.grad, *(p.grad.clone() for p in mixer.parameters())]
    return [out.detach(), *(x.detach() for x in states.values()), *gradients]


def test_a_layer_gives_what_it_gives_in_pytorch_and_the_same_bits_twice():
    torch.manual_seed(0)
    mixer = Mamba2Mixer(128, 8, 32, 64, n_groups=2).cuda()
    mixer.init_own_weights()
    hidden_BTE = torch.randn(2, 300, 128, device="cuda")
    got, again = layer_results(mixer, hidden_BTE), layer_results(mixer, hidden_BTE)
    with backends.without("simple_gla", backends.TRITON, backends.FLA):
        want = layer_results(mixer, hidden_BTE)
    for a, b, c in zip(got, again, want, strict=True):
        assert torch.equal(a, b)
        assert (a.float() - c.float()).norm() <= 3e-2 * c.float().norm()


def test_a_layer_keeps_the_output_of_its_input_projection_and_y():
    """Beside the layer's input and output and what is as small as a step size."""
    tokens, width = 4096, 512
    mixer = Mamba2Mixer(width, 16, 64, 128).cuda()
    hidden_BTE = torch.randn(1, tokens, width, device="cuda", requires_grad=True)
    layer_results(mixer, hidden_BTE)
    mixer.zero_grad()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        out, _ = mixer.mix(hidden_BTE, None, {})
    kept = torch.cuda.memory_allocated() - before
    numbers = 2 * width + sum(mixer.projected_sizes) + mixer.inner_size
    weights = sum(p.numel() for p in mixer.parameters())
    assert kept <= 2 * (tokens * numbers + weights) + 4 * tokens * 8 * mixer.num_heads
    assert out.isfinite().all()
