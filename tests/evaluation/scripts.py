"""Runs the scripts under eval/ and scripts/ as a command line would; returns their exit status and output."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

from forgetting_transformer.evaluation import generation
from tests.training.conftest import free_port
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]


def run_script(script: str, *arguments: object, processes: int = 1) -> subprocess.CompletedProcess:
    """Runs `script` (relative to the repository) in this process, which saves seconds of imports, or with torchrun."""
    command = [str(ROOT / script), *map(str, arguments)]
    if processes == 1:
        return _run_here(command)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    launcher.append(f"--master-port={free_port()}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=HANG, env=environment)


def _run_here(command: list[str]) -> subprocess.CompletedProcess:
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with (
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as stopped:  # a message goes to stderr and gives status 1, as Python does it
            status = stopped.code
    if isinstance(status, str):
        err.write(status)
        status = 1
    return subprocess.CompletedProcess(command, status or 0, out.getvalue(), err.getvalue())


def short_answers(monkeypatch, module) -> list[int]:
    """Every answer has four tokens; the numbers of tokens that were asked for."""
    asked = []

    def answer(model, prompts, max_new_tokens, *arguments, **options):
        asked.append(max_new_tokens)
        return generation.continue_greedily(model, prompts, min(4, max_new_tokens), *arguments, **options)

    monkeypatch.setattr(module, "continue_greedily", answer)
    return asked
