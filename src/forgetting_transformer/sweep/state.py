"""sweep.json: what all runs in a sweep's folder share, so that a sweep continued with other settings is noticed."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from forgetting_transformer.files import read_json, write_atomically
from forgetting_transformer.nested import flatten
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.training import Config
from forgetting_transformer.training.continuing import changes_that_alter_the_run, recorded

#: May change when one run is continued, but not within a sweep, whose runs are compared with each other.
_SAME_IN_ALL_RUNS = (
    "train.max_tokens", "skip_eval", "final_eval", "datamodule.dataset", "datamodule.eval_tokens",
    "datamodule.eval_batch_len",
)  # fmt: skip


class SweepState:
    """The settings of a sweep and its notes, in `folder/sweep.json`.

    Args:
        kind: what the sweep is, such as "learning rate".
        base: what all runs share.
        own_keys: config keys that the sweep sets itself.
        settings: more that must stay the same, as text.

    Attributes:
        notes: name of a run -> why the sweep ended it early.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        base: Config,
        own_keys: Collection[str],
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if not base.resume:
            raise SweepError(
                "resume=false: a sweep continues the runs it finds; choose another output_dir for a new one"
            )
        self.folder, self._file = folder, folder / "sweep.json"
        self._head: dict[str, Any] = {"kind": kind, "settings": dict(settings or {}), "own_keys": sorted(own_keys)}
        self._base = flatten(recorded(base))
        self.notes: dict[str, str] = {}

    def open(self) -> None:
        """Takes up the sweep in the folder, or makes the folder a new one.

        Raises:
            SweepError: it holds a sweep with other settings, or something that is no sweep. Nothing was changed.
        """
        if not self._file.is_file():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise SweepError(f"output_dir={self.folder} is not empty and holds no sweep; choose another folder")
            self.save()
            return
        stored: dict[str, Any] = read_json(self._file)
        if stored["kind"] != self._head["kind"]:
            raise SweepError(
                f"{self.folder} holds a sweep of another kind ({stored['kind']}, not {self._head['kind']}); choose "
                "another output_dir"
            )
        own = {*stored["own_keys"], *self._head["own_keys"]}
        before, now = (
            {key: value for key, value in base.items() if key not in own} for base in (stored["base"], self._base)
        )
        changes = changes_that_alter_the_run(before, now)
        changes += [
            f"{k}: {before[k]} -> {now[k]}" for k in _SAME_IN_ALL_RUNS if k in before and before[k] != now.get(k)
        ]
        old, new = stored["settings"], self._head["settings"]
        changes += [
            f"{k}: {old.get(k, '(absent)')} -> {new.get(k, '(absent)')}"
            for k in old.keys() | new.keys()
            if old.get(k) != new.get(k)
        ]
        if changes:
            raise SweepError(
                f"{self.folder} holds a sweep with other settings:\n  " + "\n  ".join(sorted(set(changes))) + "\n"
                "Undo these changes to go on with it, or choose another output_dir"
            )
        self.notes = stored["notes"]

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self._head, "notes": self.notes, "base": self._base}, indent=1)
        write_atomically(self._file, text + "\n")
