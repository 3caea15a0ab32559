"""Models that tables and figures know: what they are called there, and which style their curves have.

A plug-in may add its own when it is imported:

    known_models.MODELS["retention"] = known_models.KnownModel("RetNet", 9)

A model that is not listed is called as its run or folder is, and gets the next colour that is free in a figure.
"""

from pathlib import Path
from typing import NamedTuple

from forgetting_transformer.analysis import AnalysisError


class KnownModel(NamedTuple):
    """The name of a model in tables and figures, and the number of its colour, line and marker (plots/style.py)."""

    name: str
    style: int


#: End of the names of the models that the paper's authors have released (zhixuan-lin/forgetting-transformer).
_RELEASED = "-760m-longcrawl64-48b"
#: By the `label` of configs/model, in the order of the paper's tables.
MODELS = {
    "fox_pro": KnownModel("FoX (Pro)", 0),
    "transformer_pro": KnownModel("Transformer (Pro)", 2),
    "fox_llama": KnownModel("FoX (LLaMA)", 1),
    "transformer_llama": KnownModel("Transformer (LLaMA)", 3),
    "mamba2": KnownModel("Mamba-2", 4),
    "hgrn2": KnownModel("HGRN2", 5),
    "delta_net": KnownModel("DeltaNet", 6),
    "gated_delta_net": KnownModel("Gated DeltaNet", 7),
    "samba": KnownModel("Samba", 8),
    "transformer_swa": KnownModel("Transformer (SWA)", 9),
    "kda": KnownModel("KDA", 9),
    "path_fox": KnownModel("PaTH-FoX", 8),
}


def plain(name: str) -> str:
    """Letters and digits of a name: "FoX (Pro)" and "fox_pro" are the same model."""
    return "".join(character for character in name.lower() if character.isascii() and character.isalnum())


def find(name: str) -> KnownModel | None:
    """The model with its label in a name such as "demo_fox_pro_seed1"; of several labels the longest counts."""
    inside = [label for label in MODELS if plain(label) in plain(name)]
    return MODELS[max(inside, key=len)] if inside else None


def display_name(model: str) -> str:
    """Name of a model in tables: FoX (Pro) for the released fox-pro-760m-longcrawl64-48b; others keep their names."""
    known = MODELS.get(model.removesuffix(_RELEASED).replace("-", "_"))
    return known.name if known and model.endswith(_RELEASED) else model


def results_in(folder: Path, file: str) -> list[str]:
    """Every folder in `folder` that contains `file`, as `NAME=FOLDER`: released models first, then others by name.

    Raises:
        AnalysisError: there is none.
    """
    found = {display_name(path.parent.name): path.parent for path in sorted(folder.glob(f"*/{file}"))}
    if not found:
        raise AnalysisError(f"{folder}: there is no MODEL/{file} in it; run the evaluation that writes it first")
    released = [known.name for known in MODELS.values() if known.name in found]
    return [f"{name}={found[name]}" for name in dict.fromkeys((*released, *found))]
