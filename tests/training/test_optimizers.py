"""Optimizers besides AdamW: they resume bitwise, and a bad step is left out even if they know nothing of it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from forgetting_transformer.training.config import ConfigError, TrainConfig
from forgetting_transformer.training.faults.step_guard import decides_on_device
from forgetting_transformer.training.optimization.building import check_owns, undecayed_parameters
from forgetting_transformer.training.optimization.muon import block_matrices
from forgetting_transformer.training.optimization.optimizers import MuonConfig, muon
from tests.model.small_models import PRO, small, small_model
from tests.training.conftest import STEP, assert_same_tensors, changed, checkpoint_tensors, losses, train
from tests.training.test_bad_steps import POISON, bad_steps, single

#: An optimizer of somebody else: it knows nothing of found_inf, and counts its steps in a Python number.
TOY = """
import torch
from forgetting_transformer import plugins

class Toy(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 0.1)
                parameter.sub_(average.sign() * group["lr"])

@plugins.OPTIMIZERS.register("toy")
def toy(model, undecayed, config):
    return Toy(model.parameters(), config.lr)
"""


def with_muon(config: dict, **changes) -> dict:
    return changed(config, optimizer__name="muon", **changes)


@pytest.mark.slow
def test_a_run_with_muon_learns(tiny, finished):
    run = finished(with_muon(tiny))
    moments = {name.rpartition(".")[2] for name in checkpoint_tensors(run, 20 * STEP)}
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq"} <= moments
    reached = losses(run)
    assert reached[20 * STEP] < 0.9 * reached[STEP], "it learns"
    log = (Path(run) / "logs/rank-0.log").read_text()
    assert re.search(r"optimizer +muon, .*; cannot skip a bad step", log)


@pytest.mark.slow
def test_muon_sharded_agrees_with_one_process(tiny, finished):
    """Its products run in bfloat16, and shards add in another order, so losses agree to 1e-3 (AdamW's to 1e-6)."""
    one = losses(finished(with_muon(tiny)))
    several = losses(finished(with_muon(tiny, strategy__name="fsdp", train__max_tokens=3 * STEP), 2))
    assert len(several) == 3 and max(abs(one[step] - several[step]) for step in several) < 1e-3


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = small_model(**PRO)
    undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    optimizer = muon(model, undecayed, MuonConfig(lr=0.5, adamw_lr_scale=0.25))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, *others = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    assert first == set(block_matrices(model, undecayed)) and "model.layers.0.mlp.down_proj.weight" in first
    assert not any("embeddings" in name or "lm_head" in name or "norm" in name for name in first)
    assert first | set().union(*others) == set(names.values()) and not first & set().union(*others)
    assert [group.get("lr_scale", 1.0) for group in optimizer.param_groups] == [1.0, 0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert not decides_on_device(optimizer)
    # A table of rates is no matrix.
    samba = small("samba")
    tables = {name for name, parameter in samba.named_parameters() if parameter.ndim == 2 and name.endswith("A_log")}
    matrices = block_matrices(samba, undecayed_parameters(samba, TrainConfig(max_tokens=1, grad_acc_tokens=1)))
    assert tables and matrices and not tables & matrices.keys()


def test_an_optimizer_that_leaves_parameters_out_is_refused_with_one_of_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    check_owns(model, torch.optim.SGD(model.parameters()), "sgd")
    half = torch.optim.SGD(model[0].parameters())
    with pytest.raises(ConfigError, match=r"^optimizer.name='half' leaves out 1 of the model's 3 .*such as 1.weight, "):
        check_owns(model, half, "half")
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))])
    with pytest.raises(ConfigError, match=r"^optimizer.name='odd' leaves out 0 .* and holds 1 that are not"):
        check_owns(model, foreign, "odd")


@pytest.mark.slow
def test_an_optimizer_that_ignores_found_inf_is_not_called_in_a_bad_step(tiny):
    tiny = single(changed(tiny, optimizer__name="toy", optimizer__lr=1e-3))
    tiny = changed(tiny, checkpoint_interval=STEP, checkpoint_keep_last=30, train__max_tokens=12 * STEP)
    train(tiny, patch=TOY + POISON.format(values={8: "nan"}, rank=0))
    assert [line["bad_step/batch"] for line in bad_steps(tiny)] == [8]
    assert_same_tensors(tiny["output_dir"], tiny["output_dir"], 8 * STEP, 9 * STEP)
    later = checkpoint_tensors(tiny["output_dir"], 12 * STEP)
    assert all(torch.isfinite(tensor).all() for tensor in later.values())
    assert {tensor.item() for name, tensor in later.items() if name.endswith(".step")} == {11.0}
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    assert "cannot skip a bad step on the device (found_inf): the host waits" in log
    # What it counts in a number is there again: the next run of it takes the 13th step.
    longer = changed(tiny, train__max_tokens=13 * STEP)
    train(longer, patch=TOY)
    last = checkpoint_tensors(tiny["output_dir"], 13 * STEP)
    assert {tensor.item() for name, tensor in last.items() if name.endswith(".step")} == {12.0}
