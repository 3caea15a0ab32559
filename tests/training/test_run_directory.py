"""A run's folder holds what the run wrote. A run neither moves nor overwrites other files in it."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgetting_transformer.training import ConfigError, parse
from forgetting_transformer.training.faults import status
from forgetting_transformer.training.records.run_directory import OWN_NAMES, RunDirectory, RunDirectoryError
from tests.data.mirror import serve
from tests.training.conftest import STEP, changed, refused, train
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


def test_every_key_that_is_a_path_is_looked_at():
    """Keys of text whose names or values say that they are paths."""
    from forgetting_transformer.training.config import Text
    from forgetting_transformer.training.config.parsing import config_class, keys_of

    paths = {key: item.type for key, item in keys_of(config_class({})).items() if key.endswith(("_dir", "_path"))}
    assert len(paths) >= 5 and set(paths.values()) <= {Text, Text | None}


def test_an_empty_path_touches_no_file(tiny, tmp_path, monkeypatch):
    """What an unset $OUTPUT_DIR leaves: the current folder must stay as it is."""
    (tmp_path / "here").mkdir()
    place(tmp_path / "here", *STRANGERS)
    before = snapshot(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for resume in (True, False):
        with pytest.raises(ConfigError, match="output_dir"):
            parse(OmegaConf.create(changed(tiny, output_dir="", resume=resume)))
    with pytest.raises(RunDirectoryError, match="output_dir"):
        RunDirectory("")
    assert snapshot(tmp_path / "here") == before


@pytest.mark.slow
def test_resume_false_moves_what_a_run_wrote_and_nothing_else(tiny):
    train(changed(tiny, train__max_tokens=4 * STEP))
    root = Path(tiny["output_dir"])
    place(root, *STRANGERS)
    train(changed(tiny, resume=False, train__max_tokens=2 * STEP))
    assert all((root / name).read_text() == f"somebody's {name}" for name in STRANGERS)
    (moved,) = (root / "previous").iterdir()
    assert not {Path(name).parts[0] for name in STRANGERS} & {path.name for path in moved.iterdir()}
    assert (moved / "last_checkpoint.json").is_file() and (moved / "metrics/jsonlines/train.jsonl").is_file()
    written = {path.name for path in root.iterdir()} - {Path(name).parts[0] for name in STRANGERS}
    assert written - {"previous", "run.lock"} == {path.name for path in moved.iterdir()}, "all a run writes is moved"


@pytest.mark.parametrize("name", ["checkpoints/mine", "logs/thesis.log", "metrics/a.csv", "config.yaml", "plots/a.png"])
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


def test_what_a_start_leaves_that_failed_is_no_obstacle(tmp_path):
    directory = RunDirectory(tmp_path)
    status.claim(directory)
    directory.logs.mkdir()
    (directory.logs / "rank-0.log").touch()
    directory.checkpoints.mkdir()
    status.write_own(directory, "failed", 0, "DataError: no token array")
    directory.release()
    for resume in (True, False):
        again = RunDirectory(tmp_path)
        status.claim(again, resume)
        again.release()
    status.claim(again, resume=False)
    status.move_aside(again)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"run.lock", "previous", "status.json"}
    again.release()


@pytest.mark.parametrize("name", ["config.yaml", "model.txt", "status.json"])
def test_files_of_others_are_not_overwritten(tmp_path, name):
    place(tmp_path, name)
    with pytest.raises(RunDirectoryError, match=rf"holds {name}, and no run that wrote"):
        status.claim(RunDirectory(tmp_path))
    status.refuse(RunDirectory(tmp_path), "ConfigError: …")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: f"somebody's {name}"}


CHANGED_BY_A_START = (
    "run.lock", "goodput.json", "last_checkpoint.json", "tokenizer/tokenizer.json", "metrics/jsonlines/train.jsonl",
    "metrics/npz/val/step-000000000000128.npz", "metrics/wandb/wandb_run_id.txt",
    "tensorboard/events.out.tfevents.1.host",
)  # fmt: skip


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", CHANGED_BY_A_START)
def test_a_first_start_takes_nothing_of_others_for_its_own(tmp_path, name, resume):
    place(tmp_path, name)
    before = snapshot(tmp_path)
    with pytest.raises(
        RunDirectoryError, match=r"^output_dir=.* and no run that wrote .* choose another output_dir$"
    ) as error:
        status.claim(RunDirectory(tmp_path), resume)
    assert Path(name).parts[0] in str(error.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["run.lock", "status.json"])
def test_a_run_that_was_killed_early_starts_again(tmp_path, name):
    """Nothing but its lock or its status says whose the rest is."""
    directory = RunDirectory(tmp_path)
    status.claim(directory)
    directory.release()
    (tmp_path / {"run.lock": "status.json", "status.json": "run.lock"}[name]).unlink()
    place(tmp_path, *set(CHANGED_BY_A_START) - {"run.lock"})
    status.claim(directory)
    directory.release()


def test_what_a_start_leaves_on_a_full_disk_is_no_obstacle(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("run.lock", "logs/rank-0.log"):
        (tmp_path / name).touch()
    for resume in (True, False):
        RunDirectory(tmp_path).check_ours(resume)


def test_checkpoints_and_a_tokenizer_that_were_copied_are_no_obstacle(tmp_path):
    place(tmp_path, f"checkpoints/step-{128:015d}/trainer.json", "tokenizer/tokenizer.json", "last_checkpoint.json")
    RunDirectory(tmp_path).check_ours(resume=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [("train.zarr/zarr.json", "{}"), ("zarr.json", "{}"), ("manifest.json", '{"vocab_size": 64, "bos_token_id": 0}')],
)
def test_the_folder_of_a_corpus_is_not_an_output_dir(tmp_path, name, text):
    place(tmp_path, name, "tokenizer/tokenizer.json")
    (tmp_path / name).write_text(text)
    before = snapshot(tmp_path)
    for resume in (True, False):
        with pytest.raises(RunDirectoryError, match=r"is a folder of token arrays .*choose another output_dir$"):
            status.claim(RunDirectory(tmp_path), resume)
    (tmp_path / "starts.jsonl").touch()
    with pytest.raises(RunDirectoryError, match="resume=false would move its tokenizer aside"):
        RunDirectory(tmp_path).move_aside()
    RunDirectory(tmp_path).check_ours(resume=True)  # a run that is there goes on
    (tmp_path / "starts.jsonl").unlink()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_the_folder_of_a_model_is_not_an_output_dir(tmp_path, weights):
    """Evaluations would take that model for the run's."""
    place(tmp_path, "config.json", "tokenizer.json")
    RunDirectory(tmp_path).check_ours(resume=True)
    place(tmp_path, weights)
    for resume in (True, False):
        with pytest.raises(
            RunDirectoryError, match=rf"holds a model \(config\.json, {weights}\).*choose another output_dir$"
        ):
            status.claim(RunDirectory(tmp_path), resume)
    assert not (tmp_path / "run.lock").exists()
    (tmp_path / "starts.jsonl").touch()
    RunDirectory(tmp_path).check_ours(resume=True)  # a run that is there goes on


