"""train.cuda_graphs without a GPU: what is refused, and that a micro-batch leaves nothing where the next one writes.

That a GPU computes the same bits with graphs is in tests/gpu/test_compile_cuda.py.
"""

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer.training import ConfigError, parse
from forgetting_transformer.training.execution.graphs import check_possible, choose
from tests.tiny import STEP
from tests.training.conftest import assert_same_tensors, changed, rank_log, train

#: For a training process on a CPU: as if it had graphs. What a micro-batch leaves in their memory is overwritten when
#: the next one begins. Nothing is compiled, which takes time.
STAND_IN = """
import contextlib
from forgetting_transformer.ops import compiling
from forgetting_transformer.training.execution import graphs
from forgetting_transformer.training.trainer import Trainer

graphs.choose, graphs.check_possible = lambda config, *_: config.train.cuda_graphs is True, lambda *_, **__: True
compiling.compiled = lambda function, recordable=False: function
step, memory, trainers = Trainer.step, [], []

@contextlib.contextmanager
def recording():
    for gradient in memory:
        gradient.fill_(float("nan"))
    memory.clear()
    yield
    memory.extend(p.grad.detach() for p in trainers[-1].model.module.parameters() if p.grad is not None)
    if trainers[-1].fabric.global_rank == 0:
        with open(trainers[-1].directory.root / "micro_batches", "a") as file:
            file.write("x")

def noted(self, batch):
    trainers.append(self)
    return step(self, batch)

compiling.recording, Trainer.step = recording, noted
"""


@pytest.mark.parametrize(
    ("changes", "world_size", "compiled", "device", "message"),
    [
        ({}, 1, True, "cuda", None),
        ({}, 2, True, "cuda", None),
        ({}, 1, False, "cuda", r"needs compiled blocks"),
        ({}, 1, True, "cpu", r"needs a CUDA GPU"),
        ({"train__gradient_checkpointing": True}, 1, True, "cuda", r"needs train\.gradient_checkpointing=false"),
        ({"strategy__name": "fsdp"}, 2, True, "cuda", r"needs one process, or strategy=ddp and strategy\.context=1"),
    ],
)
def test_what_graphs_do_not_work_with_is_refused_by_name(tiny, changes, world_size, compiled, device, message):
    config = parse(OmegaConf.create(changed(tiny, train__cuda_graphs=True, **changes)))
    asked = (config, torch.device(device), world_size, compiled)
    if message is None:
        assert check_possible(*asked)
        return
    with pytest.raises(ConfigError, match=f"{message}.*; leave train.cuda_graphs=auto"):
        check_possible(*asked)
    config.train.cuda_graphs = "auto"
    assert not check_possible(*asked)


def test_auto_records_small_micro_batches_where_graphs_are_possible(tiny):
    for wanted, compiled, device, flops, on in (
        ("auto", True, "cuda", 4.9e12, True), ("auto", True, "cuda", 5.1e12, False),
        ("auto", False, "cuda", 1e12, False), ("auto", True, "cpu", 1e12, False),
        (True, True, "cuda", 1e14, True), (False, True, "cuda", 1e12, False),
    ):  # fmt: skip
        config = parse(OmegaConf.create(changed(tiny, train__cuda_graphs=wanted, fabric__peak_flops=1e15)))
        assert choose(config, torch.device(device), 1, compiled, flops) is on


@pytest.mark.slow
def test_runs_with_and_without_graphs_continue_each_other_bitwise(tiny, tmp_path):
    """With evaluations in between."""
    tiny = changed(tiny, train__grad_acc_tokens=STEP // 4, train__compile=True, train__max_tokens=8 * STEP)
    tiny |= {"eval_interval": 3 * STEP}
    without = changed(tiny, output_dir=str(tmp_path / "without"), train__cuda_graphs=False)
    train(without, 2, patch=STAND_IN)
    for on, steps in ((True, 4), (False, 8)):
        train(changed(tiny, train__cuda_graphs=on, train__max_tokens=steps * STEP), 2, patch=STAND_IN)
    assert_same_tensors(without["output_dir"], tiny["output_dir"], 8 * STEP)
    assert "not bitwise from here" not in rank_log(tiny, 0) and "yes, with CUDA graphs" in rank_log(tiny, 0)
    assert len((tmp_path / "run/micro_batches").read_text()) == 2 * 4, "micro-batches"
    assert not (tmp_path / "without/micro_batches").exists()
