"""Weight decay falls on the parameters it fell on in the paper's runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from forgetting_transformer.model.layers import RMSNorm
from forgetting_transformer.plugins import OPTIMIZERS, Component
from forgetting_transformer.training.config import ConfigError, TrainConfig
from forgetting_transformer.training.optimization.building import (
    build_optimizer,
    check_owns,
    group_parameters,
    train_only,
    trainable,
    undecayed_parameters,
)
from forgetting_transformer.training.optimization.optimizers import AdamWConfig, MuonConfig
from tests.model.small_models import small_model
from tests.training.conftest import STEP, changed, train

CONFIG = TrainConfig(max_tokens=1, grad_acc_tokens=1)


def test_what_is_decayed_and_what_is_not():
    norms = {"norm": nn.RMSNorm(2), "own_norm": RMSNorm(2)}
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), **norms, "conv": nn.Conv1d(2, 2, 3)})
    model["gate"] = nn.ParameterDict({"bias_of_gate": nn.Parameter(torch.zeros(2))})
    model["gate"]["bias_of_gate"]._no_weight_decay = True
    names = undecayed_parameters(model, CONFIG)
    assert names == {"linear.bias", "norm.weight", "own_norm.weight", "conv.bias", "gate.bias_of_gate"}
    everything = replace(CONFIG, bias_weight_decay=True, normalization_weight_decay=True, conv_weight_decay=False)
    assert undecayed_parameters(model, everything) == {"conv.weight", "gate.bias_of_gate"}
    decayed, not_decayed = group_parameters(trainable(model), names, AdamWConfig(lr=1.0, weight_decay=0.1))
    assert (decayed["weight_decay"], not_decayed["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) == 2 and len(not_decayed["params"]) == 5


def test_a_learned_gate_bias_is_not_decayed_where_it_is_sharded(tiny):
    """Sharding replaces parameters, and the mark on them is gone."""
    train(changed(tiny, strategy__name="fsdp", train__max_tokens=4 * STEP, model__config__fgate_type="bias_only"), 2)
    names = (Path(tiny["output_dir"]) / "no_decay_params.txt").read_text()
    assert names.count("fgate_bias (2,)") == 2
    assert "fgate_bias" not in (Path(tiny["output_dir"]) / "decay_params.txt").read_text()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_by_pattern_have_a_rate_of_their_own(name):
    model = small_model()
    config = {"adamw": AdamWConfig, "muon": MuonConfig}[name](lr=1.0, lr_scale=10.0, lr_scale_for=["*.fgate_proj.*"])
    optimizer = build_optimizer(model, undecayed_parameters(model, CONFIG), config)
    check_owns(model, optimizer, name)
    rates = {id(p): group.get("lr_scale", 1.0) for group in optimizer.param_groups for p in group["params"]}
    assert {key for key, p in model.named_parameters() if rates[id(p)] == 10.0} == {
        f"model.layers.{n}.attn.fgate_proj.{kind}"
        for n in range(len(model.decoder.layers))
        for kind in ("weight", "bias")
    }
    for key, refused in (("train.only", train_only), ("optimizer.lr_scale_for", None)):
        with pytest.raises(ConfigError, match=rf"{key}=\*.fgate_prj.\* names no parameter of the model"):
            if refused:
                refused(model, ["*.fgate_prj.*"])
            else:
                build_optimizer(model, set(), replace(config, lr_scale_for=["*.fgate_prj.*"]))


def test_an_optimizer_that_makes_its_own_groups_refuses_a_rate_by_pattern(monkeypatch):
    own_groups = Component("adamw", lambda model, *_: torch.optim.SGD(model.parameters(), lr=1.0))
    monkeypatch.setattr(OPTIMIZERS, "get", lambda _: own_groups)
    with pytest.raises(ConfigError, match=r"optimizer.lr_scale_for=.* has no effect with optimizer.name='adamw'"):
        build_optimizer(nn.Linear(2, 2), set(), AdamWConfig(lr=1.0, lr_scale_for=["weight"]))
