"""Faults of the file system, injected below Python by a preloaded library: a few of tests/campaign."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import faults
from tests.processes import shell_environment
from tests.waiting import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rare("tests/training/test_faults.py::test_a_fault_is_named_and_the_same_command_goes_on_bitwise"),
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
    [("disk", "auto"), ("disk", "fsdp"), ("slow_storage", "auto")],
)
def test_faults_from_below_lose_nothing(tmp_path, kind, strategy):
    """EIO, ENOSPC, EDQUOT and EROFS at any call; slow storage."""
    done = campaign(tmp_path, "--each", "3", "--kinds", kind, "--strategies", strategy, "--seed", "7")
    assert done.returncode == 0 and "3 faults in" in done.stdout, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout and not list(tmp_path.iterdir())
