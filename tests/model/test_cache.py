"""Layer caches: what they hold is what was put in, growing copies little, and nobody else's tensors are written to."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.model.generation import cached_attention
from forgetting_transformer.model.generation.cache import (
    AttentionCache,
    log_fgate_of,
)
from forgetting_transformer.model.generation.growing import GrowingTensor
from forgetting_transformer.model.span import Span
from tests.model.small_models import small_model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def states(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, 3, tokens, 4, generator=generator) for _ in range(2))
    return k, v, F.logsigmoid(torch.randn(batch, 3, tokens, generator=generator) + 2)


def filled(pieces: list[int], **options) -> tuple[AttentionCache, tuple[Tensor, Tensor, Tensor]]:
    """A cache that got its tokens in pieces, and all the tokens."""
    everything = states(sum(pieces))
    cache = AttentionCache(**options)
    for piece in zip(*(x.split(pieces, dim=2) for x in everything), strict=True):
        cache.update(*piece)
    return cache, everything


def assert_holds(cache: AttentionCache, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
    assert torch.equal(cache.keys, k) and torch.equal(cache.values, v)
    assert cache.get_seq_length() == k.shape[2]
    # A sum may start anywhere: what counts is what lies between two positions.
    c = log_fgate.double().cumsum(-1)
    assert cache.cum_log_fgate.dtype == torch.float64
    torch.testing.assert_close(cache.cum_log_fgate.diff(dim=2), c.diff(dim=2), rtol=0, atol=1e-12)
    torch.testing.assert_close(log_fgate_of(cache.cum_log_fgate)[:, :, 1:], log_fgate[:, :, 1:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("pieces", [[300], [1] * 300, [5, *[1] * 200], [100, 64, 1, 135], [1, 299]], ids=len)
def test_a_cache_holds_what_was_put_in(pieces):
    cache, everything = filled(pieces)
    assert_holds(cache, *everything)


def test_growing_copies_a_token_three_times_at_most_on_average(monkeypatch):
    copied, grow = [], GrowingTensor._grow

    def counted(self, needed):
        copied.append(self._stop - self._start)
        grow(self, needed)

    monkeypatch.setattr(GrowingTensor, "_grow", counted)
    growing = GrowingTensor(torch.zeros(1, 1, 1, 2))
    for i in range(1, 5000):
        growing.append(torch.full((1, 1, 1, 2), float(i)))
        if i > 300:
            assert growing._buffer.shape[2] <= 1.5 * (i + 1)
    assert torch.equal(growing.contents[0, 0, :, 0], torch.arange(5000.0))
    assert sum(copied) <= 3 * 5000 and len(copied) < 15


def test_a_cache_filled_in_inference_mode_goes_on_without_it():
    with torch.inference_mode():
        cache, everything = filled([9, 1])
    cache.update(*states(1, seed=5))
    assert_holds(cache, *(torch.cat((a, b), 2) for a, b in zip(everything, states(1, seed=5), strict=True)))


def test_hard_resets_stay_finite_and_come_back_as_gates_that_keep_nothing():
    k, v, log_fgate = states(40)
    log_fgate[:, :, ::3] = -torch.inf
    cache = AttentionCache()
    cache.update(k[:, :, :30], v[:, :, :30], log_fgate[:, :, :30])
    cache.update(k[:, :, 30:], v[:, :, 30:], log_fgate[:, :, 30:])
    assert cache.cum_log_fgate.isfinite().all()
    torch.testing.assert_close(
        log_fgate_of(cache.cum_log_fgate)[:, :, 1:], log_fgate[:, :, 1:].clamp(min=-256), rtol=1e-6, atol=0
    )


def random_ids(tokens: int) -> Tensor:
    return torch.randint(0, 61, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "fields", [{"qk_norm": True}, {"qk_norm": True, "num_heads": 4, "num_kv_heads": 2}], ids=["alone", "shared keys"]
)
def test_what_decoding_may_skip_weighs_less_than_the_tolerance(fields, monkeypatch):
    """Gates near 0.2 and scores of up to ±10; the newest 30 tokens one by one and four at once."""
    calls, op = [], cached_attention.forgetting_attention_decode

    def spy(q, k, v, c, *, adaptive_threshold, **options):
        calls.append((q, k, c.clone(), adaptive_threshold))
        return op(q, k, v, c, adaptive_threshold=adaptive_threshold, **options)

    monkeypatch.setattr(cached_attention, "forgetting_attention_decode", spy)
    model, ids = small_model(log_pruning_tolerance=-5.0, **fields), random_ids(150)
    layers = [block.sequence_mixer for block in model.decoder.layers]
    for layer in layers:
        layer.fgate_proj.bias.fill_(-1.5)
    cache = model.new_cache()
    for piece in ids.split([120, *[1] * 26, 4], dim=1):
        model(input_ids=piece, past_key_values=cache)
    assert len(calls) == 27 * len(layers)
    may_skip = 0
    for q, k, c, threshold in calls:
        queries, keys = q.shape[2], k.shape[2]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        bias = c[:, :, keys - queries :, None] - c[:, :, None]
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~visible, -torch.inf)
        skipped = bias < threshold.expand(q.shape[:2])[..., None, None]
        assert (scores.softmax(-1) * skipped).sum(-1).max() < math.exp(-5.0)
        may_skip += skipped.sum().item()
    assert may_skip > 0


def test_padding_that_is_nan_disturbs_nothing():
    """The cache holds it, and the op for decoding reads the cache."""
    torch.manual_seed(0)
    layer = small_model(log_pruning_tolerance=-5.0).model.layers[0].attn
    hidden, start = torch.randn(2, 9, 32), torch.tensor([0, 4])
    clean = hidden.masked_fill((torch.arange(9) < start[:, None])[..., None], 0.0)
    hidden[1, :4] = torch.nan
    outputs = []
    for x in (hidden, clean):
        cache = layer.new_cache()
        with torch.no_grad():
            parts, first = [], 0
            for piece in x.split([6, 2, 1], dim=1):
                padding = torch.arange(first, first + piece.shape[1]) < start[:, None]
                parts.append(layer(piece, Span(start, padding, cache=cache))[0])
                first += piece.shape[1]
            outputs.append(torch.cat(parts, 1))
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1, 4:], outputs[1][1, 4:])