def test_a_manifest_of_something_else_is_no_obstacle(tmp_path):
    (tmp_path / "manifest.json").write_text('{"short_name": "App", "icons": []}')
    RunDirectory(tmp_path).check_ours(resume=True)


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
            assert (root / "previous").is_dir() and bool(os.listdir(root / "previous")) == bool(cut)
        assert RunDirectory(root).is_run
        refuses_to_start_over = (root / "last_checkpoint.json").exists()
        assert refuses_to_start_over or cut >= len(OWN_NAMES) - 1, "a start without resume=false may not begin a run"
        assert RunDirectory(root).move_aside() is not None
        assert sorted(os.listdir(root)) == ["previous", "run.lock"]
        found = {str(file.relative_to(folder)): file.read_text() for folder in (root / "previous").iterdir()
                 for file in folder.rglob("*") if file.is_file()}  # fmt: skip
        assert found == content


def test_checkpoints_that_are_a_mount_are_refused_before_anything_moves(tmp_path, monkeypatch):
    rename = Path.rename

    def busy(self, target):
        if self.name == "checkpoints":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(self, target)

    place_run(tmp_path)
    before = snapshot(tmp_path)
    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(RunDirectoryError, match=r"cannot move .*/checkpoints aside: .* busy"):
        RunDirectory(tmp_path).move_aside()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_leads_where_it_led_after_it_was_moved_aside(tmp_path, caplog, relative):
    root, disk = tmp_path / "run", tmp_path / "big/disk"
    place_run(root, "checkpoints")
    place(disk, "weights")
    (root / "checkpoints").symlink_to("../big/disk" if relative else disk)
    with caplog.at_level(logging.WARNING):
        moved = RunDirectory(root).move_aside()
    assert (moved / "checkpoints").is_symlink() and (moved / "checkpoints/weights").read_text() == "somebody's weights"
    assert not os.path.lexists(root / "checkpoints")
    (record,) = caplog.records
    assert f"{root}/checkpoints was a link to {disk.resolve()}" in record.getMessage()


@pytest.mark.slow
def test_checkpoints_that_were_copied_alone_are_a_run_to_go_on_with(tiny, tmp_path):
    """Somebody takes only the checkpoints along: as before, the run goes on."""
    train(changed(tiny, train__max_tokens=4 * STEP))
    (tmp_path / "copy").mkdir()
    (Path(tiny["output_dir"]) / "checkpoints").rename(tmp_path / "copy/checkpoints")
    train(changed(tiny, output_dir=str(tmp_path / "copy"), train__max_tokens=6 * STEP))
    assert (tmp_path / f"copy/checkpoints/step-{6 * STEP:015d}").is_dir()


def test_preflight_finds_a_folder_that_training_would_refuse(tiny):
    from forgetting_transformer.training.start.preflight import preflight

    place(Path(tiny["output_dir"]), "config.yaml")
    with pytest.raises(RunDirectoryError, match=r"holds config\.yaml, and no run that wrote"):
        preflight(parse(OmegaConf.create(tiny)))


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
def test_a_file_in_the_place_of_the_folder_is_called_one(tmp_path, below):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"is a file, or lies under one; choose another output_dir$"):
        RunDirectory(tmp_path / "thesis.tex" / below).acquire()
