"""What the scripts under the names of the paper's repository (zhixuan-lin/forgetting-transformer) share.

Its evaluations are started from their own folder, write to fixed folders there, name a GPU by its number, and find the
results of models by the models' names. docs/coming_from_the_paper.md lists the commands.
"""

import sys
from pathlib import Path

from forgetting_transformer.analysis import known_models
from forgetting_transformer.evaluation.models import EvaluationError

#: How the names of the models end that the paper's authors have released.
_RELEASED = "-760m-longcrawl64-48b"


def display_name(model: str) -> str:
    """What tables call a released model, as in FoX (Pro) for fox-pro-760m-longcrawl64-48b; others keep their names."""
    known = known_models.MODELS.get(model.removesuffix(_RELEASED).replace("-", "_"))
    return known.name if known and model.endswith(_RELEASED) else model


def results_in(folder: Path, file: str) -> list[str]:
    """Every folder in `folder` that holds `file`, as `[NAME=]FOLDER`: the released models first, then others by name.

    Raises:
        EvaluationError: there is none.
    """
    found = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{file}"))}
    if not found:
        raise EvaluationError(f"{folder}: there is no MODEL/{file} in it; run the evaluation that writes it first")
    shown = [known.name for known in known_models.MODELS.values()]
    released = {display_name(name): folder for name, folder in found.items() if display_name(name) != name}
    others = [str(folder) for name, folder in found.items() if display_name(name) == name]
    return [*(f"{name}={released[name]}" for name in shown if name in released), *others]


def device_of(device: str | None, device_id: int | None) -> str | None:
    """The device to use where `--device_id` may name a GPU by its number.

    On a machine without any GPU that is the CPU, and one line says so.

    Raises:
        EvaluationError: there are GPUs, and none with this number.
    """
    import torch

    if device_id is None:
        return device
    if torch.cuda.device_count() == 0:
        print(f"--device_id={device_id}: this machine has no GPU; running on the CPU", file=sys.stderr)
        return "cpu"
    if not 0 <= device_id < torch.cuda.device_count():
        raise EvaluationError(
            f"--device_id={device_id}: this machine has GPUs 0 to {torch.cuda.device_count() - 1}, unless "
            "CUDA_VISIBLE_DEVICES hides some"
        )
    return f"cuda:{device_id}"
