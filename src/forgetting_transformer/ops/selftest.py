"""Self-tests of kernels: the backend of each op, held to the float64 reference before a run relies on it.

A kernel that is right on the GPU and compiler it was written on may be wrong, or not compile, on others. So before the
first step each kernel that a run will use computes a small problem of the run's own head dimensions and dtype, forward
and backward, and is compared with the reference in float64. One that fails is ruled out, and
the next backend is tested.

The problems have the run's number of heads, and lengths that Triton specialises in the same way, so that what is
compiled here is what the run needs and is not compiled again. They cover several tiles, and what the run has of
pruning, windows, ragged lengths and padding. They use no global random numbers.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import contextlib
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import attention, backends, path_attention, path_attention_fla, recurrence
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.forgetting_attention import (
    cumulative_log_fgate,
    forgetting_attention,
    forgetting_attention_decode,
    forgetting_attention_reference,
)
from forgetting_transformer.ops.forgetting_attention.constants import STRETCH
from forgetting_transformer.ops.forgetting_attention.dispatch import attention_backend, first_visible_key
from forgetting_transformer.ops.layers import norm, residual_norm, shift_norm, short_convolution, swiglu

log = logging.getLogger(__name__)

#: ‖x - reference‖ / ‖reference‖ of outputs and gradients, of attention. In 16 bits the kernels measured 1.8e-3 to
#: 3.4e-3 (bfloat16) and a quarter of that (float16); a kernel that is wrong is off by far more.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 5e-5}
#: The same of short convolutions, gated norms and other layers, which round their results alone.
ELEMENTWISE_TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
#: The same of recurrences, whose kernels keep inputs and states in 16 bits.
RECURRENCE_TOLERANCE = 2e-2
# Positions of a recurrence's problem: four chunks of 64, the last one ragged.
_RECURRENCE_LENGTH = 200
# The same of a selective scan: three chunks of 128.
_SCAN_LENGTH = 300
# The same of PaTH attention, whose kernels go through 512 tokens at a time: three of these, the last one ragged.
_PATH_LENGTH = 1160
# What pruning may leave out of a row in a self-test, far below every tolerance.
_LOG_PRUNING_TOLERANCE = -25.0


# (op, backend) whose backward pass adds by atomics.
_NOT_REPRODUCIBLE = {("attention", backends.PYTORCH), ("path_attention", backends.FLA)}


class Backend(NamedTuple):
    """What runs one op.

    Attributes:
        name: the backend, as in `backends.BACKENDS`.
        text: the same for people: with versions, and the largest error of its self-test.
    """

    name: str
    text: str


class _Problem(NamedTuple):
    """One call of attention to be checked."""

    length: int
    window: int | None = None
    padding: int = 0
    decodes: bool = False


def choose_backends(
    uses: Iterable[OpUse], dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None
) -> dict[str, Backend]:
    """Test what will run these uses on this device, rule out what fails, and say what is left.

    Args:
        uses: how the model calls ops.
        dtype: of queries, keys and values.
        device: where the model is. Nothing is tested on devices other than GPUs, which run everything in PyTorch.
        lengths: tokens of the sequences that will come; None if any may, with left padding and
            decoding too, as in evaluation.

    Returns:
        op: what runs it; layers on GPUs alone. Nothing is warned of: `backends.faults` has the warnings.
    """
    by_op: dict[str, list[OpUse]] = {}
    for use in uses:
        known = by_op.setdefault(use.op, [])
        if use not in known:
            known.append(use)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return {
            op: _choose(op, op_uses, dtype, device, lengths, generator)
            for op, op_uses in by_op.items()
            # Elsewhere layers have nothing to choose from, and nobody needs to read so.
            if op not in _LAYERS or device.type == "cuda"
        }


def _choose(
    op: str,
    uses: Sequence[OpUse],
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int] | None,
    generator: torch.Generator,
) -> Backend:
    find, check, tolerance = _recurrence_of, check_recurrence, RECURRENCE_TOLERANCE
    if op == "attention":
        find, check, tolerance = _attention_of, check_attention, TOLERANCES.get(dtype, 0.0)
    elif op == "path_attention":
        find, check = _path_attention_of, check_path_attention
    elif op == "short_convolution":
        find, check, tolerance = _convolution_of, check_convolution, ELEMENTWISE_TOLERANCES.get(dtype, 0.0)
    elif op == "gated_norm":
        find, check, tolerance = _norm_of, check_norm, ELEMENTWISE_TOLERANCES.get(dtype, 0.0)
    elif op in _LAYERS:
        find, check, tolerance = _layer_of, check_layer, ELEMENTWISE_TOLERANCES.get(dtype, 0.0)
    elif op == "selective_scan":
        find, check, tolerance = _scan_of, check_scan, TOLERANCES.get(dtype, 0.0)
    while True:
        names = [find(use, dtype, device) for use in uses]
        # The one that does most of the work stands for all: the fastest that any use has.
        order = backends.BACKENDS.get(op, (backends.PYTORCH,))
        name = min(names, key=order.index)
        loses_bits = device.type == "cuda" and (op, name) in _NOT_REPRODUCIBLE
        notes = ", gradients not bitwise reproducible" * loses_bits
        if name == backends.PYTORCH:
            return Backend(name, describe(name) + notes)
        try:
            tested = [use for use, found in zip(uses, names, strict=True) if found != backends.PYTORCH]
            with torch.inference_mode(False), torch.enable_grad():
                error, where = max(check(use, dtype, device, lengths, generator) for use in tested)
            if not backends.is_usable(op, name):  # the op itself went on to the next one
                continue
            if error <= tolerance:
                notes += f", from {backends.MIN_KERNEL_TOKENS:,} tokens on" if op in _LAYERS else ""
                return Backend(name, f"{describe(name)}, self-test within {_rounded_up(error)}{notes}")
            reason = f"its self-test found {where} off by {error:.1e} of its size where {tolerance:.0e} is allowed"
        except Exception as failure:  # what a compiler raises is not one class
            if backends.is_failure_of_gpu(failure):
                raise
            reason = f"its self-test failed with {backends.describe_error(failure)}"
        backends.rule_out(op, name, f"with Triton {backends.installed_version('triton')} {reason}")


def describe(name: str) -> str:
    """A backend for people, with the versions of what its kernels come from and are compiled with."""
    if name == backends.PYTORCH:
        return "PyTorch"
    compiler = f"Triton {backends.installed_version('triton')}"
    if name == backends.TRITON:
        return compiler
    source = backends.TITLES[name] if name == backends.GLUON else f"FLA {backends.installed_version('fla-core')}"
    return f"{source}, {compiler}"


def _rounded_up(error: float) -> str:
    """2.31e-3 -> "3e-3"."""
    exponent = math.floor(math.log10(error)) if error > 0 else -16
    digit = math.ceil(round(error / 10**exponent, 6))
    return f"{digit}e{exponent}" if digit < 10 else f"1e{exponent + 1}"


def _attention_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    return attention_backend(use, dtype, device)


def _recurrence_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cuda" or use.op not in backends.BACKENDS:
        return backends.PYTORCH
    index = _index(device)
    groups = use.key_heads or use.heads
    if use.op == "simple_gla" and recurrence.grouped.serves(
        use.heads, groups, use.key_dim, use.value_dim, dtype, index
    ):
        return backends.TRITON
    served = recurrence.fla.serves(use.op, use.key_dim, use.value_dim, dtype, index)
    return backends.FLA if served else backends.PYTORCH


def _path_attention_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    served = device.type == "cuda" and path_attention_fla.serves(use.key_dim, use.value_dim, dtype, _index(device))
    return backends.FLA if served else backends.PYTORCH


def _convolution_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    head_dim = use.value_dim // max(1, use.heads)
    return _triton_if(
        device, lambda index: short_convolution.kernel_serves(dtype, use.key_dim, head_dim, use.heads, index)
    )


def _norm_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    width = use.value_dim // use.heads
    return _triton_if(device, lambda index: norm.gated_norm_takes_kernel(dtype, width, index))


def _layer_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    tokens = backends.MIN_KERNEL_TOKENS
    if use.op == "swiglu":
        return _triton_if(device, lambda index: swiglu.kernel_serves(dtype, tokens, index))
    if use.op == "shift_norm":
        head_dim = use.value_dim // use.heads
        return _triton_if(device, lambda index: shift_norm.kernel_serves(dtype, head_dim, tokens, index))
    return _triton_if(device, lambda index: residual_norm.kernel_serves(dtype, use.value_dim, tokens, index))


def _scan_of(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    served = recurrence.scan_takes_kernel(use.key_dim, dtype, device)
    return backends.TRITON if served else backends.PYTORCH


def _triton_if(device: torch.device, serves: Callable[[int], bool]) -> str:
    """Triton on a GPU with whose index `serves` says so, otherwise PyTorch."""
    return backends.TRITON if device.type == "cuda" and serves(_index(device)) else backends.PYTORCH


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def problem_length(length: int) -> int:
    """A short length that kernels treat as they do `length`: whole tiles or not, a multiple of 16 of them or not."""
    if length <= 3 * STRETCH:
        return length
    if length % (16 * STRETCH) == 0:
        return 16 * STRETCH
    return 2 * STRETCH + (length % STRETCH or STRETCH)


def _problems(use: OpUse, lengths: Sequence[int] | None) -> list[_Problem]:
    window = use.window
    if lengths is None:
        whole, ragged = 3 * STRETCH, 2 * STRETCH + 37
        found = [_Problem(whole), _Problem(ragged), _Problem(ragged, padding=STRETCH + 5)]
        if use.is_gated:
            found.append(_Problem(ragged, decodes=True))
    else:
        found = [_Problem(length) for length in sorted({problem_length(length) for length in lengths})]
    if window is None:
        return found
    # A window as long as a sequence hides nothing; what it compiles and skips does not depend on how long it is.
    longest = max(lengths, default=0) if lengths is not None else window + 1
    shortened = min(window, STRETCH + STRETCH // 2)
    return [problem._replace(window=shortened) for problem in found] if longest > window else found


def check_attention(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """The largest error of outputs and gradients, and where it is."""
    return max(_attention_error(use, problem, dtype, device, generator) for problem in _problems(use, lengths))


def _attention_error(
    use: OpUse, problem: _Problem, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[float, str]:
    length, heads, groups = problem.length, use.heads, use.key_heads or use.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # As after QK-norm: no score is above √D, which is what makes a threshold safe.
    q = F.normalize(normal(1, length, heads, use.key_dim), dim=-1) * use.key_dim**0.5
    k = F.normalize(normal(1, length, groups, use.key_dim), dim=-1) * use.key_dim**0.5
    v = normal(1, length, groups, use.value_dim)
    # Every other head forgets within a few tokens, so that pruning has something to skip; the rest within hundreds.
    speed_H = torch.where(torch.arange(heads) % 2 == 0, 0.0, 6.0)
    log_fgate = F.logsigmoid(normal(1, length, heads) + speed_H)
    d_out = normal(1, length, heads, use.value_dim)
    q, k, v, d_out = (x.to(device, dtype) for x in (q, k, v, d_out))
    log_fgate = log_fgate.to(device)
    seq_start = torch.tensor([problem.padding], device=device) if problem.padding else None
    cu_seqlens = None
    if use.packed:
        cu_seqlens = _documents(length, device)
    if problem.decodes:
        return _decoding_error(q, k, v, log_fgate)

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        if not use.is_gated:
            return attention.causal_attention(
                q, k, v, window_size=problem.window, seq_start=seq_start, cu_seqlens=cu_seqlens
            )
        (log_f,) = gates
        options: dict[str, Any] = {}
        if use.pruning == "auto":
            options = {"adaptive_threshold": "auto", "log_tolerance": _LOG_PRUNING_TOLERANCE}
        elif use.pruning == "threshold":
            bound = _LOG_PRUNING_TOLERANCE - (2 * use.key_dim**0.5 + math.log(length))
            options = {"adaptive_threshold": torch.full((heads,), bound, device=device)}
        options |= {"seq_start": seq_start, "cu_seqlens": cu_seqlens, "window_size": problem.window}
        plain = seq_start is None and cu_seqlens is None and problem.window is None
        with _compiling_backward(d_out, q, k, v, log_f, apart=plain):
            out = forgetting_attention(q, k, v, log_f, **options)
        assert isinstance(out, Tensor)  # without the log-normalisers
        return out

    def reference(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        q, k, v, log_f = (
            x.transpose(1, 2) for x in (q, k, v, gates[0] if gates else q.new_zeros(1, length, q.shape[2]))
        )
        first_key = first_visible_key(q, k, window=problem.window, cu_seqlens=cu_seqlens)
        out, _ = forgetting_attention_reference(q, k, v, log_f, seq_start, use.key_dim**-0.5, first_key_BT=first_key)
        return out.transpose(1, 2)

    names = ["the output", "the gradient of q", "the gradient of k", "the gradient of v"]
    inputs = [q, k, v]
    if use.is_gated:
        names.append("the gradient of log f")
        inputs.append(log_fgate)
    got = _results(run, inputs, d_out)
    # All scores of all heads in float64 would be gigabytes: the first and the last key head stand for all.
    errors = []
    for group in sorted({0, groups - 1}):
        queries = slice(group * (heads // groups), (group + 1) * (heads // groups))
        parts = [slice(group, group + 1) if i in (1, 2) else queries for i in range(len(inputs))]
        want = _results(
            reference, [x[:, :, part].double() for x, part in zip(inputs, parts, strict=True)], d_out[:, :, queries]
        )
        for name, a, b, part in zip(names, got, want, [queries, *parts], strict=True):
            errors.append((_relative_error(a[:, :, part], b), name))
    return max(errors)


def _documents(length: int, device: torch.device) -> Tensor:
    """Bounds of packed documents of several tiles, of a few tokens and of none."""
    bounds = sorted([0, length // 2 + 3, length // 2 + 8, length - length // 4, length, length])
    return torch.tensor(bounds, device=device, dtype=torch.int32).clamp(max=length)


@contextlib.contextmanager
def _compiling_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, apart: bool
) -> Iterator[None]:
    """Compiles the kernels of the backward pass beside those of the forward pass, which halves the wait for compilers.

    Args:
        d_out, q, k, v, log_fgate: `(B, T, H or G, D)`, gates `(B, T, H)`. apart: False does nothing, as for inputs
            whose backward pass needs more than these.
    """
    if not apart or d_out.device.type != "cuda":
        yield
        return

    def compile_backward() -> None:
        from forgetting_transformer.ops.forgetting_attention import triton as kernels

        try:
            tensors = (x.detach().transpose(1, 2) for x in (d_out, q, k, v, log_fgate))
            d_out_BHTD, q_BHTD, k_BGND, v_BGND, log_fgate_BHN = tensors
            kernels.compile_backward(d_out_BHTD, q_BHTD, k_BGND, v_BGND, log_fgate_BHN, q.shape[-1] ** -0.5)
        except Exception as error:  # the test itself does the same, and says what is wrong
            log.debug("the backward pass was not compiled early: %s", error)

    thread = threading.Thread(target=compile_backward, name="compile backward", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _decoding_error(q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor) -> tuple[float, str]:
    with torch.no_grad():
        got = forgetting_attention_decode(q[:, -1:], k, v, cumulative_log_fgate(log_fgate))
        q_BHTD, k_BGND, v_BGND, log_fgate_BHN = (x.double().transpose(1, 2) for x in (q[:, -1:], k, v, log_fgate))
        want, _ = forgetting_attention_reference(q_BHTD, k_BGND, v_BGND, log_fgate_BHN, None, q.shape[-1] ** -0.5)
    assert isinstance(got, Tensor)  # without the log-normalisers
    return _relative_error(got, want.transpose(1, 2)), "the output of decoding"


def check_recurrence(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """As `check_attention`. Lengths do not matter to these kernels."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = (1, _RECURRENCE_LENGTH, use.heads)
    of_keys = (1, _RECURRENCE_LENGTH, use.key_heads or use.heads, use.key_dim)
    inputs = {
        "q": normal(*of_keys).to(dtype),
        "k": F.normalize(normal(*of_keys), dim=-1).to(dtype),
        "v": normal(*shape, use.value_dim).to(dtype),
    }
    if use.op in ("delta_rule", "gated_delta_rule", "kda"):
        inputs["beta"] = normal(*shape).sigmoid()
    if use.op != "delta_rule":
        by_channel = use.op in ("gla", "kda")
        inputs["log_decay"] = F.logsigmoid(normal(*shape, *([use.key_dim] if by_channel else [])) + 2)
    is_grouped = use.key_heads is not None
    if is_grouped:
        inputs |= {"step": F.softplus(normal(*shape)), "skip": normal(use.heads)}
    d_out = normal(*shape, use.value_dim).to(dtype)

    def run(*tensors: Tensor) -> Tensor:
        q, k, v, *others = tensors
        named: dict[str, Any] = dict(zip(list(inputs)[3:], others, strict=True))
        if use.packed and is_grouped:
            named["cu_seqlens"] = _documents(_RECURRENCE_LENGTH, q.device)
        return recurrence.recurrence(q, k, v, scale=1.0, **named)[0]

    def reference(*tensors: Tensor) -> Tensor:
        q, k, v, *others = tensors
        gates = recurrence.Gates(**dict(zip(list(inputs)[3:], others, strict=True)))
        return recurrence.reference.linear_recurrence(q, k, v, gates, 1.0, None)[0]

    if is_grouped:
        # Gradients of queries and keys are sums over heads, so all are needed; in chunks, in float64 on the CPU.
        return _compare(run, inputs, d_out, device)
    return _compare(run, inputs, d_out, device, reference=reference, heads=sorted({0, use.heads - 1}))


