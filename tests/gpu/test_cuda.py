"""On CUDA: forgetting attention against its float64 reference, in a graph, and the same bits twice."""

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import forgetting_attention
from forgetting_transformer.ops.forgetting_attention import forgetting_attention_reference
from forgetting_transformer.ops.forgetting_attention.dispatch import first_visible_key


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def run_op(op, inputs, out_gradient, **options):
    """The output and its gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = op(*leaves, **options)
    out.backward(out_gradient.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def reference_op(q, k, v, log_fgate, seq_start=None, **options):
    q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    first_key = first_visible_key(q, k, window=options.get("window_size"), cu_seqlens=options.get("cu_seqlens"))
    out, _ = forgetting_attention_reference(q, k, v, log_fgate, seq_start, q.shape[-1] ** -0.5, first_key_BT=first_key)
    return out.transpose(1, 2)


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}


def assert_like_reference(queries, keys, head_dim, dtype, gates="slow", batch=2, heads=3, groups=3, **options):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    q, d_out = normal(batch, queries, heads, head_dim).to(dtype), normal(batch, queries, heads, head_dim).to(dtype)
    k, v = normal(batch, keys, groups, head_dim).to(dtype), normal(batch, keys, groups, head_dim).to(dtype)
    log_fgate = F.logsigmoid(normal(batch, keys, heads) + {"half": 0.0, "slow": 6.0, "resets": 2.0}[gates])
    if gates == "resets":
        log_fgate[:, ::37] = -torch.inf
    actual = run_op(forgetting_attention, (q, k, v, log_fgate), d_out, **options)
    expected = run_op(reference_op, [x.double() for x in (q, k, v, log_fgate)], d_out, **options)
    # In float32 every reset adds 256 to the running sum inside a block, which leaves fewer digits for the rest.
    allowed = max(TOLERANCES[dtype], 1e-4) if gates == "resets" else TOLERANCES[dtype]
    case = f"{queries} queries, {keys} keys, {heads} heads, {groups} groups, {gates}, {options}"
    for name, a, e in zip(("out", "dq", "dk", "dv", "dlog_f"), actual, expected, strict=True):
        finite = torch.isfinite(e)
        assert torch.isfinite(a[finite]).all(), f"{name}: {case}"
        error = relative_error(a[finite], e[finite]) if e[finite].norm() > 1e-6 else a[finite].abs().max().item()
        assert error < allowed, f"{name}: {error:.2e}, {case}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, head_dim, queries, keys",
    [
        *(
            (torch.bfloat16, head_dim, *sizes)
            for head_dim in (64, 128)
            for sizes in ((700, 700), (2048, 2048), (5, 300))
        ),
        (torch.bfloat16, 64, 1, 129),
        (torch.float16, 128, 700, 700),
        (torch.float32, 64, 700, 700),
        (torch.float32, 128, 1, 129),
    ],
)
def test_the_op_and_its_gradients_agree_with_float64(dtype, head_dim, queries, keys, poisoned):
    seq_start = torch.tensor([0, min(333, keys - 1)], device="cuda")
    for gates in ("half", "slow", "resets"):
        assert_like_reference(queries, keys, head_dim, dtype, gates)
        assert_like_reference(queries, keys, head_dim, dtype, gates, seq_start=seq_start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, head_dim",
    [
        *((torch.bfloat16, head_dim) for head_dim in (8, 16, 48, 96, 192, 256)),
        *((torch.float16, head_dim) for head_dim in (80, 160)),
        (torch.float32, 32),
    ],
)
def test_every_head_dimension_agrees_with_float64(dtype, head_dim, poisoned):
    for length in (384, 500):  # through descriptors, and not
        assert_like_reference(length, length, head_dim, dtype, heads=2, groups=2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_keys_windows_and_packed_documents_agree_with_float64(head_dim, poisoned):
    for options in (
        {"heads": 6, "groups": 2},
        {"heads": 8, "groups": 1},
        {"window_size": 200},
        {"window_size": 129, "heads": 4, "groups": 2},
        {"cu_seqlens": torch.tensor([0, 100, 101, 700, 1280, 1500], device="cuda"), "batch": 1},
        {"cu_seqlens": torch.tensor([0, 700, 1500], device="cuda"), "batch": 1, "window_size": 300},
    ):
        assert_like_reference(1500, 1500, head_dim, torch.bfloat16, "half", **options)
        if "cu_seqlens" not in options:
            assert_like_reference(300, 1500, head_dim, torch.bfloat16, "half", **options)


def test_two_runs_of_the_kernel_give_the_same_bits_and_pruning_stays_within_its_bound():
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, d_out = (
        F.normalize(torch.randn(1, 4096, 8, 64, generator=generator, device="cuda"), dim=-1).bfloat16()
        for _ in range(4)
    )
    log_fgate = F.logsigmoid(torch.randn(1, 4096, 8, generator=generator, device="cuda"))

    def run(**options):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
        out = forgetting_attention(*leaves, **options)
        out.backward(d_out)
        return [out.detach(), *(x.grad for x in leaves)]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for threshold in ("auto", -10 - 2 / 8 - 8.4):
        pruned = run(adaptive_threshold=threshold)
        for a, b in zip(first, pruned, strict=True):
            assert relative_error(b, a) < 2e-3  # e^-10 and bf16's rounding
