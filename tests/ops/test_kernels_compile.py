"""Each kernel that a launcher starts compiles for every generation of GPU, within its registers and shared memory.

No GPU is needed: launchers run on this CPU with tensors as wide as those of the 760M models, and each launch is noted
instead of made. `test_forgetting_attention_compiles.py` has the kernels of forgetting attention.
"""

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from forgetting_transformer.ops.forgetting_attention import decode_triton
from forgetting_transformer.ops.layers import (
    norm_triton,
    residual_norm_triton,
    shift_norm_triton,
    short_convolution_triton,
    swiglu_triton,
)
from forgetting_transformer.ops.recurrence import scan_triton, ssd
from tests.ops.kernels import compile_kernel, generations

TOKENS = 256
#: Rows of what one product of a layer gives: 8 divides their distance, and 16 does not.
SLICED = 6216
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Case(NamedTuple):
    """Calls launchers; the backward pass follows.

    Attributes:
        shared: KiB that a program may have; None for what the generation has.
        spills: bytes that registers may leave in memory; None for any.
        wide: kernels whose names begin so load 16 bytes at a time, which masks and strides must not prevent.
    """

    call: Callable[[], Any]
    shared: int | None = None
    spills: int | None = None
    wide: str | None = None


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def f32(*shape: int) -> Tensor:
    return leaf(*shape, dtype=torch.float32)


def columns(start: int, width: int) -> Tensor:
    return leaf(1, TOKENS, SLICED)[..., start : start + width]


def residual(width: int, dtype: torch.dtype) -> Any:
    arguments = f32(1, TOKENS, width), leaf(1, TOKENS, width, dtype=dtype), f32(width)
    return residual_norm_triton.ResidualNorm.apply(*arguments, 1e-6, dtype, True)


def gated_norm(width: int, groups: int, has_gate: bool, gate_first: bool, silu: bool) -> Any:
    gate = columns(0, width * groups) if has_gate else None
    x = leaf(1, TOKENS, width * groups)
    return norm_triton.normalise(x, gate, f32(width * groups), groups, gate_first, silu, 1e-6)


def shift_norm(heads: int, shift: bool, normalised: bool, begins: bool) -> Any:
    first = torch.zeros(1, TOKENS, dtype=torch.bool) if begins else None
    weight = f32(1536) if normalised else None
    logits = columns(1536, heads) if shift else None
    return shift_norm_triton.shift_and_normalise(columns(0, 1536), logits, None, first, weight, heads, 1e-6)


def convolution(channels: int, heads: int, has_previous: bool = False, packed: bool = False) -> Any:
    previous = leaf(1, channels, 3) if has_previous else None
    position = torch.zeros(1, TOKENS, dtype=torch.int32) if packed else None
    arguments = leaf(1, TOKENS, channels), f32(channels, 1, 4), None, previous, position
    return short_convolution_triton.convolve(*arguments, heads, 1e-6)


def scan() -> Any:
    B, C = leaf(1, TOKENS, 128)[..., 96:].chunk(2, dim=-1)
    x, dt = leaf(1, TOKENS, 3072), leaf(1, TOKENS, 3072)
    return scan_triton._forward(x, dt, f32(3072, 16), B, C, f32(3072), f32(3072), None, None)


def mamba2(keys: int, values: int, dtype: torch.dtype, packed: bool) -> Any:
    q, k = (leaf(1, TOKENS, 1, keys, dtype=dtype) for _ in range(2))
    gates = f32(1, TOKENS, 48), f32(1, TOKENS, 48), f32(48), f32(1, 48, keys, values)
    documents = torch.zeros(1, TOKENS, dtype=torch.int32) if packed else None
    return ssd.ssd(q, k, leaf(1, TOKENS, 48, values, dtype=dtype), *gates, documents, 1.0)


@torch.no_grad()
def decode(head_dim: int, dtype: torch.dtype, heads: int, groups: int, keys: int, has_all: bool) -> Any:
    q, k = torch.zeros(1, heads, 1, head_dim, dtype=dtype), torch.zeros(1, groups, keys, head_dim, dtype=dtype)
    optional = (
        torch.zeros(1, heads), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    )  # fmt: skip
    given = optional if has_all else (None, None, None)
    with mock.patch.object(decode_triton, "_num_splits", lambda *_: min(32, keys)):
        return decode_triton.decode(q, k, k, torch.zeros(1, heads, keys, dtype=torch.float64), *given, 0.125)


