"""benchmarks/measure.py: every command that it knows would start, and what happens to those that end, fail and wait."""

import fnmatch
import json
import re
import shlex
import threading
import types
from pathlib import Path

import pytest

from tests.benchmarks.conftest import FOLDER, load
from tests.docs.commands import check_command
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: Takes a while, fails or writes its file, by its first option.
SCRIPT = """
import argparse, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--how")
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
print("measuring", args.how, flush=True)
if args.how == "fails":
    sys.exit(3)
if args.how == "waits":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    new = args.out.with_suffix(".new")
    new.write_text(str(child.pid))
    new.replace(args.out.with_suffix(".pid"))
    time.sleep(3600)
status = "stopped after 900 s" if args.how == "stops" else "ok"
args.out.write_text('{"rows": [{"status": "ok"}, {"status": "%s"}]}' % status)
"""


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """The script with other commands."""
    module = load("measure")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/fake.py").write_text(SCRIPT)
    (tmp_path / "commands.yaml").write_text("""
first:
  one: {command: fake.py --how ends}
  broken: {command: fake.py --how fails}
second:
  many_{gpus}: {gpus: [0, 4], command: "fake.py --how on_{gpus}"}
third:
  slow: {gpus: 0, command: fake.py --how waits}
after:
  late: {gpus: 0, command: fake.py --how late}
fourth:
  long: {gpus: 0, command: fake.py --how stops}
""")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "scripts")
    monkeypatch.setattr(module, "COMMANDS", tmp_path / "commands.yaml")
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)  # of the process of the tests
    return module


@pytest.mark.rare("no contract: benchmarks")
def test_every_command_of_the_file_would_be_taken():
    found = load("measure").measurements()
    assert len({m.name for m in found}) == len(found) > 30
    for measurement in found:
        check_command(shlex.split(f"python benchmarks/{measurement.command} --out {measurement.name}.json"))
    longest = {m.command for m in found if m.name.startswith("long_contexts_8")}
    assert any("--devices 8" in command and "1048576" in command for command in longest)
    assert all(m.gpus == int(m.command.split("--devices ")[1].split()[0]) for m in found if "--devices" in m.command)


def test_what_is_finished_is_not_measured_again_and_what_fails_is_named(measure, tmp_path, capfd):
    out = tmp_path / "out"
    assert measure.main(["first", "second", "--folder", str(out), "--gpus", "1"]) == 1
    said = capfd.readouterr().out
    assert "one: finished" in said and "many_0: finished" in said
    assert f"broken: failed with exit code 3; its output is in {out / 'broken.log'}" in said
    assert "many_4: not run: needs 4 GPUs, there are 1" in said
    assert (out / "broken.log").read_text() == "measuring fails\n"
    (out / "one.json").write_text("changed")
    measure.main(["first", "--folder", str(out), "--gpus", "1"])
    assert (out / "one.json").read_text() == "changed" and (out / "broken.log").read_text() == 2 * "measuring fails\n"
    assert sorted(json.loads((out / ".finished.json").read_text())) == ["many_0", "one"]
    assert measure.main(["one", "many_0", "many_4", "--folder", str(out), "--gpus", "1"]) == 0


def test_a_command_is_ended_with_all_that_it_started_when_time_is_over(measure, monkeypatch, tmp_path, capfd):
    out, clock = tmp_path / "out", types.SimpleNamespace(now=0.0)

    class Timer(threading.Timer):
        """Its time is over as soon as the command has started a process of its own."""

        def run(self):
            wait_until(lambda: (out / "slow.pid").is_file())
            clock.now = self.interval
            self.function(*self.args)

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(measure, "threading", types.SimpleNamespace(Timer=Timer))
    assert measure.main(["third", "after", "--folder", str(out), "--gpus", "1", "--time_limit", "60"]) == 1
    said = capfd.readouterr().out
    assert "measuring waits" in said and "slow: out of time; the same command goes on" in said
    assert "late: not measured yet" in said and "measuring late" not in said
    started = int((out / "slow.pid").read_text())
    wait_until(lambda: not runs(started))


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_unknown_name_is_refused_with_the_groups(measure, capsys):
    with pytest.raises(SystemExit):
        measure.parse_args(["firts"])
    assert "'firts' is no group and no file; groups are first, second, third, after, fourth," in capsys.readouterr().err


