"""Mark of an export: of which checkpoint it was made, and which files of a model the next export may replace."""

import json
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