CASES = {
    "SwiGLU": Case(lambda: swiglu_triton.gated(leaf(1, TOKENS, 8192)), wide=""),
    "residual norm": Case(lambda: residual(1536, torch.bfloat16), wide=""),
    "gated norm, heads of FoX": Case(lambda: gated_norm(64, 24, True, False, False), 32, 0, "norm"),
    "shift and norm, heads of FoX": Case(lambda: shift_norm(24, True, True, False), 16, 0, "shift"),
    "convolution, DeltaNet": Case(lambda: convolution(1536, 12), 16, 0),
    "scan, Samba": Case(scan),
    "SSD, Mamba-2": Case(lambda: mamba2(128, 64, torch.bfloat16, False)),
    "decoding": Case(lambda: decode(64, torch.bfloat16, 6, 2, 700, True), 99),
}
MORE = {
    # Integers that are 1 are compiled in: other code than the interpreter's.
    "decoding, one of everything": Case(lambda: decode(64, torch.float16, 1, 1, 1, False), 99),
    "decoding, wide heads": Case(lambda: decode(256, torch.float32, 6, 1, 700, False), 99),
    **{
        f"residual norm, float32, {width}": Case(lambda width=width: residual(width, torch.float32), wide="")
        for width in (2048, 4096, 8192)
    },
    "norm, DeltaNet": Case(lambda: gated_norm(128, 12, False, False, True), 32, 0, "norm"),
    "gated norm, Gated DeltaNet": Case(lambda: gated_norm(192, 16, True, False, True), 32, 0, "norm"),
    "gated norm, Mamba-2": Case(lambda: gated_norm(3072, 1, True, True, True), 32, 0, "norm"),
    "shift, packed": Case(lambda: shift_norm(24, True, False, True), 16, 0, "shift"),
    "norm of heads of 128": Case(lambda: shift_norm(12, False, True, False), 16, 0, "shift"),
    "convolution, Gated DeltaNet": Case(lambda: convolution(1536, 16), 16, 0),
    "convolution, inputs before": Case(lambda: convolution(1536, 0, has_previous=True), 16, 0),
    # ptxas keeps two numbers outside of the A100's registers.
    "convolution, packed": Case(lambda: convolution(1536, 0, packed=True), 16, 8),
    "SSD, packed, 256 keys": Case(lambda: mamba2(256, 64, torch.bfloat16, True)),
    "SSD, 128 values": Case(lambda: mamba2(128, 128, torch.bfloat16, False)),
    "SSD, packed, float32": Case(lambda: mamba2(128, 64, torch.float32, True)),
}
COMPILES = "tests/ops/test_kernels_compile.py::test_what_is_launched_compiles_for_every_generation"
RARE = pytest.mark.rare(COMPILES)


def launches(call: Callable[[], Any]) -> list[tuple[JITFunction, dict[str, Any], dict[str, Any]]]:
    """Kernels of a call and of its backward pass, each with its arguments by name and its options."""
    found = []

    def note(kernel: JITFunction, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = {name: options.pop(name) for name in kernel.arg_names if name in options}
        found.append((kernel, dict(zip(kernel.arg_names, given, strict=False)) | named, options))

    with mock.patch.object(JITFunction, "run", note):
        outs = call()
        outs = [x for x in (outs if isinstance(outs, tuple) else (outs,)) if x.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.zeros_like(x) for x in outs])
    assert found
    return found


def compiled(kernel: JITFunction, given: dict[str, Any], options: dict[str, Any], capability: int) -> Any:
    """The kernel as Triton compiles it for these arguments."""
    constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    general = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    anywhere = {parameter.name for parameter in kernel.params if parameter.do_not_specialize_on_alignment}

    def type_of(name: str) -> str:
        value = given[name]
        return f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "fp32" if type(value) is float else "i32"

    def is_aligned(name: str) -> bool:
        value = given[name]
        number = value.data_ptr() if isinstance(value, Tensor) else value
        return type(number) is int and number % 16 == 0 and name not in general | anywhere

    ones = {name for name, x in given.items() if type(x) is int and x == 1} - general
    constants = {name: x for name, x in given.items() if name in constant | ones or x is None}
    return compile_kernel(kernel, capability, constants, type_of, is_aligned, options)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=RARE) for name in MORE)])
@pytest.mark.parametrize("capability", generations(COMPILES))
def test_what_is_launched_compiles_for_every_generation(capability, name, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    case = {**CASES, **MORE}[name]
    for kernel, given, options in launches(case.call):
        made = compiled(kernel, given, options, capability)
        spilled = [int(size) for size in re.findall(r"(\d+) bytes spill stores", capfd.readouterr().out)]
        assert case.spills is None or (spilled and max(spilled) <= case.spills), (kernel.__name__, spilled)
        assert case.shared is None or made.metadata.shared <= case.shared * 1024, kernel.__name__
        ptx = made.asm["ptx"]
        # To registers or, ahead of their use, to shared memory.
        is_wide = case.wide is not None and kernel.__name__.startswith(case.wide)
        assert not is_wide or "v4.b32" in ptx or "cp.async.cg" in ptx, kernel.__name__
        if name.startswith("scan"):
            # States belong in registers. What a lane exchanges is what its tile says, and not every state with every.
            assert ptx.count("shfl.sync") <= 4 * 40 + 32
