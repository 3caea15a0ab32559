"""pyproject.toml describes the package. This file adds what it cannot express: `configs/` becomes part of the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies `configs/` beside the code, where forgetting_transformer.composition looks first.

    An editable installation uses the folder in place.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "forgetting_transformer" / "configs"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build: it may have files that are gone
            shutil.copytree("configs", target)


setup(cmdclass={"build_py": BuildWithConfigs})
