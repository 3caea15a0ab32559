"""Trained the Hugging Face way: its loss, its Trainer, LoRA and padding."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from forgetting_transformer.model import ForgettingAttentionLayer, registry
from tests.model.small_models import PRO, small, small_model

ARCHITECTURES = registry.model_names()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_loss_is_that_of_hugging_face(name, ids):
    model = small(name, loss="causal_lm")
    labels = ids.clone()
    labels[0, 5:] = -100
    out = model(input_ids=ids, labels=labels)
    torch.testing.assert_close(out.logits, model(input_ids=ids).logits)
    torch.testing.assert_close(out.loss, ForCausalLMLoss(out.logits, labels, 61))
    # The same loss by this project's own convention.
    model.config.loss = "per_token"
    per_token_BT = model(input_ids=ids[:, :-1], labels=labels[:, 1:]).loss
    torch.testing.assert_close(out.loss, per_token_BT.sum() / (labels[:, 1:] != -100).sum())


def test_the_convention_is_stored_with_the_model_and_may_be_chosen_at_loading(ids, tmp_path):
    small_model().save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=r"loss is 'causallm'; it must be one of per_token, causal_lm"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a", loss="causallm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", loss="causal_lm")
    assert model(input_ids=ids, labels=ids).loss.shape == ()
    model.save_pretrained(tmp_path / "b")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").config.loss == "causal_lm"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_loss_does_not_depend_on_the_side_of_the_padding(name, ids):
    model = small(name, loss="causal_lm")
    lengths = (12, 7)
    mask = torch.stack([torch.arange(12) < n for n in lengths]).long()
    right = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    left = {key: torch.stack([row.roll(12 - n) for row, n in zip(x, lengths, strict=True)]) for key, x in right.items()}
    torch.testing.assert_close(model(**left).loss, model(**right).loss)
    # With the same divisor, too: a step's gradients do not depend on the side.
    losses = [model(**padded, num_items_in_batch=17).loss for padded in (left, right)]
    torch.testing.assert_close(*losses)


def right_padded(batch: list[Tensor]) -> dict[str, Tensor]:
    """What DataCollatorForLanguageModeling makes of unequal texts with a tokenizer that pads on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model: torch.nn.Module, tmp_path, **options) -> list[float]:
    """Losses of a few steps of Trainer on one small corpus."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -r requirements-dev.txt")
    texts = [torch.arange(start, start + length) % 61 for start, length in ((3, 9), (20, 12), (40, 7), (11, 12))]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, max_steps=6,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=texts, data_collator=right_padded)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|use_reentrant).*")
@pytest.mark.parametrize(
    ("name", "options"),
    [("forgetting_transformer", {}), ("transformer", {"gradient_checkpointing": True}), ("samba", {})],
)
def test_trainer_trains(name, options, tmp_path):
    model = small(name, loss="causal_lm", initializer_range=0.02)
    losses = trained(model, tmp_path, **options)
    assert losses[0] == pytest.approx(4.11, abs=0.3)  # ln 61: a mean, whatever the number of micro-batches
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_trainer_refuses_a_model_of_the_other_convention_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"Trainer .* model\.config\.loss = 'causal_lm'"):
        trained(small_model(), tmp_path)


def test_an_adapter_of_the_output_layer_counts_in_either_convention(ids):
    peft = pytest.importorskip("peft", reason="LoRA is peft's: pip install -r requirements-dev.txt")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(small_model(), config)
    labels = ids.roll(-1, dims=1)
    labels[0, 2] = -100
    logits = adapted(input_ids=ids).logits
    want = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(adapted(input_ids=ids, labels=labels).loss, want)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_adapter_of_lora_gets_a_gradient(name, ids):
    peft = pytest.importorskip("peft", reason="LoRA is peft's: pip install -r requirements-dev.txt")
    model = small(name, loss="causal_lm", **(PRO if name == "forgetting_transformer" else {}))
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted(input_ids=ids, labels=ids).loss.backward()
    parameters = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert parameters and all("lora" in n for n in parameters)
    assert [n for n, p in parameters.items() if p.grad is None or not p.grad.any()] == []


# Padding.


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_right_padding_changes_nothing_before_it(name, ids):
    model = small(name, loss="causal_lm").train()
    mask = torch.ones_like(ids)
    mask[0, 7:], mask[1, :2], mask[1, 10:] = 0, 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    got = model(input_ids=ids, labels=labels, attention_mask=mask).logits
    torch.testing.assert_close(got[:1, :7], model(input_ids=ids[:1, :7]).logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[1:, 2:10], model(input_ids=ids[1:, 2:10]).logits, rtol=1e-3, atol=1e-4)


# The layer by itself.


def test_the_layer_takes_the_arguments_of_the_authors(ids):
    torch.manual_seed(0)
    options = {"num_kv_heads": None, "window_size": None, "max_position_embeddings": 2048, "initializer_range": 0.3}
    layer = ForgettingAttentionLayer(32, 2, **options, qk_norm=True, use_k_shift=True, layer_idx=1).eval()
    x = torch.randn(2, 6, 32)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    out, *rest = layer(hidden_states=x, attention_mask=mask)
    assert rest == [None, None]
    torch.testing.assert_close(out[0, 2:], layer(x[:1, 2:])[0][0])
