"""Decoding: the portable backend, and the Triton kernels in Triton's interpreter, against the float64 reference.

The reference adds up log gates itself and knows nothing of running sums, parts or caches.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import forgetting_attention_decode
from forgetting_transformer.ops.forgetting_attention import cumulative_log_fgate, forgetting_attention_reference
from tests.ops.kernels import on_every_device


def make_inputs(queries=1, keys=40, heads=4, groups=2, head_dim=8, batch=2, dtype=torch.float64, shift=2.0):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(batch, queries, heads, head_dim).to(dtype)
    k, v = (normal(batch, keys, groups, head_dim).to(dtype) for _ in range(2))
    return q, k, v, F.logsigmoid(normal(batch, keys, heads) + shift)


def reference(q, k, v, log_fgate, seq_start=None):
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v, log_fgate))
    return forgetting_attention_reference(*heads_first, seq_start, q.shape[-1] ** -0.5)[0].transpose(1, 2)


def decode(q, k, v, log_fgate, **options):
    return forgetting_attention_decode(q, k, v, cumulative_log_fgate(log_fgate), **options)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_equals_the_definition(dtype, tolerance):
    for queries, keys, groups in ((1, 1, 4), (1, 40, 1), (5, 40, 2), (40, 40, 4)):
        inputs = make_inputs(queries, keys, groups=groups, dtype=dtype)
        out, want = decode(*inputs), reference(*inputs)
        assert out.dtype == dtype and out.shape == inputs[0].shape
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_padding_on_both_sides_is_invisible_whatever_it_holds():
    """Sequences of different lengths in buffers with room to spare; both ends hold NaN."""
    q, k, v, log_fgate = make_inputs(3, 40)
    starts, ends = torch.tensor([4, 39]), torch.tensor([30, 40])
    want = []
    for row, end in enumerate(ends):
        one = [x[row : row + 1] for x in (k, v, log_fgate)]
        want.append(reference(q[row : row + 1], *(x[:, :end] for x in one), seq_start=starts[row : row + 1]))
    running = cumulative_log_fgate(log_fgate)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for x in (k, v, running):
            x[row, :start], x[row, end:] = math.nan, math.nan
    got = forgetting_attention_decode(q, k, v, running, seq_start=starts, seq_end=ends)
    torch.testing.assert_close(got, torch.cat(want))
    assert (got[1, :2] == 0).all()  # queries in padding


def test_gates_that_reset_and_gates_that_keep_everything():
    q, k, v, log_fgate = make_inputs(3)
    log_fgate[:, ::7] = -torch.inf
    for gates in (log_fgate, torch.zeros_like(log_fgate)):
        torch.testing.assert_close(decode(q, k, v, gates), reference(q, k, v, gates))


def test_running_sums_may_come_in_pieces_and_start_anywhere():
    q, k, v, log_fgate = make_inputs(2)
    running, previous = [], torch.full((2, 1, 4), -1234.5, dtype=torch.float64)
    for piece in log_fgate.split([1, 20, 1, 1, 17], dim=1):
        running.append(cumulative_log_fgate(piece, previous))
        previous = running[-1][:, -1:]
    got = forgetting_attention_decode(q, k, v, torch.cat(running, 1))
    torch.testing.assert_close(got, reference(q, k, v, log_fgate))


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("cum_log_fgate", torch.zeros(2, 39, 4), ValueError, r"cum_log_fgate has shape \(2, 39, 4\)"),
        ("seq_end", torch.tensor([1, 40]), ValueError, r"seq_end is \[1, 40\]; .* in \[2, 40\]"),
        ("adaptive_threshold", "auto", TypeError, "adaptive_threshold is 'auto'; decoding takes a number or a tensor"),
        ("q", torch.zeros(2, 2, 4, 8, dtype=torch.float64, requires_grad=True), RuntimeError, "has no gradients"),
    ],
)
def test_calls_that_cannot_be_right_are_refused(name, value, error, message):
    with pytest.raises(error, match=message):
        q, k, v, log_fgate = make_inputs(2)
        arguments = {"q": q, "k": k, "v": v, "cum_log_fgate": cumulative_log_fgate(log_fgate)}
        forgetting_attention_decode(**arguments | {name: value})


def kernel_inputs(length, head_dim, dtype=torch.float32, heads=2, groups=None, queries=1, batch=1):
    """Head first: queries, keys, values and log gates."""
    q = torch.randn(batch, heads, queries, head_dim).to(dtype)
    k, v = (torch.randn(batch, groups or heads, length, head_dim).to(dtype) for _ in range(2))
    return q, k, v, F.logsigmoid(torch.randn(batch, heads, length) + 1)


def use_splits(device, count):
    """On a GPU there are as many as fill it."""
    from forgetting_transformer.ops.forgetting_attention import decode_triton

    if device == "cpu":
        decode_triton._num_splits = lambda num_programs, num_keys, num_slots: count


def decode_with_kernel(*arguments):
    from forgetting_transformer.ops.forgetting_attention import decode_triton

    return decode_triton.decode(*arguments)


def attend(q, k, v, log_fgate, threshold=None, seq_start=None, seq_end=None, scale=None):
    running = cumulative_log_fgate(log_fgate, head_first=True)
    return decode_with_kernel(q, k, v, running, threshold, seq_start, seq_end, scale or q.shape[-1] ** -0.5)


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-3)).item()


def expect_float64(inputs, seq_start=None):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-3}[inputs[0].dtype]
    out, log_normaliser = attend(*inputs, seq_start=seq_start)
    assert torch.equal(out, attend(*inputs, seq_start=seq_start)[0] if out.is_cuda else out), "other bits a second time"
    doubles = [x.double() for x in inputs]
    want, want_normaliser = forgetting_attention_reference(*doubles, seq_start, inputs[0].shape[-1] ** -0.5)
    assert torch.equal(log_normaliser.isneginf(), want_normaliser.isneginf())
    assert (out[want == 0] == 0).all() and out.isfinite().all()
    sees = want_normaliser.isfinite()
    assert relative_error(out, want) < tolerance, relative_error(out, want)
    assert relative_error(log_normaliser[sees], want_normaliser[sees]) < tolerance


@pytest.mark.slow
@on_every_device
def test_kernel_at_ragged_lengths_and_any_number_of_parts(device):
    """More parts than tiles, too: those that get no keys write nothing, and memory holds NaN."""
    for splits, lengths in ((1, (1, 64)), (3, (2, 65, 200)), (12, (1, 200))):
        use_splits(device, splits)
        for length in lengths:
            expect_float64(kernel_inputs(length, 16, heads=1))


@pytest.mark.slow
@on_every_device
def test_kernel_at_head_dimensions_of_all_kinds(device):
    use_splits(device, 3)
    for head_dim in (24, 64) if device == "cpu" else (1, 8, 24, 64, 80, 128, 192, 256):
        length = 150 if device == "cpu" else 1111
        expect_float64(kernel_inputs(length, head_dim))
        expect_float64(kernel_inputs(length, head_dim, torch.float16, heads=6, groups=2))
        if device == "cuda":
            expect_float64(kernel_inputs(length, head_dim, torch.bfloat16, heads=6, groups=2, queries=3))


@pytest.mark.slow
@on_every_device
def test_kernel_with_shared_keys_and_several_queries(device):
    """Rows of a tile are heads × queries; 60 of them take several tiles."""
    use_splits(device, 4)
    for heads, groups, queries, batch in ((6, 2, 1, 2), (4, 4, 5, 1), (6, 2, 20, 1), (2, 1, 17, 1)):
        expect_float64(kernel_inputs(130, 16, heads=heads, groups=groups, queries=queries, batch=batch))
    expect_float64(kernel_inputs(5, 16, queries=5))


@pytest.mark.slow
@on_every_device
def test_kernel_with_padding_resets_and_absent_gates(device):
    use_splits(device, 5)
    for queries in (1, 5):
        q, k, v, log_fgate = kernel_inputs(138, 16, queries=queries, batch=3)
        start = torch.tensor([0, 77, 138 - queries + 1])  # the last has a query in padding, or nothing but padding
        for row, first in enumerate(start):
            for x in (k, v):
                x[row, :, :first] = math.nan
            log_fgate[row, :, :first] = -3e38  # a running sum, so not NaN: that would not stay in the padding
        expect_float64((q, k, v, log_fgate), start)
        running = cumulative_log_fgate(log_fgate, head_first=True)
        want = decode_with_kernel(q, k, v, running, None, start, None, 0.25)
        for garbage in (math.nan, 1e30, -1e25 * torch.arange(138.0)):
            for row, first in enumerate(start):
                running[row, :, :first] = garbage[:first] if isinstance(garbage, torch.Tensor) else garbage
            got = decode_with_kernel(q, k, v, running, torch.full((3, 2), -1e3), start, None, 0.25)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        q, k, v, _ = kernel_inputs(138, 16, queries=queries)
        expect_float64((q, k, v, torch.zeros(1, 2, 138)))
        expect_float64((q, k, v, torch.full((1, 2, 138), -8.0)))
        log_fgate = F.logsigmoid(torch.randn(1, 2, 138) + 2)
        log_fgate[:, :, [0, 5, 63, 64, 127, 128]] = -math.inf
        expect_float64((q, k, v, log_fgate))
        log_fgate[:, :, -1] = -math.inf  # the newest token sees itself only
        expect_float64((q, k, v, log_fgate))


@pytest.mark.slow
@on_every_device
def test_kernel_on_whole_buffers_with_an_end_for_every_sequence(device):
    """Before the start and after the end there is NaN. In as many parts no bit depends on it, or on the buffer."""
    use_splits(device, 4)
    starts, ends = torch.tensor([0, 3, 70, 399]), torch.tensor([1, 64, 129, 400])
    q, k, v, log_fgate = kernel_inputs(400, 16, batch=4)
    running = cumulative_log_fgate(log_fgate, head_first=True)
    want = []
    for i, end in enumerate(ends):
        part = slice(i, i + 1)
        want.append(attend(q[part], *(x[part, :, :end] for x in (k, v, log_fgate)), seq_start=starts[part]))
        for x in (k, v, running):
            x[i, :, : starts[i]], x[i, :, end:] = math.nan, math.nan
    for threshold in (None, torch.full((4, 2), -1e4)):
        got = decode_with_kernel(q, k, v, running, threshold, starts, ends, 0.25)
        for a, b in zip(got, zip(*want, strict=True), strict=True):
            if device == "cpu":
                assert torch.equal(a, torch.cat(b))
            else:
                assert relative_error(a, torch.cat(b).double()) < 1e-5


@pytest.mark.slow
@on_every_device
def test_kernel_biases_are_exact_after_65536_tokens(device):
    """Log-normalisers of queries that see one key, 1 to 64 tokens back, are the bias itself; f is near 1/2."""
    use_splits(device, 2)
    log_fgate = F.logsigmoid(torch.randn(1, 1, 65536, dtype=torch.float64)).float()
    running = cumulative_log_fgate(log_fgate, head_first=True)
    assert running[0, 0, -1] < -40_000
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 65536, 16), torch.zeros(1, 1, 65536, 16)
    for distance in (1, 16, 63):
        # Other keys are orthogonal and 10^4 nats below.
        q[..., 0], k[..., 0] = 1.0, -1e4
        k[0, 0, 65535 - distance, 0] = 0.0
        _, log_normaliser = decode_with_kernel(q, k, v, running, None, torch.tensor([65536 - 128]), None, 1.0)
        exact = log_fgate[0, 0, 65536 - distance :].double().sum()
        assert abs(log_normaliser.item() - exact) < 1e-4 and exact < -0.5


@pytest.mark.slow
@on_every_device
def test_kernel_pruning_skips_the_oldest_tiles_and_changes_rows_by_less_than_its_tolerance(device):
    """Keys that must be left out hold NaN, and a threshold that is too high changes the output: both can fail."""
    for queries, heads, groups in ((1, 2, 2), (3, 4, 2)):
        use_splits(device, 3)
        group = heads // groups
        q, k, v, log_fgate = kernel_inputs(900, 16, queries=queries, heads=heads, groups=groups)
        log_fgate[:, heads // 2 :] *= 1e-3  # heads that remember
        v = v / v.norm(dim=-1, keepdim=True)
        bound = 0.25 * q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1).repeat_interleave(group, 1)
        exact = attend(q, k, v, log_fgate)
        for tolerance in (-10.0, -3.0):
            threshold = tolerance - 2 * bound - math.log(900)
            pruned = attend(q, k, v, log_fgate, threshold)
            # Weights are non-negative and values have norm 1: a row moves by at most twice what was left out.
            assert (exact[0] - pruned[0]).norm(dim=-1).max() <= 2 * math.exp(tolerance) + 1e-6
        unseen = k.clone()
        unseen[:, 0, :640] = math.nan
        assert (log_fgate[0, :group, 640 : 900 - queries + 1].sum(-1) < threshold[0, :group]).all()
        got = attend(q, unseen, v, log_fgate, threshold)
        assert torch.equal(got[0], pruned[0]) and torch.equal(got[1], pruned[1])
        unseen[:, -1, :640] = math.nan  # a head that remembers does look there
        assert attend(q, unseen, v, log_fgate, threshold)[0][:, -1].isnan().all()
        wrong = attend(q, k, v, log_fgate, torch.full((1, heads), -0.5))
        assert (wrong[0] - exact[0]).abs().max() > 1e-3
        nothing = attend(q, k, v, log_fgate, torch.full((1, heads), math.nan))
        assert all(torch.equal(a, b) for a, b in zip(nothing, exact, strict=True))
        # Padding and pruning together: what is pruned depends on positions, not on where the sequence starts.
        start = torch.tensor([700])
        padded = attend(q, k, v, log_fgate, threshold, start)
        assert (padded[0] - attend(q, k, v, log_fgate, None, start)[0]).norm(dim=-1).max() <= 2 * math.exp(-3.0)


@pytest.mark.slow
@on_every_device
def test_kernel_prunes_a_group_only_where_all_its_heads_forget(device):
    use_splits(device, 2)
    q, k, v, log_fgate = kernel_inputs(500, 16, heads=3, groups=1)
    log_fgate[:, 0], log_fgate[:, 1], log_fgate[:, 2] = -1.0, -0.01, -1.0
    threshold = torch.full((1, 3), -30.0)
    exact = attend(q, k, v, log_fgate)
    got = attend(q, k, v, log_fgate, threshold)
    assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
    log_fgate[:, 1] = -0.5
    k[:, :, :384] = math.nan
    assert attend(q, k, v, log_fgate, threshold)[0].isfinite().all()
