"""status.json says how the last start ended, and an older start's end never passes for it."""

import errno
import json
import os
from pathlib import Path

from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.training.conftest import STEP, before, changed, refused, train
from tests.training.conftest import status as status_of


def test_a_start_says_that_it_starts_and_what_fails_in_it_replaces_the_end_of_the_one_before(tiny):
    tiny = changed(tiny, train__max_tokens=4 * STEP)
    train(tiny)
    assert status_of(tiny)["status"] == "done"
    refused(changed(tiny, optimizer__lr=1.0))
    found = status_of(tiny)
    assert (found["status"], found["step"]) == ("failed", 4 * STEP) and "with other settings" in found["reason"]
    copies = "import shutil\nshutil.copy(config.output_dir + '/status.json', config.output_dir + '/building.json')"
    patch = before("training.setup", "build_model", copies, arguments="config, data")
    train(changed(tiny, train__max_tokens=5 * STEP), patch=patch)
    found = json.loads((Path(tiny["output_dir"]) / "building.json").read_text())
    assert (found["status"], found["step"]) == ("starting", 4 * STEP)


def test_a_gpu_that_is_not_there_is_one_line_and_known_to_the_status(tiny):
    refused(changed(tiny, fabric__accelerator="cuda"), patch="import torch; torch.cuda.is_available = lambda: False")
    assert ", fabric.accelerator=cuda: " in status_of(tiny)["reason"]
    assert "\n" not in status_of(tiny)["reason"]


def test_a_full_disk_does_not_keep_the_status_from_being_right(tmp_path, monkeypatch):
    """Nothing new can be written, and what ends the run must be told all the same."""
    directory = RunDirectory(tmp_path)
    directory.acquire()
    directory.write_status("running", 128)
    really_open = os.open

    def full(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really_open(path, flags, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        directory.write_status("failed", 256, "no room " * 10_000)
        found = status_of({"output_dir": tmp_path})
        assert (found["status"], found["step"]) == ("failed", 256) and found["reason"].startswith("no room")
    directory.write_status("done", 1024)
    directory.release()
    assert status_of({"output_dir": tmp_path})["step"] == 1024
    assert {p.name for p in tmp_path.iterdir()} == {"status.json", "run.lock"}


def test_what_fails_after_the_last_step_is_how_the_run_ended(tiny):
    """Its exit code says so, too."""
    full, once = "self.refused = True\nraise OSError(28, 'No space left on device')", "not hasattr(self, 'refused')"
    patch = before("training.records.metrics.MetricsLog", "close", full, once)
    refused(changed(tiny, train__max_tokens=4 * STEP), patch=patch)
    found = status_of(tiny)
    assert (found["status"], found["step"]) == ("failed", 4 * STEP) and "No space left on device" in found["reason"]
