"""benchmarks/long_contexts.py: its rows, what it reads off a trace, and the formula of the page."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import forgetting_transformer.ops
from tests.benchmarks.conftest import load
from tests.benchmarks.test_scaling import event

FOX = {"experiment": "forgetting_transformer/pro_760m_16b", "pruned": True, "tokens": 131072, "status": "ok"}


def test_a_trace_tells_attention_exchange_and_gradients_apart():
    found = load("long_contexts").by_kind([
        event("forward_kernel", 0, 3000),
        event("backward_kernel", 3000, 4000),
        event("void cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 0, 500),
        event("triton_red_fused_backward_kernel_3", 0, 100),  # of the compiler, whatever it fused
        event("ncclDevKernel_SendRecv", 0, 2000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 1000),
        event("nvjet_hsh_256x128", 0, 600),
        event("Memcpy DtoD", 0, 300, "gpu_memcpy"),
        event("aten::mm", 0, 9000, "cpu_op"),
    ])  # fmt: skip
    assert found == pytest.approx({"attention_ms": 7.5, "exchange_ms": 2.0, "gradients_ms": 1.0, "other_ms": 1.0})


def test_kernels_of_mixers_are_known_and_all_others_are_not():
    """By the name that a trace gives them, which is that of their function."""
    ops, mixers = Path(forgetting_transformer.ops.__file__).parent, load("long_contexts").MIXERS
    kernels = [
        (file.parent != ops, name)
        for file in ops.glob("**/*.py")
        for name in re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", file.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(kernels) > 30
    assert [name for is_mixer, name in kernels if bool(mixers.search(name)) != is_mixer] == []


def results(tmp_path, monkeypatch, rows):
    tables = load("tables")
    hardware = {"environment": {"versions": {}}, "rows": rows}
    (tmp_path / "long_contexts.json").write_text(json.dumps(hardware))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tables, tables.Results("long_contexts*.json")


def rows_of(step_ms: float, idle_ms: float, exchange_ms: float, gradients_ms: float) -> list[dict]:
    """One GPU, and two that divide its work and wait for what they exchange."""
    alone = {
        "step_seconds": [step_ms / 1000],
        "idle_ms": idle_ms,
        "attention_ms": step_ms / 2,
        "exchange_ms": 0.0,
        "exposed_ms": 0.0,
    }
    shared_ms = (step_ms - idle_ms) / 2 + idle_ms + exchange_ms + gradients_ms
    waits = {"exchange_ms": exchange_ms, "gradients_ms": gradients_ms}
    shared = {
        "step_seconds": [shared_ms / 1000],
        "attention_ms": step_ms / 4,
        **waits,
        "exposed_ms": sum(waits.values()),
    }
    shared["by_rank"] = [{**waits, "exchange_ms": exchange_ms + 5}, waits]
    sizes = {"parameters": 10**9, "peak_memory_bytes": 30e9}
    rows = [{**FOX, **sizes, **alone, "context": 1}, {**FOX, **sizes, **shared, "context": 2}]
    for row in rows:
        row |= {"exchange_bytes": 30 * 10**9 * (row["context"] - 1)}
        row["tokens_per_second"] = row["tokens"] / row["step_seconds"][0]
    return rows


def steps_of(seconds, steps=2):
    """How many steps are measured, the last one included, that take so long each."""
    another, taken = load("long_contexts").another, []
    while another(steps, taken):
        taken.append(seconds[min(len(taken), len(seconds) - 1)])
    return len(taken) + 1


def test_short_steps_are_measured_so_often_that_a_pause_is_not_the_median():
    assert [steps_of([one]) for one in (50.0, 3.0, 1.6, 0.25)] == [2, 3, 3, 13]
    assert steps_of([2.7, 0.3]) == 11 and steps_of([4.0, 2.0]) == 3, "a pause in the first step"
    assert (steps_of([50.0], steps=5), steps_of([50.0], steps=1)) == (5, 1)


@pytest.mark.rare("no contract: benchmarks")
def test_one_gpu_measures_model_by_model_and_is_a_table_without_a_formula(tmp_path, monkeypatch):
    long_contexts = load("long_contexts")
    args = long_contexts.parse_args(["--devices", "1", "--experiments", "demo/mamba2", "demo/fox_pro"])
    cases = [(case["experiment"], case["pruned"]) for case in long_contexts.cases_of(args)]
    pairs = [("demo/mamba2", None), ("demo/fox_pro", True), ("demo/fox_pro", False)]
    assert cases == [pair for pair in pairs for _ in args.seq_len]
    assert all(case["context"] == 1 for case in long_contexts.cases_of(args))
    tables, found = results(tmp_path, monkeypatch, rows_of(1000, 100, 20, 10)[:1])
    assert "| FoX (Pro) 760M | 131,072 |    1 |       1.00 |" in tables.long_contexts(found)
    assert tables.long_contexts_predicted(found).startswith("Not measured on several GPUs yet")
    # A file of two GPUs has that row too, and the table once.
    again = json.loads((tmp_path / "long_contexts.json").read_text())
    again["rows"] = rows_of(2000, 100, 20, 10)
    (tmp_path / "long_contexts_2.json").write_text(json.dumps(again))
    lines = tables.long_contexts(tables.Results("long_contexts*.json")).splitlines()[2:]
    assert [line.split("|")[3].strip() for line in lines] == ["1", "2"] and "2.00" in lines[0]


def test_the_formula_gives_back_what_it_was_made_from_and_divides_what_more_gpus_send(tmp_path, monkeypatch):
    tables, found = results(tmp_path, monkeypatch, rows_of(6000, 10, 100, 20))
    rates = tables.exchange_rates(found, "")
    assert rates.exchange == pytest.approx(300e9) and rates.gradients == pytest.approx(200e9)
    alone, shared = found.rows()
    assert tables.predicted_ms(alone, shared, rates, 2) == pytest.approx(1000 * shared["step_seconds"][0])
    # Two GPUs send 1/2 · 1/2 of what attention takes and gives, eight 7/8 · 1/8; gradients 2 · 7/8 of theirs.
    eight = 10 + 5990 / 8 + 100 * 4 * 7 / 64 + 20 * 7 / 4
    assert tables.predicted_ms(alone, shared, rates, 8) == pytest.approx(eight)
    over_nodes = 1000 * 2 * 7 / 8 * 4e9 / 8 / 50e9
    assert tables.predicted_ms(alone, shared, rates, 8, groups=8) == pytest.approx(eight + over_nodes)


def test_tables_of_the_page_have_gains_shares_and_the_formula(tmp_path, monkeypatch):
    tables, found = results(tmp_path, monkeypatch, rows_of(6000, 10, 100, 20))
    alone, shared = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables.long_contexts(found).splitlines()[2:]
    )
    assert alone == ["FoX (Pro) 760M", "131,072", "1", "6.00", "21,845", "", "50 %", "", "", "30.0"]
    assert shared == ["FoX (Pro) 760M", "131,072", "2", "3.12", "41,943", "1.92", "48 %", "3 %", "3.8 %", "30.0"]
    (line,) = tables.long_contexts_predicted(found).splitlines()[2:]
    assert "3,125" in line and "+0.0 %" in line


def test_a_length_that_one_gpu_cannot_hold_is_a_row(tmp_path, monkeypatch):
    alone, shared = rows_of(6000, 10, 100, 20)
    alone = {key: alone[key] for key in ("experiment", "pruned", "tokens", "context")} | {"status": "out of memory"}
    tables, found = results(tmp_path, monkeypatch, [alone, shared])
    first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables.long_contexts(found).splitlines()[2:]
    )
    assert first[:5] == ["FoX (Pro) 760M", "131,072", "1", "", "out of memory"]
    assert second[:5] == ["FoX (Pro) 760M", "131,072", "2", "3.12", "41,943"]
    assert len(tables.long_contexts_predicted(found).splitlines()) == 2


def test_what_cannot_be_measured_is_refused_before_anything_starts(capsys):
    for options, message in [
        (["--seq_len", "1025"], "--seq_len 1025 tokens have no equal parts for --devices 2"),
        (["--experiments", "demo/fx_pro"], "there is no experiment 'demo/fx_pro'"),
    ]:
        with pytest.raises(SystemExit):
            load("long_contexts").parse_args(options)
        assert message in capsys.readouterr().err


def test_a_rank_that_has_no_room_ends_where_others_may_wait_for_it(monkeypatch):
    long_contexts = load("long_contexts")

    class Bench(long_contexts.Bench):
        def __init__(self):
            pass

        def measure(self, case):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(os, "_exit", sys.exit)
    assert Bench().row({"context": 1}) == {"context": 1, "status": "out of memory"}
    with pytest.raises(SystemExit) as end:
        Bench().row({"context": 2})
    assert end.value.code == load("scaling").OUT_OF_MEMORY


def test_a_cell_of_one_gpu_that_fails_says_why_and_the_next_ones_are_measured():
    long_contexts = load("long_contexts")

    class Bench(long_contexts.Bench):
        rank = 0

        def __init__(self):
            pass

        def measure(self, case):
            raise TypeError("list indices must be integers")

    row = Bench().row({"context": 1})
    assert row == {"context": 1, "status": "failed: TypeError: list indices must be integers"}
    with pytest.raises(TypeError):
        Bench().row({"context": 2})


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_two_processes_have_the_loss_of_one_and_say_what_they_exchange(tmp_path):
    out = tmp_path / "out.json"
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--seq_len", "64", "--steps", "1"]
    assert load("long_contexts").main([*command, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    # Those of one process come in the order in which they end.
    rows.sort(key=lambda row: (row["context"], not row["pruned"]))
    assert [(row["context"], row["pruned"]) for row in rows] == [(1, True), (1, False), (2, True), (2, False)]
    assert {round(row["loss"], 4) for row in rows} == {round(rows[0]["loss"], 4)}
    assert [row["exchange_bytes"] > 0 for row in rows] == [False, False, True, True]
