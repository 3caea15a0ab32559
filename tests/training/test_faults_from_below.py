"""Faults of the file system, injected below Python by a preloaded library: one seed of tests/campaign."""

import shutil
import subprocess
import sys

import pytest

from tests.processes import ROOT, shell_environment
from tests.waiting import HANG


@pytest.mark.slow
@pytest.mark.rare("tests/training/test_faults.py::test_a_fault_is_named_and_the_same_command_goes_on_bitwise")
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
def test_faults_from_below_lose_nothing(tmp_path):
    """EIO, ENOSPC, EDQUOT and EROFS at any call, a kill at any call, damaged checkpoints."""
    command = [sys.executable, "tests/campaign/run.py", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, env=shell_environment(), cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0 and "nothing was lost" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