def check_path_attention(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """As `check_attention`. Lengths do not matter to these kernels. The reference is PyTorch, on the same device."""

    def normal(*shape: int) -> Tensor:
        return torch.randn((1, _PATH_LENGTH, use.heads, *shape), generator=generator)

    inputs = {
        "q": normal(use.key_dim).to(dtype),
        "k": normal(use.key_dim).to(dtype),
        "v": normal(use.value_dim).to(dtype),
        "w": F.normalize(normal(use.key_dim), dim=-1),
        "beta": 2 * normal().sigmoid(),
        "log f": F.logsigmoid(normal() + 3),
    }
    d_out = normal(use.value_dim).to(dtype)

    def run(*tensors: Tensor) -> Tensor:
        q, k, v, *gates = tensors
        return path_attention.path_attention(q, k, v, *gates, has_resets=False)[0]

    # All scores of all heads in float64 would be gigabytes.
    return _compare(run, inputs, d_out, device, reference_device=device, heads=sorted({0, use.heads - 1}))


def check_convolution(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """As `check_attention`. Of lengths it matters whether they are multiples of 16, and whether any may come."""
    channels, taps = use.value_dim, use.key_dim
    if lengths is None:
        cases = [(length, goes_on) for length in (128, 133) for goes_on in (False, True)]
    else:
        cases = [(length, False) for length in sorted({128 + length % 16 for length in lengths})]
    worst = (0.0, "the output")
    for length, goes_on in cases:
        shapes = {"x": (1, length, channels), "weight": (channels, 1, taps), "bias": (channels,)}
        if goes_on and taps > 1:
            shapes["previous"] = (1, channels, taps - 1)
        inputs = [torch.randn(shape, generator=generator) for shape in shapes.values()]
        inputs[0] = inputs[0].to(dtype)
        d_out = torch.randn(shapes["x"], generator=generator).to(dtype)

        def run(
            x: Tensor, weight: Tensor, bias: Tensor, previous: Tensor | None = None, goes_on: bool = goes_on
        ) -> Tensor:
            options: dict[str, Any] = {"previous_BCW": previous, "silu": True, "unit_heads": use.heads}
            if use.packed:
                token, bounds = torch.arange(x.shape[1], device=x.device), _documents(x.shape[1], x.device)
                start = bounds[torch.searchsorted(bounds, token, right=True) - 1]
                # The first document goes on from the previous inputs, if there are any.
                options["position_BT"] = torch.where(start == 0, token + taps * goes_on, token - start)[None]
            return short_convolution.short_convolution(x, weight, bias, **options)[0]

        worst = max(worst, _compare(run, dict(zip(shapes, inputs, strict=True)), d_out, device))
    return worst


def check_norm(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """As `check_attention`. Of lengths it matters only whether they are multiples of 16."""
    worst = (0.0, "the output")
    for length in sorted({128 + length % 16 for length in lengths or (0, 5)}):
        # A gate is often a slice of a wider projection.
        x, gate, d_out = (
            torch.randn(1, length, use.value_dim + 16, generator=generator)[..., :-16].to(dtype) for _ in range(3)
        )
        inputs = {"x": x, "weight": torch.randn(use.value_dim, generator=generator)}
        if use.is_gated:
            inputs["gate"] = gate

        def run(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
            options: dict[str, Any] = {"gate_first": use.key_dim == 1, "activation": use.activation}
            return norm.gated_rms_norm(x, gate, weight, 1e-6, use.heads, **options)

        worst = max(worst, _compare(run, inputs, d_out, device))
    return worst


def check_scan(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """As `check_attention`. Lengths do not matter to these kernels; whether they start from a state does."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels, states = use.value_dim, use.key_dim
    inputs = {
        "x": normal(1, _SCAN_LENGTH, channels).to(dtype),
        "dt": normal(1, _SCAN_LENGTH, channels).to(dtype),
        "A": -torch.arange(1.0, states + 1).expand(channels, -1),
        "B": normal(1, _SCAN_LENGTH, states).to(dtype),
        "C": normal(1, _SCAN_LENGTH, states).to(dtype),
        "D": normal(channels),
        "dt_bias": normal(channels) - 3,
    }
    if lengths is None:  # decoding after a prompt, in parts
        inputs["initial_state"] = normal(1, channels, states)
    dy = normal(1, _SCAN_LENGTH, channels).to(dtype)

    def run(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, *state: Tensor
    ) -> Tensor:
        before = state[0] if state else None
        bounds = _documents(_SCAN_LENGTH, x.device) if use.packed else None
        out, _ = recurrence.selective_scan(
            x, dt, A, B, C, D_I=D, dt_bias_I=dt_bias, initial_state_BIK=before, cu_seqlens=bounds
        )
        return out

    # In float64 PyTorch runs the scan on the GPU too.
    return _compare(run, inputs, dy, device, reference_device=device)


def check_layer(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """As `check_attention`, for an op that treats every token alike, or looks at the one before, so that lengths do not
    matter.

    The reference runs on the device too: the kernels take no float64.
    """
    rows, width = backends.MIN_KERNEL_TOKENS + 5, use.value_dim
    function, shapes = _LAYERS[use.op](use, rows)
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    rounded = [x.to(device, torch.float32 if name in ("x", "weight") else dtype) for name, x in inputs.items()]
    gradients = [torch.randn(rows, width, generator=generator).to(device) for _ in range(2)]

    def run(*leaves: Tensor) -> list[Tensor]:
        leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        # Rounded as the kernel gets them, in the reference too.
        d_outs = [d.to(dtype).to(x.dtype) for d, x in zip(gradients, outs, strict=False)]
        return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, d_outs)]

    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        got = run(*rounded)
    want = run(*(x.double() for x in rounded))
    outputs = ["the output", "the residual stream"][: len(got) - len(inputs)]
    names = [*outputs, *(f"the gradient of {name}" for name in inputs)]
    errors = [_relative_error(a, b) for a, b in zip(got, want, strict=True)]
    return max(zip(errors, names, strict=True))


def _swiglu(use: OpUse, rows: int) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    return swiglu.swiglu, {"gate and up": (rows, 2 * use.value_dim)}


def _shift_norm(use: OpUse, rows: int) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    def shift(y: Tensor, logits: Tensor) -> Tensor:
        return shift_norm.shift_norm(y[None], use.heads, shift_BTH=logits[None])[0]

    def without_and_with_shift(y: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"weight": weight, "eps": 1e-5}
        y = shift_norm.shift_norm(y[None], use.heads, **options)
        return shift_norm.shift_norm(y, use.heads, shift_BTH=logits[None], **options)[0]

    shapes: dict[str, tuple[int, ...]] = {"y": (rows, use.value_dim), "shift": (rows, use.heads)}
    return (without_and_with_shift, shapes | {"weight": (use.key_dim,)}) if use.key_dim else (shift, shapes)


def _residual_norm(use: OpUse, rows: int) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    width = use.value_dim

    def twice(x: Tensor, branch: Tensor, weight: Tensor) -> Any:
        """Without a branch and with one."""
        y, x = residual_norm.add_rms_norm(x, None, weight, 1e-6)
        return residual_norm.add_rms_norm(x, branch + y, weight, 1e-6)

    return twice, {"x": (rows, width), "branch": (rows, width), "weight": (width,)}


# Ops of layers: what is run, of a use and so many rows, and the shapes of its inputs.
_LAYERS: dict[str, Callable[[OpUse, int], tuple[Callable[..., Any], dict[str, tuple[int, ...]]]]] = {
    "swiglu": _swiglu,
    "shift_norm": _shift_norm,
    "residual_norm": _residual_norm,
}


def _compare(
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    d_out: Tensor,
    device: torch.device,
    reference_device: torch.device | None = None,
    reference: Callable[..., Tensor] | None = None,
    heads: list[int] | None = None,
) -> tuple[float, str]:
    """The largest error of what `function` gives on the device, against float64 on the CPU or another; and of what.

    Args:
        reference: what is computed in float64; by default the same.
        heads: of the third axis of all tensors, those that are compared; by default all.
    """
    where = reference_device or torch.device("cpu")

    def chosen(x: Tensor) -> Tensor:
        return (x if heads is None else x[:, :, heads]).to(where)

    got = _results(function, [x.to(device) for x in inputs.values()], d_out.to(device))
    want = _results(reference or function, [chosen(x).double() for x in inputs.values()], chosen(d_out))
    names = ["the output", *(f"the gradient of {name}" for name in inputs)]
    return max(zip((_relative_error(chosen(a), b) for a, b in zip(got, want, strict=True)), names, strict=True))


def _results(function: Callable[..., Tensor], inputs: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def _relative_error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖; infinite where got is not finite."""
    error = ((got.double() - want).norm() / want.norm()).item()
    return error if math.isfinite(error) else math.inf
