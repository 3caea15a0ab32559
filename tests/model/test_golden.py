"""Models give what the paper authors' code gave for the same weights. See tests/data/golden/README.md."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forgetting_transformer.model.mixers import mamba2
from forgetting_transformer.ops.recurrence import recurrence

FOLDER = Path(__file__).parents[1] / "data" / "golden"
GOLDEN = ("fox_pro_sharedqk", "transformer_llama", "mamba2", "hgrn2", "delta_net")


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request) -> dict[str, Any]:
    return {"name": request.param, **torch.load(FOLDER / f"{request.param}.pt", weights_only=True)}


@pytest.fixture
def model(golden, monkeypatch):
    """The golden model, built from its config and weights alone (and, for Mamba-2, two defects of the original)."""
    changes = {}
    if golden["name"] == "mamba2":
        changes["time_step_limit"] = (golden["config"]["time_step_min"], math.inf)
        monkeypatch.setattr(mamba2, "recurrence", recurrence_with_the_official_defect)
    return build(golden, **changes)


def build(golden: dict[str, Any], **changes: Any):
    fields = {**golden["config"], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.load_state_dict(golden["state_dict"], strict=True)
    return model.eval()


def recurrence_with_the_official_defect(q, k, x, *, log_decay, scale, step, skip, state=None, cu_seqlens=None):
    """Mamba-2's recurrence as the official PyTorch path computes it, in chunks of 64.

    Within a chunk it is right. What enters chunk c should be Σ_{b < c} decay(b → c) · (state chunk b makes from 0). The
    official path sums its decay matrix over the wrong axis: chunk c gets what chunk c - 1 made and nothing older, times
    Σ_{d ≥ c} decay(c → d). The CUDA kernels of mamba-ssm, which the authors' stack uses, are right.
    """
    chunk, (batch, length) = 64, q.shape[:2]
    v = (x * step[..., None]).to(x.dtype)
    pad = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).flatten(0, 1) for x in (q, k, v))
    log_decay = F.pad(log_decay, (0, 0, 0, pad)).unflatten(1, (-1, chunk)).flatten(0, 1)
    _, made = recurrence(q, k, v, log_decay=log_decay, scale=scale)
    made, chunk_decay = made.unflatten(0, (batch, -1)), log_decay.sum(1).unflatten(0, (batch, -1))
    entering = [torch.zeros_like(made[:, 0])]
    for c in range(1, made.shape[1]):
        factor = sum(chunk_decay[:, c:d].sum(1).exp() for d in range(c, made.shape[1] + 1))
        entering.append(factor[..., None, None] * made[:, c - 1])
    entering = torch.stack(entering, dim=1).flatten(0, 1)
    out, _ = recurrence(q, k, v, log_decay=log_decay, scale=scale, state=entering)
    out = out.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]
    return (out + skip[:, None] * x).to(x.dtype), made[:, -1]


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def test_logits(model, golden):
    assert relative_error(model(input_ids=golden["input_ids"]).logits, golden["logits"]) < 1e-4


def test_loss_of_every_token_and_every_gradient(model, golden):
    out = model(input_ids=golden["input_ids"], labels=golden["labels"])
    assert out.loss.dtype == torch.float32 and out.logits is None
    torch.testing.assert_close(out.loss, golden["loss"], rtol=1e-4, atol=1e-5)
    out.loss.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == golden["grads"].keys()
    for name, grad in gradients.items():
        assert relative_error(grad, golden["grads"][name]) < 1e-4, name


@pytest.mark.parametrize("golden", ["mamba2"], indirect=True)
def test_mamba2_agrees_without_the_defects_where_they_do_not_show(golden):
    """In the first chunk, up to the step sizes below time_step_min, which the official PyTorch path raises to it."""
    clamped = build(golden, time_step_limit=(golden["config"]["time_step_min"], math.inf))
    logits = clamped(input_ids=golden["input_ids"]).logits
    assert relative_error(logits[:, :64], golden["logits"][:, :64]) < 1e-5
    assert relative_error(logits[:, 64:], golden["logits"][:, 64:]) > 1e-4
    logits = build(golden)(input_ids=golden["input_ids"]).logits
    assert relative_error(logits[:, :64], golden["logits"][:, :64]) < 1e-4
