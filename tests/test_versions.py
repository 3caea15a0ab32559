import importlib.metadata
import platform
import re
import tomllib
from pathlib import Path

from forgetting_transformer.versions import how_to_install, installed_versions

ROOT = Path(__file__).resolve().parents[1]
READ = ("README.md", "train.py", "save_model.py", "src", "scripts", "eval", "benchmarks", "studies", "docs", "configs")


def test_packages_that_are_not_installed_are_left_out():
    found = installed_versions(["torch", "no-such-package"])
    assert found == {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def test_nobody_is_sent_to_a_package_index_for_this_package_or_for_an_extra_that_it_lacks():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert how_to_install("data").startswith('pip install -e ".[data]"')
    places, named = [ROOT / name for name in READ], []
    for file in (file for place in places for file in ([place] if place.is_file() else place.rglob("*"))):
        if file.suffix in (".py", ".md", ".sh", ".sbatch", ".yaml"):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"pip install[^\n`]*forgetting[-_]transformer", text), file
            for chosen in re.findall(r"""how_to_install\(["'](\w+)|pip install -?e? ?["']\.\[([\w,]+)\]""", text):
                named += "".join(chosen).split(",")
    assert {"data", "remote", "gpt2", "eval"} <= set(named) <= set(extras)
