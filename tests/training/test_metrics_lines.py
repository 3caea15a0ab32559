"""A damaged line of metrics costs that line and no other."""

import json
import logging
from pathlib import Path

import pytest

from forgetting_transformer.training.records.metrics import MetricsLog, read_lines, truncate
from forgetting_transformer.training.records.run_directory import RunDirectory


@pytest.fixture
def file(tmp_path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"step": step, "train/loss": 1 / step}) + "\n" for step in range(1, 9)))
    return file


def steps(file: Path) -> list[int]:
    return [entry["step"] for entry in read_lines(file)]


@pytest.mark.parametrize(
    "line",
    [b'{"step": 3, "train/lo', b"\x00" * 40, b"\xff\xfe", b"[]", b'{"step": "3"}', b"[" * 100_000],
)  # fmt: skip
def test_only_the_damaged_line_is_lost(file, caplog, line):
    lines = file.read_bytes().split(b"\n")
    lines[2] = line
    file.write_bytes(b"\n".join(lines))
    truncate(file, 6)
    assert steps(file) == [1, 2, 4, 5, 6]
    assert f"{file}: 1 damaged lines are left out" in caplog.text


def test_a_last_line_that_a_crash_cut_short_is_dropped_quietly(file, caplog):
    caplog.set_level(logging.INFO)
    with file.open("a") as stream:
        stream.write('{"step": 9, "train/')
    truncate(file, 99)
    assert steps(file) == list(range(1, 9)) and not caplog.text
    assert [path.name for path in file.parent.iterdir()] == ["train.jsonl"]


def test_a_start_cuts_lines_of_every_kind_and_nothing_that_has_none(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    lines = "".join(json.dumps({"step": step, "mine": 1.0}) + "\n" for step in (128, 512))
    for name, text in {"train": lines, "my_probe": lines, "notes": '{"text": "mine"}\n'}.items():
        directory.jsonlines.mkdir(parents=True, exist_ok=True)
        (directory.jsonlines / f"{name}.jsonl").write_text(text)
    foreign = [directory.jsonlines / "drawer.jsonl", directory.npz / "val" / f"step-{512:015d}.npz"]
    for folder in foreign:
        folder.mkdir(parents=True)
    log = MetricsLog(directory, 256)
    log.flush()
    assert len(log.rows()) == 1 and all(folder.is_dir() for folder in foreign)
    assert [steps(directory.jsonlines / f"{name}.jsonl") for name in ("train", "my_probe")] == [[128], [128]]
    assert (directory.jsonlines / "notes.jsonl").read_text() == '{"text": "mine"}\n'
