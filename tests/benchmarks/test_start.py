"""benchmarks/start.py and compile.py: which starts they make, and what they keep of them."""

import json
import sys

import pytest
import torch

from forgetting_transformer.training.faults.failures import out_of_memory
from tests.benchmarks.conftest import load

pytestmark = pytest.mark.slow


def ok(seconds: float) -> dict:
    stages = {"imports": 2.0, "first step": seconds}
    return {"status": "ok", "first_line_seconds": seconds + 5, "launcher_seconds": 3.0, "stages": stages}


def test_the_start_with_warm_caches_follows_the_one_that_fills_them(monkeypatch, tmp_path, capsys):
    start, made = load("start"), []

    def fake(args, experiment, output):
        made.append((experiment, output.name, output.parent))
        return ok(20.0 if output.name == "empty" else 6.0)

    monkeypatch.setattr(start, "start", fake)
    command = [
        "--experiments",
        "demo/fox_pro",
        "demo/mamba2",
        "--accelerator",
        "cpu",
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert start.main(command) == 0
    assert [(experiment, caches) for experiment, caches, _ in made] == [
        (experiment, caches) for experiment in ("demo/fox_pro", "demo/mamba2") for caches in ("empty", "warm")
    ]
    assert made[0][2] == made[1][2] != made[2][2], "caches are those of the same experiment"
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["caches"], row["stages"]["first step"]) for row in rows] == [("empty", 20.0), ("warm", 6.0)] * 2
    said = capsys.readouterr().out
    assert "demo/fox_pro, empty caches: first line after 25.0 s: launcher 3.0, imports 2.0, first step 20.0" in said
    assert start.main(command) == 0 and len(made) == 4, "what is measured is not measured again"


def test_a_start_that_fails_is_a_row_and_an_exit_code(monkeypatch, tmp_path):
    start = load("start")
    monkeypatch.setattr(start, "start", lambda *_: {"status": "failed: no GPU"})
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--out", str(tmp_path / "out.json")]
    assert start.main(command) == 1


#: Stands in for train.py, and ends with this reason.
TRAIN = """
import json, pathlib, sys
(output,) = (pathlib.Path(word.partition("=")[2]) for word in sys.argv if word.startswith("output_dir="))
output.mkdir()
(output / "status.json").write_text(json.dumps({{"status": "failed", "reason": {reason!r}}}))
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (torch.OutOfMemoryError("Tried to allocate 3.00 GiB"), "out of memory", 0),
        (RuntimeError("no such kernel"), "failed: ended with code 1 after ", 1),
    ],
)
@pytest.mark.rare("no contract: benchmarks")
def test_a_run_that_does_not_fit_is_a_result(monkeypatch, tmp_path, error, status, code):
    start = load("start")
    reason = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        config = start.compose("demo/fox_pro", ["fabric.accelerator=cpu"])
        reason = f"TrainingError: {out_of_memory(error, config, 'training')}"
    program = TRAIN.format(reason=reason)
    monkeypatch.setattr(start, "write_corpus", lambda folder, *_: folder.parent.mkdir(exist_ok=True))
    monkeypatch.setattr(start, "launch_command", lambda *_: [sys.executable, "-c", program])
    out = tmp_path / "out.json"
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--out", str(out)]
    assert start.main(command) == code
    assert [row["status"].startswith(status) for row in json.loads(out.read_text())["rows"]] == [True, True]


@pytest.mark.parametrize("way", ["timed", "by rule", "reductions"])
@pytest.mark.rare("no contract: benchmarks")
def test_each_way_to_compile_has_its_options(monkeypatch, tmp_path, way):
    benchmark = load("compile")
    from forgetting_transformer.ops import compiling

    before, seen = dict(compiling.OPTIONS), {}
    monkeypatch.setattr(compiling, "OPTIONS", dict(before))
    monkeypatch.setattr(
        benchmark.training, "measure", lambda *_, **__: seen.update(compiling.OPTIONS) or {"done": True}
    )
    args = benchmark.parse_args(["--device", "cpu"])
    benchmark.work(args, "demo/fox_pro", way, str(tmp_path / "row.json"))
    assert json.loads((tmp_path / "row.json").read_text()) == {"status": "ok", "done": True}
    assert seen == (before if way == "by rule" else benchmark.WAYS[way])
