"""Self-test of kernels: the backend of each op, compared with float64 before a run relies on it.

A kernel that is right on the GPU and compiler it was written on may be wrong, or not compile, on others. So before the
first step each kernel of a run computes a small problem of the run's own head dimensions and dtype, forward and
backward. It is compared with the op in float64, which no kernel takes. One that fails is ruled out, and the next
backend is tested.

The problems have the run's number of heads, and lengths that Triton specialises in the same way, so that what is
compiled here is what the run needs and is not compiled again. They cover several tiles, and what the run has of
pruning, windows, ragged lengths and padding. They use no global random numbers.

A new op is a row of `_OPS`, at the end, and a function that calls it.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import contextlib
import importlib
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import attention, backends, path_attention, path_attention_fla, recurrence
from forgetting_transformer.ops.backends import MIN_KERNEL_TOKENS, OpUse
from forgetting_transformer.ops.forgetting_attention import (
    cumulative_log_fgate,
    forgetting_attention,
    forgetting_attention_decode,
    forgetting_attention_reference,
)
from forgetting_transformer.ops.forgetting_attention.constants import STRETCH
from forgetting_transformer.ops.forgetting_attention.dispatch import attention_backend, first_visible_key
from forgetting_transformer.ops.layers import norm, residual_norm, shift_norm, short_convolution, swiglu

#: ‖x - reference‖ / ‖reference‖ of outputs and gradients, of attention and scans. In 16 bits the kernels measured
#: 1.8e-3 to 3.4e-3 (bfloat16) and a quarter of that (float16); a kernel that is wrong is off by far more.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 5e-5}
#: The same of short convolutions, gated norms and other layers, which round their results alone.
ELEMENTWISE_TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
#: The same of recurrences and PaTH attention, whose kernels keep inputs and states in 16 bits.
RECURRENCE_TOLERANCES = dict.fromkeys(TOLERANCES, 2e-2)

# Layers have a single backend without a GPU, which need not be listed.
_LAYERS = ("swiglu", "shift_norm", "residual_norm")
# (op, backend) whose backward pass adds by atomics.
_NOT_REPRODUCIBLE = {("attention", backends.PYTORCH), ("path_attention", backends.FLA)}
# FLA's kernels, and what is chosen for them here, keep state that belongs to the whole process: two threads at once
# have ruled out kernels that were right, or tuned them differently from the next start.
_FLA_LOCK = threading.Lock()
# Weight that pruning may leave out of a row in a self-test, in nats, far below every tolerance.
_LOG_PRUNING_TOLERANCE = -25.0


class Backend(NamedTuple):
    """Backend of one op.

    Attributes:
        name: the backend, as in `backends.BACKENDS`.
        text: the same for people: with versions, and the largest error of its self-test.
    """

    name: str
    text: str


def choose_backends(
    uses: Iterable[OpUse], dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None
) -> dict[str, Backend]:
    """Test the backends of these uses on this device, rule out those that fail, and return the others.

    Args:
        uses: calls of ops by the model.
        dtype: dtype of queries, keys and values.
        device: where the model is. Nothing is tested on devices other than GPUs, which run everything in PyTorch.
        lengths: tokens of the sequences that will come; None if any may, with left padding and
            decoding too, as in evaluation.

    Returns:
        op: its backend; layers on GPUs alone. Nothing is warned of: `backends.faults` has the warnings.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread; others begin with the first
    by_op: dict[str, list[OpUse]] = {}
    for use in dict.fromkeys(uses):
        if use.op not in _LAYERS or device.type == "cuda":
            by_op.setdefault(use.op, []).append(use)

    def choose(op: str) -> Backend:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first
        calls_fla = backends.FLA in backends.BACKENDS.get(op, ())
        # Autograd has one thread for all backward passes of a GPU, where tests would wait for each other's compilers.
        with torch.autograd.set_multithreading_enabled(False), _FLA_LOCK if calls_fla else contextlib.nullcontext():
            return _choose(op, by_op[op], dtype, device, lengths)

    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, len(by_op)), "self-test") as threads:
        warnings.simplefilter("ignore", RuntimeWarning)
        return dict(zip(by_op, threads.map(choose, by_op), strict=True))


