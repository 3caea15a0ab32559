"""The Triton kernel in Triton's interpreter: the same code that runs on a GPU, held to the float64 reference.

Outputs are poisoned with NaN before the kernels write them.
"""

import pytest

from tests.ops.interpreter import interpret

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "head_dim, lengths", [pytest.param(24, (2, 129, 260), marks=pytest.mark.quick), (64, (63, 128))]
)
def test_outputs_and_gradients_are_the_references_at_ragged_lengths(head_dim, lengths):
    """Head dimensions that are no powers of two, too. Log-normalisers have gradients, too.

    A stretch is 128 positions, tiles are 32 to 128 wide; how they follow each other does not depend on the head
    dimension.
    """
    interpret(
        f"""
for length in {lengths}:
    check(*inputs(length, {head_dim}, heads=1), 1e-5)
check(*inputs(70, {head_dim}, torch.float16, heads=1), 2e-3)
"""
    )


def test_fewer_queries_than_keys_and_shared_keys():
    interpret(
        """
for queries, length in ((1, 1), (1, 129), (5, 260), (130, 140)):
    check(*inputs(length, 16, queries=queries, heads=1), 1e-5)
check(*inputs(40, 16, heads=4, groups=2, batch=2), 1e-5)
check(*inputs(140, 16, heads=3, groups=1, queries=20), 1e-5)
"""
    )


def test_padding_windows_and_packed_documents():
    interpret(
        """
for queries, length in ((140, 140), (5, 260)):
    positions = torch.arange(length)[None, length - queries:]
    for first_key in ((positions - 69).clamp(min=0), positions // 70 * 70):  # a window; documents
        check(*inputs(length, 16, queries=queries, heads=1), 1e-5, first_key.int())
for queries, length in ((150, 150), (5, 150)):
    q, k, v, log_fgate, d_out = inputs(length, 16, queries=queries, batch=2, heads=1)
    start = torch.tensor([37, length])  # the second sequence is nothing but padding
    for row, first in enumerate(start):
        for x in (k, v, log_fgate[..., None]):
            x[row, :, :first] = math.nan
        q[row, :, :max(0, first - (length - queries))] = math.nan
    check(q, k, v, log_fgate, d_out, 1e-5, start[:, None].expand(-1, queries).int().contiguous())
"""
    )


def test_kernels_for_whole_tiles_get_whole_tiles_without_what_padding_holds():
    """Results are those of the ragged length. From 256 queries on it is filled up, where they see all keys before."""
    interpret(
        """
from forgetting_transformer.ops.forgetting_attention import dispatch
dispatch._has_hopper_kernels = lambda *_: True
lengths, attend_whole = [], dispatch._attend
def seen(*args):
    lengths.append((args[0].shape[2 if args[-1] else 1], args[4] is not None and args[4].shape[1]))
    assert args[0].shape[2 if args[-1] else 1] % 128 or all(x.isfinite().all() for x in args[:3])
    return attend_whole(*args)
dispatch._attend = seen
for queries, keys, window, start, head_first in (
    (260, 260, None, None, True), (260, 388, None, None, False), (260, 388, 100, None, False),
    (300, 300, None, (270, 300), False), (128, 256, None, (200, 256), True), (260, 261, None, None, True),
):
    q, k, v, log_fgate, d_out = inputs(keys, 16, torch.float16, queries=queries, batch=2, heads=1)
    first_key = dispatch.first_visible_key(q, k, window=window)
    seq_start = None
    if start is not None:
        seq_start = torch.tensor(start)
        first_key = seq_start[:, None].expand(-1, queries).int().contiguous()
        for row, first in enumerate(start):
            k[row, :, :first] = v[row, :, :first] = math.nan
            q[row, :, :max(0, first - (keys - queries))] = math.nan
    def launch(*leaves):
        leaves = leaves if head_first else [x.transpose(1, 2) for x in leaves]
        given = None if window is None else first_key
        out = dispatch._launch(*leaves, head_first, 0.25, seq_start, given, None, None)
        return out if head_first else out.transpose(1, 2)
    def results(op, *tensors):
        *leaves, d_out = [x.detach().clone().requires_grad_() for x in tensors]
        out = op(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, d_out)
    got = results(launch, q, k, v, log_fgate, d_out)
    want = results(lambda *x: reference(*x, first_key, 0.25)[0], *(x.double() for x in (q, k, v, log_fgate, d_out)))
    for a, e in zip(got, want, strict=True):
        finite = torch.isfinite(e)
        assert a.shape == e.shape and torch.isfinite(a[finite]).all()
        assert (a.double() - e)[finite].norm() <= 3e-3 * e[finite].norm()
assert lengths == [(384, False), (384, False), (260, 260), (300, 300), (128, 128), (260, False)], lengths
"""
    )


