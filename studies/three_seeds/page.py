"""Numbers in the sentences of README.md, from study.json; studies/pages.py puts them there."""

from pathlib import Path
from statistics import mean as mean_of

from forgetting_transformer.analysis import statistics
from studies.engine import tables as study_tables
from studies.engine.claims import equal_loss
from studies.engine.numbers import StudyNumbers, in_words
from studies.engine.results import contrasts, differences, losses_by_seed

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
    """Prompts whose needle is found, and the most words that other models found.

    Raises:
        LookupError: not only FoX (Pro) finds it, in the easy mode and up to the training length, as the sentences say.
    """
    numbers = StudyNumbers.read(folder)
    answers = {
        (model, mode, beyond): numbers.answers(model, mode, beyond)
        for model in SEVEN
        for mode in ("standard", "easy")
        for beyond in (False, True)
    }
    inside = answers["fox_pro", "easy", False]
    if {case for case, some in answers.items() if any(answer.found for answer in some)} != {("fox_pro", "easy", False)}:
        raise LookupError(
            f"{folder / 'README.md'} says who finds the needle, and {folder / 'study.json'} says otherwise"
        )
    found = [answer for answer in inside if answer.found]
    others = [answer.words for case, some in answers.items() if case[0] != "fox_pro" for answer in some]
    return {
        "needles_found": str(len(found)),
        "needles_inside": str(len(inside)),
        "needles_longest": f"{max(answer.length for answer in found):,}",
        "needle_words": str(max(answer.words for answer in found)),
        "needle_others": str(max(others)),
    }


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    of_study = StudyNumbers.read(folder, models=MODELS, variants=VARIANTS)
    study, claimed, apart, beyond, mean = (
        of_study.study, of_study.claimed, of_study.apart, of_study.beyond, of_study.of_heads,
    )  # fmt: skip
    found = differences(contrasts(study, "models"))
    variants = differences(contrasts(study, "variants"))
    losses = {name: losses_by_seed(study["models"][name]) for name in MODELS}
    pooled = statistics.against_baseline(losses, "fox_pro").against["fox_pro_muon"]
    pooled_seven = statistics.against_baseline({name: losses[name] for name in SEVEN}, "fox_pro").against["mamba2"]
    # A pair that no claim names, by the rule of a claim that names it alone.
    with_muon = differences(contrasts(study, "models", "fox_pro_muon", {"transformer_pro_muon"}))

    recurrent = sorted(found[name].value for name in ("mamba2", "hgrn2", "delta_net"))

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
        "rope_pairs": in_words(apart("fox_pro_rope", "fox_pro", "variants"), sign="+"),
        "output_gate_pairs": in_words(apart("fox_pro_no_output_gate", "fox_pro", "variants"), sign="+"),
        "rope_pairs_llama": in_words(apart("fox_llama_rope", "fox_llama", "variants"), sign="+"),
        "v_shift_pairs": in_words(apart("fox_pro_no_v_shift", "fox_pro", "variants"), sign="+"),
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
        "beyond_fox": f"{beyond('fox_pro'):+.2f}",
        "beyond_transformer_pro": f"{beyond('transformer_pro'):+.2f}",
        "beyond_transformer_llama": f"{beyond('transformer_llama'):+.2f}",
        "beyond_fox_muon": f"{beyond('fox_pro_muon'):+.2f}",
        "beyond_transformer_pro_muon": f"{beyond('transformer_pro_muon'):+.2f}",
        "beyond_hybrid_pro": f"{beyond(hybrid_pro):+.2f}",
        "beyond_path_fox": f"{beyond('path_fox'):+.2f}",
        "beyond_kda": f"{beyond('kda'):+.3f}",
        "pruned_first": f"{100 * mean('fox_pro', 0, 'pruned'):.0f} %",
        "pruned_last": f"{100 * mean('fox_pro', -1, 'pruned'):.0f} %",
        **{f"longest_first_{name}": f"{mean(name, 0, 'longest'):,.0f}" for name in ("fox_pro", "fox_llama")},
        **{f"longest_last_{name}": f"{mean(name, -1, 'longest'):,.0f}" for name in ("fox_pro", "fox_llama")},
    }
