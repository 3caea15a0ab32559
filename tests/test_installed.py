"""Installed from a wheel: the same entry and the same configs, from any folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forgetting_transformer import __version__
from tests.tiny import make_corpus
from tests.training.conftest import command_line
from tests.waiting import HANG

ROOT = Path(__file__).parents[1]
#: A user's own experiment.
EXPERIMENT = """\
# @package _global_
defaults:
  - /experiment/demo/fox_pro
  - _self_
tag: of_my_own
"""


@pytest.mark.slow
def test_a_wheel_trains_from_an_empty_folder_with_configs_of_ones_own(tmp_path):
    def run(*command: str | Path, folder: Path) -> str:
        removed = ("PYTHONPATH", "RANK", "WORLD_SIZE")
        environment = {name: value for name, value in os.environ.items() if name not in removed}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    source = tmp_path / "source"  # building writes beside it
    for name in ("src", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", tmp_path / "dist", source, folder=tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.startswith(f"forgetting_transformer-{__version__}-")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        files.extractall(tmp_path / "site")
    inside = {name.partition("/configs/")[2] for name in names if "/configs/" in name}
    assert inside == {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert "forgetting_transformer/py.typed" in names

    own_folder = tmp_path / "work"
    (own_folder / "mine/experiment").mkdir(parents=True)
    (own_folder / "mine/experiment/my_fox.yaml").write_text(EXPERIMENT)
    make_corpus(tmp_path)
    train = ("-m", "forgetting_transformer.train", "--config-dir=mine", "+experiment=my_fox", "fabric.accelerator=cpu")
    _, *small = command_line({"data_dir": tmp_path}, Path("run"))
    said = run(sys.executable, *train, *small, "train.max_tokens=256", folder=own_folder)
    assert "training finished: 256 tokens" in said and "about to train of_my_own" in said
    assert {path.name for path in own_folder.iterdir()} == {"mine", "run"}