def test_strong_absent_and_resetting_gates():
    interpret(
        """
q, k, v, _, d_out = inputs(200, 16, heads=1)
check(q, k, v, torch.full((1, 1, 200), -8.0), d_out, 1e-4)
check(q, k, v, torch.zeros(1, 1, 200), d_out, 1e-5)
log_fgate = F.logsigmoid(torch.randn(1, 1, 200) + 2)
log_fgate[:, :, [0, 5, 127, 128, 170]] = -math.inf
check(q, k, v, log_fgate, d_out, 2e-4)
"""
    )


def test_the_bias_of_near_pairs_is_exact_however_long_the_sequence():
    """With f = 1/2 the running sum reaches -45,000 at 65,536 positions; its float32 neighbours are 4e-3 apart."""
    interpret(
        """
log_fgate = F.logsigmoid(torch.randn(1, 1, 65536, dtype=torch.float64)).float()
suffix, running, *_ = kernel._decay(log_fgate, 65536, None, None, None, None, None)
i = torch.arange(200, 65536, 997)
exact = (F.pad(log_fgate.double().cumsum(-1), (1, 0))[0, 0])
for distance in (1, 16, 64):
    j = i - distance
    def to_end(x):  # sum of log f from x + 1 to the end of i's stretch, as the kernel adds it up
        return suffix[0, x] + (running[0, i // 128 + 1] - running[0, x // 128 + 1]).float()
    bias = (to_end(j) - to_end(i)) / kernel.LOG2_E
    assert (bias.double() - (exact[i + 1] - exact[j + 1])).abs().max() < 1e-4
"""
    )


def test_pruning_skips_work_and_changes_rows_by_less_than_its_tolerance():
    """By one threshold for a head, and by bounds for every tile."""
    interpret(
        """
q, k, v, log_fgate, d_out = inputs(400, 16, shift=0.0, queries=150)
k[:, :, 130:140] *= 3  # norms differ from tile to tile
log_fgate[:, 1] *= 0.01  # a head that remembers: nothing to skip
v = v / v.norm(dim=-1, keepdim=True)
scale = 0.25
bound = scale * q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)
exact = run(attend, q, k, v, log_fgate, d_out, None, scale)
for bounded in (False, True):
    threshold = torch.full((1, 2), -10.0) - (0 if bounded else 2 * bound + math.log(400))
    pruned = run(attend, q, k, v, log_fgate, d_out, None, scale, threshold, bounded)
    bounds = kernel._bounds(q, k, None, scale) if bounded else [None] * 3
    decay = kernel.Decay(*kernel._decay(log_fgate, 150, threshold, *bounds, None))
    assert decay.first_stretch[0].max() >= 2
    assert decay.first_stretch[1].max() == 0
    blocks, shift = -(-150 // 128), 400 - 150
    kept = torch.zeros(blocks, 4, dtype=torch.bool)
    for block in range(blocks):
        kept[block, decay.first_stretch[0, block]:(min(block * 128 + 127, 150 - 1) + shift) // 128 + 1] = True
    for key in range(4):
        last = max(kept[:, key].nonzero().flatten().tolist(), default=-1)
        assert last == decay.end_block[0, key] - 1, "forward and backward must skip the same"
    # Weights are non-negative and values have norm 1: a row moves by at most twice what was left out.
    assert (exact[0] - pruned[0]).norm(dim=-1).max() <= 2 * math.exp(-10.0) + 1e-6
    assert torch.equal(exact[0][:, 1], pruned[0][:, 1])
    for a, b in zip(exact[2:], pruned[2:]):
        assert (a - b).norm() <= 10 * math.exp(-10.0) * a.norm()
unpruned = run(attend, q, k, v, log_fgate, d_out, None, scale, torch.full((1, 2), math.nan))
assert all(torch.equal(a, b) for a, b in zip(exact, unpruned))
"""
    )


