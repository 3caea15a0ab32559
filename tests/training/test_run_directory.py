"""A run's folder holds what the run wrote. A run neither moves nor overwrites other files in it."""

import errno
import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgetting_transformer.training import ConfigError, parse
from forgetting_transformer.training.records.run_directory import OWN_NAMES, RunDirectory, RunDirectoryError
from tests.training.conftest import STEP, assert_same_run, changed, lines, refused, train
from tests.training.conftest import status as status_at
from tests.training.test_checkpoint import snapshot

STRANGERS = (".git/HEAD", "thesis.tex", "data/train.csv", "src/model.py", "previous-work/a")


def place(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"somebody's {name}")


def test_an_empty_path_is_refused_by_name(tiny):
    for key in ("output_dir", "data_dir", "fork_dir", "init_from", "wandb.log_dir", "datamodule.cache_dir"):
        for value in ("", " "):
            config = changed(tiny, **{key.replace(".", "__"): value}, fork_step=0 if key == "fork_dir" else None)
            with pytest.raises(ConfigError, match=rf"^{key}={repr(value) if value else ''} is empty"):
                parse(OmegaConf.create(config))


@pytest.mark.slow
def test_resume_false_starts_clean_and_moves_what_a_run_wrote_and_nothing_else(tiny, finished, interrupted):
    interrupted(tiny, 8)
    root = Path(tiny["output_dir"])
    place(root, *STRANGERS)
    train(changed(tiny, resume=False))
    assert_same_run(finished(tiny), tiny["output_dir"])
    refused(changed(tiny, resume=False, data_dir="/nonexistent"))  # which leaves everything where it is
    assert all((root / name).read_text() == f"somebody's {name}" for name in STRANGERS)
    (moved,) = (root / "previous").iterdir()
    assert not {Path(name).parts[0] for name in STRANGERS} & {path.name for path in moved.iterdir()}
    assert (moved / f"checkpoints/step-{8 * STEP:015d}/manifest.json").is_file()
    assert len(lines(str(moved), "train")) == 8
    found = status_at({"output_dir": moved})
    assert (found["status"], found["step"]) == ("done", 8 * STEP)
    written = {path.name for path in root.iterdir()} - {Path(name).parts[0] for name in STRANGERS}
    assert written - {"previous", "run.lock"} == {path.name for path in moved.iterdir()}, "all a run writes is moved"


OF_A_RUN = ("goodput.json", "tokenizer/tokenizer.json", "metrics/jsonlines/train.jsonl")


@pytest.mark.parametrize("resume", [True, False])
def test_a_first_start_takes_nothing_of_others_for_its_own(tmp_path, resume):
    said = r"^output_dir=.* and no run that wrote .* choose another output_dir$"
    moved = () if resume else ("checkpoints/mine", "logs/thesis.log")
    for number, name in enumerate((*OF_A_RUN, "config.yaml", "status.json", *moved)):
        root = tmp_path / str(number)
        place(root, name, *STRANGERS)
        before = snapshot(root)
        with pytest.raises(RunDirectoryError, match=said) as error:
            RunDirectory(root).claim(resume)
        assert Path(name).parts[0] in str(error.value) and snapshot(root) == before, "not even a lock is left there"
    for below in ("", "run"):
        with pytest.raises(RunDirectoryError, match=r"cannot write to output_dir=.*choose another output_dir$"):
            RunDirectory(tmp_path / "0/thesis.tex" / below).acquire()
    place(tmp_path / "others", *STRANGERS)
    RunDirectory(tmp_path / "others").check_ours(resume)
    # One that was killed early: nothing but its lock, which is empty on a full disk, says whose the rest is.
    place(tmp_path / "killed", *OF_A_RUN)
    (tmp_path / "killed/run.lock").touch()
    RunDirectory(tmp_path / "killed").check_ours(resume)


def place_run(root: Path, without: str = "") -> dict[str, str]:
    """A finished run, each of whose names holds one file; returns what they hold."""
    folders = ("checkpoints", "logs", "metrics", "tokenizer", "plots", "wandb")
    files = {name: f"{name}/content" if name in folders else name for name in OWN_NAMES if name != without}
    place(root, *files.values())
    (root / "run.lock").write_text(json.dumps({"pid": 1, "host": "node", "since": "today"}))
    return {file: (root / file).read_text() for file in files.values()}


def test_a_move_that_is_cut_short_is_completed_by_the_same_command(tmp_path, monkeypatch):
    """Cut before every rename; what a run is recognised by must still be there."""
    rename = Path.rename
    for cut in range(len(OWN_NAMES)):
        root = tmp_path / str(cut)
        content = place_run(root)
        left = cut

        def cut_short(self, target):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", cut_short)
        with pytest.raises(RunDirectoryError, match=r"busy.*start the same command again"):
            RunDirectory(root).move_aside()
        monkeypatch.setattr(Path, "rename", rename)
        assert RunDirectory(root).is_run
        refuses_to_start_over = (root / "metrics").exists()
        assert refuses_to_start_over or cut >= len(OWN_NAMES) - 1, "a start without resume=false may not begin a run"
        assert RunDirectory(root).move_aside() is not None
        assert sorted(os.listdir(root)) == ["previous", "run.lock"]
        found = {str(file.relative_to(folder)): file.read_text() for folder in (root / "previous").iterdir()
                 for file in folder.rglob("*") if file.is_file()}  # fmt: skip
        assert found == content


def test_a_link_leads_where_it_led_after_it_was_moved_aside(tmp_path):
    root = tmp_path / "run"
    place_run(root, "checkpoints")
    place(tmp_path / "big/disk", "weights")
    (root / "checkpoints").symlink_to("../big/disk")
    moved = RunDirectory(root).move_aside()
    assert (moved / "checkpoints").is_symlink() and (moved / "checkpoints/weights").read_text() == "somebody's weights"
    assert not os.path.lexists(root / "checkpoints")
