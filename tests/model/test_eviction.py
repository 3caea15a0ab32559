"""Forgotten keys leave the cache: logits stay within the tolerance, memory follows what heads reach."""

import pytest
import torch

from forgetting_transformer.model.cache import EvictingCache
from forgetting_transformer.model.decoder import CACHE_NAME
from tests.model.small_models import PRO, small

#: Biases of the gates of four heads: a key is forgotten after some 15, 25 and 150 tokens, and never.
BIASES = [-2.0, -1.0, 1.5, 12.0]


@pytest.fixture(scope="module")
def model():
    model = small("forgetting_transformer", **PRO, num_heads=4).double().eval()
    with torch.no_grad():
        for block in model.decoder.layers:
            block.attn.fgate_proj.bias.copy_(torch.tensor(BIASES))
    return model


def read(model, ids, cache, prompt, mask=None):
    """Logits of all tokens behind the prompt: some together, some one by one."""
    found, start = [], 0
    with torch.no_grad():
        for size in (prompt, 40, *([1] * (ids.shape[1] - prompt - 40))):
            part = None if mask is None else mask[:, : start + size]
            inputs = {"input_ids": ids[:, start : start + size], "attention_mask": part}
            found.append(model(**inputs, past_key_values=cache, use_cache=True).logits)
            start += size
    return torch.cat(found, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(("evict_below", "limit"), [(-10.0, 5e-4), (-25.0, 1e-10)])
def test_logits_are_those_of_all_keys_within_the_tolerance(model, evict_below, limit, monkeypatch):
    monkeypatch.setattr(EvictingCache, "EVERY", 64)
    ids = torch.randint(61, (2, 1100), generator=torch.Generator().manual_seed(0))
    whole, evicting = model.new_cache(), model.new_cache(evict_below=evict_below)
    expected, actual = read(model, ids, whole, 960), read(model, ids, evicting, 960)
    assert (actual - expected).abs().max() < limit
    assert evicting.get_seq_length() == whole.get_seq_length() == 1100
    for layer in evicting.layers:
        kept = {head: group.contents[0].shape[2] for group in layer.groups for head in group.heads.tolist()}
        assert kept[3] == 1100 and max(kept[head] for head in range(3)) < 900
        assert all(g.num_dropped + g.contents[0].shape[2] == 1100 for g in layer.groups)
    assert evicting.memory_bytes < 0.75 * whole.memory_bytes


def test_what_decoding_adds_is_evicted_too_and_memory_is_given_back(model):
    layer = model.decoder.layers[0].attn
    cache = EvictingCache(-10.0, layer.score_bound())
    sizes = []
    with torch.no_grad():
        for _ in range(40):
            x = torch.randn(1, 4, 100, 8, dtype=torch.float64)
            cache.append(x, x, torch.full((1, 4, 100), -0.7))
            cache.evict()
            sizes.append(cache.memory_bytes)
    assert max(sizes[20:]) <= max(sizes[:20]) < 1500 * 4 * (8 + 8 + 1) * 8


def test_padding_on_the_left_counts_for_nothing(model):
    ids = torch.randint(61, (1, 900), generator=torch.Generator().manual_seed(1))
    expected = read(model, ids, model.new_cache(), 600)
    padded, mask = torch.cat((ids[:, :90] * 0, ids), dim=1), torch.ones(2, 990, dtype=torch.long)
    mask[0, :90] = 0
    both = torch.cat((padded, torch.randint(61, (1, 990))))
    actual = read(model, both, model.new_cache(evict_below=-25.0), 690, mask)
    torch.testing.assert_close(actual[:1, 90:], expected, rtol=0, atol=1e-8)


def test_beams_follow_and_generation_takes_the_cache(model):
    ids = torch.randint(1, 61, (2, 400), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    whole = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **{CACHE_NAME: model.new_cache(evict_below=-25.0)}, **options), whole)


