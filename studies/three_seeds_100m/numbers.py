"""Numbers in the sentences of README.md, from study.json and needle.json; scripts/pages.py puts them there."""

import json
from pathlib import Path
from statistics import mean as mean_of

from forgetting_transformer.analysis import study_tables
from forgetting_transformer.analysis.studies import contrasts, differences, losses_by_seed, read_study
from forgetting_transformer.analysis.study_claims import findings

MODELS = ("fox_pro", "fox_llama", "transformer_pro", "transformer_llama", "mamba2", "hgrn2", "delta_net")
RECURRENT = ("mamba2", "hgrn2", "delta_net")


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    return numbers(folder) | needles(folder) | earlier(folder) | study_tables.sections(folder, folder / "README.md")


def needles(folder: Path) -> dict[str, str]:
    """Answers that are the needle word for word, and that have ten of its twelve words or more."""
    content = json.loads((folder / "needle.json").read_text(encoding="utf-8"))
    modes = {"paper": "standard", "paper_easy": "easy"}
    counts: dict[str, int] = {}
    for row in content["rows"]:
        where = "inside" if row["length"] <= content["train_length"] else "beyond"
        case = f"{row['model']}_{modes[row['mode']]}_{where}"
        counts[f"exact_{case}"] = counts.get(f"exact_{case}", 0) + sum(row["exact"])
        found = sum(12 * words > 9.5 for words in row["words"])
        counts[f"most_{case}"] = counts.get(f"most_{case}", 0) + found
    return {name: str(count) for name, count in counts.items()}


def earlier(folder: Path) -> dict[str, str]:
    """The same differences in the studies before, as means of the seeds."""
    pairs = {
        "pro": ("transformer_pro", "fox_pro"),
        "llama": ("transformer_llama", "fox_llama"),
        "fox": ("fox_llama", "fox_pro"),
        **{name: (name, "fox_pro") for name in RECURRENT},
    }
    found = {}
    for which, name in {"one": "seven_models", "short": "three_seeds", "now": folder.name}.items():
        models = read_study(folder.parent / name)["models"]
        for key, (model, other) in pairs.items():
            difference = mean_of(models[model]["heldout_loss"]) - mean_of(models[other]["heldout_loss"])
            found[f"{key}_{which}"] = f"{difference:.2f}"
    return found


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    study = read_study(folder)
    if missing := [name for name in MODELS if None in study["models"].get(name, {}).get("heldout_loss", [None])]:
        raise LookupError(
            f"{folder / 'study.json'} lacks held-out losses of {', '.join(missing)}: finish the study first"
        )
    found = differences(contrasts(study, "models"))
    losses = {name: losses_by_seed(study["models"][name]) for name in MODELS}
    curves = {name: [dict(curve) for curve in study["models"][name]["heldout_curve"]] for name in MODELS}
    heads = {name: study["models"][name]["heads"] for name in ("fox_pro", "fox_llama")}

    def claimed(text: str, model: str) -> str:
        """What a claim that begins so measured for a model."""
        claim = next(one for one in study["claims"] if one["claim"].startswith(text) and model in one["models"])
        (finding,) = [one for one in findings(study, claim) if one.model == model]
        assert finding.measured is not None, "the losses are there"
        return finding.measured.text("+")

    def apart(model: str, other: str) -> list[float]:
        """How far a model ends above another one, by seed."""
        return [losses[model][seed] - loss for seed, loss in sorted(losses[other].items())]

    def after(tokens: int, model: str, other: str) -> float:
        """How far a model is above another one at that point of training, mean of the seeds."""
        return mean_of(a[tokens] - b[tokens] for a, b in zip(curves[model], curves[other], strict=True))

    def of_heads(name: str, which: int, key: str) -> float:
        """Mean over seeds, of the first or last measurement."""
        return mean_of(of_seed[which][key] for of_seed in heads[name])

    def beyond(name: str) -> float:
        """From the octave before the training length to the second one after it, first seed."""
        slopes = study["models"][name]["per_token_loss"]["slope"]
        return slopes[-1]["after"] - slopes[-3]["after"]

    def faster(name: str) -> str:
        """What pruning gains, mean of the seeds."""
        speeds = study["pruning_speed"][name]
        gains = [one / other - 1 for one, other in zip(speeds["pruned"], speeds["unpruned"], strict=True)]
        return f"{100 * mean_of(gains):.0f} %"

    recurrent = sorted(found[name].value for name in RECURRENT)
    lead = {tokens: after(tokens, "transformer_pro", "fox_pro") for tokens in curves["fox_pro"][0]}
    (late,) = {f"{gap:.2f}" for tokens, gap in lead.items() if tokens > 58_000_000}
    return {
        "pro_gain": found["transformer_pro"].text(),
        "llama_gain": claimed("FoX is better than the Transformer", "transformer_llama").removeprefix("+"),
        "pro_pairs": in_words(apart("transformer_pro", "fox_pro")),
        "llama_pairs": in_words(apart("transformer_llama", "fox_llama")),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        "pro_most": f"{lead[16_777_216]:.2f}",
        "pro_third": f"{lead[33_554_432]:.2f}",
        "pro_late": late,
        **{f"seeds_{name}": in_words([of[seed] for seed in sorted(of)]) for name, of in losses.items()},
        **{f"beyond_{name}": f"{beyond(name):+.2f}" for name in MODELS},
        **{f"pruned_first_{name}": f"{100 * of_heads(name, 0, 'pruned'):.0f} %" for name in heads},
        **{f"pruned_last_{name}": f"{100 * of_heads(name, -1, 'pruned'):.0f} %" for name in heads},
        **{f"global_{name}": f"{100 * of_heads(name, -1, 'global'):.1f} %" for name in heads},
        **{f"faster_{name}": faster(name) for name in heads},
        **{f"longest_first_{name}": f"{of_heads(name, 0, 'longest'):,.0f}" for name in heads},
        **{f"longest_last_{name}": f"{of_heads(name, -1, 'longest'):,.0f}" for name in heads},
    }


def in_words(values: list[float]) -> str:
    """As in "1.234, 2.345 and 3.456"."""
    *first, last = [f"{value:.3f}" for value in values]
    return f"{', '.join(first)} and {last}" if first else last
