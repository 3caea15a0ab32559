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


def test_faults_from_below_lose_nothing(tmp_path):
    """EIO, ENOSPC, EDQUOT and EROFS at any call, a kill at any call, damaged checkpoints."""
    command = [sys.executable, "tests/campaign/run.py", "--folder", str(tmp_path)]
    environment, root = shell_environment(), Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and "nothing was lost" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