def _choose(
    op: str, uses: Sequence[OpUse], dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None
) -> Backend:
    while True:
        names = [find_backend(use, dtype, device) for use in uses]
        # The backend that does most of the work represents all: the fastest of any use.
        name = min(names, key=backends.BACKENDS.get(op, (backends.PYTORCH,)).index)
        notes = ", gradients not bitwise reproducible" * (device.type == "cuda" and (op, name) in _NOT_REPRODUCIBLE)
        if name == backends.PYTORCH:
            return Backend(name, "PyTorch" + notes)
        triton = f"Triton {backends.installed_version('triton')}"
        try:
            tested = zip(uses, names, strict=True)
            error, where = max(check(use, dtype, device, lengths) for use, its in tested if its != backends.PYTORCH)
            if not backends.is_usable(op, name):  # the op itself went on to the next one
                continue
            if error <= (allowed := _OPS[op].tolerances.get(dtype, 0.0)):
                source = {backends.HOPPER: f"{backends.TITLES[backends.HOPPER]}, ", backends.TRITON: ""}
                fla = f"FLA {backends.installed_version('fla-core')}, "
                return Backend(name, f"{source.get(name, fla)}{triton}, self-test within {error:.1e}{notes}")
            reason = f"its self-test found {where} off by {error:.1e} of its size where {allowed:.0e} is allowed"
        except Exception as failure:  # what a compiler raises is not one class
            if backends.is_failure_of_gpu(failure):
                raise
            reason = f"its self-test failed with {backends.describe_error(failure)}"
        backends.rule_out(op, name, f"with {triton} {reason}")


def find_backend(use: OpUse, dtype: torch.dtype, device: torch.device) -> str:
    """The fastest backend that takes this use on this device, a GPU with its number, and has not been ruled out."""
    if device.type != "cuda" or use.op not in _OPS:
        return backends.PYTORCH
    served = _OPS[use.op].serves(use, dtype, device.index)
    return served if isinstance(served, str) else backends.BACKENDS[use.op][-2 if served else -1]


class _Op(NamedTuple):
    """A row of the table of ops.

    Attributes:
        call: the op, a function of a use, a variant and inputs.
        inputs: name: axes, and a kind of `_KINDS`. Axes that begin with T have a batch axis of 1 before it.
        serves: the backend of a use on the GPU of an index, or whether the one before PyTorch takes it.
        tolerances: dtype: largest allowed error.
        length: the length of the problem that stands for sequences of a length.
        variants: further cases where any sequence may come: "padded" on the left, "decoding" the last token,
            "continued" from a state.
        by_heads: the first and the last group of heads stand for all of them in the reference: all scores of all heads
            in float64 would be gigabytes.
        on_cpu: the reference runs on the CPU, where it is faster than the start of float64 libraries of a GPU.
    """

    call: Callable[[OpUse, str, Mapping[str, Tensor]], Any]
    inputs: Mapping[str, str]
    serves: Callable[[OpUse, torch.dtype, int], bool | str]
    tolerances: Mapping[torch.dtype, float] = ELEMENTWISE_TOLERANCES
    length: Callable[[int], int] = lambda _: MIN_KERNEL_TOKENS + 5
    variants: tuple[str, ...] = ()
    by_heads: bool = False
    on_cpu: bool = False


# Kinds of inputs, made of normally distributed numbers.
_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "unit": lambda x: F.normalize(x, dim=-1),
    # As after QK-norm: no score is above √D, which is what makes a threshold safe.
    "normed": lambda x: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5,
    "share": torch.sigmoid,
    "share of two": lambda x: 2 * x.sigmoid(),
    "step": F.softplus,
    "log decay": lambda x: F.logsigmoid(x + 2),
    "log gate": lambda x: F.logsigmoid(x + 3),
    # Every other head forgets within a few tokens, so that pruning has something to skip; the rest within hundreds.
    "log gate of two speeds": lambda x: F.logsigmoid(x + 6 * (torch.arange(x.shape[-1]) % 2)),
    "rate": lambda x: -torch.arange(1.0, x.shape[-1] + 1).expand_as(x),
    "bias of steps": lambda x: x - 3,
}
# Kinds that have the run's dtype over tokens, but after "float32". All else, parameters and states, is float32.
_ROUNDED = ("", "unit", "normed")


