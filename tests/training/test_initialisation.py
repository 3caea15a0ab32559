"""Initial weights depend on the seed and a parameter's name, and on nothing else."""

import os

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer.model import registry
from forgetting_transformer.training import parse, setup
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.initialisation import from_seed
from tests.training.conftest import changed
from tests.training.test_compile import INFO, architecture, build


def config_of(tiny: dict, name: str, **changes) -> Config:
    return parse(OmegaConf.create(changed(architecture(tiny, name), **changes)))


def weights(config: Config) -> dict[str, torch.Tensor]:
    return dict(build(config).named_parameters())


@pytest.mark.parametrize("name", registry.model_names())
def test_every_weight_is_drawn_from_its_law_whatever_the_number_of_cores(tiny, name, monkeypatch):
    """The laws are those of a model that is built without this; what memory held before is overwritten."""
    monkeypatch.setattr(from_seed, "PIECE", 1000)
    config = config_of(tiny, name)
    many = weights(config)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    built = registry.get(name).lm_class(setup.model_config(config, INFO))
    plain = {key: parameter.detach().clone() for key, parameter in built.named_parameters()}
    for parameter in built.parameters():
        parameter.detach().fill_(torch.nan)
    for module in built.modules():
        module._is_hf_initialized = False
    from_seed.initialise(built, config.seed)
    one = dict(built.named_parameters())
    assert many.keys() == one.keys() == plain.keys()
    for key, parameter in many.items():
        assert torch.equal(parameter, one[key]) and torch.isfinite(parameter).all(), key
        if plain[key].unique().numel() == 1:
            assert torch.equal(parameter, plain[key]), key
        elif plain[key].numel() > 64:
            error = 6 / parameter.numel() ** 0.5
            assert abs(parameter.mean() - plain[key].mean()) <= error * plain[key].std(), key
            assert abs(parameter.std() / plain[key].std() - 1) <= error, key


def test_models_start_alike_where_they_have_the_same_parameters(tiny):
    """A change of one part, or of depth, leaves the rest as it was; another seed changes everything."""
    ours = weights(config_of(tiny, "forgetting_transformer"))
    longer = {"model__config__num_hidden_layers": 3, "model__config__use_output_gate": False}
    theirs = weights(config_of(tiny, "forgetting_transformer", **longer))
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 10 and theirs.keys() != ours.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in shared)
    other = weights(config_of(tiny, "forgetting_transformer", seed=1))
    drawn = [key for key, parameter in ours.items() if parameter.unique().numel() > 64]
    assert len(drawn) > 5 and not any(torch.equal(ours[key], other[key]) for key in drawn)


@pytest.mark.parametrize("name", ["mamba2", "gated_delta_net"])
def test_another_thread_may_set_pytorchs_generator_meanwhile(tiny, name, monkeypatch):
    """torch.compile restores at its end the state that it found, whatever was drawn since."""
    config = config_of(tiny, name)
    before = weights(config)
    kind = next(base for base in registry.get(name).lm_class.__mro__ if "_init_weights" in vars(base))
    draw, seeds = kind._init_weights, iter(range(100, 1000))

    def disturbed(self, module):
        torch.manual_seed(next(seeds))
        draw(self, module)

    monkeypatch.setattr(kind, "_init_weights", disturbed)
    after = weights(config)
    assert next(seeds) > 110
    assert all(torch.equal(before[key], after[key]) for key in before)
