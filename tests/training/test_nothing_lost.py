"""What a start takes for its own, and what it refuses to do over again."""

import json
import shutil
from pathlib import Path

import pytest

from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint.folder import CheckpointError, inspect, remove
from tests.training.conftest import STEP, Job, changed, refused, train
from tests.training.test_checkpoint import assert_holds, save, trained
from tests.training.test_resume import lines


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_only_names_that_a_run_writes_are_cleared_away(tmp_path):
    save(tmp_path, 1)
    for name in ("step-abc", "step-5", ".tmp-step-mine", "notes", f"step-{9:015d}", f".deleted-{5}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    before = snapshot(tmp_path)
    for name in (f".tmp-step-{7:015d}", f".deleted-step-{3:015d}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text("{}")
    Checkpointer(tmp_path, 1, 0, 1).clean()
    assert snapshot(tmp_path) == before
    assert not list(tmp_path.glob(".tmp-step-0*")) and not list(tmp_path.glob(".deleted-step-0*"))


def test_checkpoints_without_manifests_are_damage_and_not_wreckage(tmp_path):
    """A copy that left out *.json must not be taken for saves that never ended."""
    for step in (1, 2):
        save(tmp_path / str(step), step)
        (path,) = (tmp_path / str(step)).iterdir()
        shutil.copytree(path, tmp_path / "run" / path.name)
        (tmp_path / "run" / path.name / "manifest.json").unlink()
    before = snapshot(tmp_path / "run")
    checkpointer = Checkpointer(tmp_path / "run", 1, 0, 1)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be used .*resume=false"):
        checkpointer.newest()
    checkpointer.clean()
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("what", ["no run is recognised", "a fork"])
def test_resume_false_is_advised_only_where_it_would_be_allowed(tmp_path, what):
    """It moves nothing aside in a folder that may not be a run's, and starts no fork over."""
    damaged = tmp_path / f"checkpoints/step-{128:015d}/state"
    damaged.mkdir(parents=True)
    (damaged / "shard").write_bytes(b"of something")
    if what == "a fork":
        (tmp_path / "starts.jsonl").write_text("{}\n")
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1, 0, 1)
    checkpointer.forked = what == "a fork"
    with pytest.raises(CheckpointError, match=r"Bring back a copy of one, or choose another output_dir$"):
        checkpointer.newest()


def test_the_manifest_is_there_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    seen = []
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        if Path(target).name.startswith("step-"):
            seen.append((self / "manifest.json").is_file())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    save(tmp_path, 1)
    assert seen == [True]


def test_what_is_half_deleted_does_not_look_like_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    (path,) = tmp_path.iterdir()

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("forgetting_transformer.training.checkpoint.writing.shutil.rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            remove(path)
    assert [p.name for p in tmp_path.iterdir()] == [f".deleted-{path.name}"]
    Checkpointer(tmp_path, 1, 0, 1).clean()
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_in_the_way_of_a_new_one_is_kept_beside_it(tmp_path):
    expected = save(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    for number in range(2):
        (path / "manifest.json").unlink()
        (path / "state/kept").write_text(str(number))
        assert_holds_after_saving_again(tmp_path, path, expected)
    kept = sorted(tmp_path.glob("damaged-*"))
    assert [p.name for p in kept] == [f"damaged-{path.name}", f"damaged-{path.name}.1"]
    assert [(p / "state/kept").read_text() for p in kept] == ["0", "1"]


def assert_holds_after_saving_again(folder: Path, path: Path, expected: dict) -> None:
    save(folder, 1)
    assert inspect(path).step == 1
    assert_holds(path, expected)


def test_a_run_whose_checkpoints_are_gone_is_refused(tmp_path):
    """A scratch file system that deletes old files may take one folder and leave the others."""
    (tmp_path / "starts.jsonl").write_text("{}\n")
    record = tmp_path / "last_checkpoint.json"
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    assert Checkpointer(folder, 1, 0, 1, record=record).newest() is None, "nothing was finished yet"
    model, optimizer = trained(1)
    checkpointer = Checkpointer(folder, 1, 0, 1, record=record)
    checkpointer.save(7, model, optimizer, {"token_count": 7}, {}, permanent=False)
    assert checkpointer.finished(wait=True).error is None
    assert json.loads(record.read_text())["step"] == 7
    shutil.rmtree(folder)
    with pytest.raises(
        CheckpointError, match=r"a checkpoint was finished at 7 tokens, and .*checkpoints holds none.*resume=false"
    ):
        checkpointer.newest()
    for damaged in ("", "[]", "{}", '{"step": Infinity}', "[" * 100_000):
        record.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"a checkpoint was finished, and .*checkpoints holds none"):
            checkpointer.newest()


@pytest.mark.slow
def test_a_run_goes_on_only_from_what_it_saved(tiny):
    """Killed before its first save, a run starts at 0; without its checkpoints, or their manifests, it is refused."""
    patch = """
import os
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 3:
        os._exit(9)
    return original(self, batch)
trainer.Trainer.step = step
"""
    root = Path(tiny["output_dir"])
    assert Job(tiny, patch=patch).wait() == [9]
    assert not (root / "last_checkpoint.json").exists()
    train(changed(tiny, train__max_tokens=8 * STEP))
    logged = lines(tiny["output_dir"], "train")
    assert len(logged) == 8
    (root / "checkpoints").rename(root.parent / "elsewhere")
    message = refused(tiny)
    assert f"a checkpoint was finished at {8 * STEP:,} tokens" in message and "resume=false" in message
    (root / "checkpoints").rmdir() if (root / "checkpoints").exists() else None
    shutil.copytree(root.parent / "elsewhere", root / "checkpoints", ignore=shutil.ignore_patterns("*.json"))
    before = snapshot(root / "checkpoints")
    assert "none of the checkpoints in" in refused(tiny)
    assert snapshot(root / "checkpoints") == before and lines(tiny["output_dir"], "train") == logged
    shutil.rmtree(root / "checkpoints")
    (root.parent / "elsewhere").rename(root / "checkpoints")
    train(tiny)
    assert len(lines(tiny["output_dir"], "train")) == 20