def check(use: OpUse, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None) -> tuple[float, str]:
    """Compare the backend of this use with float64; arguments as in `choose_backends`.

    Returns:
        The largest ‖x - reference‖ / ‖reference‖ of outputs and gradients, and where it is.
    """
    op, groups, errors = _OPS[use.op], use.key_heads or use.heads, []
    if use.window is not None:
        # One as long as a sequence hides nothing; what it compiles and skips does not depend on how long it is.
        hides = lengths is None or max(lengths, default=0) > use.window
        use = use._replace(window=min(use.window, STRETCH + STRETCH // 2) if hides else None)
    # Whole tiles, and then ragged ones, where any length may come.
    cases = [(length, "") for length in dict.fromkeys(map(op.length, lengths or (3 * STRETCH, 2 * STRETCH + 37)))]
    if lengths is None and not use.packed:
        cases += [(cases[-1][0], variant) for variant in op.variants if variant != "decoding" or use.is_gated]
    generator = torch.Generator().manual_seed(0)
    for length, variant in cases:
        inputs = _draw(use, dtype, length, variant, generator)
        leaves, outs = _call(use, variant, {name: x.to(device) for name, x in inputs.items()})
        d_outs = [torch.randn(x.shape, generator=generator).to(dtype) for x in outs]
        got = _results(leaves, outs, d_outs)
        for group in sorted({0, groups - 1}) if op.by_heads else [0]:

            def own(x: Tensor, group: int = group) -> Tensor:
                x = x.cpu() if op.on_cpu else x.to(device)
                return x.chunk(groups, dim=2)[group] if op.by_heads else x

            doubles = {name: own(x).double() for name, x in inputs.items()}
            want = _results(*_call(use, variant, doubles), [own(d) for d in d_outs])
            errors += [(_relative_error(own(x), want[name]), name) for name, x in got.items()]
    return max(errors)


def _draw(use: OpUse, dtype: torch.dtype, length: int, variant: str, generator: torch.Generator) -> dict[str, Tensor]:
    """The inputs of an op, on the CPU."""
    sizes = {"T": length, "H": use.heads, "G": use.key_heads or use.heads, "K": use.key_dim, "V": use.value_dim}
    sizes |= {"U": 2 * use.value_dim, "W": use.key_dim - 1, "1": 1}
    is_grouped, is_continued = use.key_heads is not None, variant == "continued"
    is_given = {"log f": use.is_gated, "gate": use.is_gated, "step": is_grouped, "skip": is_grouped}
    is_given |= {"initial state": is_continued, "previous": is_continued and use.key_dim > 1}
    is_given |= {"norm's weight": use.key_dim > 0}
    inputs = {}
    for name, (axes, _, kind) in ((name, text.partition(" ")) for name, text in _OPS[use.op].inputs.items()):
        if is_given.get(name, True):
            shape, is_sequence = [sizes[axis] for axis in axes], axes[0] == "T"
            x = _KINDS[kind.removeprefix("float32").strip()](
                torch.randn([1] * is_sequence + shape, generator=generator)
            )
            inputs[name] = x.to(dtype) if is_sequence and kind in _ROUNDED else x
    return inputs


def _call(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Leaves of a graph with these numbers, and the outputs."""
    leaves = {name: x.detach().clone().requires_grad_(variant != "decoding") for name, x in inputs.items()}
    out = _OPS[use.op].call(use, variant, leaves)
    return leaves, out if isinstance(out, tuple) else (out,)


def _results(leaves: Mapping[str, Tensor], outs: tuple[Tensor, ...], d_outs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    if not outs[0].requires_grad:
        return {"the output of decoding": outs[0]}
    gradients = torch.autograd.grad(outs, [*leaves.values()], [d.to(x) for d, x in zip(d_outs, outs, strict=True)])
    results = {name: x.detach() for name, x in zip(("the output", "the residual stream"), outs, strict=False)}
    return results | {f"the gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}


def _relative_error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖; infinite where got is not finite."""
    error = ((got.double() - want).norm() / want.norm()).item()
    return error if math.isfinite(error) else math.inf


def problem_length(length: int) -> int:
    """A short length that kernels treat as they do `length`: whole tiles or not, a multiple of 16 of them or not."""
    if length <= 3 * STRETCH:
        return length
    if length % (16 * STRETCH) == 0:
        return 16 * STRETCH
    return 2 * STRETCH + (length % STRETCH or STRETCH)


def _documents(use: OpUse, x: Tensor) -> Tensor | None:
    """Bounds of packed documents of several tiles, of a few tokens and of none; None where they are not packed."""
    if not use.packed:
        return None
    length = x.shape[1]
    bounds = sorted([0, length // 2 + 3, length // 2 + 8, length - length // 4, length, length])
    return torch.tensor(bounds, device=x.device, dtype=torch.int32).clamp(max=length)


# How each op is called.


def _attention(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    q, k, v, *gates = inputs.values()
    window, cu_seqlens = use.window, _documents(use, q)
    seq_start = torch.tensor([STRETCH + 5], device=q.device) if variant == "padded" else None
    if variant == "decoding":  # the cached keys are those of the window
        q, window = q[:, -1:], None
    if q.dtype == torch.float64:
        gates = gates or [q.new_zeros(q.shape[:3])]
        q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, *gates))
        first_key, scale = first_visible_key(q, k, window=window, cu_seqlens=cu_seqlens), use.key_dim**-0.5
        out, _ = forgetting_attention_reference(q, k, v, log_fgate, seq_start, scale, first_key_BT=first_key)
        return out.transpose(1, 2)
    if variant == "decoding":
        return forgetting_attention_decode(q, k, v, cumulative_log_fgate(*gates))
    options: dict[str, Any] = {"window_size": window, "seq_start": seq_start, "cu_seqlens": cu_seqlens}
    if not gates:
        return attention.causal_attention(q, k, v, **options)
    # The backward pass of other calls needs more than these inputs.
    is_plain = all(x is None for x in options.values())
    if use.pruning == "auto":
        options |= {"adaptive_threshold": "auto", "log_tolerance": _LOG_PRUNING_TOLERANCE}
    elif use.pruning == "threshold":
        bound = _LOG_PRUNING_TOLERANCE - (2 * use.key_dim**0.5 + math.log(q.shape[1]))
        options["adaptive_threshold"] = torch.full((use.heads,), bound, device=q.device)
    with ThreadPoolExecutor(1) as beside:
        if q.is_cuda and is_plain:
            # The kernels of the backward pass, which are compiled meanwhile: half the wait for compilers. An error is
            # found again where the test itself launches them.
            launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
            # Gradients of the output have the shape of queries.
            head_first = [x.detach().transpose(1, 2) for x in (q, q, k, v, *gates)]
            beside.submit(launcher.compile_backward, *head_first, sm_scale=use.key_dim**-0.5)
        return forgetting_attention(q, k, v, *gates, **options)


def _recurrence(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    q, k, v, *_ = inputs.values()
    options: dict[str, Any] = dict([*inputs.items()][3:])
    options |= {"cu_seqlens": _documents(use, q)} if use.key_heads is not None else {}
    return recurrence.recurrence(q, k, v, scale=1.0, **options)[0]


def _serves_recurrence(use: OpUse, dtype: torch.dtype, index: int) -> bool | str:
    sizes = (use.key_dim, use.value_dim, dtype, index)
    if use.op == "simple_gla" and recurrence.grouped.serves(use.heads, use.key_heads or use.heads, *sizes):
        return backends.TRITON
    return recurrence.fla.serves(use.op, *sizes)


def _selective_scan(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    x, dt, A, B, C, D, dt_bias, *state = inputs.values()
    options: dict[str, Any] = {"initial_state_BIK": state[0] if state else None, "cu_seqlens": _documents(use, x)}
    return recurrence.selective_scan(x, dt, A, B, C, D_I=D, dt_bias_I=dt_bias, **options)[0]


def _short_convolution(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    x, weight, bias, *previous = inputs.values()
    options: dict[str, Any] = {"previous_BCW": previous[0] if previous else None, "unit_heads": use.heads}
    if (bounds := _documents(use, x)) is not None:
        token = torch.arange(x.shape[1], device=x.device)
        options["position_BT"] = (token - bounds[torch.searchsorted(bounds, token, right=True) - 1])[None]
    return short_convolution.short_convolution(x, weight, bias, **options)[0]


def _gated_norm(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    options: dict[str, Any] = {"gate_first": use.key_dim == 1, "activation": use.activation}
    return norm.gated_rms_norm(inputs["x"], inputs.get("gate"), inputs["weight"], 1e-6, use.heads, **options)


def _residual_norm(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    """Two norms, without a branch and with one, under the autocast of a run."""
    x, branch, weight = inputs.values()
    with torch.autocast(x.device.type, branch.dtype, enabled=branch.dtype.itemsize == 2):
        y, x = residual_norm.add_rms_norm(x, None, weight, 1e-6)
        return residual_norm.add_rms_norm(x, branch + y, weight, 1e-6)


def _shift_norm(use: OpUse, variant: str, inputs: Mapping[str, Tensor]) -> Any:
    """A shift with its norm if there is one, after a norm without a shift."""
    y, shift, *weight = inputs.values()
    options: dict[str, Any] = {"weight": weight[0], "eps": 1e-5} if weight else {}
    y = shift_norm.shift_norm(y, use.heads, **options) if weight else y
    return shift_norm.shift_norm(y, use.heads, shift_BTH=shift, **options)


_OPS = {
    "attention": _Op(
        _attention,
        {"q": "THK normed", "k": "TGK normed", "v": "TGV", "log f": "TH log gate of two speeds"},
        lambda use, dtype, index: attention_backend(use, dtype, torch.device("cuda", index)),
        TOLERANCES,
        problem_length,
        variants=("padded", "decoding"),
        by_heads=True,
    ),
    "path_attention": _Op(
        lambda use, variant, inputs: path_attention.path_attention(*inputs.values(), has_resets=False)[0],
        {"q": "THK", "k": "THK", "v": "THV"}
        | {"w": "THK float32 unit", "beta": "TH share of two", "gates": "TH log gate"},
        lambda use, dtype, index: path_attention_fla.serves(use.key_dim, use.value_dim, dtype, index),
        RECURRENCE_TOLERANCES,
        lambda _: 1160,  # these kernels go through 512 tokens at a time: three of these, the last one ragged
        by_heads=True,
    ),
    **{
        op: _Op(
            _recurrence,
            {"q": "TGK", "k": "TGK unit", "v": "THV", **gates},
            _serves_recurrence,
            RECURRENCE_TOLERANCES,
            lambda _: 200,  # four chunks of 64, the last one ragged
            on_cpu=True,
        )
        for op, gates in {
            "simple_gla": {"log_decay": "TH log decay", "step": "TH step", "skip": "H"},
            "gla": {"log_decay": "THK log decay"},
            "delta_rule": {"beta": "TH share"},
            "gated_delta_rule": {"beta": "TH share", "log_decay": "TH log decay"},
            "kda": {"beta": "TH share", "log_decay": "THK log decay"},
        }.items()
    },
    "selective_scan": _Op(
        _selective_scan,
        {"x": "TV", "dt": "TV", "A": "VK rate", "B": "TK", "C": "TK", "D": "V", "dt_bias": "V bias of steps"}
        | {"initial state": "1VK"},
        lambda use, dtype, index: recurrence.scan_takes_kernel(use.key_dim, dtype, torch.device("cuda", index)),
        TOLERANCES,
        lambda _: 300,  # three chunks of 128
        variants=("continued",),
    ),
    "short_convolution": _Op(
        _short_convolution,
        {"x": "TV", "weight": "V1K", "bias": "V", "previous": "1VW"},
        lambda use, dtype, index: short_convolution.kernel_serves(
            dtype, use.key_dim, use.value_dim // max(1, use.heads), use.heads, index
        ),
        length=lambda length: 128 + length % 16,  # these kernels only distinguish multiples of 16
        variants=("continued",),
        on_cpu=True,
    ),
    "gated_norm": _Op(
        _gated_norm,
        {"x": "TV", "weight": "V", "gate": "TV"},
        lambda use, dtype, index: norm.gated_norm_takes_kernel(dtype, use.value_dim // use.heads, index),
        length=lambda length: 128 + length % 16,
        on_cpu=True,
    ),
    # Layers treat every token alike, or look at the one before.
    "swiglu": _Op(
        lambda use, variant, inputs: swiglu.swiglu(*inputs.values()),
        {"gate and up": "TU"},
        lambda use, dtype, index: swiglu.kernel_serves(dtype, MIN_KERNEL_TOKENS, index),
    ),
    "residual_norm": _Op(
        _residual_norm,
        {"x": "TV float32", "branch": "TV", "weight": "V"},
        lambda use, dtype, index: residual_norm.kernel_serves(dtype, use.value_dim, MIN_KERNEL_TOKENS, index),
    ),
    "shift_norm": _Op(
        _shift_norm,
        {"y": "TV", "shift": "TH", "norm's weight": "K"},
        lambda use, dtype, index: shift_norm.kernel_serves(dtype, use.value_dim // use.heads, MIN_KERNEL_TOKENS, index),
    ),
}
