"""A sweep that is killed while jobs run and wait: the same command does what is missing, and nothing twice."""

import json
import os
from pathlib import Path

import pytest

from tests.processes import Command
from tests.sweep.conftest import FAKE, ROOT, starts
from tests.waiting import wait_until

JOBS = [f"seed={seed}" for seed in range(5)]
#: A queue of five jobs, two at a time; the jobs are played by fake_train.py.
SWEEP = """
import dataclasses, json, sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from forgetting_transformer.sweep import runner
from forgetting_transformer.sweep.jobs import Job
from forgetting_transformer.training import parse

folder, configs, fake, faults, *names = sys.argv[1:]
Job.command = lambda job, devices: [sys.executable, fake, json.dumps(dataclasses.asdict(job.config)), faults]
jobs = []
with initialize_config_dir(configs, version_base="1.3"):
    for name in names:
        overrides = ("+experiment/demo=fox_pro", "data_dir=data", name)
        config = parse(compose("config", overrides=[*overrides, "output_dir=out"]))
        config.output_dir = f"{folder}/{name}"
        jobs.append(Job(name, Path("train.py"), overrides, config))
results = runner.run_jobs(jobs, runner.Machine(gpus=[], jobs_at_once=2), Path(folder) / "logs")
print(json.dumps({result.job.name: str(result.state) for result in results}))
"""


@pytest.mark.slow
def test_sigkill_in_the_queue_loses_no_job_and_repeats_none(tmp_path):
    def sweep(faults: dict, said: Path) -> Command:
        arguments = [*map(str, (tmp_path / "sweep", ROOT / "configs", FAKE)), json.dumps(faults), *JOBS]
        return Command("-c", f"import sys\nsys.argv[1:] = {arguments}\n{SWEEP}", output=said, errors=said)

    def lines(name: str) -> list[int]:
        log = tmp_path / "sweep" / name / "metrics/jsonlines/train.jsonl"
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.is_file() else []

    said = tmp_path / "first"
    killed = sweep({"hang": "seed=1"}, said)
    # seed=0 ends, seed=1 stands still in its middle, the others pass by it: two are done, at least one waits or runs.
    alive = lambda: killed.poll() is None  # noqa: E731
    wait_until(lambda: len(lines("seed=0")) == 10 and len(lines("seed=1")) >= 5, alive, said.read_text)
    wait_until((tmp_path / "sweep/seed=2/starts.txt").is_file, alive, said.read_text)
    hung = next(child for child in children(killed.pid) if "/seed=1" in Path(f"/proc/{child}/cmdline").read_text())
    killed.kill()
    killed.wait()
    wait_until(lambda: not running(hung), said=f"the job {hung} outlives its sweep")
    before = {name: len(starts(tmp_path / "sweep" / name)) for name in JOBS}
    again = sweep({}, tmp_path / "second")
    assert again.wait() == 0, (tmp_path / "second").read_text()
    states = json.loads((tmp_path / "second").read_text().splitlines()[-1])
    assert states == dict.fromkeys(JOBS, "finished")
    for name in JOBS:
        assert len(set(lines(name))) == len(lines(name)) == 10, "every line once"
    after = {name: len(starts(tmp_path / "sweep" / name)) for name in JOBS}
    assert after["seed=0"] == before["seed=0"] == 1, "what was finished is not started again"
    assert after["seed=1"] == 2 and all(after[name] >= 1 for name in JOBS)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
        # A child of a killed parent is reaped by init, where there is one that does.
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
