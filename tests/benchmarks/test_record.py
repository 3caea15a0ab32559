"""benchmarks/record.py: rows are on disk once measured, a killed command continues, no file mixes two commands."""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.conftest import FOLDER, load, run_until_killed
from tests.interrupting import code_when_interrupted
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record():
    return load("record")


def options(record, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--folder")
    record.add_options(parser)
    return parser.parse_args(arguments)


def open_record(record, *arguments: str):
    return record.Record("speed", options(record, *arguments), arguments, "cpu", leave_out=("folder",))


def never():
    raise AssertionError("measured again")


def test_a_file_says_what_was_measured_where_and_with_what(record, tmp_path, monkeypatch):
    file = tmp_path / "new" / "results.json"
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123abc")
    monkeypatch.setattr("forgetting_transformer.training.provenance.git_state", lambda folder: {})
    opened = open_record(record, "--out", str(file), "--steps", "3", "--folder", "somewhere", "--replace")
    assert opened.add({"shape": (1, 2), "ms": 0.5}) == {"shape": [1, 2], "ms": 0.5}
    found = json.loads(file.read_text())
    assert list(found) == ["benchmark", "environment", "settings", "rows"]
    assert found["settings"] == {"steps": 3} and found["rows"] == [{"shape": [1, 2], "ms": 0.5}]
    place = found["environment"]
    assert place["command"] == "python benchmarks/speed.py --steps 3"
    assert place["commit"] == "0123abc" and place["changed"] is False and place["date"].endswith("+00:00")
    assert place["versions"]["torch"] == importlib.metadata.version("torch")
    assert place["hardware"]["cores"] == os.cpu_count()


def test_only_changed_code_counts_as_a_change(record, monkeypatch):
    def changed(*names: str) -> bool:
        patch = "".join(f"diff --git a/{name} b/{name}\n+x\n" for name in names)
        state = {"commit": "c", "patch": patch}
        monkeypatch.setattr("forgetting_transformer.training.provenance.git_state", lambda folder: state)
        return record.environment("speed", "cpu")["changed"]

    assert not changed() and not changed("benchmarks/results/decode.json", "docs/performance.md")
    assert changed("docs/performance.md", "src/forgetting_transformer/ops/layers/norm.py") and changed(
        "configs/config.yaml"
    )


def test_the_same_command_measures_what_is_missing_and_what_failed(record, tmp_path):
    arguments = ("--out", str(tmp_path / "results.json"))
    first = open_record(record, *arguments)
    first.row({"case": 1}, lambda: {"ms": 1.0})
    first.add({"case": 2, "status": "failed: no kernel"})
    again = open_record(record, *arguments)
    assert again.row({"case": 1}, never) == {"case": 1, "ms": 1.0}
    assert again.row({"case": 2}, lambda: {"status": "ok"}) == {"case": 2, "status": "ok"}
    assert again.environment["date"] == first.environment["date"]
    assert open_record(record, *arguments).rows == [{"case": 1, "ms": 1.0}, {"case": 2, "status": "ok"}]
    assert open_record(record, *arguments, "--replace").rows == []


@pytest.mark.parametrize(
    ("status", "is_failure"),
    [("ok", False), ("out of memory", False), ("stopped after 9 s", False), ("failed: no kernel", True)],
)
def test_only_what_failed_is_a_failure(record, status, is_failure):
    opened = open_record(record)
    opened.add({"case": 1})
    opened.add({"case": 2, "status": status})
    assert opened.failed == is_failure


@pytest.mark.parametrize("key", ["settings.steps", "commit", "versions.torch", "hardware.cpu", "benchmark"])
def test_results_of_something_else_are_refused_and_stay(record, tmp_path, key):
    file = tmp_path / "results.json"
    arguments = ("--out", str(file))
    open_record(record, *arguments).add({"case": 1})
    content = json.loads(file.read_text())
    *parents, last = key.split(".")
    inner = content if key.split(".")[0] in content else content["environment"]
    for name in parents:
        inner = inner[name]
    inner[last] = "other"
    file.write_text(record.dumps(content))
    with pytest.raises(record.RecordError, match=rf"has results with .*{last}='other', and now it is .*--replace"):
        open_record(record, *arguments)
    assert json.loads(file.read_text()) == content


def test_what_is_no_file_of_results_or_was_typed_by_hand_is_refused(record, tmp_path):
    file = tmp_path / "results.json"
    arguments = ("--out", str(file))
    for text in ("", "[]", '{"rows": []}', '{"rows": [1]}'):
        file.write_text(text)
        with pytest.raises(record.RecordError, match="is not a file of results"):
            open_record(record, *arguments)
    content = open_record(record, *arguments, "--replace").content
    file.write_text(record.dumps({**content, "source": "transcribed"}))
    with pytest.raises(record.RecordError, match=r"was not written by a benchmark \(transcribed\)"):
        open_record(record, *arguments)


# The benchmarks themselves, killed while they measure their second row.


def kill_at_second_call(module, name: str, monkeypatch, result) -> list:
    """Replaces a function of the module, and returns the list of its calls in this process."""
    calls = []

    def replacement(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 2 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return result(*arguments)

    parent = os.getpid()
    monkeypatch.setattr(module, name, replacement)
    return calls


def check_killed_and_continued(benchmark, arguments, file, calls, rows: int, capfd) -> list[dict]:
    run_until_killed(benchmark.main, arguments)
    kept = json.loads(file.read_text())["rows"]
    assert len(kept) == 1
    # The row was printed as well, below the two lines of the header.
    assert len(capfd.readouterr().out.splitlines()) == 3
    assert benchmark.main(arguments) == 0
    assert len(calls) == rows - 1, "a row that was there was measured again"
    found = json.loads(file.read_text())["rows"]
    assert found[0] == kept[0] and len(found) == rows
    calls.clear()
    assert benchmark.main(arguments) == 0 and not calls
    return found


@pytest.mark.rare("no contract: benchmarks")
def test_reading_of_data(tmp_path, monkeypatch, capfd):
    benchmark, file = load("data"), tmp_path / "results.json"
    result = {"tokens_per_second": [1e6], "decode_factor": 1.0, "cpu_seconds_per_token": 1e-9, "kept_bytes": 0}
    calls = kill_at_second_call(benchmark, "measure", monkeypatch, lambda *_: result)
    arguments = ["--documents", "16", "--doc_len", "64", "--workers", "0", "1", "--out", str(file)]
    found = check_killed_and_continued(benchmark, arguments, file, calls, 4, capfd)
    cases = [("plain zarr", 0), ("plain zarr", 1), ("kept chunks", 0), ("kept chunks", 1)]
    assert [(row["reader"], row["workers"]) for row in found] == cases


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A machine that says it has a GPU, whose tensors are on the CPU, for benchmarks whose clocks are replaced."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    for name in ("randn", "full"):
        create = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, create=create, device=None, **k: create(*a, **k))


def test_decoding(tmp_path, monkeypatch, capfd, pretend_gpu):
    benchmark, file = load("decode"), tmp_path / "results.json"
    result = {"us": 1.0, "tokens_per_second": 1e6, "gb_per_second": None, "share_of_peak": None, "error": 0.0}
    calls = kill_at_second_call(benchmark, "measure", monkeypatch, lambda *_: result)
    arguments = ["--shapes", "1,2,2,64,128", "--kernels", "decode", "half", "flash", "--out", str(file)]
    found = check_killed_and_continued(benchmark, arguments, file, calls, 3, capfd)
    assert [row["kernel"] for row in found] == ["decode", "half", "flash"]


def test_attention(tmp_path, monkeypatch, capfd, pretend_gpu):
    benchmark, file = load("attention"), tmp_path / "results.json"
    calls = kill_at_second_call(benchmark, "time_both_ways", monkeypatch, lambda *_: (1.0, 2.5))
    monkeypatch.setattr(benchmark, "time_launched", lambda *_: {"graph_ms": 0.75, "queued_ms": 1.25})
    monkeypatch.setattr(benchmark, "time_replayed", lambda *_: (0.5, 0.5))
    monkeypatch.setattr(benchmark, "time_search", lambda *_: 0.1)
    arguments = ["--shapes", "1,256,2,64", "--prune_shapes", "1,256,2,64", "--out", str(file)]
    run_until_killed(benchmark.main, arguments)
    assert len(json.loads(file.read_text())["rows"]) == 1
    capfd.readouterr()
    assert benchmark.main(arguments) == 0
    assert len(calls) == 2
    rows = json.loads(file.read_text())["rows"]
    assert [row["table"] for row in rows] == 3 * ["kernels"] + 6 * ["pruning"]
    lines = capfd.readouterr().out.splitlines()
    assert lines[2] == "| 1,256,2,64 | forgetting attention | 1.00 | 2.50 | 0 | 0.75 | 1.25 |"
    assert lines[8] == "| 1,256,2,64 | half | weights | 0.50 + 0.50 | 0.50 + 0.50 | 1.00 | 0.0% | 10.0% |"


def test_checkpoints_are_measured_again_from_the_first_row(tmp_path, monkeypatch, capfd):
    """A save depends on the ones before it in the same process."""
    benchmark, file = load("checkpoint"), tmp_path / "results.json"
    arguments = ["--device", "cpu", "--saves", "2", "--out", str(file)]
    parent = os.getpid()

    def measure(args):
        yield {"reserve_seconds": os.getpid()}
        yield {"save": 1}
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"save": 2}

    monkeypatch.setattr(benchmark, "measure", measure)
    run_until_killed(benchmark.main, arguments)
    assert len(json.loads(file.read_text())["rows"]) == 2
    assert benchmark.main(arguments) == 0
    assert "an earlier start did not finish; measuring again from the first row" in capfd.readouterr().err
    wanted = [{"reserve_seconds": parent}, {"save": 1}, {"save": 2}]
    assert json.loads(file.read_text())["rows"] == wanted
    monkeypatch.setattr(benchmark, "measure", lambda args: never())
    assert benchmark.main(arguments) == 0
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()][-3:] == wanted


