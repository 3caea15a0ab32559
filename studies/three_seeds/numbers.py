"""Numbers in the sentences of README.md, from study.json; scripts/pages.py puts them there."""

import statistics
from pathlib import Path

from forgetting_transformer.analysis import study_tables
from forgetting_transformer.analysis.studies import contrasts, losses_by_seed, read_study

#: The models and variants that the sentences are about.
MODELS = ("fox_pro", "fox_llama", "transformer_pro", "transformer_llama", "mamba2", "hgrn2", "delta_net")
VARIANTS = (
    "fox_pro_bias_only", "fox_pro_fixed_gate", "fox_pro_no_forget_gate", "fox_pro_rope", "fox_llama_rope",
    "fox_pro_no_output_gate", "fox_pro_no_output_norm", "fox_pro_no_qk_norm", "fox_pro_no_k_shift",
    "fox_pro_no_v_shift",
)  # fmt: skip


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    return numbers(folder) | study_tables.sections(folder, folder / "README.md")


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    study = read_study(folder)
    parts = [("models", name) for name in MODELS] + [("variants", name) for name in VARIANTS]
    if missing := [name for kind, name in parts if None in study[kind].get(name, {}).get("heldout_loss", [None])]:
        raise LookupError(
            f"{folder / 'study.json'} lacks held-out losses of {', '.join(missing)}: finish the study first"
        )
    found, within_llama = contrasts(study, "models"), contrasts(study, "models", "fox_llama", ["transformer_llama"])
    assert found is not None and within_llama is not None, "the losses are there"
    variants = contrasts(study, "variants")
    assert variants is not None, "the losses are there"
    recurrent = sorted(found.against[name].value for name in ("mamba2", "hgrn2", "delta_net"))
    octaves = {name: model["per_token_loss"]["slope"] for name, model in study["models"].items()}
    beyond = {name: slopes[-1]["after"] - slopes[-3]["after"] for name, slopes in octaves.items()}
    heads = {name: study["models"][name]["heads"] for name in ("fox_pro", "fox_llama")}

    def mean(name: str, which: int, key: str) -> float:
        """Over seeds, of the first or last measurement."""
        return statistics.mean(of_seed[which][key] for of_seed in heads[name])

    def pairs(variant: str, model: str) -> str:
        """Difference of each seed that the variant has."""
        own, other = losses_by_seed(study["variants"][variant]), losses_by_seed(study["models"][model])
        *first, last = [f"{own[seed] - other[seed]:+.3f}" for seed in sorted(own)]
        return f"{', '.join(first)} and {last}" if first else last

    return {
        "pro_gain": found.against["transformer_pro"].text(),
        "llama_gain": within_llama.against["transformer_llama"].text(),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        **{f"variant_{name}": apart.text() for name, apart in variants.against.items()},
        "fixed_gain": f"{found.against['transformer_pro'].value - variants.against['fox_pro_fixed_gate'].value:.2f}",
        "rope_pairs": pairs("fox_pro_rope", "fox_pro"),
        "output_gate_pairs": pairs("fox_pro_no_output_gate", "fox_pro"),
        "rope_pairs_llama": pairs("fox_llama_rope", "fox_llama"),
        "beyond_fox": f"{beyond['fox_pro']:+.2f}",
        "beyond_transformer_pro": f"{beyond['transformer_pro']:+.2f}",
        "beyond_transformer_llama": f"{beyond['transformer_llama']:+.2f}",
        "pruned_first": f"{100 * mean('fox_pro', 0, 'pruned'):.0f} %",
        "pruned_last": f"{100 * mean('fox_pro', -1, 'pruned'):.0f} %",
        **{f"longest_first_{name}": f"{mean(name, 0, 'longest'):,.0f}" for name in heads},
        **{f"longest_last_{name}": f"{mean(name, -1, 'longest'):,.0f}" for name in heads},
    }
