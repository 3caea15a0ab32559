"""Self-tests of kernels: the backend of each op, held to the float64 reference before a run relies on it.

A kernel that is right on the GPU and compiler it was written on may be wrong, or not compile, on others. So before the
first step each kernel that a run will use computes a small problem of the run's own head dimensions and dtype, forward
and backward, and is compared with the reference in float64. One that fails is ruled out, and
the next backend is tested.

The problems have the run's number of heads, and lengths that Triton specialises in the same way, so that what is
compiled here is what the run needs and is not compiled again. They cover several tiles, and what the run has of
pruning, windows, ragged lengths and padding. They use no global random numbers.

A new op is a row of `_OPS`, with a function that makes its problems, and a case of `find_backend`.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import decimal
import functools
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

#: ‖x - reference‖ / ‖reference‖ of outputs and gradients, of attention and scans. In 16 bits the kernels measured
#: 1.8e-3 to 3.4e-3 (bfloat16) and a quarter of that (float16); a kernel that is wrong is off by far more.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 5e-5}
#: The same of short convolutions, gated norms and other layers, which round their results alone.
ELEMENTWISE_TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
#: The same of recurrences and PaTH attention, whose kernels keep inputs and states in 16 bits.
RECURRENCE_TOLERANCES = dict.fromkeys(TOLERANCES, 2e-2)
# Positions of a recurrence's problem: four chunks of 64, the last one ragged.
_RECURRENCE_LENGTH = 200
# The same of a selective scan: three chunks of 128.
_SCAN_LENGTH = 300
# The same of PaTH attention, whose kernels go through 512 tokens at a time: three of these, the last one ragged.
_PATH_LENGTH = 1160
# What pruning may leave out of a row in a self-test, far below every tolerance.
_LOG_PRUNING_TOLERANCE = -25.0

# Layers have nothing to choose from without a GPU, and nobody needs to read so.
_LAYERS = ("swiglu", "shift_norm", "residual_norm")
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


class _Run(NamedTuple):
    """What problems are made for; arguments as in `choose_backends`."""

    dtype: torch.dtype
    device: torch.device
    lengths: Sequence[int] | None
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed numbers, in float32 on the CPU."""
        return torch.randn(shape, generator=self.generator)

    def rounded(self, *shape: int) -> Tensor:
        """The same in the dtype of the run."""
        return self.normal(*shape).to(self.dtype)


class _Problem(NamedTuple):
    """A small call of an op, forward and backward, and how it is compared with float64.

    Attributes:
        call: the op with its options, a function of the inputs.
        inputs: name: tensor; float64 gets them rounded as they are here.
        d_outs: gradients of the outputs; none where there is no backward pass.
        reference: what is computed in float64; by default the same call, whose kernels take no float64.
        on_cpu: whether the reference runs on the CPU; otherwise where the kernel does.
        groups: heads of keys. Given, the first and the last with their queries stand for the whole third axis of all
            tensors: all scores of all heads in float64 would be gigabytes.
        outputs: names of the outputs.
    """

    call: Callable[..., Any]
    inputs: Mapping[str, Tensor]
    d_outs: Sequence[Tensor]
    reference: Callable[..., Any] | None = None
    on_cpu: bool = False
    groups: int | None = None
    outputs: Sequence[str] = ("the output",)


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
    for use in dict.fromkeys(uses):
        if use.op not in _LAYERS or device.type == "cuda":
            by_op.setdefault(use.op, []).append(use)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore", RuntimeWarning)
        return {op: _choose(op, op_uses, dtype, device, lengths, generator) for op, op_uses in by_op.items()}


