"""benchmarks/cases.py: rows are on disk once measured, what is missing is measured, nothing is mixed."""

import importlib.metadata
import json
import os

import pytest
import torch

from tests.processes import load_script


@pytest.fixture(scope="module")
def cases():
    return load_script("cases", "benchmarks")


def open_record(cases, *arguments: str):
    made = cases.parser("")
    made.add_argument("--steps", type=int, default=1)
    return cases.Record("speed", made.parse_args(["--device", "cpu", *arguments]), arguments)


def test_a_file_says_what_was_measured_where_and_with_what(cases, tmp_path, monkeypatch):
    file = tmp_path / "new" / "results.json"
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123abc")
    monkeypatch.setattr("forgetting_transformer.training.records.descriptions.git_state", lambda folder: {})
    opened = open_record(cases, "--out", str(file), "--steps", "3", "--replace", "--time_limit", "9")
    assert opened.add({"shape": (1, 2), "ms": 0.5}) == {"shape": [1, 2], "ms": 0.5}
    found = json.loads(file.read_text())
    assert list(found) == ["benchmark", "environment", "settings", "rows"]
    assert found["settings"] == {"device": "cpu", "steps": 3} and found["rows"] == [{"shape": [1, 2], "ms": 0.5}]
    place = found["environment"]
    assert place["command"] == "python benchmarks/speed.py --steps 3"
    assert place["commit"] == "0123abc" and place["changed"] is False and place["date"].endswith("+00:00")
    assert place["versions"]["torch"] == importlib.metadata.version("torch")
    assert place["hardware"]["cores"] == os.cpu_count()


@pytest.mark.slow
def test_the_same_command_measures_what_is_missing_and_what_failed(cases, tmp_path, capsys):
    made = cases.parser("")
    argv = ["--device", "cpu", "--out", str(tmp_path / "results.json")]
    calls = []

    def run(*broken: int, more: tuple[str, ...] = ()) -> int:
        def measure(case):
            calls.append(case["n"])
            if case["n"] in broken:
                raise ValueError("no such\nkernel")
            if case["n"] == 3:
                raise torch.OutOfMemoryError("too much")
            return {"ms": 1.0}

        args = cases.parse(made, [*argv, *more])
        return cases.run("speed.py", args, [*argv, *more], [{"n": n} for n in (1, 2, 3)], measure)

    assert run(more=("--dry_run",)) == 0 and not calls
    assert run(2) == 1 and calls == [1, 2, 3]
    assert "n 2  status failed: ValueError: no such kernel" in capsys.readouterr().out
    assert run() == 0 and calls == [1, 2, 3, 2], "running out of memory is a result"
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["n"], row["status"]) for row in rows] == [(1, "ok"), (3, "out of memory"), (2, "ok")]
    assert run(more=("--replace",)) == 0 and len(calls) == 7


def test_results_of_something_else_are_refused_and_stay(cases, tmp_path):
    file = tmp_path / "results.json"
    written = open_record(cases, "--out", str(file)).content
    for section, key in (("settings", "steps"), ("environment", "commit"), ("environment", "versions")):
        content = {**written, section: {**written[section], key: {"torch": "1"} if key == "versions" else "other"}}
        file.write_text(cases.dumps(content))
        with pytest.raises(cases.RecordError, match=r"has results with .*, and now it is .*--replace"):
            open_record(cases, "--out", str(file))
        assert file.read_text() == cases.dumps(content)
    for text, said in (('{"rows": [1]}', "is not a file of results"),):
        file.write_text(text)
        with pytest.raises(cases.RecordError, match=said):
            open_record(cases, "--out", str(file))
