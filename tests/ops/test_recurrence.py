"""Recurrences: the forms for any device against the step-by-step reference, and the reference against its definition.

Axes: B batch, T positions, H heads, K key channels, V value channels; selective_scan: E channels, N states.
"""

import itertools
import math
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forgetting_transformer.ops import backends, recurrence
from forgetting_transformer.ops.recurrence import Gates, chunked, fla, fla_on_hopper, reference, scan

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

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

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
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, state = call(function, leaves)
    generator = torch.Generator().manual_seed(1)
    # Rounded to bfloat16, so that they are the same numbers in every dtype.
    grads = [torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in (out, state)]
    torch.autograd.backward((out, state), grads)
    gradients = {f"d{name}": x.grad for name, x in leaves.items()}
    return {"out": out.detach(), "state": state.detach(), **gradients}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """||got - want|| ≤ tolerance · ||want||, with a floor for gradients that are zero but for rounding."""
    for name in want:
        assert got[name].isfinite().all(), name
        error, size = (got[name].double() - want[name].double()).norm().item(), want[name].double().norm().item()
        assert error <= tolerance * (size + 0.1), f"{name}: relative error {error / max(size, 1e-30):.1e}"


def rounded(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Sequences in `dtype`; gates and states in float32 as layers pass them."""
    wide = torch.promote_types(dtype, torch.float32)
    names = ("q", "k", "v", "x", "B", "C")
    return {name: x.to(dtype if name in names else wide) for name, x in inputs.items()}


def test_the_reference_is_the_definition():
    """One head, with Python loops over matrices."""
    for op in OPS[:-1]:
        inputs = make_inputs(op, 7)
        out, final_state = call(REFERENCE[op], inputs)
        for b in range(2):
            for h in range(3):
                state = inputs["initial_state"][b, h]
                for t in range(7):
                    q, k, v = (inputs[name][b, t, h] for name in "qkv")
                    decay = inputs["log_decay"][b, t, h].exp() if "log_decay" in inputs else torch.tensor(1.0)
                    state = torch.diag(decay.expand(6).double()) @ state
                    value = inputs["beta"][b, t, h] * (v - state.T @ k) if "beta" in inputs else v
                    state = state + torch.outer(k, value)
                    torch.testing.assert_close(out[b, t, h], 0.7 * state.T @ q, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(final_state[b, h], state, rtol=1e-12, atol=1e-12)


def test_the_reference_of_the_scan_is_the_definition():
    inputs = make_inputs("selective_scan", 7)
    x, dt, A, B, C, state = inputs.values()
    out, final_state = call(reference.selective_scan, inputs)
    want = torch.zeros_like(out)
    for b, e, n in itertools.product(range(2), range(6), range(9)):
        h = state[b, e, n]
        for t in range(7):
            h = math.exp(dt[b, t, e] * A[e, n]) * h + dt[b, t, e] * x[b, t, e] * B[b, t, n]
            want[b, t, e] += h * C[b, t, n]
        torch.testing.assert_close(final_state[b, e, n], h)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_the_reference_are_derivatives(op):
    inputs = make_inputs(op, 3, key_dim=2, value_dim=3)
    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(lambda *x: call(REFERENCE[op], dict(zip(inputs, x, strict=True))), leaves)


@pytest.mark.parametrize("op", OPS)
def test_portable_equals_reference(op):
    for decay in ["none"] if op == "delta_rule" else DECAYS:
        for length in (1, 65, 200):
            inputs = make_inputs(op, length, decay)
            assert_close(run(PORTABLE[op], inputs), run(REFERENCE[op], inputs), 1e-11)
            single = rounded(inputs, torch.float32)
            want = run(REFERENCE[op], {name: x.double() for name, x in single.items()})
            assert_close(run(PORTABLE[op], single), want, 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_portable_equals_reference_over_several_segments(op, monkeypatch):
    monkeypatch.setattr(chunked, "_SEGMENT_LENGTH", 128)
    monkeypatch.setattr(scan, "_CPU_STATES", 1)
    inputs = make_inputs(op, 300)
    assert_close(run(PORTABLE[op], inputs), run(REFERENCE[op], inputs), 1e-11)
    with torch.no_grad():
        out, state = call(PORTABLE[op], inputs)
    want_out, want_state = call(REFERENCE[op], inputs)
    assert_close({"out": out, "state": state}, {"out": want_out, "state": want_state}, 1e-11)


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


@pytest.mark.parametrize("op", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_a_gate_next_to_a_strong_decay_keeps_its_digits(op):
    """Float32: what one running sum over the chunk would lose at -1e4 is 5e-4 of every later pair."""
    inputs = rounded(make_inputs(op, 64), torch.float32)
    inputs["log_decay"][:, 3] = -1e4
    want = run(REFERENCE[op], {name: x.double() for name, x in inputs.items()})
    assert_close(run(PORTABLE[op], inputs), want, 2e-6)


@pytest.mark.parametrize("op", OPS)
def test_a_sequence_may_be_cut_anywhere(op):
    inputs = make_inputs(op, 130)
    whole = run(PORTABLE[op], inputs)

    def in_parts(*arguments):
        *sequences, state = arguments
        outs = []
        for start, stop in itertools.pairwise((0, 1, 2, 3, 64, 130)):
            parts = [x[:, start:stop] if isinstance(x, Tensor) and x.ndim > 2 else x for x in sequences]
            scale = {} if op == "selective_scan" else {"scale": parts.pop()}
            out, state = walk(op, *parts, **scale, state=state)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    assert_close(run(in_parts, inputs), whole, 1e-11)


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("op", OPS)
def test_the_first_state_is_zero_and_autocast_does_not_round_inside(op, length):
    inputs = rounded(make_inputs(op, length), torch.float32)
    given = [x for name, x in inputs.items() if name != "initial_state"]
    out, state = walk(op, *given)
    want, want_state = call(REFERENCE[op], inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])})
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
    storages = {}

    def note(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out, state = call(PORTABLE[op], leaves)
    assert out.requires_grad
    states = 1024 // 256 * state.numel() * 4
    assert sum(storages.values()) <= 1.5 * (sum(x.numel() * 4 for x in leaves.values()) + out.numel() * 4 + states)


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


GOOD = {"q": (2, 5, 3, 8), "k": (2, 5, 3, 8), "v": (2, 5, 3, 4), "beta": (2, 5, 3), "log_decay": (2, 5, 3)}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"k": torch.zeros(2, 6, 3, 8)}, ValueError, r"k has shape .*\(B, T, H, K\) = \(2, 5, 3, 8\)"),
        ({"log_decay": torch.zeros(2, 5, 3, 7)}, ValueError, r"log_decay has shape .*\(B, T, H, K\) = \(2, 5, 3, 8\)"),
        ({"log_decay": 0.5}, TypeError, "log_decay is a float"),
        ({"log_decay": None, "beta": None}, ValueError, "log_decay and beta are both None; give one of them"),
        ({"state": torch.zeros(2, 3, 4, 8)}, ValueError, r"state has shape .*\(B, H, K, V\) = \(2, 3, 8, 4\)"),
        ({"scale": math.nan}, ValueError, "scale is nan; it must be a positive finite number"),
    ],
)
def test_refused_inputs_are_named(change, error, message):
    q, k, v, beta, log_decay = (torch.zeros(shape) for shape in GOOD.values())
    arguments = {"q_BTGK": q, "k_BTGK": change.pop("k", k), "v_BTHV": v, "beta": beta, "log_decay": log_decay} | change
    with pytest.raises(error, match=message):
        recurrence.recurrence(**arguments)


def test_the_scan_checks_its_own_arguments():
    x, A, B = torch.zeros(2, 5, 6), torch.zeros(6, 4), torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match=r"dt has shape .*\(B, T, I\) = \(2, 5, 6\)"):
        recurrence.selective_scan(x, x[..., :1], A, B, B)
    with pytest.raises(ValueError, match=r"C has shape .*\(B, T, K\) = \(2, 5, 4\)"):
        recurrence.selective_scan(x, x, A, B, B[..., :3])


def shared_inputs(length: int = 70) -> dict[str, Tensor]:
    """Of simple_gla in float64: 2 sequences, 6 heads in 2 groups."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return {
        "q_BTGK": normal(2, length, 2, 5),
        "k_BTGK": normal(2, length, 2, 5),
        "v_BTHV": normal(2, length, 6, 3),
        "log_decay": make_log_decay("random", 2, length, 6),
        "step": F.softplus(normal(2, length, 6)),
        "skip": normal(6),
        "state": normal(2, 6, 5, 3),
    }


