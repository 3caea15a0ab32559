"""The mean of the weights of several checkpoints of a run, written as an exported model.

Summed in float64 in the order of the steps: the result does not depend on the machine.
"""

from itertools import pairwise
from pathlib import Path

import torch

from forgetting_transformer.training.checkpoint.folder import CheckpointError, read_newest, steps_in
from forgetting_transformer.training.checkpoint.reading import check_weights, read_weights
from forgetting_transformer.training.config.continuing import changes_that_alter_the_run
from forgetting_transformer.training.export import folder as exports
from forgetting_transformer.training.export.contents import build_model
from forgetting_transformer.training.records.run_directory import RunDirectory


def average(
    run_folder: Path,
    save_folder: Path,
    last: int | None = None,
    steps: list[int] | None = None,
    tokenizer: str | None = None,
    replace: bool = False,
) -> str:
    """Writes the mean of some checkpoints to `save_folder`, and returns a line that says so. The run is only read.

    Args:
        last: how many, the newest ones; or steps: the training tokens of each.
        tokenizer: folder or hub id; None for the run's own.
        replace: replace another run's export too.

    Raises:
        CheckpointError: there are not so many, they belong to runs of other settings, or one cannot be read.
        ExportError: as `export`.
    """
    exports.check_target(save_folder, "--out")
    directory = RunDirectory(run_folder)
    folder, held = directory.checkpoints, steps_in(directory.checkpoints)
    if steps is None and len(held) < (last or 0):
        raise CheckpointError(
            f"--last={last}: {folder} holds {len(held)} checkpoint{'s' * (len(held) != 1)} ({held}); average fewer, "
            "or let a run keep more (checkpoint_keep_last, checkpoint_keep_interval)"
        )
    chosen = [read_newest(folder, lambda found: found, step) for step in sorted(steps or held[-(last or 0) :])]
    states = [checkpoint.trainer_state() for checkpoint in chosen]
    for (one, before), (other, after) in pairwise(zip(chosen, states, strict=True)):
        changes = changes_that_alter_the_run(before["config"], after["config"])
        if before["model_config"] != after["model_config"]:
            changes.append("the configuration of the model")
        if changes:
            raise CheckpointError(
                f"{one.path.name} and {other.path.name} in {folder} belong to runs of other settings "
                f"({'; '.join(changes[:3])}); average those of one run with --steps"
            )
    model = build_model(chosen[-1], states[-1])
    own = model.state_dict()
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in own.items()}
    for checkpoint in chosen:
        for name, tensor in read_weights(checkpoint, list(own)).items():
            sums[name] += tensor
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(sums.pop(name) / len(chosen))
    check_weights(model, f"the average of {', '.join(str(checkpoint.path) for checkpoint in chosen)}")
    numbers = [f"{checkpoint.step:,}" for checkpoint in chosen]
    what = f"the average of {len(chosen)} checkpoints of {run_folder}, {numbers[0]} to {numbers[-1]} tokens,"
    about = {"weights": f"the mean of the checkpoints at {', '.join(numbers)} tokens"}
    return exports.write(
        directory, chosen[-1], states[-1], model.eval(), save_folder, tokenizer, what, about, flag="--out",
        replace=replace,
    )  # fmt: skip
