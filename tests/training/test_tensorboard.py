"""TensorBoard is a second sink: it has what wandb has, every step once, and never stops a run."""

from pathlib import Path

import pytest

from tests.training.conftest import STEP, Job, assert_same_run, changed, lines, losses, rank_log, train, word_tokenizer

pytestmark = pytest.mark.slow

#: The run is killed in step 10, two steps past a checkpoint.
DIE = """
import os, signal
from forgetting_transformer.training.callbacks.steps import Loss
report = Loss.on_interval
def on_interval(self, trainer, kind):
    report(self, trainer, kind)
    if trainer.counters.token_count == 10 * 128:
        os.kill(os.getpid(), signal.SIGKILL)
Loss.on_interval = on_interval
"""


def with_tensorboard(config: dict, **more) -> dict:
    return changed(config, callbacks={"tensorboard": None, **more})


def test_it_has_what_the_lines_have_once_after_a_kill_and_changes_no_weight(tiny, finished, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tokenizer = str(word_tokenizer(tmp_path / "tokenizer"))
    samples = {"interval": 10 * STEP, "prompts": ["w1 w2"], "tokenizer": tokenizer, "max_new_tokens": 4}
    config = with_tensorboard(tiny, samples=samples)
    assert Job(config, patch=DIE).wait() == [-9]
    train(config)
    assert_same_run(finished(tiny), tiny["output_dir"])
    # What TensorBoard would show.
    sizes = dict.fromkeys(("scalars", "images", "tensors"), 0)
    events = event_accumulator.EventAccumulator(f"{tiny['output_dir']}/tensorboard", size_guidance=sizes).Reload()
    for kind in ("train", "norm", "throughput", "goodput", "val", "resume"):
        found = lines(tiny["output_dir"], kind)
        for name in found[-1].keys() - {"step"}:
            if isinstance(found[-1][name], int | float):
                points = [(event.step, event.value) for event in events.Scalars(name)]
                assert points == [(line["step"], pytest.approx(line[name])) for line in found if name in line], name
    (written,) = {bytes(event.tensor_proto.string_val[0]) for event in events.Tensors("samples/text_summary")[-1:]}
    assert lines(tiny["output_dir"], "samples")[-1]["samples/0/text"] in written.decode()


def test_without_the_package_it_is_one_line_before_the_first_step(tiny):
    absent = "import importlib.util\nfind = importlib.util.find_spec\n"
    absent += "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorboard' else find(name, *rest)"
    job = Job(with_tensorboard(tiny), 2, patch=absent)
    assert job.wait() == [1, 1]
    assert "callbacks=[tensorboard] needs the package tensorboard: pip install 'tensorboard>=2.16'" in job.errors()
    assert not Path(tiny["output_dir"], "metrics/jsonlines/train.jsonl").exists()


@pytest.mark.parametrize("fault", ["SummaryWriter", "add_scalar"])
def test_a_writer_that_fails_never_stops_a_run(tiny, finished, fault):
    straight = finished(changed(tiny, train__max_tokens=4 * STEP))
    patch = f"""
import importlib.util, sys, types
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: name == "tensorboard" or find(name, *rest)
def fails(*arguments, **options):
    raise OSError("no space left")
works = lambda *arguments, **options: None
methods = dict.fromkeys(("add_scalar", "add_text", "flush", "close"), works) | {{{fault!r}: fails}}
writer = fails if {fault == "SummaryWriter"} else lambda *a, **o: types.SimpleNamespace(**methods)
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=writer)
"""
    job = Job(changed(with_tensorboard(tiny), train__max_tokens=4 * STEP), patch=patch)
    assert job.wait() == [0], job.errors()
    assert "(no space left)" in rank_log(tiny, 0)
    assert losses(straight) == losses(tiny["output_dir"])
