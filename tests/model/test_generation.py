"""Whatever a cache is put through, the model predicts what a full forward pass predicts."""

import re

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from forgetting_transformer.model import DecoderForCausalLM
from forgetting_transformer.model.generation.cache import AttentionCache
from tests.model.small_models import GROUPED, PRO, WINDOWS, small, small_model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def short_history(monkeypatch):
    """Caches of sliding windows that drop keys within a dozen tokens."""
    monkeypatch.setattr(AttentionCache, "CROP_HISTORY", 6)


# One model per kind of state that is kept between tokens.
MODELS = {
    "fox pro rope": ("forgetting_transformer", {**PRO, "use_rope": True}),
    "transformer": ("transformer", {}),
    "transformer gqa window": ("transformer", {"num_heads": 4, "num_kv_heads": 2, "window_size": 4}),
    "fox pro rope gqa window": ("forgetting_transformer", {**PRO, **GROUPED, "window_size": 4, "use_rope": True}),
    "fox hybrid of windows": ("hybrid", WINDOWS),
    "samba": ("samba", {}),
    "mamba2": ("mamba2", {"n_groups": 2}),
    "hgrn2": ("hgrn2", {}),
    "delta_net": ("delta_net", {}),
    "gated_delta_net": ("gated_delta_net", {}),
    "kda": ("kda", {}),
    "path_fox": ("path_fox", {}),
    "hybrid": ("hybrid", {}),
}
CROPPABLE = (
    "fox pro rope",
    "transformer",
    "transformer gqa window",
    "fox pro rope gqa window",
    "fox hybrid of windows",
)


@pytest.fixture(params=MODELS)
def model(request) -> DecoderForCausalLM:
    name, fields = MODELS[request.param]
    return small(name, **fields)


