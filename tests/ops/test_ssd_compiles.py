"""The kernels of the state space duality compile for every generation of GPU, within its shared memory per program.

At the shape of Mamba-2's 760M model. No GPU is needed.
"""

import os

import pytest

triton = pytest.importorskip("triton")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

# Compute capability: KiB of shared memory a program may have (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
KERNELS = (
    "decay",
    "score",
    "state",
    "output",
    "value_gradient",
    "key_gradient",
    "score_gradient",
    "group_gradient",
    "decay_gradient",
)
KEYS, VALUES = 128, 64
# Arguments by the first part of their names; what is not listed is a float32 pointer or an integer.
INPUTS = ("q_ptr", "k_ptr", "v_ptr", "d_out_ptr", "out_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "states_ptr", "d_states_ptr")


def compile_kernel(name: str, capability: int, dtype: str, has_documents: bool, keys: int, values: int) -> int:
    """Bytes of shared memory of one program."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forgetting_transformer.ops.recurrence import ssd, ssd_kernels

    kernel = getattr(ssd_kernels, f"{name}_kernel")
    tiles = ssd.TILES[4 if dtype == "fp32" else 2]
    block_k, block_v = (min(a, b) for a, b in zip(tiles.state_block, (keys, values), strict=True))
    constants = {
        "CHUNK": tiles.chunk, "TILE": tiles.tile, "KEYS": keys, "VALUES": values, "BLOCK_K": block_k,
        "BLOCK_V": block_v, "HEADS": 8, "BLOCKS": 6, "HAS_SKIP": True, "HAS_START": True,
        "HAS_DOCUMENTS": has_documents, "REVERSE": False, "READS": True, "PRECISION": "ieee",
    }  # fmt: skip
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in INPUTS:
            types[argument] = f"*{dtype}"
        elif argument.endswith("_ptr"):
            wide = argument == "sums_ptr" and dtype == "fp32"
            types[argument] = "*i32" if argument == "documents_ptr" else "*fp64" if wide else "*fp32"
        else:
            types[argument] = "fp32" if argument in ("scale", "minimum") else "i32"
        if types[argument].startswith("*") or argument.endswith(("_0", "_1", "_2")):
            aligned[(i,)] = [["tt.divisibility", 16]]
    known = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    options = {key: value for key, value in tiles.options(name).items() if key != "CHUNK"}
    source = ASTSource(kernel, types, known, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


RARE = pytest.mark.rare("tests/ops/test_ssd_compiles.py::test_kernels_fit_the_shared_memory_of_every_generation")
GENERATIONS = [pytest.param(c, marks=[] if c == 90 else [RARE]) for c in SHARED_KIB]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", GENERATIONS)
def test_kernels_fit_the_shared_memory_of_every_generation(capability, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    used = compile_kernel(name, capability, "bf16", False, KEYS, VALUES)
    assert used <= SHARED_KIB[capability] * 1024


@RARE
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "dtype, has_documents, keys, values", [("bf16", True, 256, 64), ("bf16", False, 128, 128), ("fp32", True, 128, 64)]
)
def test_the_largest_heads_fit_the_smallest_shared_memory(
    name, dtype, has_documents, keys, values, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    used = compile_kernel(name, 86, dtype, has_documents, keys, values)
    assert used <= SHARED_KIB[86] * 1024
