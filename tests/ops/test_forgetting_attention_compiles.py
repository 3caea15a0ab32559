"""The kernels compile for every generation of GPU, within its shared memory per program. No GPU is needed."""

import os

import pytest

pytest.importorskip("triton")
from forgetting_transformer.ops.forgetting_attention.layout import FUSED
from tests.ops.kernels import SHARED_KIB, compile_kernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

FITS = "tests/ops/test_forgetting_attention_compiles.py::test_tiles_fit_the_shared_memory_of_every_generation"
KERNELS = ("forward", "key_gradient", "query_gradient")
# Generations that have Hopper's copy engine, and others: each kernel with and without is compiled like one of these.
USUAL_TILES = [(90, 256, "forward"), (90, 256, "key_gradient"), (86, 64, "query_gradient")]
TILES = [(86, 64, name) for name in KERNELS] + [(c, 256, name) for c in SHARED_KIB for name in KERNELS]
HEADS_AND_CHANNELS = {"q_ptr", "k_ptr", "v_ptr", "d_out_ptr", "out_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
LOCATIONS = ("_0", "_1", "_2")


def type_of(argument: str) -> str:
    """Of what is neither a constant nor a descriptor."""
    if argument in HEADS_AND_CHANNELS:
        return "*bf16"
    if argument in ("running_ptr", "reference_ptr"):
        return "*fp64"
    if argument in ("first_stretch_ptr", "end_block_ptr", "first_key_ptr", "end_query_ptr", "turns_ptr"):
        return "*i32"
    return "*fp32" if argument.endswith("_ptr") else "fp32" if "scale" in argument else "i32"


def all_and_usual(cases, usual, shown_by):
    """Cases, of which those that are not usual need --all."""
    return [pytest.param(*case, marks=[] if case in usual else [pytest.mark.rare(shown_by)]) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "head_dim", "name"), all_and_usual(TILES, USUAL_TILES, FITS))
def test_tiles_fit_the_shared_memory_of_every_generation(capability, head_dim, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from forgetting_transformer.ops.forgetting_attention import kernels
    from forgetting_transformer.ops.forgetting_attention import triton as launcher

    has_copy_engine = capability in (90, 100)
    block_m, block_n, warps, stages = (launcher._DESCRIPTORS if has_copy_engine else launcher._SAFE)[name, head_dim]
    constants = {
        "GROUP": 1, "HAS_FIRST": not has_copy_engine, "HEAD_DIM": head_dim, "CHANNELS": head_dim, "BLOCK_M": block_m,
        "BLOCK_N": block_n, "STRETCH": 128, "TMA": has_copy_engine, "PRECISION": "ieee",
    }  # fmt: skip
    rows = {"q_ptr": block_m, "d_out_ptr": block_m, "k_ptr": block_n, "v_ptr": block_n} if has_copy_engine else {}
    descriptors = {argument: f"tensordesc<bf16[{n}, {head_dim}]>" for argument, n in rows.items()}
    compile_kernel(
        getattr(kernels, f"{name}_kernel"), capability, constants, lambda x: descriptors.get(x) or type_of(x),
        lambda x: x not in descriptors and x.endswith(("_ptr", *LOCATIONS)),
        {"num_warps": warps, "num_stages": stages, **FUSED},
    )  # fmt: skip


def compile_for_hopper(name: str, head_dim: int, has_first: bool) -> None:
    """Compile a kernel of `hopper.py`, with first visible keys or without."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    from forgetting_transformer.ops.forgetting_attention import hopper, hopper_backward

    def descriptor(dtype: str, shape: list[int], swizzle: int, bits: int) -> str:
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))
        return f"tensordesc<{dtype}{shape},{layout!r}>"

    if name == "backward":
        kernel, tile, stages = hopper_backward.backward_kernel, hopper_backward.TILES[name, head_dim], 2
        warpgroups = 2
    else:
        kernel, (warpgroups, tile, stages) = hopper.forward_kernel, hopper.TILES[name, head_dim]
    constants = {
        "HEAD_DIM": head_dim, "STAGES": stages, "HAS_FIRST": has_first, "N": tile, "M": tile, "WARPGROUPS": warpgroups
    }  # fmt: skip
    constants |= {} if has_first else {"first_key_ptr": None, "end_query_ptr": None}
    rows = {"q": 64, "k": tile, "v": tile}
    if name == "backward":
        rows = {"q": tile, "d_out": tile, "k": 128, "v": 128, "dk": 64, "dv": 64}
    descriptors = {argument: descriptor("bf16", [n, head_dim], 128, 16) for argument, n in rows.items()}
    vectors = ("suffix_vector", "log_normaliser", "delta", "row_sum")
    descriptors |= {"dq": descriptor("fp32", [tile, 4096 // tile], 128, 32)} | dict.fromkeys(
        vectors, descriptor("fp32", [tile], 0, 32)
    )
    compile_kernel(
        kernel, 90, constants, lambda x: descriptors.get(x) or type_of(x),
        lambda x: x.endswith(("_ptr", *LOCATIONS, "num_queries", "num_keys")), hopper.launch_options(warpgroups),
        is_gluon=True,
    )  # fmt: skip


HOPPER = [(name, head_dim, first) for name in ("forward", "backward") for head_dim in (64, 128) for first in (0, 1)]
USUAL = [("forward", 64, 1), ("backward", 128, 1)]
IN_FLIGHT = "tests/ops/test_forgetting_attention_compiles.py::test_products_of_the_hopper_kernels_stay_in_flight"


@pytest.mark.slow
@pytest.mark.parametrize("name, head_dim, has_first", all_and_usual(HOPPER, USUAL, IN_FLIGHT))
def test_products_of_the_hopper_kernels_stay_in_flight(name, head_dim, has_first, tmp_path, monkeypatch, capsys):
    """The assembler says in its log when it makes every product wait for the one before: C7510 and so on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    compile_for_hopper(name, head_dim, bool(has_first))
    log = capsys.readouterr().out
    assert "registers" in log and "serialized" not in log