@pytest.fixture(params=CROPPABLE)
def croppable_model(request) -> DecoderForCausalLM:
    """A model whose cache can forget its last tokens: one without a recurrent state."""
    name, fields = MODELS[request.param]
    return small(name, **fields)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def logits_in_pieces(model, ids: Tensor, lengths: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of a sequence fed in pieces, each onto the cache of those before."""
    cache, pieces, start = None, [], 0
    for length in lengths:
        piece = slice(start, start + length)
        piece_mask = None if mask is None else mask[:, : start + length]
        out = model(input_ids=ids[:, piece], attention_mask=piece_mask, past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, start + length
        pieces.append(out.logits)
        assert cache.get_seq_length() == start
    return torch.cat(pieces, dim=1)


VARIANTS = {
    **MODELS,
    "fox llama": ("forgetting_transformer", {}),
    "fox pro shared qk-norm": (
        "forgetting_transformer",
        {**PRO, "qk_norm_share_param_across_head": True, "use_rope": True},
    ),
    "fox window, pruned": ("forgetting_transformer", {"window_size": 4, "log_pruning_tolerance": -10.0}),
    "fox gqa window, pruned": (
        "forgetting_transformer",
        {**PRO, **GROUPED, "window_size": 4, "log_pruning_tolerance": -10.0, "qk_norm_share_param_across_head": True},
    ),
    "transformer pro gqa window": (
        "forgetting_transformer",
        {**PRO, **GROUPED, "window_size": 4, "fgate_type": "none", "use_rope": True},
    ),
    "fox window 1": ("forgetting_transformer", {"window_size": 1}),
    "samba without attention": ("samba", {"attn": None}),
    "mamba2 without convolution bias": ("mamba2", {"use_conv_bias": False}),
    "delta_net wide, gated": ("delta_net", {"expand_k": 0.5, "expand_v": 2, "use_gate": True}),
}


@pytest.mark.parametrize("lengths", [[1] * 12, [5, 3, *[1] * 4]], ids=str)
@pytest.mark.parametrize(("name", "fields"), VARIANTS.values(), ids=VARIANTS)
def test_pieces_equal_the_whole(name, fields, lengths, ids):
    model = small(name, **fields)
    assert_close(logits_in_pieces(model, ids, lengths), model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("lengths", [[5, 7], [1] * 12], ids=len)
def test_left_padding_changes_nothing(model, ids, lengths):
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    logits = logits_in_pieces(model, ids, lengths, mask)
    assert_close(logits[:1, 6:], model(input_ids=ids[:1, 6:]).logits)
    assert_close(logits[1:], model(input_ids=ids[1:]).logits)


def test_the_cache_remembers_padding_without_a_mask(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    cache = model(input_ids=ids[:, :8], attention_mask=mask[:, :8]).past_key_values
    logits = model(input_ids=ids[:, 8:], past_key_values=cache).logits
    assert_close(logits[:1], model(input_ids=ids[:1, 6:]).logits[:, 2:])


def greedy_by_full_passes(model, ids: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        ids = torch.cat((ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


@pytest.mark.parametrize(
    "how",
    [{}, {"prefill_chunk_size": 5}],
    ids=["cache", "chunked prefill"],
)
def test_greedy_generation_with_and_without_left_padding(model, ids, how):
    want = greedy_by_full_passes(model, ids, 6)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, **how), want)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    out = model.generate(ids, max_new_tokens=6, do_sample=False, **{**how, "attention_mask": mask})
    assert torch.equal(out[:1, 5:], greedy_by_full_passes(model, ids[:1, 5:], 6)) and torch.equal(out[1:], want[1:])


@pytest.mark.parametrize("how", [{"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True}], ids=str)
def test_beams_and_samples_do_not_depend_on_the_cache(model, ids, how):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    outs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        outs.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **{"do_sample": False, **how}
            )
        )
    assert torch.equal(*outs)


def test_assisted_generation_takes_back_rejected_tokens(croppable_model, ids):
    prompt = ids[:1].repeat(1, 2)  # repetition gives the look-up something to propose
    want = greedy_by_full_passes(croppable_model, prompt, 12)
    out = croppable_model.generate(prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(out, want)


def test_a_target_may_write_the_padding_token_while_a_draft_guesses(ids):
    model, draft, prompt = small_model(), small("forgetting_transformer", seed=1), ids[:1, :4]
    want = greedy_by_full_passes(model, prompt, 8)
    written = {*want[0, 4:].tolist()} - {*prompt[0].tolist()}
    assert written
    for token in written:
        out = model.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=draft, pad_token_id=token)
        assert torch.equal(out, want)


def test_fox_drafts_for_other_models(ids):
    """They hand on their positions, for which a model without rotary positions has no use."""
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=61, eos_token_id=None, **fields)).eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    out = llama.generate(ids[:1], assistant_model=small_model(), **options)
    assert torch.equal(out, llama.generate(ids[:1], **options))


@pytest.mark.parametrize("name", ["mamba2", "hybrid"])
def test_a_draft_that_cannot_take_tokens_back_is_refused_at_the_start(name, ids):
    model, draft = small_model(), small(MODELS[name][0], **MODELS[name][1])
    draft.decoder.register_forward_pre_hook(lambda *_: pytest.fail("it drafts"))
    with pytest.raises(ValueError, match=f"assistant_model is a {type(draft).__name__}, whose recurrent state"):
        model.generate(ids[:1], max_new_tokens=8, assistant_model=draft)


def test_generation_from_embeddings(model, ids):
    embeds = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, greedy_by_full_passes(model, ids, 6)[:, 12:])


def test_generation_goes_on_from_a_returned_cache(model, ids):
    first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    out = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, greedy_by_full_passes(model, ids, 10))


def test_reordering_moves_every_state(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    order = torch.tensor([1, 1, 0])
    full = model(input_ids=ids, attention_mask=mask).logits[:, 9:]
    cache = model(input_ids=ids[:, :9], attention_mask=mask[:, :9]).past_key_values
    cache.reorder_cache(order)
    assert_close(model(input_ids=ids[order, 9:], past_key_values=cache).logits, full[order])
    cache = model(input_ids=ids[:, :9], attention_mask=mask[:, :9]).past_key_values
    cache.batch_repeat_interleave(2)
    twice = torch.tensor([0, 0, 1, 1])
    assert_close(model(input_ids=ids[twice, 9:], past_key_values=cache).logits, full[twice])


def test_cropping_takes_tokens_back(croppable_model, ids):
    full = croppable_model(input_ids=ids).logits
    cache = croppable_model(input_ids=ids[:, :8]).past_key_values
    croppable_model(input_ids=ids[:, :3], past_key_values=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 6
    assert_close(croppable_model(input_ids=ids[:, 6:], past_key_values=cache).logits, full[:, 6:])
    cache.crop(0)
    assert cache.get_seq_length() == 12
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(-12)
    assert cache.get_seq_length() == 0
    assert_close(croppable_model(input_ids=ids, past_key_values=cache).logits, full)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CROPPABLE])
def test_taking_tokens_back_from_a_recurrent_state_is_refused(name, ids):
    model = small(MODELS[name][0], **MODELS[name][1])
    cache = model(input_ids=ids).past_key_values
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"cannot remove 3 tokens .* recurrent state"):
        cache.crop(-3)
    cache.crop(-12)
    assert cache.get_seq_length() == 0
    assert_close(model(input_ids=ids, past_key_values=cache).logits, model(input_ids=ids).logits)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids[:1], max_new_tokens=4, prompt_lookup_num_tokens=2)


def test_a_sliding_window_keeps_only_the_keys_it_needs(ids):
    model = small("transformer", window_size=4)
    num_kept = 3 + AttentionCache.CROP_HISTORY
    cache = model(input_ids=ids).past_key_values
    assert cache.layers[0].keys.shape[2] == num_kept and cache.get_seq_length() == 12
    assert cache.layers[0].keys.untyped_storage().nbytes() == cache.layers[0].keys.nbytes
    with pytest.raises(ValueError, match=r"cannot remove 7 tokens .* sliding window of 4 keeps 6 more"):
        cache.crop(-7)
    cache.crop(-6)
    assert_close(model(input_ids=ids[:, 6:], past_key_values=cache).logits, model(input_ids=ids).logits[:, 6:])


def test_the_tokenizer_that_generate_hands_on_is_no_input(ids):
    """With stop_strings, and from servers; models that take any argument swallow it."""
    model = small_model()
    state = model.prepare_inputs_for_generation(ids[:1, :5], tokenizer="a tokenizer", assistant_tokenizer="another")
    assert "tokenizer" not in state and "assistant_tokenizer" not in state
    assert model.generate(ids[:1, :5], max_new_tokens=2, tokenizer="a tokenizer").shape[1] <= 7


def test_what_is_no_batch_of_sequences_is_refused():
    model = small_model()
    for name, shape in (("input_ids", (5,)), ("input_ids", (2, 0)), ("inputs_embeds", (2, 5, 16))):
        given = {name: torch.zeros(shape, dtype=torch.float32 if name == "inputs_embeds" else torch.long)}
        for call in (model, model.decoder, *([model.generate] if name == "input_ids" else [])):
            with pytest.raises(ValueError, match=re.escape(f"{name} has shape {shape}; it must be (B, T")):
                call(**given)
    with pytest.raises(TypeError, match="input_ids is a list; it must be a tensor"):
        model([[1, 2]])


@pytest.mark.parametrize("name", ["static", "hybrid"])
def test_other_cache_implementations_are_refused(ids, name):
    model = small_model()
    for how in ({"cache_implementation": name}, {"generation_config": GenerationConfig(cache_implementation=name)}):
        with pytest.raises(ValueError, match=f"cache_implementation is '{name}'; this model has one cache"):
            model.generate(ids, max_new_tokens=2, **how)
    model.generation_config.cache_implementation = name
    with pytest.raises(ValueError, match=f"cache_implementation is '{name}'"):
        model.generate(ids, max_new_tokens=2)
