"""FLA's kernels on Hopper GPUs (H100, H200): chosen launch configurations, and a check of the gated backward pass.

**Configurations.** FLA lets Triton time up to 48 configurations of each kernel in every new process without a warm
cache: 372 kernels to compile for four of the five ops here, minutes before the first step. And what is fastest is
settled by a race, so that two starts of one run may sum in different orders and differ in the last bits. The
configurations below won on an H200 at the published head dimensions, but for those of Kimi Delta Attention, which were
never timed. With one configuration left, Triton times nothing.

PaTH attention's kernels (`path_attention_fla.py`) have fixed configurations, of which two hold more in a thread than it
has registers. They get others.

**Gated backward.** With Triton 3.4.0 to 3.7.0, FLA refuses the backward pass of chunk_simple_gla and
chunk_gated_delta_rule on Hopper, because Triton miscompiled one of its kernels (FLA's issue 640). Not every version and
shape is affected: in Triton 3.6.0, with the configurations here and the head dimensions below, all gradients are right.
There the kernels are compared with PyTorch's once per process, and used if they agree. At other head dimensions they
have accessed memory out of bounds, which no comparison survives, or taken more shared memory than there is (256
channels, with every Triton), so those are not tried: `fla.py` pads keys and values and splits values into heads like
these.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.recurrence import chunked
from forgetting_transformer.ops.recurrence.reference import Gates

# kernel: (its options, warps, pipeline stages). `module.kernel` where several modules have one of that name.
_CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    "chunk_bwd_kernel_dh": ({"BK": 32, "BV": 64}, 8, 3),
    "chunk_bwd_kernel_dqkwg": ({}, 4, 2),
    "chunk_bwd_kernel_dv": ({}, 4, 3),
    "chunk_bwd_kernel_dv_local": ({}, 4, 4),
    "chunk_fwd_kernel_h": ({"BK": 64, "BV": 32}, 2, 4),
    "chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 4),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 1, 3),
    "chunk_global_cumsum_scalar_kernel": ({"BT": 256}, 4, 2),
    "chunk_gla_bwd_kernel_dA": ({}, 4, 4),
    "chunk_gla_bwd_kernel_dv": ({"BK": 32, "BV": 64}, 8, 3),
    "chunk_gla_bwd_kernel_inter": ({"BK": 64, "BV": 64}, 4, 2),
    "chunk_gla_bwd_kernel_intra": ({}, 1, 2),
    "chunk_gla_fwd_A_kernel_intra_sub_inter": ({"BK": 32}, 1, 3),
    "chunk_gla_fwd_A_kernel_intra_sub_intra": ({}, 1, 2),
    "chunk_gla_fwd_kernel_o": ({"BK": 64, "BV": 128}, 4, 3),
    "chunk_kda_bwd_kernel_dAv": ({}, 4, 3),
    "chunk_kda_bwd_kernel_intra": ({}, 1, 2),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": ({"BK": 64, "BV": 64}, 4, 2),
    "chunk_kda_fwd_kernel_inter_solve_fused": ({"BK": 32}, 2, 3),
    "chunk_kda_fwd_kernel_intra_token_parallel": ({"BH": 4}, 4, 3),
    "chunk_local_cumsum_scalar_kernel": ({}, 1, 3),
    "chunk_local_cumsum_vector_kernel": ({"BS": 64}, 4, 3),
    "chunk_scaled_dot_kkt_fwd_kernel": ({"BK": 128}, 4, 2),
    "merge_16x16_to_64x64_inverse_kernel": ({"DOT_PRECISION": "ieee"}, 2, 3),
    "fla.ops.delta_rule.wy_fast.prepare_wy_repr_bwd_kernel": ({}, 2, 2),
    "fla.ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd_kernel": ({}, 4, 3),
    "recompute_w_u_fwd_kda_kernel": ({}, 4, 3),
    "recompute_w_u_fwd_kernel": ({}, 4, 3),
}
# Warps and pipeline stages of kernels that FLA launches with four and three, which takes 2.6 and 3.1 times as long
# (H200, 64 channels).
_LAUNCHES = {"parallel_path_fwd_kernel": (8, 2), "parallel_path_bwd_dkv_kernel": (8, 1)}
# Key and value channels of a head with which the gated backward pass was right on an H200.
_GATED_HEAD_DIMS = {(64, 64), (128, 64), (128, 128)}
# FLA stores inputs and states in 16 bits; a miscompiled kernel is wrong by far more than their rounding.
_TOLERANCE = 2e-2


def is_hopper(device_index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index)[0] == 9


@functools.cache
def choose_configurations() -> None:
    """Give each of FLA's kernels that are listed above the one configuration that is listed."""
    from triton import Config
    from triton.runtime.autotuner import Autotuner, Heuristics

    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("fla.ops.")]
    for module in modules:
        for kernel in vars(module).values():
            # Where a heuristic holds an Autotuner, that has no name.
            if isinstance(kernel, Heuristics) and (launch := _LAUNCHES.get(getattr(kernel.fn, "__name__", ""))):
                warps, stages = launch
                # What a heuristic returns takes precedence over the call.
                values = {"num_warps": lambda _, n=warps: n, "num_stages": lambda _, n=stages: n}
                kernel.values = {**kernel.values, **values}
            while hasattr(kernel, "fn") and not isinstance(kernel, Autotuner):
                kernel = kernel.fn
            if not isinstance(kernel, Autotuner):
                continue
            name = kernel.base_fn.__name__
            chosen = _CONFIGURATIONS.get(f"{kernel.base_fn.__module__}.{name}", _CONFIGURATIONS.get(name))
            if chosen is not None:
                options, warps, stages = chosen
                kernel.configs = [Config(options, num_warps=warps, num_stages=stages)]


