"""benchmarks/scaling.py: what it reads off a trace, its rows, and that all ways to shard are one computation."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks.conftest import load

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: benchmarks")]

#: Stands in for a worker of two: rank 1 has no room for a case that is called large, and rank 0 waits for it for ever.
WORKER = """
import json, os, pathlib, sys, time
job, rank = pathlib.Path(sys.argv[-1]), int(os.environ["RANK"])
rows = job.with_name("rows.jsonl")
for number, case in enumerate(json.loads(job.read_text()), 1):
    if case["case"].startswith("large") and rank == 1:
        sys.exit({out_of_memory})
    if case["case"] == "broken" and rank == 1:
        sys.exit(1)
    if rank == 0 and case["case"] == "small":
        with rows.open("a") as stream:
            stream.write(json.dumps(case | {{"status": "ok"}}) + "\\n")
    while rows.read_text().count("\\n") < number:
        time.sleep(0.01)
"""


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
        traced = {"exposed_ms": 1.5, "hidden_ms": 2.5, "idle_ms": 0.0}
        yield {**cases[1], **alone, "tokens_per_second": 97.0, "mfu": 0.4, **traced}
        yield {**cases[2], "status": "failed: processes ended with [None, 1]"}

    monkeypatch.setattr(scaling, "run", fake)
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--micro_batches", "2", "--cases"]
    out = tmp_path / "out.json"
    assert scaling.main([*command, "one", "fsdp", "ddp", "--out", str(out)]) == 1
    assert [case["case"] for case in wanted] == ["one", "fsdp", "ddp"]
    said = capsys.readouterr().out
    assert "| demo/fox_pro | fsdp | 2 | 500.0 | 97 | 97.0% | 40.0% | 1.5 | 2.5 | 0.0 | – |" in said
    assert "| demo/fox_pro | ddp | 2 | failed: processes ended with [None, 1] |" in said
    assert len(json.loads(out.read_text())["rows"]) == 3


def test_several_gpus_may_hold_what_one_does_not(tmp_path):
    row = {"experiment": "demo/fox_pro", "micro_batches": 2, "step_seconds": [0.5], "tokens_per_second": 97.0}
    row |= {"case": "fsdp", "status": "ok", "peak_memory_bytes": None}
    alone = {"experiment": "demo/fox_pro", "micro_batches": 2, "case": "one", "status": "out of memory"}
    describe = load("scaling").describe
    assert describe(row, [alone, row]) == "| demo/fox_pro | fsdp | 2 | 500.0 | 97 | – | – | – | – | – | – |"
    assert describe(alone, [alone, row]) == "| demo/fox_pro | one | 2 | out of memory | | | | | | | |"


def statuses(scaling, tmp_path, *names: str, time_limit: float = 900.0) -> list[str]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(out_of_memory=scaling.OUT_OF_MEMORY))
    args = SimpleNamespace(devices=2, accelerator="cpu", time_limit=time_limit)
    rows = list(scaling.run(args, [{"case": name} for name in names], [], str(worker)))
    assert [row["case"] for row in rows] == [*names]
    return [row["status"] for row in rows]


def test_a_case_that_does_not_fit_is_a_row_and_those_after_it_are_measured(tmp_path):
    names = ["small", "large", "large too", "small", "small"]
    assert statuses(load("scaling"), tmp_path, *names) == ["ok", "out of memory", "out of memory", "ok", "ok"]
    assert statuses(load("scaling"), tmp_path, "small", "large") == ["ok", "out of memory"]


def test_a_case_that_fails_is_a_row_and_those_after_it_are_measured(tmp_path):
    first, broken, last = statuses(load("scaling"), tmp_path, "small", "broken", "small")
    assert first == last == "ok"
    assert broken.startswith("failed: processes ended with [")


def test_what_fails_in_two_starts_without_a_row_is_not_started_for_every_case(tmp_path, monkeypatch):
    scaling = load("scaling")
    starts, start = [], scaling.start
    monkeypatch.setattr(scaling, "start", lambda *given: starts.append(given) or start(*given))
    found = statuses(scaling, tmp_path, *["broken"] * 5, "small")
    assert all(status.startswith("failed: processes ended with [") for status in found[:2])
    assert found[2:] == ["stopped: two starts in a row measured nothing"] * 4
    assert len(starts) == 2


@pytest.mark.parametrize("name", ["scaling", "long_contexts"])
def test_what_does_not_fit_is_a_result_and_not_tried_again(monkeypatch, tmp_path, name):
    benchmark, asked = load(name), []

    def fake(args, cases, *_):
        asked.extend(cases)
        return ({**case, "status": "out of memory"} for case in cases)

    monkeypatch.setattr(benchmark, "run", fake)
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--out", str(tmp_path / "out.json")]
    assert benchmark.main(command) == 0 and asked
    asked.clear()
    assert benchmark.main(command) == 0 and not asked


def test_a_worker_says_that_a_case_does_not_fit_by_how_it_ends(monkeypatch, tmp_path):
    scaling = load("scaling")

    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(scaling, "measure", too_large)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = scaling.parse_args(["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--devices", "1"])
    (tmp_path / "job.json").write_text(json.dumps([{"experiment": "demo/fox_pro", "case": "fsdp", "micro_batches": 1}]))
    with pytest.raises(SystemExit) as end:
        scaling.work(args, tmp_path / "job.json")
    assert end.value.code == scaling.OUT_OF_MEMORY


def test_no_step_repeats_tokens_and_a_new_model_continues_with_the_next(monkeypatch):
    """FoX learned a repeated batch by heart within ten steps, and what its gates pruned was unknown."""
    scaling, seen = load("scaling"), []
    args = scaling.parse_args(["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--seq_len", "16"])
    config = scaling.compose("demo/fox_pro", ["fabric.accelerator=cpu"])
    weights, draws = scaling.build(config).state_dict(), torch.Generator().manual_seed(0)

    def step_of():
        case = {"case": "one", "micro_batches": 2}
        step, model, _ = scaling.prepare(args, case, config, weights, None, torch.device("cpu"), draws)
        model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
        return step

    step = step_of()
    step()
    place = draws.get_state()
    step()
    assert len(seen) == 4 and len({tuple(tokens.flatten().tolist()) for tokens in seen}) == 4
    draws.set_state(place)
    step_of()()
    assert torch.equal(torch.cat(seen[4:]), torch.cat(seen[2:4]))


def test_all_ways_to_shard_take_bitwise_the_same_steps_on_two_processes(tmp_path):
    out = tmp_path / "out.json"
    command = ["--experiments", "demo/fox_pro", "--accelerator", "cpu", "--seq_len", "32", "--steps", "1"]
    command += ["--micro_batches", "2", "--overrides", "fabric.precision=bf16-mixed", "--out", str(out)]
    assert load("scaling").main([*command, "--cases", "fsdp_plain", "fsdp", "fsdp_kept"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len({row["weights"] for row in rows}) == 1
    assert all(row["resumed"] for row in rows)
