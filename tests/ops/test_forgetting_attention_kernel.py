"""The Triton kernel in Triton's interpreter: the same code that runs on a GPU, held to the float64 reference.

The interpreter is chosen when Triton is imported, so every case runs in a process of its own; outputs are poisoned with
NaN before the kernels write them.
"""

import functools
import importlib
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


def test_compiled_graphs_see_a_constant_where_the_kernel_is_looked_for(monkeypatch):
    """Importing a module cannot be traced; one graph would become three."""
    from forgetting_transformer.ops import forgetting_attention as package

    calls = []

    @functools.cache
    def load(device_index):
        importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
        calls.append(device_index)
        return True

    monkeypatch.setattr(package, "_load_kernel", load)
    compiled = torch.compile(lambda x: x + 1 if package._has_kernel(0) else x - 1, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0] and calls == [0]


PRELUDE = """
import math, torch
import torch.nn.functional as F
import forgetting_transformer.ops.forgetting_attention.triton as kernel
from forgetting_transformer.ops.forgetting_attention.reference import forgetting_attention_reference

for name in ("empty_like", "empty"):
    original = getattr(torch, name)
    setattr(torch, name, lambda *a, _original=original, **k: _original(*a, **k).fill_(float("nan")))
torch.manual_seed(0)

def attend(q, k, v, log_fgate, scale, threshold=None):
    return torch.ops.forgetting_transformer.forgetting_attention_forward(q, k, v, log_fgate, threshold, scale)[0]

def inputs(length, head_dim, dtype, shift=1.0, heads=2):
    q, k, v, d_out = (torch.randn(1, heads, length, head_dim).to(dtype) for _ in range(4))
    return q, k, v, F.logsigmoid(torch.randn(1, heads, length) + shift), d_out

def run(op, q, k, v, log_fgate, d_out, *rest):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
    out = op(*leaves, *rest)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]

def check(q, k, v, log_fgate, d_out, tolerance):
    scale = q.shape[-1] ** -0.5
    actual = run(attend, q, k, v, log_fgate, d_out, scale)
    doubles = [x.double() for x in (q, k, v, log_fgate, d_out)]
    expected = run(forgetting_attention_reference, *doubles, None, scale)
    for name, a, e in zip(("out", "dq", "dk", "dv", "dlog_f"), actual, expected):
        assert torch.isfinite(a).all(), name
        finite = torch.isfinite(e)
        error = ((a.double() - e)[finite].norm() / e[finite].norm()).item()
        assert error < tolerance, f"{name}: {error:.1e}"
"""


def interpret(code: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_outputs_and_gradients_are_the_references_at_ragged_lengths(head_dim):
    interpret(
        f"""
for length in (2, 63, 128, 129, 300):
    check(*inputs(length, {head_dim}, torch.float32), 2e-5)
check(*inputs(200, {head_dim}, torch.float16), 2e-3)
"""
    )


def test_strong_absent_and_resetting_gates():
    interpret(
        """
q, k, v, _, d_out = inputs(300, 16, torch.float32)
check(q, k, v, torch.full((1, 2, 300), -8.0), d_out, 1e-4)
check(q, k, v, torch.zeros(1, 2, 300), d_out, 2e-5)
log_fgate = F.logsigmoid(torch.randn(1, 2, 300) + 2)
log_fgate[:, :, [0, 5, 127, 128, 200]] = -math.inf
check(q, k, v, log_fgate, d_out, 2e-4)
"""
    )


def test_the_bias_of_near_pairs_is_exact_however_long_the_sequence():
    """With f = 1/2 the running sum reaches -45,000 at 65,536 positions; its float32 neighbours are 4e-3 apart."""
    interpret(
        """
log_fgate = F.logsigmoid(torch.randn(1, 1, 65536, dtype=torch.float64)).float()
suffix, running = kernel._decay_sums(log_fgate)
i = torch.arange(200, 65536, 997)
exact = (F.pad(log_fgate.double().cumsum(-1), (1, 0))[0, 0])
for distance in (1, 16, 64):
    j = i - distance
    def to_end(x):  # sum of log f from x + 1 to the end of i's stretch, as the kernel adds it up
        return suffix[0, x] + (running[0, i // 128 + 1] - running[0, x // 128 + 1]).float()
    bias = (to_end(j) - to_end(i)) / kernel._LOG2_E
    assert (bias.double() - (exact[i + 1] - exact[j + 1])).abs().max() < 1e-4
"""
    )


@pytest.mark.parametrize("log_tolerance", [-3.0, -10.0])
def test_pruning_skips_work_and_changes_rows_by_less_than_its_tolerance(log_tolerance):
    interpret(
        f"""
q, k, v, log_fgate, d_out = inputs(900, 16, torch.float32, shift=2.0)
log_fgate[:, 1] *= 0.01  # a head that remembers: nothing to skip
v = v / v.norm(dim=-1, keepdim=True)
scale = 0.25
bound = scale * q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)
threshold = {log_tolerance} - 2 * bound - math.log(900)
exact = run(attend, q, k, v, log_fgate, d_out, scale)
pruned = run(attend, q, k, v, log_fgate, d_out, scale, threshold)
first_keys, end_queries = kernel._kept_stretches(kernel._decay_sums(log_fgate)[1], threshold)
assert first_keys[0].max() >= 2 and first_keys[1].max() == 0
kept = torch.zeros(8, 8, dtype=torch.bool)
for query in range(8):
    kept[query, first_keys[0, query]:query + 1] = True
for key in range(8):
    assert kept[:, key].nonzero().max() == end_queries[0, key] - 1, "forward and backward must skip the same"
# Weights are non-negative and values have norm 1: a row moves by at most twice what was left out.
assert (exact[0] - pruned[0]).norm(dim=-1).max() <= 2 * math.exp({log_tolerance}) + 1e-6
assert torch.equal(exact[0][:, 1], pruned[0][:, 1])
for a, b in zip(exact[1:], pruned[1:]):
    assert (a - b).norm() <= 10 * math.exp({log_tolerance}) * a.norm()
"""
    )


def test_a_threshold_that_prunes_too_much_is_seen():
    """The bound above can fail: without the margin for scores, rows change."""
    interpret(
        """
q, k, v, log_fgate, d_out = inputs(900, 16, torch.float32, shift=6.0)
exact = run(attend, q, k, v, log_fgate, d_out, 0.25)
pruned = run(attend, q, k, v, log_fgate, d_out, 0.25, torch.full((1, 2), -0.01))
assert (exact[0] - pruned[0]).abs().max() > 1e-2
"""
    )


def test_any_memory_layout_is_taken_and_the_operator_is_registered_right():
    """Callers hand over transposed views; `opcheck` holds schema, fake kernel and autograd registration to the real ones."""
    interpret(
        """
q, k, v, log_fgate, d_out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(130, 16, torch.float32))
check(q, k, v, log_fgate, d_out, 2e-5)
leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
torch.library.opcheck(
    kernel._forward, (*leaves, None, 0.25), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
)
"""
    )
