"""The version is the same wherever it stands."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import forgetting_transformer

ROOT = Path(__file__).resolve().parents[1]


def test_the_version_is_known_without_an_installation_and_without_pytorch():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import forgetting_transformer as f; "
        "print(f.__version__, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, ROOT / "src"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [forgetting_transformer.__version__, "False"]


def test_changelog_and_citation_have_the_version():
    released = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released[0] == (forgetting_transformer.__version__, str(citation["date-released"]))
    assert citation["version"] == forgetting_transformer.__version__


def test_one_range_of_pythons_stands_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    script = (ROOT / "scripts/environment.sh").read_text()
    assert f"(3, {first}) <= sys.version_info < (3, {end})" in script
    *others, last = (f"3.{minor}" for minor in range(int(first), int(end)))
    said = f"Python {', '.join(others)} or {last}"
    assert script.count(said) == 2
    assert (ROOT / "README.md").read_text().count(f"Python 3.{first} to {last}") == 1


def test_nobody_is_sent_to_a_package_index_for_this_package():
    """It is in none."""
    places = (ROOT / name for name in ("README.md", "train.py", "save_model.py", "docs", "eval", "scripts", "src"))
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.*"))]
    texts = {
        file: file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".md", ".sh", ".sbatch")
    }
    assert len(texts) > 200
    assert not [file for file, text in texts.items() if re.search(r"pip install[^\n`]*forgetting[-_]transformer", text)]
