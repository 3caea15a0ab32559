"""sweep.json: settings that all runs of a search share, so that one continued with others is noticed."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from forgetting_transformer.files import flatten, read_json, write_atomically
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.training import Config
from forgetting_transformer.training.config.continuing import as_recorded, changes_that_alter_the_run

#: May change when one run is continued, but not within a search, whose runs are compared with each other.
_SAME_IN_ALL_RUNS = (
    "train.max_tokens", "skip_eval", "final_eval", "datamodule.dataset", "datamodule.eval_tokens",
    "datamodule.eval_batch_len",
)  # fmt: skip


def open_folder(folder: Path, base: Config, own: Collection[str], settings: Mapping[str, str]) -> None:
    """Continues the search in the folder, or begins one there.

    Args:
        base: the config that all runs share. own: the keys that the search sets itself; base has any value of them.
        settings: more that must stay the same, as text.

    Raises:
        SweepError: the folder holds a search with other settings, or something else. Nothing was changed.
    """
    if not base.resume:
        raise SweepError("resume=false: a search continues the runs it finds; choose another output_dir for a new one")
    file = folder / "sweep.json"
    config = {key: value for key, value in flatten(as_recorded(base)).items() if key not in own}
    if not file.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise SweepError(f"output_dir={folder} is not empty and holds no search; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"settings": settings, "base": config}, indent=1) + "\n")
        return
    stored = read_json(file)
    changes = changes_that_alter_the_run(stored["base"], config)
    before, now = stored["settings"] | stored["base"], {**settings, **config}
    for key in {*stored["settings"], *settings, *_SAME_IN_ALL_RUNS}:
        if before.get(key) != now.get(key):
            changes.append(f"{key}: {before.get(key, '(absent)')} -> {now.get(key, '(absent)')}")
    if changes:
        raise SweepError(
            f"{folder} holds a search with other settings:\n  " + "\n  ".join(sorted(set(changes))) + "\n"
            "Undo these changes to continue it, or choose another output_dir"
        )
