"""benchmarks/scaling.py: what it reads off a trace, its rows, and that all ways to shard are one computation."""

import json

import pytest

from tests.benchmarks.conftest import load


def event(name: str, start: float, length: float, cat: str = "kernel") -> dict:
    return {"name": name, "cat": cat, "ts": start, "dur": length}


def test_a_trace_says_how_long_a_gpu_computes_communicates_and_waits():
    found = load("scaling").overlap([
        event("gemm", 0, 4000),
        event("ncclDevKernel_AllGather", 3000, 2000),  # 1 ms beside gemm, 1 ms alone
        event("copy", 4500, 200, "gpu_memcpy"),  # beside the gather: not exposed
        event("gemm", 6000, 1000),  # after 1 ms of nothing
        event("ncclDevKernel_ReduceScatter", 6200, 300),
        event("aten::mm", 0, 9000, "cpu_op"),
    ])  # fmt: skip
    assert found == pytest.approx(
        {"compute_ms": 5.2, "communication_ms": 2.3, "hidden_ms": 1.5, "exposed_ms": 0.8, "idle_ms": 1.0}
    )


def test_rows_are_kept_as_they_come_and_a_case_that_fails_says_why(monkeypatch, tmp_path, capsys):
    scaling, wanted = load("scaling"), []

    def fake(args, cases, argv):
        wanted.extend(cases)
        alone = {"status": "ok", "step_seconds": [0.5], "tokens_per_second": 100.0, "peak_memory_bytes": None}
        yield {**cases[0], **alone}
        yield {**cases[1], **alone, "tokens_per_second": 97.0, "exposed_ms": 1.5, "hidden_ms": 2.5, "idle_ms": 0.0}
        yield {**cases[2], "status": "failed: processes ended with [None, 1]"}

    monkeypatch.setattr(scaling, "run", fake)
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--micro_batches", "2", "--cases"]
    out = tmp_path / "out.json"
    assert scaling.main([*command, "one", "fsdp", "ddp", "--out", str(out)]) == 1
    assert [case["case"] for case in wanted] == ["one", "fsdp", "ddp"]
    said = capsys.readouterr().out
    assert "| demo/fox_pro | fsdp | 2 | 500.0 | 97 | 97.0% | 1.5 | 2.5 | 0.0 | – |" in said
    assert "| demo/fox_pro | ddp | 2 | failed: processes ended with [None, 1] |" in said
    assert len(json.loads(out.read_text())["rows"]) == 3


@pytest.mark.slow
def test_all_ways_to_shard_take_bitwise_the_same_steps_on_two_processes(tmp_path):
    out = tmp_path / "out.json"
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--seq_len", "32", "--steps", "1"]
    command += ["--micro_batches", "2", "--overrides", "fabric.precision=bf16-mixed", "--out", str(out)]
    assert load("scaling").main([*command, "--cases", "fsdp_plain", "fsdp", "fsdp_kept"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len({row["weights"] for row in rows}) == 1
    assert all(row["resumed"] for row in rows)
