"""benchmarks/interruptions.py: which runs it starts, how it judges them, and that it keeps what it has measured."""

import json

import pytest

from tests.benchmarks.conftest import load

pytestmark = pytest.mark.slow

COMMAND = ["--accelerator", "cpu", "--devices"]


@pytest.mark.parametrize(
    ("devices", "sizes"), [(8, [8, 4, 2, 8]), (6, [6, 3, 1, 6]), (4, [4, 2, 1, 4]), (3, [3, 1, 3]), (2, [2, 1, 2])]
)
def test_a_run_moves_to_fewer_devices_and_back(devices, sizes):
    assert load("interruptions").world_sizes(devices) == sizes


def test_straight_runs_come_first_and_only_for_checks_that_compare_with_them():
    interruptions = load("interruptions")

    def planned(*checks: str) -> list[tuple]:
        args = interruptions.parse_args([*COMMAND, "8", "--checks", *checks])
        return [(case["check"], case["devices"]) for case in interruptions.cases(args)]

    assert planned("hang", "world_sizes") == [
        ("straight", [8]), ("straight", [4]), ("world_sizes", [8, 4, 2, 8]), ("hang", [8]),
    ]  # fmt: skip
    assert planned("sigkill") == [("straight", [8]), ("sigkill", [8])]
    assert planned("checkpoint_stall") == [("checkpoint_stall", [8])]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["2", "--steps", "10"], "--steps: '10' is not a whole number from 12 to 2**31 - 1"),
        (["2", "--steps", "13"], "--steps 13 must be a multiple of 4"),
        (["2", "--experiment", "demo/fax"], "there is no experiment 'demo/fax'"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, said, capsys):
    with pytest.raises(SystemExit):
        load("interruptions").parse_args([*COMMAND, *options])
    assert said in capsys.readouterr().err


def test_one_device_is_refused_when_it_starts(capsys):
    assert load("interruptions").main([*COMMAND, "1"]) == 2
    said = capsys.readouterr().err
    assert said == "error: this needs several devices, and there are 1; try --accelerator cpu --devices 4\n"


def test_a_step_has_one_digest_however_many_ranks_share_it(tmp_path):
    tokens = load("runs")

    def note(folder, ranks):
        (tmp_path / folder).mkdir()
        for rank, (share, steps) in enumerate(ranks):
            lines = [{"step": step, "time": 0.5 * step, "sequences": names} for step, names in steps.items()]
            text = "\n".join(map(json.dumps, [{"pid": 40 + rank, "share": share}, *lines]))
            (tmp_path / folder / f"rank-{rank}.jsonl").write_text(f'{text}\n{{"step": 9')  # killed while it wrote

    note("one", [(0, {0: ["a", "b"], 1: ["c", "d"]})])
    note("two", [(0, {0: ["a"], 1: ["c"], 2: ["e"]}), (1, {0: ["b"], 1: ["d"]})])
    note("shared", [(0, {0: ["a", "b"]}), (0, {0: ["a", "b"]})])
    note("other", [(0, {0: ["b"], 1: ["c"]}), (1, {0: ["a"], 1: ["d"]})])
    one, two = tokens.tokens_by_step(tmp_path / "one", 1), tokens.tokens_by_step(tmp_path / "two", 2)
    assert one == two and list(two) == [0, 1], "a step that not all ranks took is no step"
    assert tokens.tokens_by_step(tmp_path / "shared", 2) == {0: one[0]}
    other = tokens.tokens_by_step(tmp_path / "other", 2)
    assert other[0] != one[0] and other[1] == one[1]
    assert tokens.process_of(tmp_path / "two", 1) == 41 and tokens.process_of(tmp_path / "two", 2) is None
    assert tokens.times(tmp_path / "two") == {0: 0.0, 1: 0.5, 2: 1.0}


def test_a_stall_is_what_steps_took_longer_than_those_without_a_checkpoint():
    taken, now = {}, 0.0
    for step in range(12):
        taken[step] = now
        now += {0: 9.0, 5: 1.5, 6: 1.25, 7: 1.25}.get(step, 1.0)  # saved after six steps, written during the next two
    found = load("interruptions").stall(taken, 6, 2.0)
    assert found == {"step_seconds": 1.0, "step_seconds_meanwhile": 1.25, "steps_meanwhile": 2, "stall_seconds": 1.0}
    assert load("interruptions").stall(taken, 6, 0.0)["step_seconds_meanwhile"] is None


