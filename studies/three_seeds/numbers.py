"""Numbers in the sentences of README.md, from study.json; scripts/pages.py puts them there."""

from pathlib import Path

from forgetting_transformer.analysis import study_tables
from forgetting_transformer.analysis.studies import contrasts, read_study


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    return numbers(folder) | study_tables.sections(folder, folder / "README.md")


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    study = read_study(folder)
    found, within_llama = contrasts(study, "models"), contrasts(study, "models", "fox_llama", ["transformer_llama"])
    assert found is not None and within_llama is not None
    recurrent = sorted(found.against[name].value for name in ("mamba2", "hgrn2", "delta_net"))
    octaves = {name: model["per_token_loss"]["slope"] for name, model in study["models"].items()}
    beyond = {name: slopes[-1]["after"] - slopes[-3]["after"] for name, slopes in octaves.items()}
    pruned = [heads for heads in study["models"]["fox_pro"]["heads"] if heads]
    return {
        "pro_gain": found.against["transformer_pro"].text(),
        "llama_gain": within_llama.against["transformer_llama"].text(),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        "deviation": f"{found.deviation:.3f}",
        "detectable": f"{found.detectable():.2f}",
        "beyond_fox": f"{beyond['fox_pro']:+.2f}",
        "beyond_transformer_pro": f"{beyond['transformer_pro']:+.2f}",
        "beyond_transformer_llama": f"{beyond['transformer_llama']:+.2f}",
        "pruned_first": f"{100 * sum(heads[0]['pruned'] for heads in pruned) / len(pruned):.0f} %",
        "pruned_last": f"{100 * sum(heads[-1]['pruned'] for heads in pruned) / len(pruned):.0f} %",
    }
