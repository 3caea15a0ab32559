"""Recurrences: the forms for any device against the step-by-step reference.

Both agree with the equations of the papers: `tests/model/test_equations.py` has them.
Axes: B batch, T positions, H heads, K key channels, V value channels; selective_scan: E channels, N states.
"""

import math
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forgetting_transformer.ops import recurrence
from forgetting_transformer.ops.recurrence import Gates, chunked, fla, fla_on_hopper, reference, scan
from tests.ops.kernels import assert_close, results, saved_bytes

OPS = ["simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "selective_scan"]
GATES = {
    "simple_gla": ["log_decay"],
    "gla": ["log_decay"],
    "delta_rule": ["beta"],
    "gated_delta_rule": ["beta", "log_decay"],
    "kda": ["beta", "log_decay"],
}
DELTA_RULES = ("delta_rule", "gated_delta_rule", "kda")
BY_CHANNEL = ("gla", "kda")  # a decay for every key channel


def by_position(module: types.ModuleType, op: str):
    """A backend's form of the op as a function of queries, keys, values, gates, scale and state; the scan as it is."""

    def function(q, k, v, *others):
        *gates, scale, state = others
        return module.linear_recurrence(q, k, v, Gates(**dict(zip(GATES[op], gates, strict=True))), scale, state)

    return module.selective_scan if op == "selective_scan" else function


PORTABLE = {op: by_position(scan if op == "selective_scan" else chunked, op) for op in OPS}
REFERENCE = {op: by_position(reference, op) for op in OPS}
# "resets": a tenth of the tokens erase the state, the others keep most of it.
DECAYS = ["random", "none", "strong", "resets"]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def make_log_decay(kind: str, *shape: int) -> Tensor:
    logit = torch.randn(shape, dtype=torch.float64)
    if kind == "none":
        return torch.zeros_like(logit)
    if kind == "strong":
        return -30 * torch.rand_like(logit)
    log_decay = F.logsigmoid(logit + {"random": 0, "resets": 4}[kind])
    if kind == "resets":
        log_decay[torch.rand(shape) < 0.1] = -1e4
    return log_decay


def make_inputs(op: str, length: int, decay: str = "random", key_dim: int = 6, value_dim: int = 9) -> dict[str, Tensor]:
    """Float64 arguments by name, for 2 sequences (of 3 heads), with an initial state."""
    torch.manual_seed(length)
    if op == "selective_scan":
        # The decay of state n of channel e is exp(dt_te A_en).
        dt = -make_log_decay(decay, 2, length, key_dim)
        A = -torch.rand(key_dim, value_dim, dtype=torch.float64) - 0.1
        B, C = normal(2, length, value_dim), normal(2, length, value_dim)
        # Large steps make large inputs too: what is left of x is what the state can hold.
        x = normal(2, length, key_dim) / (1 + dt)
        return {"x": x, "dt": dt, "A": A, "B": B, "C": C, "initial_state": normal(2, key_dim, value_dim)}
    inputs = {"q": normal(2, length, 3, key_dim), "k": normal(2, length, 3, key_dim)}
    inputs["v"] = normal(2, length, 3, value_dim)
    if op in DELTA_RULES:
        inputs["k"] = F.normalize(inputs["k"], dim=-1)
        inputs["beta"] = torch.rand(2, length, 3, dtype=torch.float64)
    if op != "delta_rule":
        log_decay = make_log_decay(decay, 2, length, 3, *((key_dim,) if op in BY_CHANNEL else ()))
        inputs["log_decay"] = log_decay
    return {**inputs, "initial_state": normal(2, 3, key_dim, value_dim)}


def walk(op: str, *arguments: Tensor, state: Tensor | None = None, scale: float = 0.7) -> tuple[Tensor, Tensor]:
    """The public function that runs this op, with sequences and gates in the order of `make_inputs`."""
    if op == "selective_scan":
        return recurrence.selective_scan(*arguments, initial_state_BIK=state)
    q, k, v, *gates = arguments
    named = dict(zip(GATES[op], gates, strict=True))
    return recurrence.recurrence(q, k, v, **named, state=state, scale=scale)


def call(function, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Backends take their arguments by position, with the scale before the initial state."""
    *arguments, initial_state = inputs.values()
    scale = () if "x" in inputs else (0.7,)
    return function(*arguments, *scale, initial_state)


def run(function, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, final state and the gradients of both, for fixed random gradients of output and final state."""
    got = results(lambda **leaves: call(function, leaves), inputs)
    return {{"out 0": "out", "out 1": "state"}.get(name, name.replace(" ", "")): x for name, x in got.items()}


def rounded(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Sequences in `dtype`; gates and states in float32 as layers pass them."""
    wide = torch.promote_types(dtype, torch.float32)
    names = ("q", "k", "v", "x", "B", "C")
    return {name: x.to(dtype if name in names else wide) for name, x in inputs.items()}


@pytest.mark.parametrize("op", OPS)
def test_portable_equals_reference(op, monkeypatch):
    for decay in ["none"] if op == "delta_rule" else DECAYS:
        for length in (1, 65, 200):
            inputs = make_inputs(op, length, decay)
            assert_close(run(PORTABLE[op], inputs), run(REFERENCE[op], inputs), 1e-11)
            single = rounded(inputs, torch.float32)
            want = run(REFERENCE[op], {name: x.double() for name, x in single.items()})
            assert_close(run(PORTABLE[op], single), want, 1e-5)
    monkeypatch.setattr(chunked, "_SEGMENT_LENGTH", 128)  # the last inputs in several segments
    monkeypatch.setattr(scan, "_CPU_STATES", 1)
    want = run(REFERENCE[op], inputs)
    assert_close(run(PORTABLE[op], inputs), want, 1e-11)
    with torch.no_grad():
        out, state = call(PORTABLE[op], inputs)
    assert_close({"out": out, "state": state}, {"out": want["out"], "state": want["state"]}, 1e-11)


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_costs_no_more_than_rounding_inputs_and_outputs(op):
    inputs = rounded(make_inputs(op, 130, key_dim=32, value_dim=16), torch.bfloat16)
    want = run(REFERENCE[op], {name: x.double() for name, x in inputs.items()})
    got = run(PORTABLE[op], inputs)
    first = next(iter(inputs))
    assert got["out"].dtype == got[f"d{first}"].dtype == torch.bfloat16
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.float32
    assert_close(got, want, 1e-2)
    gates = {f"d{name}" for name in ("log_decay", "beta", "dt", "A", "initial_state")} & want.keys()
    # The output's gradient is the same number in both, so what is float32 stays float32.
    assert_close(
        {name: got[name] for name in gates | {"state"}}, {name: want[name] for name in gates | {"state"}}, 1e-5
    )


@pytest.mark.parametrize("op", DELTA_RULES)
def test_the_delta_rules_at_the_ends_of_beta_and_with_one_key_repeated(op):
    for beta in (0.0, 1.0, 2.0):
        inputs = make_inputs(op, 130)
        inputs["beta"] = torch.full_like(inputs["beta"], beta)
        assert_close(run(PORTABLE[op], inputs), run(REFERENCE[op], inputs), 1e-9)
    # The worst case of the triangular system: every key is in the way of every other.
    inputs = make_inputs(op, 130, "none")
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs = rounded(inputs, torch.float32)
    want = run(REFERENCE[op], {name: x.double() for name, x in inputs.items()})
    assert_close(run(PORTABLE[op], inputs), want, 1e-5)


@pytest.mark.parametrize("op", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_nothing_passes_a_decay_of_minus_infinity(op):
    inputs = make_inputs(op, 130)
    inputs["log_decay"][:, 70] = -torch.inf

    def late_part(*arguments):
        out, state = PORTABLE[op](*arguments)
        return out[:, 70:], state

    got = run(late_part, inputs)
    assert all(x.isfinite().all() for x in got.values())
    for name in inputs.keys() - {"initial_state"}:
        assert (got[f"d{name}"][:, :70] == 0).all() and (got[f"d{name}"][:, 71:] != 0).any(), name
    assert (got["dlog_decay"][:, 70] == 0).all() and (got["dinitial_state"] == 0).all()
    tail = {name: x if name == "initial_state" else x[:, 70:] for name, x in inputs.items()}
    out, state = call(PORTABLE[op], tail)
    torch.testing.assert_close(got["out"], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["state"], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_the_first_state_is_zero_and_autocast_does_not_round_inside(op):
    inputs = rounded(make_inputs(op, 70), torch.float32)
    *given, initial = inputs.values()
    out, state = walk(op, *given)
    want, want_state = call(REFERENCE[op], inputs | {"initial_state": torch.zeros_like(initial)})
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(state, want_state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, inside_state = walk(op, *given)
    assert torch.equal(inside, out) and torch.equal(inside_state, state)


@pytest.mark.parametrize("op", OPS)
def test_memory_kept_for_the_backward_pass(op, monkeypatch):
    """With several segments: the inputs, the outputs and a state per segment; nothing of K·V or C per token."""
    monkeypatch.setattr(chunked, "_SEGMENT_LENGTH", 256)
    monkeypatch.setattr(scan, "_CPU_STATES", 2 * 256 * 32 * 16)
    inputs = rounded(make_inputs(op, 1024, key_dim=32, value_dim=16), torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    outputs, states = inputs["x" if op == "selective_scan" else "v"].numel(), 4 * inputs["initial_state"].numel()
    needed = 4 * (sum(x.numel() for x in leaves.values()) + outputs + states)
    assert saved_bytes(lambda: call(PORTABLE[op], leaves)) <= 1.5 * needed


@pytest.mark.parametrize("op", OPS[:-1])
def test_flops_per_token_are_those_of_the_chunked_products(op, key_dim=32, value_dim=96):
    inputs = make_inputs(op, 256, key_dim=key_dim, value_dim=value_dim)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call(PORTABLE[op], inputs)
    counted = counter.get_total_flops() / (2 * 256)
    # PyTorch's counter knows matrix products only. Not among them:
    if op == "gla":
        counted += 3 * 2 * (key_dim + value_dim)  # a token with itself
    if op == "kda":
        counted += 3 * 2 * key_dim  # a token's query with its own key
    if op in DELTA_RULES:
        counted += 3 * chunked.CHUNK_LENGTH * (key_dim + value_dim)  # the triangular system
    formula = getattr(recurrence, f"{op.removeprefix('gated_')}_flops_per_token")
    assert formula(3, key_dim, value_dim) == pytest.approx(counted, rel=1e-12)


GOOD = {
    "q_BTGK": (2, 5, 3, 8),
    "k_BTGK": (2, 5, 3, 8),
    "v_BTHV": (2, 5, 3, 4),
    "beta": (2, 5, 3),
    "log_decay": (2, 5, 3),
}
GOOD_SCAN = {"x_BTI": (2, 5, 6), "dt_BTI": (2, 5, 6), "A_IK": (6, 4), "B_BTK": (2, 5, 4), "C_BTK": (2, 5, 4)}
SHARED = {"q_BTGK": torch.zeros(2, 5, 2, 8), "k_BTGK": torch.zeros(2, 5, 2, 8), "beta": None}
BOUNDS = "must rise from 0 to the 10 tokens"


@pytest.mark.parametrize(
    ("good", "change", "message"),
    [
        (GOOD, {"k_BTGK": torch.zeros(2, 6, 3, 8)}, r"k has shape .*\(B, T, H, K\) = \(2, 5, 3, 8\)"),
        (GOOD, {"log_decay": torch.zeros(2, 5, 3, 7)}, r"log_decay has shape .*\(B, T, H, K\) = \(2, 5, 3, 8\)"),
        (GOOD, {"log_decay": 0.5}, "log_decay is a float"),
        (GOOD, {"log_decay": None, "beta": None}, "log_decay and beta are both None; give one of them"),
        (GOOD, {"state": torch.zeros(2, 3, 4, 8)}, r"state has shape .*\(B, H, K, V\) = \(2, 3, 8, 4\)"),
        (GOOD, {"scale": math.nan}, "scale is nan; it must be a positive finite number"),
        (GOOD, SHARED, "q has 2 heads and v 3; the heads of v must be a multiple"),
        (GOOD, {"beta": None, "skip": torch.zeros(5)}, "skip has shape"),
        (GOOD, {"beta": None, "cu_seqlens": torch.tensor([0, 7, 5, 10])}, BOUNDS),
        (GOOD_SCAN, {"dt_BTI": torch.zeros(2, 5, 1)}, r"dt has shape .*\(B, T, I\) = \(2, 5, 6\)"),
        (GOOD_SCAN, {"C_BTK": torch.zeros(2, 5, 3)}, r"C has shape .*\(B, T, K\) = \(2, 5, 4\)"),
        (GOOD_SCAN, {"cu_seqlens": torch.tensor([0, 5, 9])}, BOUNDS),
        (GOOD_SCAN, {"cu_seqlens": torch.tensor([0.0, 10.0])}, "cu_seqlens has dtype torch.float32; it must be int32"),
        (GOOD_SCAN, {"cu_seqlens": torch.tensor([[0, 10]])}, r"cu_seqlens has shape \(1, 2\)"),
    ],
)
def test_refused_inputs_are_named(good, change, message):
    function = recurrence.recurrence if good is GOOD else recurrence.selective_scan
    with pytest.raises((TypeError, ValueError), match=message):
        function(**{name: torch.zeros(shape) for name, shape in good.items()} | change)


def test_kernels_of_fla_get_the_listed_configurations(monkeypatch):
    triton = pytest.importorskip("triton")

    @triton.heuristics({"USE_GATE": lambda _: True})
    @triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=[])
    @triton.jit
    def chunk_bwd_kernel_dv(): ...

    @triton.heuristics({"USE_GATE": lambda _: True})
    @triton.jit
    def parallel_path_fwd_kernel(): ...

    module = types.ModuleType("fla.ops.some")
    module.tuned, module.fixed = chunk_bwd_kernel_dv, parallel_path_fwd_kernel
    monkeypatch.setitem(sys.modules, "fla.ops.some", module)
    fla_on_hopper.choose_configurations.__wrapped__()
    assert [(c.num_warps, c.num_stages) for c in chunk_bwd_kernel_dv.fn.configs] == [(4, 3)]
    values = {name: value({}) for name, value in parallel_path_fwd_kernel.values.items()}
    assert values == {"USE_GATE": True, "num_warps": 8, "num_stages": 2}


# Modules, functions and arguments of flash-linear-attention 0.6.
FLA_KERNELS = {
    "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla", ["q", "k", "v", "g"]),
    "gla": ("fla.ops.gla", "chunk_gla", ["q", "k", "v", "g"]),
    "delta_rule": ("fla.ops.delta_rule", "chunk_delta_rule", ["q", "k", "v", "beta"]),
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", ["q", "k", "v", "beta", "g"]),
    "kda": ("fla.ops.kda", "chunk_kda", ["q", "k", "v", "beta", "g"]),
}


@pytest.fixture
def stand_in_fla(monkeypatch) -> Iterator[list[dict]]:
    """On a Hopper GPU modules named as in FLA, whose kernels are the reference; what they were called with."""
    monkeypatch.setattr(fla, "_loaded", {})
    monkeypatch.setattr(fla_on_hopper, "is_hopper", lambda device_index: True)
    monkeypatch.setattr(fla_on_hopper, "serves_gated", lambda *_: True)
    monkeypatch.setattr(fla_on_hopper, "choose_configurations", lambda: None)
    fla._is_installed.cache_clear()
    calls = []
    for op, (module_name, kernel_name, order) in FLA_KERNELS.items():

        def kernel(op=op, order=order, **arguments):
            calls.append(dict(arguments))
            assert arguments.pop("output_final_state") is True
            scale, state = arguments.pop("scale"), arguments.pop("initial_state")
            assert sorted(arguments) == sorted(order)
            return REFERENCE[op](*(arguments[name] for name in order), scale, state)

        module = types.ModuleType(module_name)
        setattr(module, kernel_name, kernel)
        monkeypatch.setitem(sys.modules, module_name, module)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    yield calls
    fla._is_installed.cache_clear()


@pytest.mark.parametrize(
    ("op", "key_dim", "value_dim", "calls"),
    [
        *((op, 128, 64, [(128, 64)]) for op in FLA_KERNELS),
        ("delta_rule", 96, 192, [(128, 192)]),
        ("gated_delta_rule", 48, 96, [(64, 64), (64, 64)]),
        ("kda", 96, 192, [(128, 128), (128, 64)]),
    ],
)
def test_fla_gets_every_argument_under_its_name(op, key_dim, value_dim, calls, stand_in_fla):
    """Heads of the delta rules are padded and split into those that were right."""
    assert fla.serves(op, key_dim, value_dim, torch.bfloat16, 0)
    inputs = rounded(make_inputs(op, 9, key_dim=key_dim, value_dim=value_dim), torch.bfloat16)
    # The gradients that each call has for q and k are rounded to bfloat16 before they are added.
    tolerance = 1e-6 if len(calls) == 1 else 5e-3
    assert_close(run(by_position(fla, op), inputs), run(REFERENCE[op], inputs), tolerance)
    assert [(given["k"].shape[-1], given["v"].shape[-1]) for given in stand_in_fla] == calls
    for given in stand_in_fla:
        assert type(given["scale"]) is float
        assert all(given[gate].dtype == torch.float32 for gate in ("g", "beta") if gate in given)


@pytest.mark.slow
def test_the_scan_is_an_operator_that_torch_compile_can_take(monkeypatch):
    monkeypatch.setattr(scan, "_CPU_STATES", 2 * 6 * 9 * 16)  # segments of 16 positions
    inputs = {name: value.float() for name, value in make_inputs("selective_scan", 48).items()}
    time_first = [name for name in inputs if name not in ("A", "initial_state")]
    inputs |= {name: inputs[name].transpose(0, 1).contiguous() for name in time_first}
    operator = torch.ops.forgetting_transformer.selective_scan.default
    assert len(operator(*inputs.values())[2]) == 3
    torch.library.opcheck(operator, [value.requires_grad_() for value in inputs.values()])


@pytest.mark.slow
def test_nothing_is_imported_from_fla_or_triton_on_the_cpu():
    code = """
import sys, torch
from forgetting_transformer.ops import recurrence
q = torch.zeros(1, 70, 1, 16, dtype=torch.bfloat16)
recurrence.recurrence(q, q, q, log_decay=torch.zeros(1, 70, 1))
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"fla", "triton"}, loaded & {"fla", "triton"}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize(("op", "groups"), [("simple_gla", 3), ("simple_gla", 1), ("gla", 3)])
@pytest.mark.parametrize("decay", ["none", "resets"])
def test_the_last_state_needs_no_walk(op, groups, decay, length=600):
    """What tokens add to the state and leave of it, and their gradients, as a walk from another state has them."""
    inputs = make_inputs(op, length, decay)
    names = ["k", "v", "log_decay"] + ["step"] * (op == "simple_gla")
    given = {**inputs, "k": inputs["k"][:, :, :groups], "step": torch.rand(2, length, 3, dtype=torch.float64)}

    def last(function) -> list[Tensor]:
        leaves = [given[name].clone().requires_grad_() for name in names]
        state = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        return [state, *torch.autograd.grad((state * torch.randn(state.shape, generator=generator)).sum(), leaves)]

    def walked(k, v, log_decay, step=None):
        q = torch.zeros_like(k)
        return recurrence.recurrence(q, k, v, log_decay=log_decay, step=step, state=inputs["initial_state"])[1]

    def added(*arguments):
        state, log_left = recurrence.last_state(*arguments)
        return state + log_left.exp() * inputs["initial_state"]

    for ours, theirs in zip(last(added), last(walked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