@pytest.mark.parametrize("length", [1, 70])
def test_heads_may_share_queries_and_keys(length):
    inputs = shared_inputs(length)
    out, state = recurrence.recurrence(**inputs, scale=0.7)
    for head in range(6):
        q, k = (inputs[name][:, :, head // 3, None] for name in ("q_BTGK", "k_BTGK"))
        v, step = inputs["v_BTHV"][:, :, head, None], inputs["step"][:, :, head, None, None]
        gates = Gates(log_decay=inputs["log_decay"][:, :, head, None])
        initial = inputs["state"][:, head, None]
        want, want_state = reference.linear_recurrence(q, k, v * step, gates, 0.7, initial)
        torch.testing.assert_close(out[:, :, head, None], want + inputs["skip"][head] * v)
        torch.testing.assert_close(state[:, head, None], want_state)


def test_packed_documents_are_kept_apart():
    inputs = shared_inputs()
    bounds = [0, 13, 13, 70, 71, 140]
    out, state = recurrence.recurrence(**inputs, scale=1.0, cu_seqlens=torch.tensor(bounds))
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        row, begin = divmod(start, 70)
        part = {
            name: x[row : row + 1, begin : begin + stop - start]
            for name, x in inputs.items()
            if name not in ("skip", "state")
        }
        initial = inputs["state"][row : row + 1] if begin == 0 else None
        want, want_state = recurrence.recurrence(**part, skip=inputs["skip"], scale=1.0, state=initial)
        torch.testing.assert_close(out[row : row + 1, begin : begin + stop - start], want)
        if begin + stop - start == 70:
            torch.testing.assert_close(state[row : row + 1], want_state)


def test_heads_that_groups_do_not_divide_are_refused():
    inputs = shared_inputs()
    inputs |= {name: inputs[name][:, :, :1].expand(-1, -1, 4, -1) for name in ("q_BTGK", "k_BTGK")}
    with pytest.raises(ValueError, match="q has 4 heads and v 6; the heads of v must be a multiple"):
        recurrence.recurrence(**inputs, scale=1.0)
    with pytest.raises(ValueError, match="skip has shape"):
        recurrence.recurrence(**shared_inputs() | {"skip": torch.zeros(5, dtype=torch.float64)}, scale=1.0)


# Modules, functions and arguments of flash-linear-attention 0.6.
FLA_KERNELS = {
    "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla", ["q", "k", "v", "g"]),
    "gla": ("fla.ops.gla", "chunk_gla", ["q", "k", "v", "g"]),
    "delta_rule": ("fla.ops.delta_rule", "chunk_delta_rule", ["q", "k", "v", "beta"]),
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", ["q", "k", "v", "beta", "g"]),
    "kda": ("fla.ops.kda", "chunk_kda", ["q", "k", "v", "beta", "g"]),
}


@pytest.fixture
def fresh_fla():
    """The backend module as before its first use, now and afterwards."""

    def forget() -> None:
        fla._is_installed.cache_clear()
        fla._loaded.clear()
        backends._faults.clear()

    forget()
    yield
    forget()


@pytest.fixture
def stand_in_fla(fresh_fla, monkeypatch):
    """Modules named as in FLA, whose kernels are the reference; what they were called with, by name of the kernel."""
    calls = {}
    for op, (module_name, kernel_name, order) in FLA_KERNELS.items():

        def kernel(op=op, order=order, kernel_name=kernel_name, **arguments):
            calls[kernel_name] = dict(arguments)
            assert arguments.pop("output_final_state") is True
            scale, state = arguments.pop("scale"), arguments.pop("initial_state")
            assert sorted(arguments) == sorted(order)
            return REFERENCE[op](*(arguments[name] for name in order), scale, state)

        module = types.ModuleType(module_name)
        setattr(module, kernel_name, kernel)
        monkeypatch.setitem(sys.modules, module_name, module)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    return calls


@pytest.fixture
def on_hopper(monkeypatch):
    """Pretends a GPU and a Triton: whether FLA refuses the gated backward pass, and whether that pass is right."""

    def pretend(refuses: bool, is_right: bool = False) -> None:
        monkeypatch.setattr(fla_on_hopper, "is_hopper", lambda device_index: True)
        monkeypatch.setattr(fla_on_hopper, "choose_configurations", lambda: None)
        monkeypatch.setattr(fla_on_hopper, "refuses_gated_backward", lambda: refuses)
        monkeypatch.setattr(fla_on_hopper, "gated_backward_is_right", lambda *_: is_right)
        monkeypatch.setattr(fla_on_hopper, "kda_is_right", lambda *_: is_right)

    return pretend


GATED = ("simple_gla", "gated_delta_rule", "kda")


@pytest.mark.parametrize("op", FLA_KERNELS)
def test_fla_gets_every_argument_under_its_name(op, stand_in_fla, on_hopper):
    inputs = rounded(make_inputs(op, 9, key_dim=128, value_dim=64), torch.bfloat16)
    for refuses, is_right in ((False, False), (True, False), (True, True)):
        on_hopper(refuses, is_right)
        miscompiled = not is_right if op == "kda" else refuses and not is_right
        assert fla.serves(op, 128, 64, torch.bfloat16, 0) == (not (miscompiled and op in GATED))
        backends._faults.clear()
    assert_close(run(by_position(fla, op), inputs), run(REFERENCE[op], inputs), 1e-6)
    [(name, arguments)] = stand_in_fla.items()
    assert name == FLA_KERNELS[op][1]
    assert type(arguments["scale"]) is float
    assert all(arguments[gate].dtype == torch.float32 for gate in ("g", "beta") if gate in arguments)


def test_fla_serves_16_bits_whole_tiles_and_on_hopper_gates_where_they_were_right(stand_in_fla, on_hopper, monkeypatch):
    """On Hopper it was wrong (16 × 32, Triton 3.6) or needed too much shared memory (256 × 256, every Triton)."""
    monkeypatch.setattr(fla_on_hopper, "is_hopper", lambda device_index: False)
    for op in FLA_KERNELS:
        assert fla.serves(op, 64, 128, torch.bfloat16, 0) and fla.serves(op, 32, 64, torch.float16, 0)
        assert not fla.serves(op, 64, 128, torch.float32, 0)
        assert not fla.serves(op, 60, 128, torch.bfloat16, 0) and not fla.serves(op, 64, 33, torch.bfloat16, 0)
        assert fla.serves(op, 512, 512, torch.bfloat16, 0) == (op not in DELTA_RULES)
    on_hopper(refuses=False, is_right=True)
    for op in FLA_KERNELS:
        assert fla.serves(op, 128, 64, torch.bfloat16, 0) and fla.serves(op, 128, 128, torch.bfloat16, 0)
        assert fla.serves(op, 16, 32, torch.bfloat16, 0) == (op != "simple_gla")
        assert fla.serves(op, 256, 256, torch.bfloat16, 0) == (op == "gla")


@pytest.mark.parametrize(
    "op, key_dim, value_dim, calls",
    [
        ("delta_rule", 96, 192, [(128, 192)]),
        ("gated_delta_rule", 48, 96, [(64, 64), (64, 64)]),
        ("kda", 96, 192, [(128, 128), (128, 64)]),
    ],
)
def test_heads_of_the_delta_rules_are_padded_and_split_into_those_that_were_right(
    op, key_dim, value_dim, calls, stand_in_fla, on_hopper, monkeypatch
):
    on_hopper(refuses=False, is_right=True)
    assert fla.serves(op, key_dim, value_dim, torch.bfloat16, 0)
    fla._is_installed()
    kernel, seen = fla._loaded[op], []

    def recorded(**arguments):
        seen.append((arguments["k"].shape[-1], arguments["v"].shape[-1]))
        return kernel(**arguments)

    monkeypatch.setitem(fla._loaded, op, recorded)
    inputs = rounded(make_inputs(op, 9, key_dim=key_dim, value_dim=value_dim), torch.bfloat16)
    # The gradients that each call has for q and k are rounded to bfloat16 before they are added.
    tolerance = 1e-6 if len(calls) == 1 else 5e-3
    assert_close(run(by_position(fla, op), inputs), run(REFERENCE[op], inputs), tolerance)
    assert seen == calls


def test_a_gated_backward_pass_that_is_wrong_stays_forbidden(monkeypatch):
    """The guard in FLA is lifted only for kernels that give PyTorch's gradients."""
    chunk_o = types.SimpleNamespace(TRITON_ABOVE_3_7_1=False)
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", chunk_o)
    for answer in (True, False):
        fla_on_hopper.gated_backward_is_right.cache_clear()
        chunk_o.TRITON_ABOVE_3_7_1 = False
        monkeypatch.setattr(fla_on_hopper, "_agrees", lambda *_, answer=answer: answer and chunk_o.TRITON_ABOVE_3_7_1)
        assert fla_on_hopper.gated_backward_is_right("simple_gla", 64, 64, torch.bfloat16, 0) is answer
        assert chunk_o.TRITON_ABOVE_3_7_1 is answer
    fla_on_hopper.gated_backward_is_right.cache_clear()


def test_kernels_of_kimi_delta_attention_that_are_wrong_are_ruled_out_with_a_warning(fresh_fla, monkeypatch):
    monkeypatch.setattr(fla_on_hopper, "_agrees", lambda *_: False)
    fla_on_hopper.kda_is_right.cache_clear()
    with pytest.warns(RuntimeWarning, match="kda: flash-linear-attention is not used: .*PyTorch runs instead"):
        assert not fla_on_hopper.serves_gated("kda", 128, 128, torch.bfloat16, 0)
    assert not backends.is_usable("kda", backends.FLA)
    fla_on_hopper.kda_is_right.cache_clear()


@pytest.mark.slow
def test_the_scan_is_an_operator_that_torch_compile_can_take(monkeypatch):
    monkeypatch.setattr(scan, "_CPU_STATES", 2 * 6 * 9 * 16)  # segments of 16 positions
    inputs = {name: value.float() for name, value in make_inputs("selective_scan", 48).items()}
    time_first = [name for name in inputs if name not in ("A", "initial_state")]
    inputs |= {name: inputs[name].transpose(0, 1).contiguous() for name in time_first}
    operator = torch.ops.forgetting_transformer.selective_scan.default
    assert len(operator(*inputs.values())[2]) == 3
    torch.library.opcheck(operator, [value.requires_grad_() for value in inputs.values()])


def test_one_warning_says_what_to_install(fresh_fla, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.warns(RuntimeWarning, match=r'it is not installed.* pip install -e "\.\[cuda\]"') as caught:
        assert not any(fla.serves(op, 16, 16, torch.bfloat16, 0) for op in FLA_KERNELS for _ in range(3))
    assert len(caught) == 1


def test_the_package_that_flash_linear_attention_lacks_is_named(monkeypatch):
    def fails(module):
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    monkeypatch.setattr(backends, "installed_version", lambda package: "0.6.0")
    monkeypatch.setattr(backends, "_faults", {})
    monkeypatch.setattr(backends.importlib, "import_module", fails)
    with pytest.warns(RuntimeWarning, match="needs einops, which is not installed.* To mend it, pip install einops"):
        assert not backends.load_fla("recurrences", fla._KERNELS)


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


def test_step_sizes_from_a_bias_and_a_skip_are_those_of_the_definition():
    inputs = make_inputs("selective_scan", 70)
    x, dt, A, B, C, state = inputs.values()
    D, bias = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    got, got_state = recurrence.selective_scan(x, dt, A, B, C, D_I=D, dt_bias_I=bias, initial_state_BIK=state)
    want, want_state = reference.selective_scan(x, (1 + (dt + bias).exp()).log(), A, B, C, state)
    torch.testing.assert_close(got, want + D * x)
    torch.testing.assert_close(got_state, want_state)


def test_a_scan_of_packed_documents_is_the_scans_of_the_documents():
    """Documents of one token and of several; ends are repeated; the first of a row goes on from the initial state."""
    x, dt, A, B, C, initial = make_inputs("selective_scan", 40).values()
    cu_seqlens = torch.tensor([0, 1, 23, 70, 80, 80])
    got, state = recurrence.selective_scan(x, dt, A, B, C, initial_state_BIK=initial, cu_seqlens=cu_seqlens)
    flat = [tensor.flatten(0, 1)[None] for tensor in (x, dt, B, C)]
    for start, stop in [(0, 1), (1, 23), (23, 40), (40, 70), (70, 80)]:
        part = [tensor[:, start:stop] for tensor in flat]
        before = initial[start // 40, None] if start % 40 == 0 else None
        want, last = reference.selective_scan(*part[:2], A, *part[2:], before)
        torch.testing.assert_close(got.flatten(0, 1)[None, start:stop], want)
        if stop % 40 == 0:
            torch.testing.assert_close(state[stop // 40 - 1], last[0])


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [
        ([0, 5, 9], "must rise from 0 to the 10 tokens"),
        ([0, 7, 5, 10], "must rise from 0 to the 10 tokens"),
        ([0.0, 10.0], "cu_seqlens has dtype torch.float32; it must be int32 or int64"),
        ([[0, 10]], r"cu_seqlens has shape \(1, 2\)"),
    ],
)
def test_boundaries_of_documents_that_do_not_fit_are_refused(cu_seqlens, message):
    """They would compute something: documents that are joined, or none."""
    x, dt, A, B, C, _ = make_inputs("selective_scan", 5).values()
    bounds = torch.tensor(cu_seqlens)
    with pytest.raises((TypeError, ValueError), match=message):
        recurrence.selective_scan(x, dt, A, B, C, cu_seqlens=bounds)
    q, log_decay = torch.randn(2, 5, 1, 4), torch.zeros(2, 5, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        recurrence.recurrence(q, q, q, log_decay=log_decay, cu_seqlens=bounds)


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


@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_the_state_before_a_part_is_compiled_without_running_sums(op, monkeypatch):
    """On a GPU TorchInductor of PyTorch 2.11 fails on some running sums, as of 32 chunks of 256 tokens, 48 heads."""
    from functorch.compile import aot_function, make_boxed_func

    from forgetting_transformer.ops import context

    found = []
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda received, sent, group: received.copy_(sent))

    def kept(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def state(k, v, log_decay):
        return context.state_before(*recurrence.last_state(k, v, log_decay))

    inputs = make_inputs(op, 600)
    leaves = [inputs[name].clone().requires_grad_() for name in ("k", "v", "log_decay")]
    with context.sharing(context.Context(1, 2)):
        aot_function(state, fw_compiler=kept)(*leaves).sum().backward()
    assert sum("forgetting_transformer.exchange" in name for name in found) >= 4, "forward and backward pass"
    assert [name for name in found if "cumsum" in name or "scan" in name] == []


@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_the_last_state_of_bfloat16_inputs_is_not_rounded_to_it(op):
    """Only decayed keys or values are; their products are added in float32."""
    inputs = make_inputs(op, 600)
    k, v = (inputs[name].bfloat16() for name in ("k", "v"))
    log_decay = inputs["log_decay"].float()
    with torch.autocast("cpu", torch.bfloat16):
        state, _ = recurrence.last_state(k, v, log_decay)
    weight = torch.cat((log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])), dim=1).flip(1).cumsum(1).flip(1).exp()
    if op == "gla":
        k = (k * weight).bfloat16()
    else:
        v = (v * weight[..., None]).bfloat16()
    torch.testing.assert_close(
        state.double(), torch.einsum("bthk,bthv->bhkv", k.double(), v.double()), rtol=1e-4, atol=1e-4
    )
    assert state.dtype == torch.float32
