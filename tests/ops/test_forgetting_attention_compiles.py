"""The kernels compile for every generation of GPU, within its shared memory per program. No GPU is needed."""

import os

import pytest

triton = pytest.importorskip("triton")
from forgetting_transformer.ops.forgetting_attention.layout import FUSED  # noqa: E402  (needs Triton)

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

# Compute capability: KiB of shared memory a program may have (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# One generation that has Hopper's copy engine and one that has not; the others are compiled like one of the two.
USUAL_SIZES = [(86, 64), (90, 256)]
FITS = "tests/ops/test_forgetting_attention_compiles.py::test_tiles_fit_the_shared_memory_of_every_generation"
SIZES = [
    pytest.param(*size, marks=[] if size in USUAL_SIZES else [pytest.mark.rare(FITS)])
    for size in ((86, 64), *((capability, 256) for capability in SHARED_KIB))
]
HEADS_AND_CHANNELS = {"q_ptr", "k_ptr", "v_ptr", "d_out_ptr", "out_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
LOCATIONS = ("_0", "_1", "_2")
KERNELS = ("forward", "key_gradient", "query_gradient")


def compile_kernel(name: str, capability: int, head_dim: int, tiles: tuple[int, int, int, int], tma: bool) -> int:
    """Bytes of shared memory of one program."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forgetting_transformer.ops.forgetting_attention import kernels

    kernel = getattr(kernels, f"{name}_kernel")
    block_m, block_n, warps, stages = tiles
    constants = {
        "GROUP": 1, "HAS_FIRST": not tma, "HEAD_DIM": head_dim, "CHANNELS": head_dim, "BLOCK_M": block_m,
        "BLOCK_N": block_n, "STRETCH": 128, "TMA": tma, "PRECISION": "ieee",
    }  # fmt: skip
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
            continue
        if argument in HEADS_AND_CHANNELS:
            is_loaded = argument in ("q_ptr", "k_ptr", "v_ptr", "d_out_ptr")
            rows = block_n if argument in ("k_ptr", "v_ptr") else block_m
            types[argument] = f"tensordesc<bf16[{rows}, {head_dim}]>" if tma and is_loaded else "*bf16"
        elif argument in ("running_ptr", "reference_ptr"):
            types[argument] = "*fp64"
        elif argument in ("first_stretch_ptr", "end_block_ptr", "first_key_ptr", "end_query_ptr"):
            types[argument] = "*i32"
        else:
            types[argument] = "*fp32" if argument.endswith("_ptr") else "fp32" if "scale" in argument else "i32"
        if types[argument].startswith("*") or argument.endswith(LOCATIONS):
            aligned[(i,)] = [["tt.divisibility", 16]]
    known = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(kernel, types, known, aligned)
    options = {"num_warps": warps, "num_stages": stages, **FUSED}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("capability", "head_dim"), SIZES)
def test_tiles_fit_the_shared_memory_of_every_generation(capability, head_dim, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from forgetting_transformer.ops.forgetting_attention import triton as launcher

    has_copy_engine = capability in (90, 100)
    table = launcher._DESCRIPTORS if has_copy_engine else launcher._SAFE
    used = compile_kernel(name, capability, head_dim, table[name, head_dim], has_copy_engine)
    assert 0 < used <= SHARED_KIB[capability] * 1024


def compile_for_hopper(name: str, head_dim: int, group: int) -> int:
    """The same for a kernel of `hopper.py`."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from forgetting_transformer.ops.forgetting_attention import hopper, hopper_backward

    def descriptor(dtype: str, shape: list[int], swizzle: int, bits: int) -> str:
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))
        return f"tensordesc<{dtype}{shape},{layout!r}>"

    if name == "backward":
        kernel, tile, stages = hopper_backward.backward_kernel, hopper_backward.TILES[name, head_dim], 2
    else:
        kernel, (tile, stages) = getattr(hopper, f"{name}_kernel"), hopper.TILES[name, head_dim]
    constants = {"HEAD_DIM": head_dim, "STAGES": stages, "GROUP": group, "N": tile, "M": tile}
    streamed = ("q", "d_out") if name in ("key_gradient", "backward") else ("k", "v")
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in ("q", "k", "v", "d_out"):
            types[argument] = descriptor("bf16", [tile if argument in streamed else 128, head_dim], 128, 16)
        elif argument in ("dk", "dv"):
            types[argument] = descriptor("bf16", [64, head_dim], 128, 16)
        elif argument == "dq":
            types[argument] = descriptor("fp32", [64, 64], 128, 32)
        elif argument in ("suffix_vector", "log_normaliser", "delta", "row_sum"):
            types[argument] = descriptor("fp32", [tile], 0, 32)
        elif argument in HEADS_AND_CHANNELS:
            types[argument] = "*bf16"
        elif argument in ("running_ptr", "reference_ptr"):
            types[argument] = "*fp64"
        elif argument in ("first_stretch_ptr", "end_block_ptr", "turns_ptr"):
            types[argument] = "*i32"
        else:
            types[argument] = "*fp32" if argument.endswith("_ptr") else "fp32" if "scale" in argument else "i32"
        if types[argument].startswith("*") or argument.endswith((*LOCATIONS, "num_queries", "num_keys")):
            aligned[(i,)] = [["tt.divisibility", 16]]
    known = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    source = GluonASTSource(kernel, types, {(kernel.arg_names.index(a),): value for a, value in known.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=hopper._LAUNCH).metadata.shared


# Heads that share keys change the loops of the key gradient, and addresses elsewhere.
HOPPER = [
    *((name, 64, group) for name in ("forward", "key_gradient") for group in (1, 3)),
    *((name, 128, group) for name in KERNELS for group in (1, 3)),
    ("backward", 64, 1),
    ("backward", 128, 1),
]
USUAL = [("forward", 64, 3), ("key_gradient", 128, 3), ("query_gradient", 128, 3), ("backward", 64, 1)]
IN_FLIGHT = "tests/ops/test_forgetting_attention_compiles.py::test_products_of_the_hopper_kernels_stay_in_flight"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, head_dim, group",
    [pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.rare(IN_FLIGHT)]) for case in HOPPER],
)
def test_products_of_the_hopper_kernels_stay_in_flight(name, head_dim, group, tmp_path, monkeypatch, capsys):
    """The assembler says in its log when it makes every product wait for the one before: C7510 and so on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    used = compile_for_hopper(name, head_dim, group)
    log = capsys.readouterr().out
    assert "registers" in log and "serialized" not in log
    assert 0 < used <= SHARED_KIB[90] * 1024
