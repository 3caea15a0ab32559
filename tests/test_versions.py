import importlib.metadata
import platform
from pathlib import Path

from forgetting_transformer.versions import installed_versions

ROOT = Path(__file__).resolve().parents[1]


def test_packages_that_are_not_installed_are_left_out():
    found = installed_versions(["torch", "no-such-package"])
    assert found == {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