def test_rows_are_kept_as_they_come_and_a_broken_promise_is_a_row_and_an_exit_code(monkeypatch, tmp_path, capsys):
    interruptions, made = load("interruptions"), []
    common = {"status": "ok", "first_step_seconds": [20.0], "step_seconds": 0.25}

    def straight(runs, output, devices):
        made.append(output.name)
        return {**common, "losses": [2.0, 1.0 + devices / 1000], "tokens": ["x", "y"], "weights": "w"}

    def moved(runs, output, sizes, reference):
        made.append(output.name)
        difference = interruptions.largest_difference([2.0, 1.0], reference["losses"])
        row = {"first_step_seconds": [20.0, None, 30.0], "same_tokens": True, "largest_difference": difference}
        return interruptions.judged(row, {interruptions.OTHER_TOKENS: True})

    def killed(runs, output, number, reference):
        made.append(output.name)
        row = {"outcome": "failed", "exit_code": 1, "steps_lost": 2, "same_tokens": True, "bitwise": len(made) > 5}
        row |= {"reason": "rank 1 was killed; and so on", "seconds_to_status": 1.8, "seconds_to_end": 3.0}
        return interruptions.judged(row, {"losses differ": row["bitwise"]})

    def hung(runs, output):
        made.append(output.name)
        if len(made) < 6:
            raise interruptions.TimeOver
        return {**common, "seconds_to_end": 51.0}

    for name, fake in (("straight", straight), ("continued_elsewhere", moved), ("struck", killed), ("hang", hung)):
        monkeypatch.setattr(interruptions, name, fake)
    out = tmp_path / "out.json"
    command = [*COMMAND, "2", "--out", str(out), "--checks", "world_sizes", "sigkill", "hang"]
    assert interruptions.main(command) == 1
    assert made == ["straight-2", "straight-1", "world_sizes-2", "sigkill-2", "hang-2"]
    said = capsys.readouterr().out
    assert "| straight | 1 | 20.0 |  |  |  |  |  | 250 ms per step |" in said
    assert "| world_sizes | 2 → 1 → 2 | 20.0, 30.0 |  |  |  | same | 2.0e-03 (1.0e-03) |  |" in said
    assert "| sigkill | 2 |  | 3.0 | 1 | 2 | same |  | failed: losses differ |" in said
    assert "| hang | 2 |  |  |  |  |  |  | stopped after 540 s; " in said
    assert [row["check"] for row in json.loads(out.read_text())["rows"]].count("straight") == 2
    assert interruptions.main(command) == 0, "what failed or was stopped is measured again"
    assert made[5:] == ["sigkill-2", "hang-2"], "and only that"
    assert "| sigkill | 2 |  | 3.0 | 1 | 2 | same | bitwise | rank 1 was killed (2 s) |" in capsys.readouterr().out
    assert {row["status"] for row in json.loads(out.read_text())["rows"]} == {"ok"}


def test_without_a_straight_run_nothing_is_compared(monkeypatch, capsys):
    interruptions = load("interruptions")

    def fails(*_):
        raise interruptions.Failure("a start ended with code 1: no GPU | no luck")

    monkeypatch.setattr(interruptions, "straight", fails)
    assert interruptions.main([*COMMAND, "2", "--checks", "sigterm"]) == 1
    said = capsys.readouterr().out
    assert "failed: a start ended with code 1: no GPU / no luck |" in said
    assert "failed: there is no straight run to compare with |" in said


def test_checks_whose_straight_run_was_stopped_are_stopped_and_have_not_failed(tmp_path, capsys):
    folder = tmp_path / "not there/yet"
    command = [*COMMAND, "2", "--checks", "sigterm", "--time_limit", "1e-3", "--folder", str(folder)]
    assert load("interruptions").main(command) == 1
    said = capsys.readouterr().out
    assert said.count("stopped after 0.001 s; the same command with --out goes on here") == 2 and "failed" not in said
    assert list(folder.iterdir()) == [], "the folder is made, and what runs left there is gone"


def measured(tmp_path, *options: str) -> dict[tuple[str, int], dict]:
    """Rows of two processes by check and devices, with a limit that a hang reaches on a busy machine too."""
    out = tmp_path / "out.json"
    command = [*COMMAND, "2", "--out", str(out), "--time_limit", "1800", "--timeout", "30", "--folder", str(tmp_path)]
    tiny = ["datamodule.train_batch_len=32", "train.grad_acc_tokens=32", "eval.min_val_length=8"]
    code = load("interruptions").main([*command, "--vocabulary", "64", "--overrides", *tiny, *options])
    rows = {(row["check"], row["devices"][0]): row for row in json.loads(out.read_text())["rows"]}
    assert code == 0, {key: row["status"] for key, row in rows.items()}
    return rows


@pytest.mark.rare("no contract: benchmarks")
def test_a_run_of_two_processes_of_which_one_is_killed_ends_as_if_none_had_been(tmp_path):
    rows = measured(tmp_path, "--checks", "sigkill")
    kill = rows["sigkill", 2]
    assert kill["outcome"] == "failed" and kill["exit_code"] == 1 and "was killed or has crashed" in kill["reason"]
    assert kill["bitwise"] and 0 <= kill["steps_lost"] < 24


@pytest.mark.rare("no contract: benchmarks")
def test_two_processes_are_stopped_and_moved_and_end_as_if_they_had_not_been(tmp_path):
    rows = measured(tmp_path, "--checks", "world_sizes", "sigterm", "hang", "checkpoint_stall")
    assert len(rows) == 6 and rows["straight", 2]["losses"] != rows["straight", 1]["losses"]
    assert rows["straight", 2]["tokens"] == rows["straight", 1]["tokens"] and None not in rows["straight", 1]["tokens"]
    moved, term, hang = (rows[check, 2] for check in ("world_sizes", "sigterm", "hang"))
    assert moved["devices"] == [2, 1, 2] and moved["same_tokens"] and moved["largest_difference"] < 1e-5
    assert (term["outcome"], term["exit_code"], term["steps_lost"]) == ("preempted", 75, 0) and term["bitwise"]
    assert hang["outcome"] == "failed" and hang["exit_code"] == 1 and "hangs, or was killed" in hang["reason"]
    assert rows["checkpoint_stall", 2]["write_seconds"] > 0
