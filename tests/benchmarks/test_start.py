"""benchmarks/start.py and compile.py: which starts they make, and what they keep of them."""

import json

import pytest

from tests.benchmarks.conftest import load


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


@pytest.mark.parametrize("way", ["timed", "by rule", "reductions"])
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