SCRIPTS = [file.name for file in sorted(FOLDER.glob("*.py")) if "__main__" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("moment", ["importing", "working"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_is_one_line_that_says_what_is_saved(script, moment, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *(["--seq_len", "64"] if script == "memory.py" else [])])
    code = code_when_interrupted(FOLDER / script, moment, lambda name: name.partition(".")[0] == "torch", monkeypatch)
    said = capsys.readouterr().err
    assert code == 130 and said.count("\n") == 1
    assert re.match("interrupted; .*the rows so far are saved, and the same command goes on$", said)


def test_scripts_are_found():
    assert len(SCRIPTS) > 15


def test_ctrl_c_in_a_terminal_leaves_no_traceback_of_workers_either(tmp_path):
    """It goes to all processes of the command. This worker says that it has begun, and waits."""
    (tmp_path / "worker.py").write_text("print('begun', flush=True)\nwhile True:\n    __import__('time').sleep(1)\n")
    program = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import record, training
def main():
    list(training.rows_of_process([sys.executable, {str(tmp_path / "worker.py")!r}], [{{}}], 1e6))
sys.exit(record.run_main(main))
"""
    printed = tmp_path / "printed"
    with printed.open("w") as said:
        # As a terminal starts it: what runs in the background of a script ignores Ctrl-C, and so do these tests there.
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        wait_until(lambda: printed.read_text() == "begun\n", lambda: process.poll() is None, printed.read_text)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG) == 130
    finally:
        process.kill()
        process.wait()
    assert re.fullmatch("begun\ninterrupted; .*\n", printed.read_text())


#: Stands in for the process that measures an experiment.
WORKER = """
import json, pathlib, sys, time
experiment, file = sys.argv[-2:]
def say(row):
    with open(file, "a") as stream:
        stream.write(json.dumps({"experiment": experiment, **row}) + "\\n")
say({"checkpointing": True, "status": "out of memory"})
while not pathlib.Path(experiment).exists():
    time.sleep(0.01)
say({"checkpointing": False, "status": "out of memory"})
"""


def test_a_training_row_is_there_before_the_next_one_is_measured(tmp_path, monkeypatch):
    benchmark, seen = load("training"), tmp_path / "seen"
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "worker.py"))
    args = benchmark.parse_args(["--device", "cpu"])
    rows = benchmark.run_in_process(args, str(seen), (True, False), [])
    assert next(rows)["checkpointing"] is True
    seen.touch()
    assert next(rows)["checkpointing"] is False and next(rows, None) is None


def test_training_of_whole_models(tmp_path, monkeypatch, capfd):
    benchmark, file = load("training"), tmp_path / "results.json"

    def run(args, experiment, settings, argv):
        return ({"experiment": experiment, "checkpointing": c, "status": "out of memory"} for c in settings)

    calls = kill_at_second_call(benchmark, "run_in_process", monkeypatch, run)
    names = ["demo/fox_pro", "demo/mamba2", "demo/hgrn2"]
    arguments = ["--device", "cpu", "--checkpointing", "off", "--experiments", *names, "--out", str(file)]
    found = check_killed_and_continued(benchmark, arguments, file, calls, 3, capfd)
    assert [row["experiment"] for row in found] == names


def test_a_worker_does_not_outlive_a_killed_benchmark(tmp_path, monkeypatch):
    """It would hold the GPU that the next start needs."""
    record = load("record")
    pid = tmp_path / "pid"

    def start_worker():
        worker = os.fork()
        if worker == 0:
            record.end_with_parent()
            pid.write_text(str(os.getpid()))
            while True:
                time.sleep(1)
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    run_until_killed(start_worker)
    wait_until(lambda: not is_running(pid.read_text()), said="the worker lives on")


def is_running(pid: str) -> bool:
    """False for a zombie too, which holds nothing."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
