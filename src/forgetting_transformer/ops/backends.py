"""The backends of the ops, and those that are ruled out in this process.

The backends of an op are listed in the order in which they are tried, the fastest first. A backend is ruled out, for
the rest of the process, when its package does not import, a kernel of it does not compile, or its self-test
(`selftest.py`) finds it wrong. PyTorch is never ruled out. Importing this imports neither Triton nor
flash-linear-attention.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from forgetting_transformer.console import how_to_install

HOPPER, TRITON, FLA, PYTORCH = "hopper", "triton", "fla", "pytorch"

#: Attention with and without forget gates shares its kernels. An op that is not listed runs in PyTorch alone.
BACKENDS: dict[str, tuple[str, ...]] = {
    "attention": (HOPPER, TRITON, PYTORCH),
    "short_convolution": (TRITON, PYTORCH),
    "gated_norm": (TRITON, PYTORCH),
    "swiglu": (TRITON, PYTORCH),
    "shift_norm": (TRITON, PYTORCH),
    "residual_norm": (TRITON, PYTORCH),
    "selective_scan": (TRITON, PYTORCH),
    "simple_gla": (TRITON, FLA, PYTORCH),  # Triton where heads share queries and keys
    "gla": (FLA, PYTORCH),
    "delta_rule": (FLA, PYTORCH),
    "gated_delta_rule": (FLA, PYTORCH),
    "kda": (FLA, PYTORCH),
    "path_attention": (FLA, PYTORCH),
    "recurrences": (FLA, PYTORCH),  # all of them, where the package itself is broken
}
TITLES = {HOPPER: "Hopper kernels", TRITON: "Triton", FLA: "flash-linear-attention", PYTORCH: "PyTorch"}
# Cost of the next backend, measured on an H200, and the fix.
_COSTS = {
    HOPPER: "attention takes 1.3 to 1.5 times as long",
    TRITON: "attention takes 14 to 40 times as long, and its gradients are not bitwise reproducible",
    FLA: "it takes 40 to 150 times as long",
}
# The same where it depends on the op.
_COSTS_OF_OP = {
    ("path_attention", FLA): "it takes many times as long, and its memory grows with the square of the length",
    ("selective_scan", TRITON): "a step of Samba takes 4 times as long",
    ("short_convolution", TRITON): "it takes many times as long, most of it for the gradients of its filters",
    ("gated_norm", TRITON): "it takes several times as long",
    ("swiglu", TRITON): "a step takes a little longer",
    ("residual_norm", TRITON): "a step takes a little longer",
    ("shift_norm", TRITON): "a step takes a little longer",
    ("simple_gla", TRITON): "it takes several times as long, and copies queries and keys for every head",
}
_CURES = {
    HOPPER: "install a Triton with which these kernels were measured: 3.6.0, 3.7.1 or 3.9.0",
    TRITON: "install Triton again: pip install --force-reinstall --no-deps triton=={triton}",
    FLA: "install it again: pip install --force-reinstall --no-deps fla-core=={fla_core}",
}

#: Calls on a GPU with fewer tokens than this stay in PyTorch where a kernel saves memory traffic alone.
MIN_KERNEL_TOKENS = 1024

# Modules of the package fla that are not in fla-core.
_SECOND_PACKAGE = ("fla.layers", "fla.models")

# (op, backend): the warning with the reason why it is ruled out.
_faults: dict[tuple[str, str], str] = {}

#: Fix where nothing compiles: Triton builds its launchers with the system's compiler.
COMPILER_CURE = (
    "look whether a C compiler and Python's headers are installed (gcc, python3-dev), or install another Triton"
)


class OpUse(NamedTuple):
    """A model's call of an op, as far as it decides which kernels run.

    Attributes:
        op: a name in `BACKENDS`, or another op, which runs in PyTorch.
        heads: query heads; short_convolution: heads that are normalised, 0 for none; gated_norm: groups.
        key_dim: channels of a head of queries and keys; short_convolution: taps; gated_norm: 1 with the gate before the
            norm, 0 behind it; selective_scan: states per channel; shift_norm: weights of the norm, 0 without one.
        value_dim: channels of a head of values; short_convolution, gated_norm, selective_scan and layers: all channels.
        key_heads: attention: heads of keys and values; simple_gla: of queries and keys. Default as many as heads.
        is_gated: attention: whether it has forget gates; gated_norm: whether it has a gate.
        window: attention: keys that a query sees at most; None is all.
        activation: gated_norm: of the gate.
        packed: attention, convolutions, Mamba and Mamba-2: whether documents are packed, with `cu_seqlens`.
        pruning: attention: kind of pruning: "threshold", "auto", or None for none.
    """

    op: str
    heads: int
    key_dim: int
    value_dim: int
    key_heads: int | None = None
    is_gated: bool = False
    window: int | None = None
    pruning: str | None = None
    packed: bool = False
    activation: str = "silu"


def is_usable(op: str, backend: str) -> bool:
    """Whether this backend has not been ruled out."""
    return (op, backend) not in _faults


def faults() -> dict[tuple[str, str], str]:
    """(op, backend): the warning about it, of all that were ruled out."""
    return dict(_faults)


def rule_out(op: str, backend: str, reason: str, cure: str | None = None) -> None:
    """Stop using a backend and warn once, with the failure, the replacement, its cost and the fix."""
    if (op, backend) in _faults:
        return
    order = BACKENDS[op]
    following = TITLES[order[order.index(backend) + 1]]
    cure = cure or _CURES[backend].format(triton=installed_version("triton"), fla_core=installed_version("fla-core"))
    cost = _COSTS_OF_OP.get((op, backend), _COSTS[backend])
    message = f"{op}: {TITLES[backend]} cannot be used: {reason}. {following} runs instead: {cost}. "
    message += f"To mend it, {cure}"
    _faults[op, backend] = message
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def rule_out_import(op: str, backend: str, package: str, name: str, error: Exception, install: str) -> None:
    """Stop using a backend whose package does not import: it or what it needs is not installed, or it is broken.

    Args:
        package: its name for pip.
        name: in the message.
        install: the fix where it is not installed.
    """
    version = installed_version(package)
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if version is None:
        rule_out(op, backend, "it is not installed", install)
    elif missing in _SECOND_PACKAGE:
        rule_out(op, backend, f"{package} {version} needs flash-linear-attention, which is not installed", install)
    elif (needed := missing.partition(".")[0]) not in ("", package.partition("-")[0]):
        rule_out(op, backend, f"{package} {version} needs {needed}, which is not installed", f"pip install {needed}")
    else:
        rule_out(op, backend, f"{name} {version} is installed but broken, {describe_error(error)}")


def has_triton(op: str, module: str, device_index: int) -> bool:
    """Whether the Triton kernels of an op can be used on this GPU; a constant to compiled graphs.

    Args:
        module: full name of the module that holds them. Importing it registers its operators.
    """
    return is_usable(op, TRITON) and _loads_triton(op, module, device_index)


# the mark that `torch.compiler.assume_constant_result` sets. The decorator itself would import the compiler.
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _loads_triton(op: str, module: str, device_index: int) -> bool:
    if torch.cuda.get_device_capability(device_index) < (8, 0):
        return False
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that is broken fails in any way
        rule_out_import(op, TRITON, "triton", "Triton", error, "pip install triton")
        return False
    return True


def attempt(op: str, launch: Callable[..., Any], *arguments: Any) -> Any:
    """Result of the Triton kernels of an op; None, after a warning, where Triton cannot compile them."""
    if torch.compiler.is_compiling():
        return launch(*arguments)
    try:
        return launch(*arguments)
    except Exception as error:  # compilers raise errors of many classes
        rule_out_compiling(op, TRITON, error)
        return None


def rule_out_compiling(op: str, backend: str, error: Exception) -> None:
    """Stop using a backend whose kernels Triton cannot compile; raises any other error again."""
    if is_failure_of_gpu(error) or not is_raised_by_triton(error):
        raise error
    rule_out(op, backend, f"its kernels do not compile: {describe_error(error)}", COMPILER_CURE)


def load_fla(op: str, functions: Mapping[str, tuple[str, str]]) -> dict[str, Callable[..., Any]]:
    """Functions of flash-linear-attention; none, after ruling it out for this op, where one does not import.

    Args:
        functions: for each key of the result its module and its name there.
    """
    try:
        return {key: getattr(importlib.import_module(module), name) for key, (module, name) in functions.items()}
    except Exception as error:  # a package that is broken, or beside a Triton that is, fails in any way
        rule_out_import(op, FLA, "fla-core", "version", error, how_to_install("cuda"))
        return {}


def adopt(others: dict[tuple[str, str], str]) -> None:
    """Rule out backends that another process ruled out; `others` is its `faults`."""
    for key, message in others.items():
        _faults.setdefault(key, message)


@contextlib.contextmanager
def without(op: str, *names: str) -> Iterator[None]:
    """Go without these backends for a while, without a warning, for measurements."""
    before = dict(_faults)
    _faults.update({(op, name): "left out on purpose" for name in names})
    try:
        yield
    finally:
        _faults.clear()
        _faults.update(before)


def installed_version(package: str) -> str | None:
    """The version of an installed package, also of one that does not import; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = package.replace("-", "_")
        return "unknown" if importlib.util.find_spec(module) is not None else None


def is_failure_of_gpu(error: Exception) -> bool:
    """Whether a GPU ran out of memory or failed while a kernel ran. Another backend would not help."""
    return isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) or "Triton Error [CUDA]" in str(error)


def is_raised_by_triton(error: Exception) -> bool:
    """Whether the error comes from inside Triton, and not from how a kernel is called."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "triton":
            return True
        frame = frame.tb_next
    return False


def describe_error(error: BaseException) -> str:
    """One line: the kind of error and the first line of its message, cut in the middle where it is long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0].rstrip(".")
    return f"{type(error).__name__}: {text if len(text) <= 240 else f'{text[:120]} … {text[-110:]}'}"
