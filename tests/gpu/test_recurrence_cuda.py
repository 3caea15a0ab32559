"""Recurrences on CUDA against the float64 reference: FLA's kernels, our own, and PyTorch code where there are none.

On GPUs other than Hopper's FLA tunes its kernels on first use, which takes minutes in a process without Triton's cache.
Axes: B batch, T positions, H heads, K key channels, V value channels; selective_scan: E channels, N states.
"""

import random
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends, recurrence
from forgetting_transformer.ops.layers import norm, short_convolution
from forgetting_transformer.ops.recurrence import Gates, chunked, fla, reference

# K and V of the published models.
HEAD_DIMS = {
    "simple_gla": (128, 64),
    "gla": (128, 128),
    "delta_rule": (128, 128),
    "gated_delta_rule": (128, 128),
    "kda": (128, 128),
}
PUBLISHED = dict(HEAD_DIMS)
BY_CHANNEL = ("gla", "kda")  # a decay for every key channel
HEADS = 3

pytestmark = pytest.mark.slow
with_fla = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")


def make_inputs(
    op: str, length: int, decay: str = "random", dtype: torch.dtype = torch.bfloat16, heads: int = HEADS
) -> dict[str, Tensor]:
    """Arguments by name: sequences in `dtype`, gates and initial state in float32."""
    generator = torch.Generator("cuda").manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    if op == "selective_scan":
        x, B, C = normal(2, length, 96).to(dtype), normal(2, length, 16).to(dtype), normal(2, length, 16).to(dtype)
        dt = F.softplus(normal(2, length, 96) - 2)
        A = -torch.arange(1, 17, device="cuda").float().expand(96, 16).clone()
        return {"x": x, "dt": dt, "A": A, "B": B, "C": C, "initial_state": normal(2, 96, 16)}
    key_dim, value_dim = HEAD_DIMS[op]
    q, k = normal(2, length, heads, key_dim), normal(2, length, heads, key_dim)
    inputs = {
        "q": q.to(dtype),
        "k": F.normalize(k, dim=-1).to(dtype),
        "v": normal(2, length, heads, value_dim).to(dtype),
    }
    if "delta_rule" in op or op == "kda":
        inputs["beta"] = normal(2, length, heads).sigmoid()
    if op != "delta_rule":
        logit = normal(2, length, heads, *((key_dim,) if op in BY_CHANNEL else ()))
        inputs["log_decay"] = {"random": F.logsigmoid(logit + 2), "none": 0 * logit, "strong": -30 * logit.sigmoid()}[
            decay
        ]
    return {**inputs, "initial_state": normal(2, heads, key_dim, value_dim)}


