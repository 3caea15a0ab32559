"""Numbers in the sentences of README.md, from study.json; scripts/pages.py puts them there."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean as mean_of

from forgetting_transformer.analysis import statistics, study_tables
from forgetting_transformer.analysis.studies import contrasts, differences, losses_by_seed, read_study
from forgetting_transformer.analysis.study_claims import equal_loss, findings

#: The models and variants that the sentences are about.
MODELS = (
    "fox_pro", "fox_llama", "transformer_pro", "transformer_llama", "mamba2", "hgrn2", "delta_net", "hybrid",
    "hybrid_mamba2_fox", "hybrid_gated_delta_net_transformer", "hybrid_gated_delta_net_transformer_pro", "fox_pro_muon",
    "transformer_pro_muon", "kda", "path_fox",
)  # fmt: skip
VARIANTS = (
    "fox_pro_bias_only", "fox_pro_fixed_gate", "fox_pro_no_forget_gate", "fox_pro_rope", "fox_llama_rope",
    "fox_pro_no_output_gate", "fox_pro_no_k_shift", "fox_pro_no_kv_shift", "fox_pro_no_v_shift", "fox_llama_qk_norm",
    "fox_llama_qk_norm_output_gate", "transformer_llama_no_rope",
)  # fmt: skip
NO_HYBRIDS = [name for name in MODELS if not name.startswith("hybrid")]
SEVEN = MODELS[: MODELS.index("hybrid")]


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    return numbers(folder) | needles(folder) | study_tables.sections(folder, folder / "README.md")


def needles(folder: Path) -> dict[str, str]:
    """Prompts that are answered with most of the needle's words, and the most words that other models found."""
    content = json.loads((folder / "needle.json").read_text(encoding="utf-8"))
    answers = [
        (row["model"], row["mode"], row["length"], depth, words)
        for row in content["rows"]
        for depth, words in zip(content["depths"], row["words"], strict=True)
    ]
    found = [answer for answer in answers if answer[-1] > 0.5]
    assert {answer[:2] for answer in found} == {("fox_pro", "paper_easy")}, "the sentences name one model and one mode"
    inside = [answer for answer in answers if answer[:2] == found[0][:2] and answer[2] <= content["train_length"]]
    return {
        "needles_found": str(len(found)),
        "needles_inside": str(len(inside)),
        "needles_longest": f"{max(answer[2] for answer in found):,}",
        "needle_words": f"{12 * max(answer[-1] for answer in found):.0f}",
        "needle_others": f"{12 * max(answer[-1] for answer in answers if answer[0] != 'fox_pro'):.0f}",
    }


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    study = read_study(folder)
    parts = [("models", name) for name in MODELS] + [("variants", name) for name in VARIANTS]
    if missing := [name for kind, name in parts if None in study[kind].get(name, {}).get("heldout_loss", [None])]:
        raise LookupError(
            f"{folder / 'study.json'} lacks held-out losses of {', '.join(missing)}: finish the study first"
        )
    found = differences(contrasts(study, "models"))
    variants = differences(contrasts(study, "variants"))
    losses = {name: losses_by_seed(study["models"][name]) for name in MODELS}
    pooled = statistics.against_baseline(losses, "fox_pro").against["fox_pro_muon"]
    pooled_seven = statistics.against_baseline({name: losses[name] for name in SEVEN}, "fox_pro").against["mamba2"]
    # A pair that no claim names, by the rule of a claim that names it alone.
    with_muon = differences(contrasts(study, "models", "fox_pro_muon", {"transformer_pro_muon"}))

    def claimed(text: str, model: str) -> str:
        """What a claim that begins so measured for a model."""
        claim = next(one for one in study["claims"] if one["claim"].startswith(text) and model in one["models"])
        (finding,) = [one for one in findings(study, claim) if one.model == model]
        assert finding.measured is not None, "the losses are there"
        return finding.measured.text("+")

    recurrent = sorted(found[name].value for name in ("mamba2", "hgrn2", "delta_net"))
    octaves = {name: study["models"][name]["per_token_loss"]["slope"] for name in MODELS}
    beyond = {name: slopes[-1]["after"] - slopes[-3]["after"] for name, slopes in octaves.items()}
    heads = {name: study["models"][name]["heads"] for name in ("fox_pro", "fox_llama")}

    def mean(name: str, which: int, key: str) -> float:
        """Over seeds, of the first or last measurement."""
        return mean_of(of_seed[which][key] for of_seed in heads[name])

    def pairs(variant: str, model: str) -> str:
        """Difference of each seed that the variant has."""
        own, other = losses_by_seed(study["variants"][variant]), losses[model]
        return in_words([own[seed] - other[seed] for seed in sorted(own)], sign="+")

    def apart(model: str, other: str) -> list[float]:
        """How far a model ends above another one, by seed."""
        return [losses[model][seed] - loss for seed, loss in sorted(losses[other].items())]

    def after(tokens: int, model: str) -> list[float]:
        """Held-out losses of all seeds in the middle of training."""
        return [dict(curve)[tokens] for curve in study["models"][model]["heldout_curve"]]

    def above_fox(model: str, begin: int) -> str:
        """How far a model is above FoX (Pro) in the octave from a position on, mean of the seeds."""
        rows = {(row["model"], row["begin"]): row["loss"] for row in study["comparison"]}
        return f"{rows[study['names'][model], begin]:+.2f}"

    hybrid_pro = "hybrid_gated_delta_net_transformer_pro"
    early = [one - two for one, two in zip(after(8_388_608, "hybrid"), after(8_388_608, hybrid_pro), strict=True)]
    half = [one - two for one, two in zip(after(16_777_216, "hybrid"), after(16_777_216, hybrid_pro), strict=True)]
    return {
        "pro_gain": found["transformer_pro"].text(),
        "llama_gain": claimed("FoX is better than the Transformer", "transformer_llama").removeprefix("+"),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        **{f"variant_{name}": difference.text() for name, difference in variants.items()},
        "fixed_gain": f"{found['transformer_pro'].value - variants['fox_pro_fixed_gate'].value:.2f}",
        "rope_pairs": pairs("fox_pro_rope", "fox_pro"),
        "output_gate_pairs": pairs("fox_pro_no_output_gate", "fox_pro"),
        "rope_pairs_llama": pairs("fox_llama_rope", "fox_llama"),
        "v_shift_pairs": pairs("fox_pro_no_v_shift", "fox_pro"),
        "llama_qk_norm": claimed("QK-norm helps", "fox_llama_qk_norm"),
        "llama_output_gate": claimed("the output gate helps too", "fox_llama_qk_norm_output_gate"),
        "transformer_no_rope": claimed("without gates", "transformer_llama_no_rope").removeprefix("+"),
        "muon_gain": claimed("Muon reaches", "fox_pro_muon").removeprefix("-"),
        "muon_share": f"{100 * mean_of(equal_loss(study, 'fox_pro_muon', 'fox_pro').values()):.0f} %",
        "transformer_muon_gain": claimed("Muon reaches", "transformer_pro_muon").removeprefix("-"),
        "transformer_muon_share": (
            f"{100 * mean_of(equal_loss(study, 'transformer_pro_muon', 'transformer_pro').values()):.0f} %"
        ),
        "pro_gain_muon": with_muon["transformer_pro_muon"].text(),
        "pro_gain_muon_mean": f"{with_muon['transformer_pro_muon'].value:.2f}",
        "pro_gain_mean": f"{found['transformer_pro'].value:.2f}",
        "pro_pairs": in_words(apart("transformer_pro", "fox_pro"), sign="+"),
        "pro_pairs_muon": in_words(apart("transformer_pro_muon", "fox_pro_muon"), sign="+"),
        "forget_gate_in_hybrids": claimed("the forget gate helps", "hybrid_gated_delta_net_transformer"),
        "hybrid_range": f"{max(losses['hybrid'].values()) - min(losses['hybrid'].values()):.2f}",
        "hybrid_pairs": in_words(apart("hybrid_gated_delta_net_transformer", "hybrid"), 2),
        "hybrid_pro": claimed("the forget gate helps", hybrid_pro),
        "hybrid_pro_gain": claimed("the forget gate helps", hybrid_pro).removeprefix("-"),
        "hybrid_pro_pairs": in_words(apart(hybrid_pro, "hybrid"), sign="+"),
        "hybrid_pro_above_fox": in_words(apart(hybrid_pro, "fox_pro"), 2),
        "hybrid_pro_below_transformer": in_words(apart("transformer_pro", hybrid_pro), 2),
        "hybrid_pro_early": in_words(early, 2),
        "hybrid_pro_half": in_words(half, 2),
        "half_hybrid": in_words(after(16_777_216, "hybrid_mamba2_fox")),
        "best_hybrid": f"{min(apart('hybrid_mamba2_fox', 'fox_pro')):.2f}",
        **{f"seeds_{name}": in_words([of[seed] for seed in sorted(of)]) for name, of in losses.items()},
        **{f"{name}_gain": found[name].text() for name in ("kda", "path_fox")},
        "kda_above_mamba2": in_words(apart("kda", "mamba2"), 2),
        "kda_below_hgrn2": in_words(apart("hgrn2", "kda"), 2),
        "kda_below_delta_net": in_words(apart("delta_net", "kda"), 2),
        "kda_below_transformer_llama": in_words(apart("transformer_llama", "kda"), 2),
        "kda_pairs": in_words(apart("kda", "hybrid"), sign="+"),
        "path_fox_below_fox_llama": in_words(apart("fox_llama", "path_fox"), 2),
        "path_fox_below_mamba2": in_words(apart("mamba2", "path_fox"), 2),
        "path_fox_pairs": in_words(apart("path_fox", "transformer_pro"), sign="+"),
        **{f"{name}_near": above_fox(name, 256) for name in ("kda", "path_fox", "hybrid", hybrid_pro)},
        **{f"{name}_far": above_fox(name, 2048) for name in ("kda", "path_fox", "hybrid", hybrid_pro)},
        **{f"{name}_farthest": above_fox(name, 8192) for name in ("kda", "path_fox")},
        "pooled_all": f"{pooled.half_width:.2f}",
        "pooled_seven": f"{pooled_seven.half_width:.4f}",
        "bartlett_all": f"{statistics.equal_noise([[*of.values()] for of in losses.values()]):.0e}",
        "bartlett_models": f"{statistics.equal_noise([[*losses[name].values()] for name in NO_HYBRIDS]):.2f}",
        "beyond_fox": f"{beyond['fox_pro']:+.2f}",
        "beyond_transformer_pro": f"{beyond['transformer_pro']:+.2f}",
        "beyond_transformer_llama": f"{beyond['transformer_llama']:+.2f}",
        "beyond_fox_muon": f"{beyond['fox_pro_muon']:+.2f}",
        "beyond_transformer_pro_muon": f"{beyond['transformer_pro_muon']:+.2f}",
        "beyond_hybrid_pro": f"{beyond[hybrid_pro]:+.2f}",
        "beyond_path_fox": f"{beyond['path_fox']:+.2f}",
        "beyond_kda": f"{beyond['kda']:+.3f}",
        "pruned_first": f"{100 * mean('fox_pro', 0, 'pruned'):.0f} %",
        "pruned_last": f"{100 * mean('fox_pro', -1, 'pruned'):.0f} %",
        **{f"longest_first_{name}": f"{mean(name, 0, 'longest'):,.0f}" for name in heads},
        **{f"longest_last_{name}": f"{mean(name, -1, 'longest'):,.0f}" for name in heads},
    }


def in_words(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """As in "1.234, 2.345 and 3.456"; `sign` "+" shows plus signs."""
    *first, last = [f"{value:{sign}.{digits}f}" for value in values]
    return f"{', '.join(first)} and {last}" if first else last
