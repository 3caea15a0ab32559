"""On a Hopper GPU: its kernels of forgetting attention against float64, and that they are the ones that run.

Axes: B batch, H query heads, G key and value heads, M queries, N keys, D channels of a head.
"""

import random

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import forgetting_attention
from forgetting_transformer.ops import backends
from tests.gpu.test_cuda import assert_like_reference, relative_error

triton_attention = pytest.importorskip("forgetting_transformer.ops.forgetting_attention.triton")

KERNELS = ("forward", "backward")


@pytest.fixture
def kernels(monkeypatch):
    """Names of Hopper's kernels that did their work, in the order they were launched."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert triton_attention.has_hopper_kernels(torch.cuda.current_device(), 64), backends.faults()
    names = []

    def record(module, name, launch):
        def recorded(*args):
            found = launch(*args)
            if found is not None:
                names.append(name)
            return found

        monkeypatch.setattr(module, name, recorded)

    for name in KERNELS:
        module = triton_attention._hopper(name)
        record(module, name, getattr(module, name))
    return names


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("groups", [2, 4])
def test_what_pruning_leaves_out_does_not_show(kernels, groups, head_dim, poisoned):
    """With gates of about ½ nearly all tiles are left out, for the first keys all of them."""
    for queries in (4096, 1024):
        leaves, d_out = random_leaves(2, queries, 4, head_dim, keys=4096, groups=groups, shift=0)

        def run(leaves=leaves, d_out=d_out, **options):
            out = forgetting_attention(*leaves, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

        kernels.clear()
        whole, pruned = run(), run(adaptive_threshold=-60.0)
        assert kernels == [*KERNELS, *KERNELS]
        for a, b in zip(whole, pruned, strict=True):
            assert relative_error(b, a) < 1e-5


def gradients(leaves, d_out, **options):
    return torch.autograd.grad(forgetting_attention(*leaves, **options), leaves, d_out)


def random_leaves(batch, length, heads, head_dim, keys=None, groups=None, shift=4, generator=None):
    def normal(*shape):
        return torch.randn(batch, *shape, device="cuda", generator=generator)

    keys, groups = keys or length, groups or heads
    q, d_out = (normal(length, heads, head_dim).bfloat16() for _ in range(2))
    k, v = (normal(keys, groups, head_dim).bfloat16() for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, F.logsigmoid(normal(keys, heads) + shift))], d_out


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_backward_passes_give_the_same_bits_whatever_runs_beside_them(kernels, head_dim):
    """Other kernels take multiprocessors away for random times, so that programs start and add at other moments."""
    generator = torch.Generator("cuda").manual_seed(0)
    leaves, d_out = random_leaves(1, 2048, 6, head_dim, generator=generator)
    out = forgetting_attention(*leaves)
    assert torch.equal(out, forgetting_attention(*leaves))
    expected_bits = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    beside, chance = [torch.cuda.Stream() for _ in range(3)], random.Random(0)
    matrix = torch.randn(1024, 1024, device="cuda")
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for stream in beside:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(chance.randrange(200_000))
                matrix[: chance.randrange(64, 1024)] @ matrix
        found = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        for a, b in zip(found, expected_bits, strict=True):
            differs += (a != b).any()
    assert differs.item() == 0


def test_random_cases_agree_with_float64(kernels, poisoned):
    for seed in range(40):
        chance = random.Random(seed)
        queries = chance.choice([128 * chance.randrange(1, 9), chance.randrange(256, 1100)])
        keys = queries + 128 * chance.choice([0, 0, chance.randrange(1, 5)])
        dtype, head_dim = chance.choice([torch.bfloat16, torch.float16]), chance.choice([64, 128])
        groups, gates = chance.randrange(1, 4), chance.choice(["half", "slow", "resets"])
        options = {"batch": chance.randrange(1, 4), "heads": groups * chance.randrange(1, 4), "groups": groups}
        if queries % 128:  # filled up, where queries see all keys before
            assert_like_reference(queries, keys, head_dim, dtype, gates, **options)
            assert kernels == [*KERNELS], f"seed {seed}"
            kernels.clear()
            continue
        if chance.random() < 0.4:
            options["window_size"] = chance.randrange(1, keys)
        if chance.random() < 0.3:
            options["seq_start"] = torch.tensor([chance.randrange(keys + 1) for _ in range(options["batch"])]).cuda()
        elif keys == queries and chance.random() < 0.6:
            bounds = sorted(chance.choices(range(keys), k=chance.randrange(6)))
            options |= {"batch": 1, "cu_seqlens": torch.tensor([0, *bounds, keys]).cuda()}
        assert_like_reference(queries, keys, head_dim, dtype, gates, **options)
        assert kernels == [*KERNELS], f"seed {seed}"
        kernels.clear()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_documents_padding_and_ragged_lengths_agree_with_float64(kernels, head_dim, poisoned):
    def ints(*numbers):
        return torch.tensor(numbers, device="cuda")

    for queries, keys, options in (
        (1024, 1024, {"window_size": 1}),
        (1024, 1024, {"window_size": 128}),
        (1024, 1024, {"window_size": 129, "heads": 4, "groups": 2}),
        (512, 1024, {"window_size": 300}),
        (1024, 1024, {"batch": 1, "cu_seqlens": ints(0, 128, 640, 1024)}),
        (1024, 1024, {"batch": 1, "cu_seqlens": ints(0, 1, 2, 127, 500, 500, 777, 1024)}),
        (1024, 1024, {"batch": 1, "cu_seqlens": ints(0, 300, 999, 1024), "window_size": 200}),
        (1024, 1024, {"seq_start": ints(0, 1024)}),
        (512, 1024, {"seq_start": ints(700, 512)}),
        (257, 257, {}),
        (700, 1212, {"heads": 4, "groups": 1}),
        (1024, 1024, {"seq_start": ints(129, 1000), "window_size": 150}),
    ):
        for gates in ("half", "slow"):
            assert_like_reference(queries, keys, head_dim, torch.bfloat16, gates, **options)
            assert kernels == [*KERNELS], options
            kernels.clear()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_padding_gives_zeros_and_changes_no_bit_whatever_it_holds(kernels, head_dim):
    """Gradients of its outputs too."""
    leaves, d_out = random_leaves(2, 768, 4, head_dim, groups=2)
    options = {"seq_start": torch.tensor([130, 600], device="cuda"), "window_size": 300}
    clean = [forgetting_attention(*leaves, **options), *gradients(leaves, d_out, **options)]
    is_padding = torch.arange(768, device="cuda") < options["seq_start"][:, None]
    with torch.no_grad():
        for x in (*leaves[:3], d_out):
            x[is_padding] = torch.nan
    held = [forgetting_attention(*leaves, **options), *gradients(leaves, d_out, **options)]
    for a, b in zip(held, clean, strict=True):
        assert torch.equal(a, b) and not a[is_padding].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_twice_with_windows_documents_and_shared_keys(kernels, head_dim):
    documents = torch.tensor([0, 1000, 1001, 3000, 4096], device="cuda")
    for options in ({"window_size": 500}, {"cu_seqlens": documents}, {}):
        leaves, d_out = random_leaves(1, 4096, 8, head_dim, groups=2)
        first, *others = (gradients(leaves, d_out, **options) for _ in range(20))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