def run(function, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, final state and gradients, for fixed random gradients of output and final state."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, state = function(leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    # Rounded to bfloat16, so that they are the same numbers in every dtype.
    grads = [torch.randn(x.shape, generator=generator, device="cuda").bfloat16().to(x.dtype) for x in (out, state)]
    torch.autograd.backward((out, state), grads)
    return {"out": out.detach(), "state": state.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}


def public(op: str):
    """The public function as a function of a dictionary."""

    def function(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        *arguments, state = inputs.values()
        if op == "selective_scan":
            return recurrence.selective_scan(*arguments, initial_state_BIK=state)
        gates = {name: inputs[name] for name in ("beta", "log_decay") if name in inputs}
        return recurrence.recurrence(*arguments[:3], **gates, state=state, scale=0.1)

    return function


def by_name(module: ModuleType, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The op that has these arguments, as a backend computes it."""
    if "x" in inputs:
        return module.selective_scan(*inputs.values())
    q, k, v, *_ = inputs.values()
    gates = Gates(inputs.get("beta"), inputs.get("log_decay"))
    return module.linear_recurrence(q, k, v, gates, 0.1, inputs["initial_state"])


def expected(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {name: x.double() for name, x in inputs.items()}
    return run(lambda x: by_name(reference, x), wide)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, **floors: float) -> None:
    """||got - want|| ≤ tolerance · ||want||, or the floor of that name where the right number is nearly 0."""
    for name in want:
        assert got[name].isfinite().all(), name
        error, size = (got[name].double() - want[name]).norm().item(), want[name].norm().item()
        assert error <= max(tolerance * (size + 1e-6), floors.get(name, 0.0)), (
            f"{name}: error {error:.1e}, relative {error / max(size, 1e-30):.1e}"
        )


def rounding_of_gate_gradients(want: dict[str, Tensor], inputs: dict[str, Tensor]) -> float:
    """FLA takes a gate's gradient as a running sum of `q·dq - k·dk`, whose terms are 16-bit products that nearly
    cancel if decays are strong. Each is rounded by up to 2⁻⁸, and so is their sum, relative to the terms.
    """
    terms = inputs["q"].double() * want["dq"]
    return 0.05 * (terms if terms.shape == want["dlog_decay"].shape else terms.sum(-1)).norm().item()


def decay_floors(op: str, decay: str, want: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, float]:
    """Error that the gradient of a log decay may have beside 1.5e-2 of its size.

    For gated_delta_rule, FLA's kernel multiplies a state with its gradient and adds the thousands of products of a tile
    in the type of the inputs (`tl.sum` keeps it). Without decay, where the products nearly cancel, that costs 2.7e-2 in
    bfloat16 and 2e-3 in float16; with a sum in float32 it is 2e-3 in bfloat16 too. simple_gla's states are float32.
    """
    rounding = rounding_of_gate_gradients(want, inputs) if decay == "strong" else 0.0
    sums = 4e-2 * want["dlog_decay"].norm().item() if op == "gated_delta_rule" else 0.0
    return {"dlog_decay": max(rounding, sums)}


@with_fla
@pytest.mark.parametrize("op", HEAD_DIMS)
def test_fla_and_its_gradients_agree_with_float64(op):
    """At the published sizes; nothing is tuned on Hopper GPUs, whose configurations are chosen."""
    from triton.runtime.autotuner import Autotuner

    if torch.cuda.get_device_capability() == (9, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Autotuner, "_bench", lambda *_, **__: pytest.fail("a kernel was tuned"))
            run(public(op), make_inputs(op, 200))
    for decay in ("none",) if op == "delta_rule" else ("random", "none", "strong"):
        for length in (63, 64, 300):
            inputs = make_inputs(op, length, decay)
            assert recurrence._select_backend(op, inputs["q"], inputs["v"]) is fla
            want = expected(inputs)
            floors = {"dlog_decay": rounding_of_gate_gradients(want, inputs)} if decay == "strong" else {}
            got = run(public(op), inputs)
            assert got["out"].dtype == torch.bfloat16 and got["state"].dtype == torch.float32
            assert_close(got, want, 1.5e-2, **floors)


@pytest.mark.parametrize("op", HEAD_DIMS)
def test_random_cases_agree_with_float64(op, monkeypatch):
    """What a GPU runs, whoever serves it, against PyTorch in float64, and the same bits a second time."""
    for seed in range(8):
        draw = random.Random(seed)
        monkeypatch.setitem(HEAD_DIMS, op, draw.choice([PUBLISHED[op], PUBLISHED[op], (64, 64), (96, 192)]))
        length, heads = draw.choice([2, 17, 63, 64, 130, 257, 600, 1100]), draw.randint(1, 5)
        decay = "none" if op == "delta_rule" else draw.choice(["random", "random", "none", "strong"])
        is_kda = op == "kda"
        inputs = make_inputs(op, length, decay, torch.float16 if is_kda and seed % 2 else torch.bfloat16, heads)
        if is_kda:
            inputs["beta"] *= draw.choice([1, 2])
        want = run(lambda x: by_name(chunked, x), {name: x.double() for name, x in inputs.items()})
        got = run(public(op), inputs)
        assert_close(got, want, 1.5e-2, **decay_floors(op, decay, want, inputs))
        again = run(public(op), inputs)
        assert all(torch.equal(got[name], again[name]) for name in got)


@with_fla
@pytest.mark.parametrize("op", HEAD_DIMS)
def test_other_head_dimensions_are_right_at_length(op, monkeypatch):
    """Configurations chosen at the published sizes fit smaller and larger heads, and long sequences."""
    for *dims, length in ((16, 32, 130), (64, 64, 5000), (96, 192, 1000), (48, 96, 300), (256, 256, 300)):
        monkeypatch.setitem(HEAD_DIMS, op, tuple(dims))
        inputs = make_inputs(op, length)
        want = run(lambda x: by_name(chunked, x), {name: x.float() for name, x in inputs.items()})
        assert_close(run(public(op), inputs), {name: x.double() for name, x in want.items()}, 1.5e-2)


@with_fla
def test_fla_goes_on_from_a_state_and_takes_expanded_views():
    """Mamba-2 has one query and key for all heads."""
    for op in HEAD_DIMS:
        inputs = make_inputs(op, 200)
        want_out, want_state = public(op)(inputs)
        state, outs = inputs["initial_state"], []
        for start, stop in [(0, 130), (130, 131), (131, 200)]:
            part = {name: x[:, start:stop] for name, x in inputs.items()} | {"initial_state": state}
            out, state = public(op)(part)
            outs.append(out)
        got = {"out": torch.cat(outs, dim=1), "state": state}
        assert_close(got, {"out": want_out.double(), "state": want_state.double()}, 1.5e-2)
        expanded = inputs | {name: inputs[name][:, :, :1].expand(-1, -1, HEADS, -1) for name in "qk"}
        copied = {name: x.contiguous() for name, x in expanded.items()}
        for x, y in zip(public(op)(expanded), public(op)(copied), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("op", [*HEAD_DIMS, "selective_scan"])
def test_float32_is_float32_and_pytorch_serves_16_bits_too(op, monkeypatch):
    """Float32 inputs never run in TF32, with FLA or without."""
    for length in (1, 63, 1100):
        inputs = make_inputs(op, length, dtype=torch.float32)
        assert_close(run(public(op), inputs), expected(inputs), 2e-5)
    monkeypatch.setattr(fla, "serves", lambda *_: False)
    monkeypatch.setattr(recurrence, "scan_takes_kernel", lambda *_: False)
    inputs = make_inputs(op, 300)
    assert_close(run(public(op), inputs), expected(inputs), 1e-2)


def test_without_fla_it_trains_and_warns_once(monkeypatch):
    fla._is_installed.cache_clear()
    monkeypatch.setattr(backends, "installed_version", lambda package: None)
    monkeypatch.setitem(sys.modules, "fla", None)
    for module, _ in fla._KERNELS.values():
        monkeypatch.setitem(sys.modules, module, None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for op in HEAD_DIMS:
                inputs = make_inputs(op, 130)
                assert recurrence._select_backend(op, inputs["q"], inputs["v"]) is chunked
                assert_close(run(public(op), inputs), expected(inputs), 1e-2)
        messages = [str(w.message) for w in caught if "flash-linear-attention" in str(w.message)]
        assert len(messages) == 1 and 'pip install -e ".[cuda]"' in messages[0]
    finally:
        fla._is_installed.cache_clear()


def test_kernels_are_taken():
    """Convolutions, norms and scans, whose numbers `tests/ops` compares on a GPU too."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert short_convolution.kernel_serves(dtype, 4, 128, 3, 0)
        assert norm.gated_norm_takes_kernel(dtype, 1536, 0)
        assert recurrence.scan_takes_kernel(16, dtype, torch.device("cuda", 0))


def test_a_gated_norm_of_more_rows_than_a_grid_has_in_its_second_axis(poisoned):
    x, gate = torch.randn(2, 1, 70000, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda")
    y = norm.gated_rms_norm(x, gate, weight, 1e-6)
    want = norm.gated_rms_norm(x[:, -10:].double(), gate[:, -10:].double(), weight.double(), 1e-6)
    assert_close({"y": y[:, -10:]}, {"y": want}, 6e-3)
