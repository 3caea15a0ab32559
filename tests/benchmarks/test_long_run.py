"""benchmarks/long_run.py: a run that is stopped and continued, and its losses by position."""

import json
import sys
import time

import pytest

from forgetting_transformer.training import check
from tests.benchmarks.conftest import load
from tests.benchmarks.test_long_contexts import results
from tests.waiting import HANG

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    return load("long_run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "3"], "--context 3 must divide --devices 3 and --seq_len 131072"),
        (["--devices", "4", "--context", "3"], "--context 3 must divide --devices 4"),
        (["--devices", "1", "--seq_len", "100000"], "--seq_len 100000 must be a power of two"),
        (["--devices", "1", "--experiment", "no_such"], "there is no experiment 'no_such'"),
    ],
)
def test_options_that_do_not_fit_are_refused(benchmark, capsys, arguments, message):
    with pytest.raises(SystemExit):
        benchmark.parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("devices", "context"), [(1, 1), (2, 2), (8, 4)])
def test_a_step_has_one_sequence_for_each_group_of_gpus(benchmark, devices, context):
    given = ["--devices", str(devices), "--context", str(context)]
    args = benchmark.parse_args(given)
    config = load("long_contexts").compose(args.experiment, benchmark.settings(args))
    check(config, devices)
    assert config.train.max_tokens == 200 * 131072 * devices // context == config.schedule.total_tokens
    assert not config.skip_eval and config.eval_interval == config.train.max_tokens
    assert config.train.gradient_checkpointing and config.model.config["log_pruning_tolerance"] is not None
    assert config.strategy.context == context and config.datamodule.train_batch_size == devices // context


def test_a_start_is_stopped_when_it_is_time_and_one_that_fails_says_what_it_printed(benchmark, tmp_path):
    began, log = time.monotonic(), tmp_path / "log"
    patient = "import time\nprint('training', flush=True)\ntime.sleep(36000)"
    benchmark.start([sys.executable, "-c", patient], log, lambda: "training" in log.read_text())
    assert time.monotonic() - began < HANG
    for stop in (None, lambda: False):
        with pytest.raises(benchmark.BenchmarkError, match="out of luck"):
            benchmark.start([sys.executable, "-c", "raise SystemExit('out of luck')"], log, stop)


ROW = {"experiment": "forgetting_transformer/pro_760m_16b", "seq_len": 1024, "devices": 2, "context": 2}


def test_columns_are_means_over_two_octaves_each(tmp_path, monkeypatch):
    values = {
        "status": "ok", "stopped_after": None, "losses": [5.0] * 8, "step_seconds": 1.5, "peak_memory_bytes": 2e10,
        "octaves": [[0, 9.0], [128, 8.0], [256, 3.0], [512, 6.0]],
    }  # fmt: skip
    rows = [
        {**ROW, "part": "straight", **values},
        {**ROW, "part": "resumed", **values, "stopped_after": 4, "bitwise": True, "largest_difference": 0.0},
        {**ROW, "part": "resumed", **values, "stopped_after": 4, "bitwise": False, "largest_difference": 0.25},
        {**ROW, "part": "resumed", "status": "out of memory"},
        {
            **ROW,
            "part": "beyond",
            "status": "ok",
            "octaves": [*values["octaves"], [1024, 7.0]],
            "evaluation_seconds": 9.0,
        },
    ]
    tables, _ = results(tmp_path, monkeypatch, [])
    (tmp_path / "long_run.json").write_text(json.dumps({"environment": {"versions": {}}, "rows": rows}))
    header, _, *lines = tables.long_runs(tables.Results("long_run*.json")).splitlines()
    header, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (header, *lines))
    assert header[-3:] == ["losses", "loss from 256", "loss from 1,024"]
    # 256 positions with 3.0 and 512 with 6.0.
    assert lines[0] == ["FoX (Pro) 760M", "straight", "1,024", "2", "8", "1.50", "20.0", "", "5.000", ""]
    said = ["", "bitwise, stopped after 4", "2.5e-01, stopped after 4", "out of memory", ""]
    assert [line[7] for line in lines] == said
    assert lines[-1][4:] == ["", "", "", "", "5.000", "7.000"]


@pytest.mark.rare("no contract: benchmarks")
def test_a_tiny_run_is_stopped_and_continued_bitwise(benchmark, tmp_path, capfd):
    out = tmp_path / "results.json"
    command = ["--accelerator", "cpu", "--devices", "1", "--max_bytes", "300KB", "--steps", "24", "--out", str(out)]
    assert benchmark.main([*command, "--folder", str(tmp_path / "folder")]) == 0, capfd.readouterr().out
    straight, beyond, resumed = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in (straight, beyond, resumed)] == ["straight", "beyond", "resumed"]
    assert resumed["bitwise"] and [begin for begin, _ in beyond["octaves"]] == OCTAVES
    assert straight["stopped_after"] is None and 12 <= resumed["stopped_after"] <= 24
    assert len(straight["losses"]) == 24 and len(straight["octaves"]) == 7
    whole = sum(loss * (end - begin) for (begin, loss), end in zip(straight["octaves"], OCTAVES[1:], strict=True)) / 512
    assert [begin for begin, _ in straight["octaves"]] == OCTAVES[:-1]
    assert whole == pytest.approx(straight["heldout_loss"], abs=1e-4)
    # The same command has nothing left to do.
    assert benchmark.main([*command, "--folder", str(tmp_path / "other")]) == 0 and not any(
        (tmp_path / "other").iterdir()
    )


OCTAVES = [0, 8, 16, 32, 64, 128, 256, 512]
