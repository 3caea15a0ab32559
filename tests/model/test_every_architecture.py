"""What holds for every registered architecture: training, compiling, saving.

A new one is tested by its entry in `small_models.SMALL_FIELDS`; what holds for its cache is in test_generation.py.
"""

import pickle

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from forgetting_transformer.model import DecoderForCausalLM, registry
from tests.model.small_models import GROUPED, PRO, small

pytestmark = pytest.mark.parametrize("name", registry.model_names())


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 61, (2, 80), generator=torch.Generator().manual_seed(0))


def gradients(model: DecoderForCausalLM, ids: Tensor, **forward) -> dict[str, Tensor]:
    """Gradients of the summed loss of all tokens that the mask, if there is one, leaves."""
    model.zero_grad()
    labels = ids.clone()
    if "attention_mask" in forward:
        labels[forward["attention_mask"] == 0] = -100
    model(input_ids=ids, labels=labels, **forward).loss.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=1e-3, atol=1e-3 * want[name].abs().max().item(), msg=name
        )


def test_every_trainable_parameter_gets_a_gradient(name, ids):
    model = small(name).train()
    got = gradients(model, ids)
    assert got.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in got.values())


def test_no_token_sees_the_future(name, ids):
    model = small(name)
    changed = ids.clone()
    changed[:, 70:] = (changed[:, 70:] + 1) % 61
    before, after = (model(input_ids=x, use_cache=False).logits for x in (ids, changed))
    torch.testing.assert_close(after[:, :70], before[:, :70])
    assert (after[:, 70:] - before[:, 70:]).abs().amax(dim=-1).min() > 1e-3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_changes_no_gradient(name, ids):
    model = small(name).train()
    want = gradients(model, ids)
    model.gradient_checkpointing_enable()
    assert_close(gradients(model, ids), want)


def test_left_padding_contributes_no_gradient(name, ids):
    model = small(name).train()
    mask = torch.ones_like(ids)
    mask[:, :11] = 0
    assert_close(gradients(model, ids, attention_mask=mask), gradients(model, ids[:, 11:]))


@pytest.fixture
def fresh_compiler():
    """PyTorch compiles a function for only so many models before it gives up."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_training_step_compiles_into_one_graph(name, ids, fresh_compiler):
    """As few layers as have every kind."""
    model = small(name, num_hidden_layers=2 if name in ("hybrid", "samba") else 1).train()
    want = gradients(model, ids)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert_close(gradients(model, ids), want)


def test_bfloat16_autocast_keeps_the_residual_stream_in_float32(name, ids):
    model = small(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    assert all(hidden.dtype == torch.float32 for hidden in out.hidden_states)
    want = model(input_ids=ids, use_cache=False).logits
    assert (out.logits - want).norm() < 0.1 * want.norm()


OPTIONS = {
    "forgetting_transformer": {**PRO, **GROUPED, "window_size": 7, "tie_word_embeddings": True},
    "samba": {"use_bias": True, "use_conv_bias": False},
    "transformer": GROUPED,
}


def test_saving_and_loading_by_model_type_gives_the_same_model(name, ids, tmp_path):
    model = small(name, **OPTIONS.get(name, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is registry.get(name).config_class
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is registry.get(name).lm_class
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert pickle.loads(pickle.dumps(type(loaded))) is type(loaded)
    decoder = AutoModel.from_pretrained(tmp_path).eval()
    want = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(decoder(input_ids=ids).last_hidden_state, want)
