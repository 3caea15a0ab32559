"""pyproject.toml describes the package. What it cannot say: `configs/` at the top of the repository goes into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies `configs/` beside the code, where forgetting_transformer.train looks first; an editable installation uses it in place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "forgetting_transformer" / "configs"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build: it may have files that are gone
            shutil.copytree("configs", target)


setup(cmdclass={"build_py": BuildWithConfigs})
