"""The decoder shell: what forward returns, losses, gradient checkpointing, and how an architecture plugs in."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from forgetting_transformer.model.generation.cache import CACHE_NAME
from forgetting_transformer.model.layers import Embedding
from forgetting_transformer.ops.embedding import lookup
from tests.model.small_models import PRO, small_model


def test_loss_is_per_token_and_labels_are_not_shifted(ids):
    model = small_model(**PRO)
    labels = ids.roll(-1, dims=1)
    labels[1, 4] = -100
    out = model(input_ids=ids, labels=labels)
    log_probs = model(input_ids=ids).logits.log_softmax(-1)
    want = -log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    want[1, 4] = 0
    torch.testing.assert_close(out.loss, want)


def test_newer_versions_of_transformers_call_past_key_values_cache(ids):
    model = small_model()
    for name in ("cache", "past_key_values"):
        given = model.new_cache()
        model(input_ids=ids[:, :4], **{name: given})
        out = model(input_ids=ids[:, 4:], **{name: given})
        assert given.get_seq_length() == 12 and getattr(out, CACHE_NAME) is given
    with pytest.raises(ValueError, match="cache and past_key_values are both given"):
        model(input_ids=ids, cache=given, past_key_values=given)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    cache, whole = model.new_cache(), model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache=cache, **options), whole) and cache.get_seq_length() == 14


def test_cache_is_returned_only_where_it_is_of_use(ids):
    model = small_model()
    assert model(input_ids=ids).past_key_values is not None
    assert model(input_ids=ids, use_cache=False).past_key_values is None
    assert model(input_ids=ids, labels=ids).past_key_values is None
    assert model.train()(input_ids=ids).past_key_values is None
    assert small_model(use_cache=False)(input_ids=ids).past_key_values is None


def test_logits_to_keep(ids):
    model = small_model()
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids, logits_to_keep=3).logits, logits[:, -3:])
    positions = torch.tensor([0, 7])
    torch.testing.assert_close(model(input_ids=ids, logits_to_keep=positions).logits, logits[:, positions])


def test_tuples_and_hidden_states(ids):
    model = small_model()
    loss, hidden_states = model(input_ids=ids, labels=ids, return_dict=False, output_hidden_states=True)
    assert loss.shape == ids.shape and len(hidden_states) == 3
    assert torch.equal(hidden_states[0], model.get_input_embeddings()(ids))
    torch.testing.assert_close(model.lm_head(hidden_states[-1]), model(input_ids=ids).logits)


def gradients(model: PreTrainedModel, ids: torch.Tensor, **forward) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, **forward).loss.mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def count_mixer_calls(model: PreTrainedModel) -> list[int]:
    calls = [0] * len(model.model.layers)
    for i, block in enumerate(model.model.layers):

        def count(*_, i=i):
            calls[i] += 1

        block.sequence_mixer.register_forward_hook(count)
    return calls


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_runs_blocks_twice_and_changes_no_gradient(ids):
    model = small_model(**PRO).train()
    want = gradients(model, ids)
    calls = count_mixer_calls(model)
    model.gradient_checkpointing_enable()
    got = gradients(model, ids)
    assert calls == [2, 2]
    assert all(torch.equal(got[name], want[name]) for name in want)
    model.gradient_checkpointing_enable(every_n_layers=2)
    gradients(model, ids)
    assert calls == [4, 3]
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids, use_cache=True)
    assert model.eval()(input_ids=ids).past_key_values is not None


def test_hooks_of_a_checkpointed_block_run_once_per_pass(ids):
    """FSDP2 gathers and frees weights in the hooks of a block, so checkpointing must happen inside of them."""
    model = small_model().train()
    block = model.model.layers[0]
    block.gradient_checkpointing = True
    calls = []
    block.register_forward_pre_hook(lambda *_: calls.append("hook"))
    gradients(model, ids)
    assert calls == ["hook"]


def test_the_lookup_of_gpus_gives_the_gradient_of_pytorchs_embedding():
    embedding = Embedding(11, 4, padding_idx=3)
    ids = torch.tensor([[0, 3, 7, 7, 10, 3, 7]])
    d = torch.randn(1, 7, 4)
    y = lookup(embedding.weight, ids, 3)
    assert torch.equal(y, embedding(ids))
    got, want = (torch.autograd.grad(x, embedding.weight, d)[0] for x in (y, embedding(ids)))
    assert torch.equal(got, want) and want[7].any() and not want[3].any()
    assert not torch.are_deterministic_algorithms_enabled()


IDS, PACKED, HF = torch.zeros(2, 12, dtype=torch.long), torch.tensor([0, 5, 12, 24]), {"loss": "causal_lm"}
RIGHT, HOLE = (torch.ones_like(IDS).index_fill(1, torch.tensor([n]), 0) for n in (11, 3))
TOGETHER = r"attention_mask or past_key_values is given, which packed documents \(cu_seqlens\) do not take"


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        ({}, {"attention_mask": RIGHT}, "only left padding .* Pad on the left"),
        ({}, {"attention_mask": HOLE, "use_cache": False}, "zeros between ones"),
        ({}, {"attention_mask": torch.ones(2, 4)}, r"attention_mask has shape \(2, 4\)"),
        ({}, {"inputs_embeds": torch.zeros(2, 12, 32)}, "exactly one of input_ids and inputs_embeds"),
        ({}, {"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache"),
        ({}, {"labels": IDS, "num_items_in_batch": 3}, r"num_items_in_batch .* model\.config\.loss = 'causal_lm'"),
        (HF, {"labels": IDS[:, 1:]}, r"labels have shape \(2, 11\); they must be \(2, 12\)"),
        (HF, {"labels": IDS, "logits_to_keep": 1}, "logits_to_keep"),
        (HF, {"labels": IDS, "cu_seqlens": PACKED}, "whose shift crosses documents"),
        ({}, {"cu_seqlens": torch.tensor([0, 5, 24])}, "each of the 2 rows of 12 tokens"),
        ({}, {"cu_seqlens": PACKED[None]}, r"cu_seqlens has shape \(1, 4\); it must be \(documents \+ 1,\)"),
        ({}, {"cu_seqlens": PACKED, "attention_mask": IDS + 1}, TOGETHER),
        ({}, {"cu_seqlens": PACKED, "use_cache": True}, TOGETHER),
        ({}, {"output_attentions": True}, "output_attentions is given.* eval/forget_gates draws them"),
    ],
)
def test_calls_that_cannot_be_right_are_refused(fields, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small_model(**fields)(**{"input_ids": IDS} | call)
