"""Recurrences on CUDA against the float64 reference: FLA's kernels, our own, and PyTorch code where there are none.

On GPUs other than Hopper's FLA tunes its kernels on first use, which takes minutes in a process without Triton's cache.
Axes: B batch, T positions, H heads, K key channels, V value channels; selective_scan: E channels, N states.
"""

import random
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import recurrence
from forgetting_transformer.ops.layers import norm, short_convolution
from forgetting_transformer.ops.recurrence import fla
from tests.ops import test_recurrence as on_cpu
from tests.ops.test_recurrence import PORTABLE, REFERENCE, rounded, run

# K and V of the published models.
HEAD_DIMS = {
    "simple_gla": (128, 64),
    "gla": (128, 128),
    "delta_rule": (128, 128),
    "gated_delta_rule": (128, 128),
    "kda": (128, 128),
}

pytestmark = pytest.mark.slow
with_fla = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")


def make_inputs(
    op: str,
    length: int,
    decay: str = "random",
    dtype: torch.dtype = torch.bfloat16,
    head_dims: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Arguments by name: sequences in `dtype`, gates and initial state in float32."""
    decay = "none" if op == "delta_rule" else decay
    dims = (96, 16) if op == "selective_scan" else head_dims or HEAD_DIMS[op]
    inputs = on_cpu.make_inputs(op, length, decay, *dims)
    if "k" in inputs:
        inputs["k"] = F.normalize(inputs["k"], dim=-1)
    if decay == "random" and "log_decay" in inputs:
        inputs["log_decay"] = F.logsigmoid(torch.randn_like(inputs["log_decay"]) + 2)
    return {name: x.cuda() for name, x in rounded(inputs, dtype).items()}


def public(op: str):
    """The public function with arguments by position, as `run` calls it."""

    def function(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        *sequences, state = arguments
        scale = {} if op == "selective_scan" else {"scale": sequences.pop()}
        return on_cpu.walk(op, *sequences, **scale, state=state)

    return function


def expected(op: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return run(REFERENCE[op], {name: x.double() for name, x in inputs.items()})


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
    if "dlog_decay" not in want:
        return {}
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
            want = expected(op, inputs)
            got = run(public(op), inputs)
            assert got["out"].dtype == torch.bfloat16 and got["state"].dtype == torch.float32
            assert_close(got, want, 1.5e-2, **decay_floors(op, decay, want, inputs))


@pytest.mark.parametrize("op", HEAD_DIMS)
def test_random_cases_agree_with_float64(op):
    """What a GPU runs, whoever serves it, against PyTorch in float64, and the same bits a second time."""
    for seed in range(8):
        draw = random.Random(seed)
        head_dims = draw.choice([HEAD_DIMS[op], HEAD_DIMS[op], (64, 64), (96, 192)])
        length = draw.choice([2, 17, 63, 64, 130, 257, 600, 1100])
        decay = draw.choice(["random", "random", "none", "strong"])
        is_kda = op == "kda"
        inputs = make_inputs(op, length, decay, torch.float16 if is_kda and seed % 2 else torch.bfloat16, head_dims)
        if is_kda:
            inputs["beta"] *= draw.choice([1, 2])
        want = run(PORTABLE[op], {name: x.double() for name, x in inputs.items()})
        got = run(public(op), inputs)
        assert_close(got, want, 1.5e-2, **decay_floors(op, decay, want, inputs))
        again = run(public(op), inputs)
        assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.parametrize("op", [*HEAD_DIMS, "selective_scan"])
def test_float32_is_float32_and_pytorch_serves_16_bits_too(op, monkeypatch):
    """Float32 inputs never run in TF32, with FLA or without."""
    for length in (1, 63, 1100):
        inputs = make_inputs(op, length, dtype=torch.float32)
        assert_close(run(public(op), inputs), expected(op, inputs), 2e-5)
    monkeypatch.setattr(fla, "serves", lambda *_: False)
    monkeypatch.setattr(recurrence, "scan_takes_kernel", lambda *_: False)
    inputs = make_inputs(op, 300)
    assert_close(run(public(op), inputs), expected(op, inputs), 1e-2)


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
