"""Faults of the file system and the clock, injected below Python by a preloaded library: a few of tests/campaign."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import faults
from tests.processes import shell_environment
from tests.waiting import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rare("tests/training/test_failures.py::test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run"),
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or faults.compiler() is None, reason="needs Linux and a C compiler"
    ),
]


def campaign(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tests/campaign/run.py", "--runs", "1", "--jobs", "1", "--folder", str(folder), *options]
    environment = shell_environment()
    return subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG
    )


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("disk", "auto"), ("disk", "fsdp"), ("slow_storage", "auto"), ("clock_jumps", "ddp")],
)
def test_faults_from_below_lose_nothing(tmp_path, kind, strategy):
    """EIO, ENOSPC, EDQUOT and EROFS at any call; slow storage; a clock that jumps by seconds, hours and months."""
    done = campaign(tmp_path, "--each", "3", "--kinds", kind, "--strategies", strategy, "--seed", "7")
    assert done.returncode == 0 and "3 faults in" in done.stdout, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout and not list(tmp_path.iterdir())


def test_the_campaign_finds_what_is_lost(tmp_path):
    """A checkpoint that is damaged and has none before it to go on from: the campaign must not take that for sound."""
    script = """
import sys
from tests.campaign import run as campaign
def loses(run, generator):
    campaign.killed_at_a_call(run, generator)
    for manifest in run.folder.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text("{")
    run.kept = max(run.kept, 1)
sys.exit(campaign.main(sys.argv[1:]) if campaign.KINDS.clear() or not campaign.KINDS.update({loses: 1}) else 0)
"""
    command = [
        sys.executable,
        "-c",
        script,
        "--runs",
        "1",
        "--each",
        "1",
        "--strategies",
        "auto",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, env=shell_environment(), cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 1 and "LOST: seed 0" in done.stdout, done.stdout + done.stderr
    assert (
        "the newest whole checkpoint was at step" in done.stdout
        and "python tests/campaign/run.py --seed 0" in done.stdout
    )
