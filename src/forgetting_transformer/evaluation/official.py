"""Names of the models that the paper's authors have released (zhixuan-lin/forgetting-transformer), for tables."""

from pathlib import Path

from forgetting_transformer.analysis import AnalysisError, known_models

#: End of their names.
_RELEASED = "-760m-longcrawl64-48b"


def display_name(model: str) -> str:
    """What tables call a released model, as in FoX (Pro) for fox-pro-760m-longcrawl64-48b; others keep their names."""
    known = known_models.MODELS.get(model.removesuffix(_RELEASED).replace("-", "_"))
    return known.name if known and model.endswith(_RELEASED) else model


def results_in(folder: Path, file: str) -> list[str]:
    """Every folder in `folder` that holds `file`, as `[NAME=]FOLDER`: the released models first, then others by name.

    Raises:
        AnalysisError: there is none.
    """
    found = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{file}"))}
    if not found:
        raise AnalysisError(f"{folder}: there is no MODEL/{file} in it; run the evaluation that writes it first")
    shown = [known.name for known in known_models.MODELS.values()]
    released = {display_name(name): path for name, path in found.items() if display_name(name) != name}
    others = [str(path) for name, path in found.items() if display_name(name) == name]
    return [*(f"{name}={released[name]}" for name in shown if name in released), *others]