def _choose(
    op: str,
    uses: Sequence[OpUse],
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int] | None,
    generator: torch.Generator,
) -> Backend:
    while True:
        names = [find_backend(use, dtype, device) for use in uses]
        # The one that does most of the work stands for all: the fastest that any use has.
        name = min(names, key=backends.BACKENDS.get(op, (backends.PYTORCH,)).index)
        loses_bits = device.type == "cuda" and (op, name) in _NOT_REPRODUCIBLE
        notes = ", gradients not bitwise reproducible" * loses_bits
        if name == backends.PYTORCH:
            return Backend(name, describe(name) + notes)
        try:
            tested = [use for use, found in zip(uses, names, strict=True) if found != backends.PYTORCH]
            error, where = max(check(use, dtype, device, lengths, generator) for use in tested)
            if not backends.is_usable(op, name):  # the op itself went on to the next one
                continue
            allowed = _OPS[op][1].get(dtype, 0.0)
            if error <= allowed:
                notes += f", from {backends.MIN_KERNEL_TOKENS:,} tokens on" if op in _LAYERS else ""
                return Backend(name, f"{describe(name)}, self-test within {_rounded_up(error)}{notes}")
            reason = f"its self-test found {where} off by {error:.1e} of its size where {allowed:.0e} is allowed"
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
    one_digit = decimal.Context(prec=1, rounding=decimal.ROUND_UP)
    return f"{one_digit.create_decimal(f'{error:.6e}'):.0e}"


