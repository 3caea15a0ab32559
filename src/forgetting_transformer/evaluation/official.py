"""What the scripts under the names of the paper's repository (zhixuan-lin/forgetting-transformer) share.

Its evaluations are started from their own folder, write to fixed folders there, name a GPU by its number, and find the
results of models by the models' names. docs/coming_from_the_paper.md lists the commands.
"""

import sys
from pathlib import Path

from forgetting_transformer.evaluation.models import EvaluationError

#: The models that the paper's authors have released, in the order of its tables -> their names there.
MODELS = {
    f"{name}-760m-longcrawl64-48b": label
    for name, label in {
        "fox-pro": "FoX (Pro)",
        "transformer-pro": "Transformer (Pro)",
        "fox-llama": "FoX (LLaMA)",
        "transformer-llama": "Transformer (LLaMA)",
        "mamba2": "Mamba-2",
        "hgrn2": "HGRN2",
        "delta_net": "DeltaNet",
    }.items()
}


def results_in(folder: Path, file: str) -> list[str]:
    """Every folder in `folder` that holds `file`, as `[NAME=]FOLDER`: the released models first, then others by name.

    Raises:
        EvaluationError: there is none.
    """
    found = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{file}"))}
    if not found:
        raise EvaluationError(f"{folder}: there is no MODEL/{file} in it; run the evaluation that writes it first")
    released = [f"{MODELS[name]}={found.pop(name)}" for name in MODELS if name in found]
    return [*released, *map(str, found.values())]


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
