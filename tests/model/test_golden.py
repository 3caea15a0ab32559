"""FoX (Pro) gives what the paper authors' code gave for the same weights. See tests/data/golden/README.md."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import forgetting_transformer.model  # noqa: F401  (registers the architecture)

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "fox_pro_sharedqk.pt"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return torch.load(GOLDEN, weights_only=True)


@pytest.fixture
def model(golden):
    """The golden model, built from nothing but its config and weights."""
    fields = dict(golden["config"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.load_state_dict(golden["state_dict"], strict=True)
    return model.eval()


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def test_logits(model, golden):
    assert relative_error(model(input_ids=golden["input_ids"]).logits, golden["logits"]) < 1e-4


def test_loss_of_every_token_and_every_gradient(model, golden):
    out = model(input_ids=golden["input_ids"], labels=golden["labels"])
    assert out.loss.dtype == torch.float32 and out.logits is None
    torch.testing.assert_close(out.loss, golden["loss"], rtol=1e-4, atol=1e-5)
    out.loss.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == golden["grads"].keys()
    for name, grad in gradients.items():
        assert relative_error(grad, golden["grads"][name]) < 1e-4, name


def test_the_comparison_notices_a_changed_weight(model, golden):
    with torch.no_grad():
        model.model.layers[0].attn.k_proj.shift_proj.weight.neg_()
    assert relative_error(model(input_ids=golden["input_ids"]).logits, golden["logits"]) > 1e-2


def test_bfloat16_autocast_stays_close_and_keeps_the_residual_stream_in_float32(model, golden):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=golden["input_ids"], output_hidden_states=True)
        loss = model(input_ids=golden["input_ids"], labels=golden["labels"]).loss
    assert relative_error(out.logits, golden["logits"]) < 2e-2
    assert relative_error(loss, golden["loss"]) < 2e-2 and loss.dtype == torch.float32
    assert all(hidden.dtype == torch.float32 for hidden in out.hidden_states)
    loss.mean().backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad, golden["grads"][name]) < 5e-2, name


def test_bfloat16_weights_stay_close(model, golden):
    model.bfloat16()
    assert relative_error(model(input_ids=golden["input_ids"]).logits, golden["logits"]) < 5e-2
    loss = model(input_ids=golden["input_ids"], labels=golden["labels"]).loss
    assert relative_error(loss, golden["loss"]) < 2e-2 and loss.dtype == torch.float32
