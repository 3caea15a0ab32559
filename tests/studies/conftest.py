"""Studies of two small models whose runs are played by tests/sweep/fake_train.py."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from forgetting_transformer import command_line
from studies import run
from tests.sweep.conftest import faults  # noqa: F401 (a fixture)

YAML = """
group: demo
models: {mamba2: Mamba-2, fox_pro: FoX (Pro)}
seeds: [0, 1, 2]
learning_rates: {mamba2: 5e-3, fox_pro: 2e-3}
baseline: fox_pro
claims:
  - {claim: FoX is better, rule: higher, models: [mamba2], than: fox_pro}
  - {claim: Mamba-2 is better, rule: lower, models: [mamba2], than: fox_pro}
  - {claim: FoX forgets, rule: local_heads, models: [fox_pro]}
"""


@pytest.fixture
def study(faults, tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, list[str]]]:  # noqa: F811
    """Runs studies/run.py in `study`; returns exit code, output and the jobs in the order of start."""

    def start(*arguments: str, yaml: str = YAML) -> tuple[int, str, list[str]]:
        monkeypatch.chdir(tmp_path)
        Path("study.yaml").write_text(textwrap.dedent(yaml))
        code = command_line.run(lambda: run.main(["study.yaml", "study", "fabric.accelerator=cpu", *arguments]))
        out, err = capfd.readouterr()
        return code, out + err, [line.split()[1] for line in err.splitlines() if line.startswith("started")]

    return start
