"""Where a run came from: the code's git state, library versions, the machine."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from forgetting_transformer.versions import installed_versions

# Those that can change a run's numbers.
PACKAGES = (
    "torch", "triton", "lightning", "hydra-core", "omegaconf", "transformers", "tokenizers", "zarr", "numpy", "wandb",
    "flash-linear-attention", "fla-core", "forgetting-transformer",
)  # fmt: skip


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the repository that holds `folder`, the uncommitted changes as a patch, and the names of files that git
    does not know; {} outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},  # a partial clone may ask for a password to fetch a file
        )
        return done.stdout

    try:
        untracked = git("ls-files", "--others", "--exclude-standard", "--full-name", ":/").splitlines()
        return {"commit": git("rev-parse", "HEAD").strip(), "patch": git("diff", "HEAD"), "untracked": untracked}
    except (OSError, subprocess.SubprocessError):
        return {}


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, git state and hardware of this process, as plain JSON types."""
    return {
        "versions": installed_versions(PACKAGES),
        "git": git_state(Path(__file__).parent),
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        },
    }