def test_a_list_of_what_is_finished_that_is_damaged_is_named(measure, tmp_path, capsys):
    for text in ("{broken", '["one"]'):
        (tmp_path / ".finished.json").write_text(text)
        assert measure.main(["one", "--folder", str(tmp_path), "--gpus", "1"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {tmp_path}/.finished.json is damaged") and said.count("\n") == 1


def test_what_is_finished_and_whose_file_is_gone_is_measured_again(measure, tmp_path):
    command = ["one", "--folder", str(tmp_path), "--gpus", "1"]
    assert measure.main(command) == 0
    (tmp_path / "one.json").unlink()
    assert measure.main(command) == 0 and (tmp_path / "one.json").is_file()


def test_a_failure_is_one_whatever_the_folder_is_called(measure, tmp_path):
    assert measure.main(["broken", "--folder", str(tmp_path / "not run yet"), "--gpus", "1"]) == 1


def test_every_file_is_one_that_a_page_takes():
    """What is copied to benchmarks/results under its name would be in no table otherwise."""
    source = (Path(__file__).parents[2] / "studies/pages.py").read_text()
    patterns = {*re.findall(r'"([\w*]+\*\.json)"', source), "scaling*.json", "peers*.json"}
    names = [found.name for found in load("measure").measurements()]
    assert [name for name in names if not any(fnmatch.fnmatch(f"{name}.json", each) for each in patterns)] == []


RESULTS = {file.stem: json.loads(file.read_text()) for file in (FOLDER / "results").glob("*.json")}


def names_of(kind: str) -> list[str]:
    """Those in tables; files of other names have numbers of sentences."""
    return [name for name, content in RESULTS.items() if content["benchmark"] == kind and name.startswith(f"{kind}_")]


@pytest.mark.parametrize("name", [*names_of("attention"), *names_of("recurrence")])
def test_a_copy_replaces_what_was_measured_with_the_same_triton(monkeypatch, name):
    """Two files that say different things about one case would both be in a table."""
    measure, versions = load("measure"), RESULTS[name]["environment"]["versions"]
    monkeypatch.setattr(measure, "installed_versions", lambda _: versions)
    assert name in {found.name for found in measure.measurements()}


#: Options that tell the cases of two files apart, and the values that the first files do not have.
CASE = {"experiments": None, "devices": None, "overrides": None}
CASES = {"scaling": CASE | {"batch_size": 1, "micro_batches": None}, "start": CASE | {"launcher": "fabric"}}


@pytest.mark.parametrize("kind", CASES)
def test_a_copy_replaces_what_was_measured_on_as_many_gpus(kind):
    """What is of an older commit or another machine is kept beside it, under a longer name."""
    script, replaced = load(kind), set()
    for found in load("measure").measurements():
        words = shlex.split(found.command)
        if words[0] != f"{kind}.py":
            continue
        options = vars(script.parse_args(words[1:]))
        for name in names_of(kind):
            settings = {key: RESULTS[name]["settings"].get(key, value) for key, value in CASES[kind].items()}
            if settings.items() <= options.items():
                assert name == found.name or name.startswith(f"{found.name}_")
                replaced |= {name} & {found.name}
    assert replaced


def test_without_triton_there_is_a_name_too(monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(measure, "installed_versions", lambda _: {"python": "3.11.7"})
    assert "recurrence_triton_none" in {m.name for m in measure.measurements()}


def test_what_stopped_at_its_own_limit_is_not_finished(measure, tmp_path, capfd):
    for _ in range(2):
        assert measure.main(["long", "--folder", str(tmp_path), "--gpus", "1"]) == 1
        said = capfd.readouterr().out
        assert "measuring stops" in said and "long: 1 row stopped after 900 s; the same command goes on" in said
    assert not (tmp_path / ".finished.json").exists()
