"""Mark of an export: of which checkpoint it was made, and which files of a model the next export may replace."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forgetting_transformer.data.storage.checksums import sha256_of

#: Written into every export.
MARK = "exported_from.json"


class ExportError(RuntimeError):
    """An export is not possible. The message names what is missing and how to give it."""


def read_mark(folder: Path) -> dict[str, Any]:
    """Mark of the last export; empty if no export wrote there."""
    try:
        found = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return found if isinstance(found["checkpoint"], int) and isinstance(found["files"], dict) else {}
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def origin_of(folder: Path) -> tuple[int | None, int | None]:
    """Tokens and seed of the training that an exported model comes from; None for what is not known.

    Weights that have changed since the export, as by fine-tuning, come from elsewhere.
    """
    mark = read_mark(folder)
    if not mark or any(mark["files"].get(file.name) != sha256_of(file) for file in folder.glob("*.safetensors")):
        return None, None
    return mark["checkpoint"], mark.get("seed")


def is_of_a_model(name: str) -> bool:
    """Whether a file of this name holds the configuration or weights of a model."""
    return name == "config.json" or name.endswith((".safetensors", ".bin", ".index.json"))


def check_replaceable(
    present: Iterable[str], before: Mapping[str, Any], new: Mapping[str, Any], where: str, elsewhere: str, replace: bool
) -> None:
    """Refuses to overwrite or to be mixed with what is not an earlier export of the same run.

    Args:
        present: names of the files there that the new export would overwrite, or that are of a model.
        before, new: marks of the export there, empty without one, and of the new one.
        where: the place, for messages. elsewhere: the way to choose another place.
        replace: whether another run's export may be replaced.

    Raises:
        ExportError: a file there is not from an export, or the export there is another run's.
    """
    if strangers := sorted({*present} - {*before.get("files", ()), *([MARK] if before else [])}):
        raise ExportError(
            f"{where} holds {strangers[0]}, which is not from an export: the new model would overwrite it, or be mixed "
            f"with it; choose another {elsewhere}"
        )
    if before and before.get("run") != new["run"] and not replace:
        raise ExportError(
            f"{where} holds the export of another run ({before.get('tag')}, seed {before.get('seed')}, "
            f"{before['checkpoint']:,} tokens); choose another {elsewhere}, or replace it with --replace"
        )
