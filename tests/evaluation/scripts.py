"""Runs the scripts under eval/ and scripts/ as a user does: their own process, their exit status and what they print."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(script: str, *arguments: object, processes: int = 1) -> subprocess.CompletedProcess:
    """Runs `script` (relative to the repository), with torchrun if there are several processes."""
    command = [sys.executable]
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    return subprocess.run(
        [*command, str(ROOT / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
