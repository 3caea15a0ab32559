"""Damage to a run's folder, and a disk that is full from the start: one line that says where, and what to do."""

import errno
import json
import logging
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training import setup
from forgetting_transformer.training.checkpoint import folder
from forgetting_transformer.training.checkpoint.folder import CheckpointError, inspect, newest_valid, read_manifest
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.records.logs import LogFile
from tests.training.conftest import Job, refused
from tests.training.test_checkpoint import save

#: The disk takes no byte from the moment that training begins. The kernel refuses, and gives no path, as a full disk
#: does.
NO_ROOM = """
import resource
from forgetting_transformer.training.faults.failures import Start
enter, leave = Start.__enter__, Start.__exit__
def limited(self):
    resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, resource.RLIM_INFINITY))
    return enter(self)
def freed(self, *error):
    try:
        return leave(self, *error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
Start.__enter__, Start.__exit__ = limited, freed
"""


def without(files: dict, *names: str) -> dict:
    return {name: entry for name, entry in files.items() if name not in names}


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (lambda text: "[" * 100_000, "its manifest.json is damaged"),
        (lambda text: "{}", "its manifest.json is damaged"),
        (lambda text: "null", "its manifest.json is damaged"),
        (lambda text: json.dumps(json.loads(text) | {"files": {}}), "does not list state/.metadata"),
        (lambda text: json.dumps(json.loads(text) | {"files": []}), "does not list state/.metadata"),
        (
            lambda text: json.dumps(
                {**json.loads(text), "files": without(json.loads(text)["files"], "state/__0_0.distcp")}
            ),
            "does not list state/__0_0.distcp, so nothing holds that to its contents",
        ),
    ],
    ids=["brackets", "empty", "null", "no files", "a list", "one file less"],
)
def test_a_checkpoint_whose_manifest_holds_nothing_to_its_contents_is_passed_over(tmp_path, manifest, reason):
    save(tmp_path, 1)
    file = tmp_path / f"step-{1:015d}/manifest.json"
    file.write_text(manifest(file.read_text()))
    with pytest.raises(CheckpointError, match=reason) as error:
        inspect(file.parent)
    assert "\n" not in str(error.value)
    assert newest_valid(tmp_path) is None
    read_manifest(file.parent)  # for listings: what cannot be read is none, and no traceback


def test_too_many_open_files_are_no_damage(tmp_path, monkeypatch):
    """An older checkpoint would be taken, or none."""
    save(tmp_path, 1)

    def refuse(file: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(file))

    monkeypatch.setattr(folder, "checksum", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        newest_valid(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoints", "logs", "metrics"])
def test_a_file_where_a_run_keeps_a_folder_is_refused_by_name(tiny, name):
    run = Path(tiny["output_dir"])
    run.mkdir()
    # A run's own folder, so that nothing else about it is strange.
    (run / "starts.jsonl").write_text("")
    (run / name).write_text("")
    said = refused(tiny).strip().splitlines()[-1]
    assert "RunDirectoryError" in said and f"{run / name}" in said and "move it away" in said


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 600])
def test_a_disk_that_is_full_from_the_start_is_one_line_with_its_place(tiny, room):
    job = Job(tiny, patch=NO_ROOM.format(bytes=room))
    assert job.wait() == [1]
    said = job.errors().strip().splitlines()[-1]
    assert said.startswith("forgetting_transformer.training.errors.TrainingError: cannot start: "), said
    assert tiny["output_dir"] in said and "File too large" in said and "start the same command again" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((errno.ENOSPC, "No space left on device"), "No space left on device"),
        (
            (errno.EMFILE, "Too many open files", "/a/file"),
            r"Too many open files: this process may have .* \(`ulimit -n`\)",
        ),
        ((errno.EIO, "Input/output error", "/a/file"), "/a/file: Input/output error"),
    ],
)
def test_an_error_of_the_system_is_put_down_to_what_it_concerns(tiny, monkeypatch, error, said):
    """And to no folder that has nothing to do with it: full may be shared memory, say."""

    def refuse(*_: object) -> None:
        raise OSError(*error)

    monkeypatch.setattr(setup, "open_data", refuse)
    with pytest.raises(TrainingError, match=f"^cannot start: {said}. Mend this and start the same command again$"):
        training.run(training.parse(OmegaConf.create(tiny)))


def test_a_log_that_cannot_be_written_says_so_once(capsys):
    handler = LogFile("/dev/full")
    for number in range(3):
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}", (), None))
    sys.stderr.flush()
    said = capsys.readouterr().err
    assert said == "/dev/full cannot be written: No space left on device; lines of the log are lost\n"
