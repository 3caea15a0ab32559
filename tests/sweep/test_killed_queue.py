"""A sweep that is killed while jobs run and wait: the same command does what is missing, and nothing twice."""

import json
from pathlib import Path

import pytest

from forgetting_transformer.training.faults.peers import is_gone
from tests.processes import ROOT, Command
from tests.sweep.conftest import DEMO, FAKE, starts
from tests.waiting import wait_until

JOBS = [f"seed={seed}" for seed in range(5)]
#: `train.py -m`, whose jobs are played by fake_train.py.
SWEEP = """
import dataclasses, json, runpy, sys
from forgetting_transformer.sweep.jobs import Job
Job.command = lambda job, devices: [sys.executable, {fake}, json.dumps(dataclasses.asdict(job.config)), {faults}]
sys.argv = {arguments}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_sigkill_in_the_queue_loses_no_job_and_repeats_none(tmp_path):
    options = ["hydra.launcher.gpus=[]", "hydra.launcher.jobs_at_once=2", f"hydra.sweep.dir={tmp_path}/logs"]
    arguments = [str(ROOT / "train.py"), "-m", *DEMO, f"output_dir={tmp_path}/sweep", "seed=0,1,2,3,4", *options]

    def sweep(faults: dict, said: Path) -> Command:
        code = SWEEP.format(fake=repr(str(FAKE)), faults=repr(json.dumps(faults)), arguments=arguments)
        return Command("-c", code, output=said, errors=said)

    def lines(name: str) -> list[int]:
        log = tmp_path / "sweep" / name / "metrics/jsonlines/train.jsonl"
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.is_file() else []

    said = tmp_path / "first"
    killed = sweep({"hang": "seed=1"}, said)
    # seed=0 ends, seed=1 stands still in its middle, the others pass by it: two are done, at least one waits or runs.
    alive = lambda: killed.poll() is None  # noqa: E731
    wait_until(lambda: len(lines("seed=0")) == 10 and len(lines("seed=1")) >= 5, alive, said.read_text)
    wait_until((tmp_path / "sweep/seed=2/starts.txt").is_file, alive, said.read_text)
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    hung = next(int(child) for child in children if "/seed=1" in Path(f"/proc/{child}/cmdline").read_text())
    killed.kill()
    killed.wait()
    wait_until(lambda: is_gone(hung), said=f"the job {hung} outlives its sweep")
    before = {name: len(starts(tmp_path / "sweep" / name)) for name in JOBS}
    again = sweep({}, tmp_path / "second")
    assert again.wait() == 0, (tmp_path / "second").read_text()
    assert (tmp_path / "second").read_text().count("| finished |") == len(JOBS)
    for name in JOBS:
        assert len(set(lines(name))) == len(lines(name)) == 10, "every line once"
    after = {name: len(starts(tmp_path / "sweep" / name)) for name in JOBS}
    assert after["seed=0"] == before["seed=0"] == 1, "what was finished is not started again"
    assert after["seed=1"] == 2 and all(after[name] >= 1 for name in JOBS)