def test_the_search_finds_what_a_walk_over_all_blocks_finds():
    """Bounds per tile leave out more than one bound per head, and less where norms are large. Padding adds nothing."""
    interpret(
        """
from forgetting_transformer.ops.forgetting_attention import reference as definition
totals = torch.zeros(2)
for queries, keys, groups, kernel._MAX_CHUNK in ((1, 129, 3, 1024), (700, 700, 1, 2), (500, 645, 3, 1024)):
    q, k, _, log_fgate, _ = inputs(keys, 16, heads=3, groups=groups, queries=queries)
    log_fgate += torch.tensor([-1.0, 0.1, 0.0])[:, None]
    log_fgate = log_fgate.clamp(max=0)
    log_fgate[:, 2, keys // 2] = -math.inf
    q[:, :, queries // 2:] *= torch.rand(1, 3, queries - queries // 2, 1) * 4
    threshold = torch.tensor([[-10.0, -5.0, -20.0]])
    norms = 0.25 * q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1).repeat_interleave(3 // groups, 1)
    for rule, (given, bounds) in enumerate((
        (threshold - 2 * norms - math.log(keys), None), (threshold, definition.score_bounds(q, k, 0.25))
    )):
        found = kernel._bounds(q, k, None, 0.25) if bounds else (None, None, None)
        if bounds:
            for actual, expected in zip(found, (bounds.query_norm_BHQ, bounds.self_score_BHQ, bounds.key_norm_BHS)):
                scale = 1 if expected is bounds.key_norm_BHS else kernel.LOG2_E
                torch.testing.assert_close(actual.double(), expected[0] * scale, rtol=1e-5, atol=1e-5)
        first = kernel.Decay(*kernel._decay(log_fgate, queries, given, *found, None)).first_stretch
        assert torch.equal(first.long(), definition.first_kept_stretch(log_fgate, queries, given, bounds)[0])
        totals[rule] += definition.skipped_share(log_fgate, queries, given, bounds).sum()
assert 1 < totals[0] < totals[1], totals

# A later block that looks back further takes the earlier ones of its chunk with it.
q, k, *_ = inputs(900, 16, heads=1)
q[:, :, :640] *= 0.1
q[:, :, 640:] *= 10
slow, threshold = torch.full((1, 1, 900), -0.05), torch.full((1, 1), -10.0)
first = kernel.Decay(*kernel._decay(slow, 900, threshold, *kernel._bounds(q, k, None, 0.25), None)).first_stretch
walked = definition.first_kept_stretch(slow, 900, threshold, definition.score_bounds(q, k, 0.25))[0]
bounds = definition.score_bounds(q[:, :, :640], k[:, :, :640], 0.25)
alone = definition.first_kept_stretch(slow[..., :640], 640, threshold, bounds)
assert torch.equal(first.long(), walked) and (walked[..., :5] < alone[0]).any()

q, k, _, log_fgate, _ = inputs(600, 16)
padded_q, padded_k = q.clone(), k.clone()
for x in (padded_q, padded_k):
    x[:, :, :300] = math.nan
first_key = torch.full((1, 600), 300, dtype=torch.int32)
clean = [x[:, :, 256:].clone() for x in (q, k)]
for x in clean:
    x[:, :, :44] = 0
expected = definition.score_bounds(*clean, 0.25)
_, self_score, key_norm = kernel._bounds(padded_q, padded_k, first_key, 0.25)
torch.testing.assert_close(key_norm[:, 2:].double(), expected.key_norm_BHS[0], rtol=1e-5, atol=1e-5)
assert (key_norm[:, :2] == 0).all() and self_score[:, :2].isposinf().all()
"""
    )


def test_softmax_attention_through_the_kernels_is_what_it_is_through_pytorch():
    """`causal_attention` without gates: windows, left padding, shared keys, fewer queries than keys."""
    interpret(
        """
from forgetting_transformer.ops import attention
from forgetting_transformer.ops.attention import causal_attention

calls, attend_with_kernel = [], attention.attend_with_kernel
attention.attend_with_kernel = lambda *args, **options: calls.append(args) or attend_with_kernel(*args, **options)

def run_causal(tensors, takes_kernel, **options):
    attention.takes_kernel = lambda q: takes_kernel
    calls.clear()
    q, k, v, d_out = (x.transpose(1, 2) for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves, **options)
    assert len(calls) == takes_kernel
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]

for queries, length, groups, window, start in (
    (130, 130, 2, None, None), (70, 70, 1, 40, (70, 41)), (20, 130, 2, 40, (120, 3)), (2, 130, 2, 1, None),
    (20, 90, 2, 1000, None),
):
    q, k, v, _, d_out = inputs(length, 16, torch.float16, queries=queries, groups=groups, batch=2)
    options = {"window_size": window, "seq_start": None if start is None else torch.tensor(start)}
    actual = run_causal((q, k, v, d_out), True, **options)
    expected = run_causal([x.double() for x in (q, k, v, d_out)], False, **options)
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        if start is not None:
            is_padding = torch.arange(length)[length - a.shape[1]:] < options["seq_start"][:, None]
            assert (a[is_padding] == 0).all(), name
        # A query that sees one key has gradients of 0, but for rounding.
        error = ((a.double() - e).norm() / (e.norm() + 0.1 * expected[0].norm())).item()
        assert error < 2e-3, f"{name}, {options}: {error:.1e}"
"""
    )
