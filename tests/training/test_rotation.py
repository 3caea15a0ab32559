"""A run that trains deletes checkpoints while others read them: the next one is read instead."""

import errno
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from forgetting_transformer.evaluation.models import EvaluationError, _load_run
from forgetting_transformer.training import export as exporting
from forgetting_transformer.training.checkpoint import reading
from forgetting_transformer.training.checkpoint.folder import CheckpointError, remove
from tests.training.conftest import STEP, changed, train

pytestmark = pytest.mark.slow

#: What happens just before a file of a checkpoint is opened, by the hook below.
before_open = None


def _hook(event: str, arguments: tuple) -> None:
    if event == "open" and before_open is not None and "/checkpoints/step-" in str(arguments[0]):
        before_open()


sys.addaudithook(_hook)


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus) -> Path:
    """With checkpoints of steps 4 and 8."""
    from tests.training.conftest import tiny_config

    config = changed(tiny_config(tmp_path_factory.mktemp("rotating") / "run", corpus), train__max_tokens=8 * STEP)
    train(config)
    return Path(config["output_dir"])


def rotate_at(moment: int, folder: Path) -> tuple[Path, list[int]]:
    """A copy of the run `folder` that, at the `moment`-th opening of a file, has step 12 instead of steps 4 and 8."""
    global before_open
    opened: list[int] = []

    def rotate() -> None:
        global before_open
        opened.append(moment)
        if len(opened) == moment:
            before_open = None
            old = sorted((folder / "checkpoints").glob("step-*"))
            shutil.copytree(old[-1], folder / f"checkpoints/step-{12 * STEP:015d}")
            for path in old:
                remove(path)

    before_open = rotate
    return folder, opened


@pytest.fixture(autouse=True)
def no_hook():
    yield
    global before_open
    before_open = None


def test_a_checkpoint_that_goes_at_any_moment_of_reading_makes_room_for_the_next(run, tmp_path):
    moments = 0
    for moment in range(1, 100):
        shutil.copytree(run, tmp_path / f"{moment}")
        folder, opened = rotate_at(moment, tmp_path / f"{moment}")
        loaded = _load_run(folder, None, None)
        assert loaded.train_length == 32 and all(torch.isfinite(p).all() for p in loaded.model.parameters())
        assert loaded.train_tokens in (8 * STEP, 12 * STEP)
        if len(opened) < moment:
            break
        moments += loaded.train_tokens == 12 * STEP
        shutil.rmtree(folder)
    assert moments > 5, "most moments were too early for step 8 to be read"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_a_shard_that_cannot_be_read_is_named(run, tmp_path, monkeypatch, number):
    """It was whole when it was looked at, and then the disk fails: PyTorch raises what `except Exception` misses."""
    shutil.copytree(run, tmp_path / "run")
    whole = reading.checksum

    def fails(*_, **__):
        raise OSError(number, "the disk has failed")

    def read_data(*arguments):
        monkeypatch.setattr(reading, "checksum", lambda file, *_: fails() if file.suffix == ".distcp" else whole(file))
        fails()

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    shard = f"step-{8 * STEP:015d}/state/__0_0.distcp"
    with pytest.raises(CheckpointError, match=f"{shard} cannot be read: the disk has failed"):
        exporting.export(tmp_path / "run", tmp_path / "hf")
    monkeypatch.setattr(reading, "checksum", whole)
    with pytest.raises(EvaluationError, match=f"{shard} cannot be read: the disk has failed"):
        _load_run(tmp_path / "run", None, None)