def widest_gated_values(key_dim: int) -> int:
    """The most value channels of a head with which the gated backward pass was right, with so many key channels."""
    return max((value for key, value in _GATED_HEAD_DIMS if key == key_dim), default=max(_GATED_HEAD_DIMS)[1])


def serves_gated(op: str, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Whether simple_gla, gated_delta_rule or kda is right on this Hopper GPU, forward and backward, at these
    dimensions.
    """
    if (key_dim, value_dim) not in _GATED_HEAD_DIMS:
        return False
    if op == "kda":  # FLA refuses it nowhere
        return kda_is_right(key_dim, value_dim, dtype, device_index)
    return not refuses_gated_backward() or gated_backward_is_right(op, key_dim, value_dim, dtype, device_index)


@functools.cache
def refuses_gated_backward() -> bool:
    """Whether FLA itself, as imported beside this Triton, refuses the gated backward pass on Hopper GPUs.

    Asked once, before `gated_backward_is_right` lifts the refusal for one op: the others are still to be compared.
    """
    chunk_o = importlib.import_module("fla.ops.common.chunk_o")
    return getattr(chunk_o, "TRITON_ABOVE_3_4_0", False) and not getattr(chunk_o, "TRITON_ABOVE_3_7_1", True)


@functools.cache
def gated_backward_is_right(op: str, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Let FLA run the gated backward pass, and compare it with PyTorch's; if it is wrong, forbid it again.

    Args:
        op: "simple_gla" or "gated_delta_rule".
        key_dim, value_dim, dtype: those of the inputs.
    """
    chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
    before = chunk_o.TRITON_ABOVE_3_7_1
    chunk_o.TRITON_ABOVE_3_7_1 = True
    is_right = _is_right(op, key_dim, value_dim, dtype, device_index)
    if not is_right:
        chunk_o.TRITON_ABOVE_3_7_1 = before
    return is_right


@functools.cache
def kda_is_right(key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Whether FLA's kernels of Kimi Delta Attention give PyTorch's output and gradients here. Warns if they do not."""
    if _is_right("kda", key_dim, value_dim, dtype, device_index):
        return True
    triton = backends.installed_version("triton")
    reason = (
        f"with Triton {triton} its kernels do not compile on this GPU, or differ from PyTorch in output or gradients"
    )
    backends.rule_out("kda", backends.FLA, reason, "install another Triton")
    return False


def _is_right(op: str, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    try:
        # In a separate thread, which does not inherit the caller's autocast, checkpointing, gradient mode or tracing.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(_agrees, op, key_dim, value_dim, dtype, device_index).result()
    except Exception:  # a compiler that fails counts like one that is wrong
        return False


def _agrees(op: str, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Compare output and gradients of FLA's kernel with those of PyTorch's chunks in float32."""
    kernel = getattr(importlib.import_module(f"fla.ops.{op}"), f"chunk_{op}")
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda", device_index)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    length, heads = 300, 2
    inputs = {
        "q": normal(1, length, heads, key_dim).to(dtype),
        "k": F.normalize(normal(1, length, heads, key_dim), dim=-1).to(dtype),
        "v": normal(1, length, heads, value_dim).to(dtype),
    }
    if op in ("gated_delta_rule", "kda"):
        inputs["beta"] = normal(1, length, heads).sigmoid()
    inputs["g"] = F.logsigmoid(normal(1, length, heads, *((key_dim,) if op == "kda" else ())) + 2)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    d_out = normal(1, length, heads, value_dim).to(device)

    def results(function: Callable[..., tuple[Tensor, Tensor]], arguments: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in arguments.items()}
        out, _ = function(**leaves)
        return [out, *torch.autograd.grad(out, list(leaves.values()), d_out.to(out.dtype))]

    with torch.cuda.device(device):
        got = results(functools.partial(kernel, scale=1.0, initial_state=None, output_final_state=True), inputs)
        wide = {name: x.float() for name, x in inputs.items()}
        want = results(
            lambda q, k, v, g, beta=None: chunked.linear_recurrence(q, k, v, Gates(beta, g), 1.0, None), wide
        )
        return all(
            (a.float() - b).norm().item() <= _TOLERANCE * b.norm().item() for a, b in zip(got, want, strict=True)
        )