def test_a_prompt_may_be_read_in_parts_first(model):
    """As docs/long_contexts.md shows it."""
    input_ids = torch.randint(1, 61, (1, 900), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(evict_below=-25.0)
    with torch.no_grad():
        for part in input_ids[:, :-1].split(300, dim=1):
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(input_ids)
    whole = model.generate(input_ids, **options)
    assert torch.equal(model.generate(input_ids, **{CACHE_NAME: cache}, **options), whole)


def test_layers_without_gates_keep_their_keys():
    layer = {"architecture": "forgetting_transformer", "num_heads": 2, "qk_norm": True}
    mixers = {"fox": layer, "attention": {**layer, "fgate_type": "none", "use_rope": True}}
    cache = small("hybrid", pattern=["fox", "attention"], mixers=mixers).new_cache(evict_below=-10.0)
    assert [isinstance(layer, EvictingCache) for layer in cache.layers] == [True, False, True]


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_groups_of_heads_that_come_to_reach_alike_merge(rate):
    """Each group is a call of its own for every token. With a rate of 0.5 heads reach 48 keys."""
    cache = EvictingCache(-10.0, torch.zeros(8, dtype=torch.float64))
    heads, generator = torch.arange(8), torch.Generator().manual_seed(0)
    everything = [torch.empty(1, 8, 0, 4, dtype=torch.float64) for _ in range(2)]
    log_fgate = torch.empty(1, 8, 0, dtype=torch.float64)
    groups = []
    for step in range(60):
        # First heads of four kinds, then all alike.
        rate_H = 10.0 ** -(1 + heads % 4 * 0.7) if step < 30 else torch.full((8,), rate)
        new = [torch.randn(1, 8, 256, 4, dtype=torch.float64, generator=generator) for _ in range(2)]
        gates = -rate_H.double()[None, :, None].expand(1, 8, 256)
        cache.append(*new, gates)
        everything = [torch.cat(pair, dim=2) for pair in zip(everything, new, strict=True)]
        log_fgate = torch.cat((log_fgate, gates), dim=2)
        cache.evict()
        groups.append(len(cache.groups))
    assert max(groups) == 3 and groups[-1] == 1
    decay = log_fgate.flip(-1).cumsum(-1).flip(-1) - log_fgate
    threshold = -10 - torch.tensor(2.0**20).log()
    for group in cache.groups:
        for found, whole in zip(group.contents, everything, strict=False):
            assert torch.equal(found, whole[:, group.heads, group.num_dropped :])
        assert (decay[:, group.heads, : group.num_dropped] < threshold + 1e-9).all(), "only what is forgotten"


def test_assisted_generation_which_takes_tokens_back_is_refused(model):
    ids = torch.randint(1, 61, (1, 40), generator=torch.Generator().manual_seed(4))
    options = {"max_new_tokens": 4, "do_sample": False, "prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match="assisted generation takes rejected tokens back"):
        model.generate(ids, **{CACHE_NAME: model.new_cache(evict_below=-10.0)}, **options)


def test_what_cannot_evict_is_refused(model):
    with pytest.raises(ValueError, match="evict_below is 10; it is ln ε of a small ε"):
        model.new_cache(evict_below=10)
    with pytest.raises(ValueError, match="evict_below is -10; TransformerModel has no layer that evicts, which takes"):
        small("transformer").new_cache(evict_below=-10)
    with pytest.raises(ValueError, match="this layer has no qk_norm, without which scores have no bound"):
        small("forgetting_transformer").new_cache(evict_below=-10)
    with pytest.raises(ValueError, match="ForgettingTransformerModel has no layer that evicts"):
        small("forgetting_transformer", **{**PRO, "fgate_type": "none", "use_rope": True}).new_cache(evict_below=-10)
    cache = model.new_cache(evict_below=-10.0)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="output_attentions is asked for, and evict_below leaves no keys"):
            ids = torch.zeros(1, 1, dtype=torch.long)
            model(input_ids=ids, past_key_values=cache, use_cache=True, output_attentions=True)
    with pytest.raises(ValueError, match="cannot remove 2 tokens from the cache: evict_below has evicted"):
        cache.crop(-2)
