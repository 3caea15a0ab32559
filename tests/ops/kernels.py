"""Kernel tests with one body for every device: in the interpreter of Triton on this CPU, and on a GPU if there is one.

Memory that is handed out unwritten holds NaN, or a large negative index.
"""

import base64
import contextlib
import functools
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import interpret

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


def on_every_device(test: Callable[..., None]) -> Callable[..., None]:
    """The test, whose first argument is the device that its tensors are made on.

    The interpreter's process imports its module and calls it by name, so what it is parametrised with is pickled.
    """

    @functools.wraps(test)
    def run(device: str, **arguments: Any) -> None:
        if device == "cpu":
            call = base64.b64encode(pickle.dumps(arguments))
            interpret(
                f"import base64, pickle; from {test.__module__} import {test.__name__} as test\n"
                f"test.__wrapped__('cpu', **pickle.loads(base64.b64decode({call})))"
            )
            return
        with poisoned_memory(), torch.device(device):
            torch.manual_seed(0)
            test(device, **arguments)

    return pytest.mark.parametrize("device", DEVICES)(run)


def draws(device: str) -> Iterator[random.Random]:
    """Seeded draws of random cases: one in the interpreter, ten on a GPU."""
    for seed in range(1 if device == "cpu" else 10):
        torch.manual_seed(seed)
        yield random.Random(seed)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory on the GPU that is handed out unwritten holds NaN, or a large negative index."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_poisoned(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)
            return x.fill_(math.nan if x.is_floating_point() else -(2**30)) if x.is_cuda else x

        return make_poisoned

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poison(getattr(torch, name)))
        yield


def results(function: Callable[..., Any], inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Outputs and gradients by name. The gradients of outputs are the same random numbers in every dtype."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    outs = function(**leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator("cpu").manual_seed(1)
    d_outs = [torch.randn(x.shape, generator=generator, device="cpu").bfloat16().to(x) for x in outs]
    torch.autograd.backward(outs, d_outs)
    of = {name: x for name, x in leaves.items() if x is not None}
    gradients = {f"d {name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in of.items()}
    return {f"out {i}": x.detach() for i, x in enumerate(outs)} | gradients


def saved_bytes(function: Callable[[], Any]) -> int:
    """Bytes of all tensors that a call keeps for its backward pass, those that share memory counted once."""
    saved = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x  # held, so that its address is not given to another
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outs = function()
    assert (outs if isinstance(outs, Tensor) else outs[0]).requires_grad
    return sum(x.untyped_storage().nbytes() for x in saved.values())


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, floor: float = 0.1) -> None:
    """‖got - want‖ ≤ tolerance · (‖want‖ + floor), since some gradients are zero but for rounding."""
    for name in want:
        assert got[name].isfinite().all(), name
        error, size = (got[name].double() - want[name].double()).norm().item(), want[name].double().norm().item()
        assert error <= tolerance * (size + floor), f"{name}: relative error {error / max(size, 1e-30):.1e}"


def expect_float64(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Tensor | None],
    tolerance: float,
    **floors: float,
) -> dict[str, Tensor]:
    """‖got - want‖ ≤ tolerance · ‖want‖ for outputs and gradients, and on a GPU the same bits a second time.

    Args:
        inputs: arguments of both functions by name; the reference gets them in float64.
        floors: errors that are allowed where the right number is nearly 0, by name.

    Returns:
        What the function gives.
    """
    got = results(function, inputs)
    again = results(function, inputs) if next(iter(got.values())).is_cuda else got
    want = results(reference, {name: None if x is None else x.double() for name, x in inputs.items()})
    for name, expected in want.items():
        assert got[name].shape == expected.shape and got[name].isfinite().all(), name
        assert torch.equal(got[name], again[name]), f"{name} has other bits a second time"
        error, size = (got[name].double() - expected).norm().item(), expected.norm().item()
        allowed = max(tolerance * max(size, 1e-3), floors.get(name.replace(" ", "_"), 0.0))
        assert error <= allowed, f"{name}: error {error:.1e}, relative {error / max(size, 1e-30):.1e}"
    return got


#: Compute capability: KiB of shared memory that a program may have (CUDA C++ Programming Guide, "Technical
#: Specifications").
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def generations(shown_by: str) -> list:
    """Compute capabilities: Hopper's, and with --all the others; takes the test that shows Hopper's."""
    return [pytest.param(c, marks=[] if c == 90 else [pytest.mark.rare(shown_by)]) for c in SHARED_KIB]


def compile_kernel(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    type_of: Callable[[str], str],
    is_aligned: Callable[[str], bool],
    options: dict[str, Any],
    is_gluon: bool = False,
) -> Any:
    """The kernel compiled for a generation of GPUs, which need not be here.

    Args:
        constants: name: value of constants, and of pointers that are None; others' are passed over.
        type_of: type of an argument that is no constant, by name.
        is_aligned: whether an argument is a multiple of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    known = {name: constants[name] for name in names if name in constants}
    types = {name: "constexpr" if name in known else type_of(name) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in known and is_aligned(name)
    }
    source = ASTSource(kernel, types, known, aligned)
    if is_gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource(kernel, types, {(names.index(name),): x for name, x in known.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    assert compiled.metadata.shared <= SHARED_KIB[capability] * 1024
    return compiled
