"""A run's folder holds what the run wrote. A run neither moves nor overwrites other files in it."""

import errno
import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgetting_transformer.training import ConfigError, parse
from forgetting_transformer.training.faults import status
from forgetting_transformer.training.records.run_directory import OWN_NAMES, RunDirectory, RunDirectoryError
from tests.data.mirror import serve
from tests.training.conftest import STEP, assert_same_run, changed, lines, refused, train
from tests.training.conftest import status as status_at
from tests.training.test_checkpoint import snapshot

STRANGERS = (".git/HEAD", "thesis.tex", "data/train.csv", "src/model.py", "previous-work/a")


def place(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"somebody's {name}")


@pytest.mark.parametrize(
    "key",
    ["output_dir", "data_dir", "fork_dir", "init_from", "wandb.log_dir", "datamodule.cache_dir", "datamodule.dataset"],
)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_path_is_refused_by_name(tiny, key, value):
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
    assert (moved / "last_checkpoint.json").is_file() and len(lines(str(moved), "train")) == 8
    found = status_at({"output_dir": moved})
    assert (found["status"], found["step"]) == ("done", 8 * STEP)
    written = {path.name for path in root.iterdir()} - {Path(name).parts[0] for name in STRANGERS}
    assert written - {"previous", "run.lock"} == {path.name for path in moved.iterdir()}, "all a run writes is moved"


@pytest.mark.parametrize("name", ["checkpoints/mine", "logs/thesis.log"])
def test_resume_false_is_refused_where_no_run_is_recognised(tiny, name):
    root = Path(tiny["output_dir"])
    place(root, name, "thesis.tex")
    before = snapshot(root)
    message = refused(changed(tiny, resume=False))
    assert f"holds {Path(name).parts[0]}, and no run that wrote" in message and "choose another output_dir" in message
    assert snapshot(root) == before, "not even a lock or a status is left there"


def test_a_folder_of_other_things_is_no_obstacle(tiny):
    root = Path(tiny["output_dir"])
    place(root, *STRANGERS)
    train(changed(tiny, resume=False, train__max_tokens=2 * STEP))
    assert all((root / name).read_text() == f"somebody's {name}" for name in STRANGERS)
    assert not (root / "previous").exists()


CHANGED_BY_A_START = (
    "goodput.json", "last_checkpoint.json", "tokenizer/tokenizer.json", "metrics/jsonlines/train.jsonl",
    "metrics/npz/val/step-000000000000128.npz", "metrics/wandb/wandb_run_id.txt",
)  # fmt: skip


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", [*CHANGED_BY_A_START, "config.yaml", "status.json"])
def test_a_first_start_takes_nothing_of_others_for_its_own(tmp_path, name, resume):
    place(tmp_path, name)
    before = snapshot(tmp_path)
    with pytest.raises(
        RunDirectoryError, match=r"^output_dir=.* and no run that wrote .* choose another output_dir$"
    ) as error:
        status.claim(RunDirectory(tmp_path), resume)
    assert Path(name).parts[0] in str(error.value)
    assert snapshot(tmp_path) == before


def test_a_run_that_was_killed_early_starts_again(tmp_path):
    """Nothing but its lock, which is empty on a full disk, says whose the rest is."""
    place(tmp_path, *CHANGED_BY_A_START)
    (tmp_path / "run.lock").touch()
    for resume in (True, False):
        RunDirectory(tmp_path).check_ours(resume)


@pytest.mark.parametrize("name", ["train.zarr/zarr.json", "manifest.json"])
def test_the_folder_of_a_corpus_is_not_an_output_dir(tmp_path, name):
    place(tmp_path, name, "tokenizer/tokenizer.json")
    for resume in (True, False):
        with pytest.raises(RunDirectoryError, match=r"is a folder of token arrays; choose another output_dir$"):
            status.claim(RunDirectory(tmp_path), resume)
    (tmp_path / "starts.jsonl").touch()
    with pytest.raises(RunDirectoryError, match="is a folder of token arrays"):
        RunDirectory(tmp_path).move_aside()
    RunDirectory(tmp_path).check_ours(resume=True)  # a run that is there goes on


def place_run(root: Path, without: str = "") -> dict[str, str]:
    """A finished run, each of whose names holds one file; returns what they hold."""
    folders = ("checkpoints", "logs", "metrics", "tokenizer", "plots", "wandb")
    files = {name: f"{name}/content" if name in folders else name for name in OWN_NAMES if name != without}
    place(root, *files.values())
    (root / "run.lock").write_text(json.dumps({"pid": 1, "host": "node", "since": "today"}))
    return {file: (root / file).read_text() for file in files.values()}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_move_that_is_cut_short_is_completed_by_the_same_command(tmp_path, monkeypatch, kind):
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
                raise kind(errno.EBUSY, os.strerror(errno.EBUSY))
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", cut_short)
        with pytest.raises((KeyboardInterrupt, RunDirectoryError)) as error:
            RunDirectory(root).move_aside()
        monkeypatch.setattr(Path, "rename", rename)
        if kind is OSError:
            assert "busy" in str(error.value) and "start the same command again" in str(error.value)
            assert sum(1 for _ in (root / "previous").glob("*/*")) == cut
        assert RunDirectory(root).is_run
        refuses_to_start_over = (root / "last_checkpoint.json").exists()
        assert refuses_to_start_over or cut >= len(OWN_NAMES) - 1, "a start without resume=false may not begin a run"
        assert RunDirectory(root).move_aside() is not None
        assert sorted(os.listdir(root)) == ["previous", "run.lock"]
        found = {str(file.relative_to(folder)): file.read_text() for folder in (root / "previous").iterdir()
                 for file in folder.rglob("*") if file.is_file()}  # fmt: skip
        assert found == content


@pytest.mark.slow
def test_checkpoints_that_were_copied_alone_are_a_run_to_go_on_with(tiny, tmp_path):
    """Somebody takes only the checkpoints along: as before, the run goes on."""
    train(changed(tiny, train__max_tokens=4 * STEP))
    (tmp_path / "copy").mkdir()
    (Path(tiny["output_dir"]) / "checkpoints").rename(tmp_path / "copy/checkpoints")
    train(changed(tiny, output_dir=str(tmp_path / "copy"), train__max_tokens=6 * STEP))
    assert (tmp_path / f"copy/checkpoints/step-{6 * STEP:015d}").is_dir()


@pytest.mark.slow
def test_with_a_cache_too_small_the_old_run_stays_where_it_is(tiny, tmp_path):
    root = Path(tiny["output_dir"])
    root.mkdir()
    (root / "starts.jsonl").write_text("{}\n")
    with serve(Path(tiny["data_dir"])) as mirror:
        remote = {
            "data_dir": mirror.url,
            "datamodule__cache_dir": str(tmp_path / "cache"),
            "datamodule__cache_gb": 1e-9,
        }
        assert "datamodule.cache_gb=1e-09 is less than" in refused(changed(tiny, resume=False, **remote))
    assert (root / "starts.jsonl").is_file() and not (root / "previous").exists()


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, below):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"cannot write to output_dir=.*choose another output_dir$"):
        RunDirectory(tmp_path / "thesis.tex" / below).acquire()