def find_backend(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    """The fastest backend that takes this use on this device and has not been ruled out."""
    if device.type != "cuda" or use.op not in backends.BACKENDS:
        return backends.PYTORCH
    index = torch.cuda.current_device() if device.index is None else device.index
    heads, key_dim, value_dim, tokens = use.heads, use.key_dim, use.value_dim, backends.MIN_KERNEL_TOKENS
    match use.op:
        case "attention":
            return attention_backend(use, dtype, device)
        case "path_attention":
            served = path_attention_fla.serves(key_dim, value_dim, dtype, index)
        case "selective_scan":
            served = recurrence.scan_takes_kernel(key_dim, dtype, device)
        case "short_convolution":
            served = short_convolution.kernel_serves(dtype, key_dim, value_dim // max(1, heads), heads, index)
        case "gated_norm":
            served = norm.gated_norm_takes_kernel(dtype, value_dim // heads, index)
        case "swiglu":
            served = swiglu.kernel_serves(dtype, tokens, index)
        case "shift_norm":
            served = shift_norm.kernel_serves(dtype, value_dim // heads, tokens, index)
        case "residual_norm":
            served = residual_norm.kernel_serves(dtype, value_dim, tokens, index)
        case _:
            groups = use.key_heads or heads
            if use.op == "simple_gla" and recurrence.grouped.serves(heads, groups, key_dim, value_dim, dtype, index):
                return backends.TRITON
            served = recurrence.fla.serves(use.op, key_dim, value_dim, dtype, index)
    # Of these ops the kernels of one package stand before PyTorch.
    return backends.BACKENDS[use.op][-2] if served else backends.PYTORCH


def check(
    use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, generator: torch.Generator
) -> tuple[float, str]:
    """Compare what runs this use with float64; arguments as in `choose_backends`.

    Returns:
        The largest ‖x - reference‖ / ‖reference‖ of outputs and gradients, and where it is.
    """
    make_problems, _ = _OPS[use.op]
    return max(_compare(problem, device) for problem in make_problems(use, _Run(dtype, device, lengths, generator)))


def _compare(problem: _Problem, device: torch.device) -> tuple[float, str]:
    where = torch.device("cpu") if problem.on_cpu else device
    inputs, groups = problem.inputs.values(), problem.groups
    got = _results(problem.call, [x.to(device) for x in inputs], [d.to(device) for d in problem.d_outs])
    errors = []
    for group in [0] if groups is None else sorted({0, groups - 1}):

        def part(x: Tensor, group: int = group) -> Tensor:
            if groups is not None:
                heads = x.shape[2] // groups
                x = x[:, :, group * heads : (group + 1) * heads]
            return x.to(where)

        want = _results(
            problem.reference or problem.call, [part(x).double() for x in inputs], [part(d) for d in problem.d_outs]
        )
        names = [*problem.outputs, *(f"the gradient of {name}" for name in problem.inputs)][: len(want)]
        errors += [(_relative_error(part(a), b), name) for a, b, name in zip(got, want, names, strict=True)]
    return max(errors)


def _results(call: Callable[..., Any], inputs: Sequence[Tensor], d_outs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of all inputs if there are gradients of outputs."""
    leaves = [x.detach().clone().requires_grad_(bool(d_outs)) for x in inputs]
    out = call(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    values = [x.detach() for x in outs]
    if not d_outs:
        return values
    return values + list(torch.autograd.grad(outs, leaves, [d.to(x.dtype) for d, x in zip(d_outs, outs, strict=True)]))


def _relative_error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖; infinite where got is not finite."""
    error = ((got.double() - want).norm() / want.norm()).item()
    return error if math.isfinite(error) else math.inf


def _documents(length: int, device: torch.device) -> Tensor:
    """Bounds of packed documents of several tiles, of a few tokens and of none."""
    bounds = sorted([0, length // 2 + 3, length // 2 + 8, length - length // 4, length, length])
    return torch.tensor(bounds, device=device, dtype=torch.int32).clamp(max=length)


# The problems of each op, drawn one by one as they are asked for.


def problem_length(length: int) -> int:
    """A short length that kernels treat as they do `length`: whole tiles or not, a multiple of 16 of them or not."""
    if length <= 3 * STRETCH:
        return length
    if length % (16 * STRETCH) == 0:
        return 16 * STRETCH
    return 2 * STRETCH + (length % STRETCH or STRETCH)


def _attention(use: OpUse, run: _Run) -> Iterator[_Problem]:
    # Length, left padding, and whether the last token is decoded.
    if run.lengths is None:
        whole, ragged = 3 * STRETCH, 2 * STRETCH + 37
        cases = [(whole, 0, False), (ragged, 0, False), (ragged, STRETCH + 5, False)]
        cases += [(ragged, 0, True)] * use.is_gated
    else:
        cases = [(length, 0, False) for length in sorted({problem_length(length) for length in run.lengths})]
    window = use.window
    if window is not None:
        # One as long as a sequence hides nothing; what it compiles and skips does not depend on how long it is.
        hides = run.lengths is None or max(run.lengths, default=0) > window
        window = min(window, STRETCH + STRETCH // 2) if hides else None
    heads, groups = use.heads, use.key_heads or use.heads
    for length, padding, decodes in cases:
        # As after QK-norm: no score is above √D, which is what makes a threshold safe.
        q = F.normalize(run.normal(1, length, heads, use.key_dim), dim=-1) * use.key_dim**0.5
        k = F.normalize(run.normal(1, length, groups, use.key_dim), dim=-1) * use.key_dim**0.5
        v = run.normal(1, length, groups, use.value_dim)
        # Every other head forgets within a few tokens, so that pruning has something to skip; the rest within hundreds.
        speed_H = torch.where(torch.arange(heads) % 2 == 0, 0.0, 6.0)
        log_fgate = F.logsigmoid(run.normal(1, length, heads) + speed_H)
        d_out = run.rounded(1, length, heads, use.value_dim)
        inputs = {"q": q.to(run.dtype), "k": k.to(run.dtype), "v": v.to(run.dtype)}
        inputs |= {"log f": log_fgate} if use.is_gated else {}
        visible: dict[str, Any] = {
            "window_size": window,
            "seq_start": torch.tensor([padding], device=run.device) if padding else None,
            "cu_seqlens": _documents(length, run.device) if use.packed else None,
        }
        if decodes:
            inputs["q"] = inputs["q"][:, -1:]
            yield _Problem(_decode, inputs, (), _attention_reference, outputs=("the output of decoding",))
            continue
        options: dict[str, Any] = {}
        if use.pruning == "auto":
            options = {"adaptive_threshold": "auto", "log_tolerance": _LOG_PRUNING_TOLERANCE}
        elif use.pruning == "threshold":
            bound = _LOG_PRUNING_TOLERANCE - (2 * use.key_dim**0.5 + math.log(length))
            options = {"adaptive_threshold": torch.full((heads,), bound, device=run.device)}
        call = functools.partial(_attend, visible=visible, **options)
        yield _Problem(call, inputs, [d_out], functools.partial(_attention_reference, **visible), groups=groups)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor | None = None, *, visible: Mapping[str, Any], **pruning: Any
) -> Any:
    if log_fgate is None:
        return attention.causal_attention(q, k, v, **visible)
    early = threading.Thread(target=_compile_backward, args=(q, k, v, log_fgate), daemon=True)
    # The backward pass of other calls needs more than these inputs.
    if q.is_cuda and all(x is None for x in visible.values()):
        early.start()
    try:
        return forgetting_attention(q, k, v, log_fgate, **pruning, **visible)
    finally:
        if early.ident is not None:
            early.join()


def _compile_backward(*tensors: Tensor) -> None:
    """Compile the kernels of the backward pass beside those of the forward pass: half the wait for compilers."""
    from forgetting_transformer.ops.forgetting_attention import triton as kernels

    try:
        q, k, v, log_fgate = (x.detach().transpose(1, 2) for x in tensors)
        kernels.compile_backward(q, q, k, v, log_fgate, q.shape[-1] ** -0.5)  # gradients have the shape of queries
    except Exception as error:  # the test itself does the same, and says what is wrong
        log.debug("the backward pass was not compiled early: %s", error)


def _attention_reference(
    *tensors: Tensor,
    window_size: int | None = None,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    q, k, v, *gates = (x.transpose(1, 2) for x in tensors)
    log_fgate = gates[0] if gates else q.new_zeros(q.shape[:3])
    first_key = first_visible_key(q, k, window=window_size, cu_seqlens=cu_seqlens)
    out, _ = forgetting_attention_reference(q, k, v, log_fgate, seq_start, q.shape[-1] ** -0.5, first_key_BT=first_key)
    return out.transpose(1, 2)


def _decode(q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor) -> Any:
    return forgetting_attention_decode(q, k, v, cumulative_log_fgate(log_fgate))


def _recurrence(use: OpUse, run: _Run) -> Iterator[_Problem]:
    """Lengths do not matter to these kernels."""
    shape = (1, _RECURRENCE_LENGTH, use.heads)
    of_keys = (1, _RECURRENCE_LENGTH, use.key_heads or use.heads, use.key_dim)
    inputs = {
        "q": run.rounded(*of_keys),
        "k": F.normalize(run.normal(*of_keys), dim=-1).to(run.dtype),
        "v": run.rounded(*shape, use.value_dim),
    }
    if use.op in ("delta_rule", "gated_delta_rule", "kda"):
        inputs["beta"] = run.normal(*shape).sigmoid()
    if use.op != "delta_rule":
        by_channel = use.op in ("gla", "kda")
        inputs["log_decay"] = F.logsigmoid(run.normal(*shape, *([use.key_dim] if by_channel else [])) + 2)
    is_grouped = use.key_heads is not None
    if is_grouped:
        inputs |= {"step": F.softplus(run.normal(*shape)), "skip": run.normal(use.heads)}
    d_outs = [run.rounded(*shape, use.value_dim)]
    names = list(inputs)[3:]

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        named: dict[str, Any] = dict(zip(names, others, strict=True))
        if use.packed and is_grouped:
            named["cu_seqlens"] = _documents(_RECURRENCE_LENGTH, q.device)
        return recurrence.recurrence(q, k, v, scale=1.0, **named)[0]

    def reference(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        gates = recurrence.Gates(**dict(zip(names, others, strict=True)))
        return recurrence.reference.linear_recurrence(q, k, v, gates, 1.0, None)[0]

    if is_grouped:
        # Gradients of queries and keys are sums over heads, so all are needed; in chunks, in float64.
        yield _Problem(call, inputs, d_outs, on_cpu=True)
    else:
        yield _Problem(call, inputs, d_outs, reference, on_cpu=True, groups=use.heads)


def _path_attention(use: OpUse, run: _Run) -> Iterator[_Problem]:
    """Lengths do not matter to these kernels. The reference is PyTorch."""
    shape = (1, _PATH_LENGTH, use.heads)
    inputs = {
        "q": run.rounded(*shape, use.key_dim),
        "k": run.rounded(*shape, use.key_dim),
        "v": run.rounded(*shape, use.value_dim),
        "w": F.normalize(run.normal(*shape, use.key_dim), dim=-1),
        "beta": 2 * run.normal(*shape).sigmoid(),
        "log f": F.logsigmoid(run.normal(*shape) + 3),
    }

    def call(*tensors: Tensor) -> Tensor:
        return path_attention.path_attention(*tensors, has_resets=False)[0]

    yield _Problem(call, inputs, [run.rounded(*shape, use.value_dim)], groups=use.heads)


def _short_convolution(use: OpUse, run: _Run) -> Iterator[_Problem]:
    """Of lengths it matters whether they are multiples of 16, and whether any may come."""
    channels, taps = use.value_dim, use.key_dim
    if run.lengths is None:
        cases = [(length, goes_on) for length in (128, 133) for goes_on in (False, True)]
    else:
        cases = [(length, False) for length in sorted({128 + length % 16 for length in run.lengths})]
    for length, goes_on in cases:
        inputs = {
            "x": run.rounded(1, length, channels),
            "weight": run.normal(channels, 1, taps),
            "bias": run.normal(channels),
        }
        if goes_on and taps > 1:
            inputs["previous"] = run.normal(1, channels, taps - 1)

        def call(
            x: Tensor, weight: Tensor, bias: Tensor, previous: Tensor | None = None, goes_on: bool = goes_on
        ) -> Tensor:
            options: dict[str, Any] = {"previous_BCW": previous, "silu": True, "unit_heads": use.heads}
            if use.packed:
                token, bounds = torch.arange(x.shape[1], device=x.device), _documents(x.shape[1], x.device)
                start = bounds[torch.searchsorted(bounds, token, right=True) - 1]
                # The first document goes on from the previous inputs, if there are any.
                options["position_BT"] = torch.where(start == 0, token + taps * goes_on, token - start)[None]
            return short_convolution.short_convolution(x, weight, bias, **options)[0]

        yield _Problem(call, inputs, [run.rounded(1, length, channels)], on_cpu=True)


def _gated_norm(use: OpUse, run: _Run) -> Iterator[_Problem]:
    """Of lengths it matters only whether they are multiples of 16."""

    def call(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {"gate_first": use.key_dim == 1, "activation": use.activation}
        return norm.gated_rms_norm(x, gate, weight, 1e-6, use.heads, **options)

    for length in sorted({128 + length % 16 for length in run.lengths or (0, 5)}):
        # A gate is often a slice of a wider projection.
        x, gate, d_out = (run.normal(1, length, use.value_dim + 16)[..., :-16].to(run.dtype) for _ in range(3))
        inputs = {"x": x, "weight": run.normal(use.value_dim)} | ({"gate": gate} if use.is_gated else {})
        yield _Problem(call, inputs, [d_out], on_cpu=True)


def _selective_scan(use: OpUse, run: _Run) -> Iterator[_Problem]:
    """Lengths do not matter to these kernels; whether they start from a state does."""
    channels, states = use.value_dim, use.key_dim
    inputs = {
        "x": run.rounded(1, _SCAN_LENGTH, channels),
        "dt": run.rounded(1, _SCAN_LENGTH, channels),
        "A": -torch.arange(1.0, states + 1).expand(channels, -1),
        "B": run.rounded(1, _SCAN_LENGTH, states),
        "C": run.rounded(1, _SCAN_LENGTH, states),
        "D": run.normal(channels),
        "dt_bias": run.normal(channels) - 3,
    }
    if run.lengths is None:  # decoding after a prompt, in parts
        inputs["initial_state"] = run.normal(1, channels, states)

    def call(*tensors: Tensor) -> Tensor:
        x, dt, A, B, C, D, dt_bias, *state = tensors
        before, bounds = state[0] if state else None, _documents(_SCAN_LENGTH, x.device) if use.packed else None
        return recurrence.selective_scan(
            x, dt, A, B, C, D_I=D, dt_bias_I=dt_bias, initial_state_BIK=before, cu_seqlens=bounds
        )[0]

    yield _Problem(call, inputs, [run.rounded(1, _SCAN_LENGTH, channels)])


def _layer(use: OpUse, run: _Run) -> Iterator[_Problem]:
    """These ops treat every token alike, or look at the one before: lengths do not matter."""
    rows, width = backends.MIN_KERNEL_TOKENS + 5, use.value_dim
    outputs: tuple[str, ...] = ("the output",)
    shapes: dict[str, tuple[int, ...]]
    layer: Callable[..., Any]
    if use.op == "swiglu":
        shapes, layer = {"gate and up": (rows, 2 * width)}, swiglu.swiglu
    elif use.op == "residual_norm":
        shapes, layer = {"x": (rows, width), "branch": (rows, width), "weight": (width,)}, _norms_of_residuals
        outputs += ("the residual stream",)
    else:
        shapes = {"y": (rows, width), "shift": (rows, use.heads)} | ({"weight": (use.key_dim,)} if use.key_dim else {})
        layer = functools.partial(_shift_norms, heads=use.heads)
    inputs = {name: run.normal(*shape) for name, shape in shapes.items()}
    inputs |= {name: x.to(run.dtype) for name, x in inputs.items() if name not in ("x", "weight")}

    def call(*tensors: Tensor) -> Any:
        is_reference = tensors[0].dtype == torch.float64
        with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32 and not is_reference):
            return layer(*tensors)

    yield _Problem(call, inputs, [run.rounded(rows, width) for _ in outputs], outputs=outputs)


def _norms_of_residuals(x: Tensor, branch: Tensor, weight: Tensor) -> Any:
    """Without a branch and with one."""
    y, x = residual_norm.add_rms_norm(x, None, weight, 1e-6)
    return residual_norm.add_rms_norm(x, branch + y, weight, 1e-6)


def _shift_norms(y: Tensor, shift: Tensor, weight: Tensor | None = None, *, heads: int) -> Tensor:
    """With a shift, and if there is a norm, without one before."""
    norm_options: dict[str, Any] = {} if weight is None else {"weight": weight, "eps": 1e-5}
    y = y[None] if weight is None else shift_norm.shift_norm(y[None], heads, **norm_options)
    return shift_norm.shift_norm(y, heads, shift_BTH=shift[None], **norm_options)[0]


# What makes the problems of an op, and the tolerances that it is held to.
_OPS: dict[str, tuple[Callable[[OpUse, _Run], Iterator[_Problem]], Mapping[torch.dtype, float]]] = {
    "attention": (_attention, TOLERANCES),
    "path_attention": (_path_attention, RECURRENCE_TOLERANCES),
    "selective_scan": (_selective_scan, TOLERANCES),
    "short_convolution": (_short_convolution, ELEMENTWISE_TOLERANCES),
    "gated_norm": (_gated_norm, ELEMENTWISE_TOLERANCES),
    **dict.fromkeys(_LAYERS, (_layer, ELEMENTWISE_TOLERANCES)),
    **dict.fromkeys(
        ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda"), (_recurrence, RECURRENCE_TOLERANCES)
    ),
}
