"""TensorBoard is a second sink: it has what wandb has, every step once, and never stops a run."""

from pathlib import Path

import pytest

from tests.training.conftest import STEP, Job, changed, rank_log, refused, train
from tests.training.test_export import word_tokenizer
from tests.training.test_resume import assert_same_run, lines, losses

pytestmark = pytest.mark.slow


def with_tensorboard(config: dict, **more) -> dict:
    return changed(config, callbacks={"tensorboard": None, **more})


def read(output_dir: str):
    """What TensorBoard would show."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sizes = dict.fromkeys(("scalars", "images", "tensors"), 0)
    events = event_accumulator.EventAccumulator(f"{output_dir}/tensorboard", size_guidance=sizes)
    return events.Reload()


def steps(events, name: str) -> list[int]:
    return [event.step for event in events.Scalars(name)]


def test_it_has_what_the_lines_have_and_changes_no_weight(tiny, finished, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    tokenizer = str(word_tokenizer(tmp_path / "tokenizer"))
    samples = {"interval": 10 * STEP, "prompts": ["w1 w2"], "tokenizer": tokenizer, "max_new_tokens": 4}
    gates = {"interval": 10 * STEP}
    straight = finished(tiny)
    train(with_tensorboard(tiny, gate_statistics=gates, samples=samples))
    assert_same_run(straight, tiny["output_dir"])
    events = read(tiny["output_dir"])
    for kind in ("train", "norm", "throughput", "goodput", "val", "gates"):
        found = lines(tiny["output_dir"], kind)
        for name in found[-1].keys() - {"step"}:
            points = [(event.step, event.value) for event in events.Scalars(name)]
            assert points == [(line["step"], pytest.approx(line[name])) for line in found if name in line], name
    assert {"train/lr", "train/global_grad_norm", "throughput/peak_memory_bytes"} <= {*events.Tags()["scalars"]}
    (written,) = {bytes(event.tensor_proto.string_val[0]) for event in events.Tensors("samples/text_summary")[-1:]}
    assert lines(tiny["output_dir"], "samples")[-1]["samples/0/text"] in written.decode()
    for name, first in (("loss_position", 10 * STEP), ("evaluations", 10 * STEP)):
        assert [event.step for event in events.Images(f"figures/{name}")] == [first, 20 * STEP]


ONCE = pytest.mark.rare("tests/training/test_tensorboard.py::test_every_step_is_there_once_after_a_resume")


@pytest.mark.parametrize(
    "start",
    ["continued", pytest.param("added", marks=ONCE), pytest.param("left out for a while", marks=ONCE)],
)
def test_every_step_is_there_once_after_a_resume(tiny, finished, start):
    """Steps past the checkpoint are done twice, and a run may have been without the callback before."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    die = """
import os, signal
from forgetting_transformer.training.callbacks.steps import Loss
report = Loss.on_interval
def on_interval(self, trainer, kind):
    report(self, trainer, kind)
    if trainer.counters.token_count == 10 * 128:
        os.kill(os.getpid(), signal.SIGKILL)
Loss.on_interval = on_interval
"""
    first = tiny if start == "added" else with_tensorboard(tiny)
    assert Job(first, patch=die).wait() == [-9]
    if start == "left out for a while":
        train(changed(tiny, train__max_tokens=14 * STEP))
    train(with_tensorboard(tiny))
    events = read(tiny["output_dir"])
    assert steps(events, "train/loss") == [n * STEP for n in range(1, 21)]
    values = [event.value for event in events.Scalars("train/loss")]
    assert values == pytest.approx([line["train/loss"] for line in lines(tiny["output_dir"], "train")])
    assert len({*steps(events, "resume/resume_step")}) == len(steps(events, "resume/resume_step"))
    train(with_tensorboard(tiny))  # nothing is left to train
    assert [event.step for event in read(tiny["output_dir"]).Images("figures/loss_position")][-1] == 20 * STEP


def test_without_the_package_it_is_one_line_before_the_first_step(tiny):
    absent = "import importlib.util\nfind = importlib.util.find_spec\n"
    absent += "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorboard' else find(name, *rest)"
    job = Job(with_tensorboard(tiny), 2, patch=absent)
    assert job.wait() == [1, 1]
    assert "callbacks=[tensorboard] needs the package tensorboard: pip install 'tensorboard>=2.16'" in job.errors()
    assert not Path(tiny["output_dir"], "metrics/jsonlines/train.jsonl").exists()


FAILS = pytest.mark.rare("tests/training/test_tensorboard.py::test_a_writer_that_fails_never_stops_a_run")


@pytest.mark.parametrize(
    "fault",
    ["SummaryWriter", "add_scalar", pytest.param("flush", marks=FAILS), pytest.param("close", marks=FAILS)],
)
def test_a_writer_that_fails_never_stops_a_run(tiny, finished, fault):
    straight = finished(changed(tiny, train__max_tokens=8 * STEP))
    patch = f"""
import importlib.util, sys, types
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: name == "tensorboard" or find(name, *rest)
def fails(*arguments, **options):
    raise OSError("no space left")
works = lambda *arguments, **options: None
methods = dict.fromkeys(("add_scalar", "add_text", "add_image", "flush", "close"), works) | {{{fault!r}: fails}}
writer = fails if {fault == "SummaryWriter"} else lambda *a, **o: types.SimpleNamespace(**methods)
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=writer)
"""
    job = Job(changed(with_tensorboard(tiny), train__max_tokens=8 * STEP), patch=patch)
    assert job.wait() == [0], job.errors()
    assert "(no space left)" in rank_log(tiny, 0)
    assert losses(straight) == losses(tiny["output_dir"])


def test_events_of_somebody_else_are_not_mixed_with_the_runs(tiny):
    file = Path(tiny["output_dir"], "tensorboard/events.out.tfevents.1.host")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"theirs")
    said = refused(with_tensorboard(tiny))
    assert "holds tensorboard, and no run that wrote this" in said and "choose another output_dir" in said
    assert file.read_bytes() == b"theirs"
