"""Numbers in the sentences of README.md, from study.json; scripts/pages.py puts them there."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean as mean_of

from forgetting_transformer.analysis import statistics, study_tables
from forgetting_transformer.analysis.studies import contrasts, differences, losses_by_seed, read_study
from forgetting_transformer.analysis.study_claims import equal_loss, findings

#: The models and variants that the sentences are about.
MODELS = (
    "fox_pro", "fox_llama", "transformer_pro", "transformer_llama", "mamba2", "hgrn2", "delta_net", "hybrid",
    "hybrid_mamba2_fox", "hybrid_gated_delta_net_transformer", "fox_pro_muon",
)  # fmt: skip
VARIANTS = (
    "fox_pro_bias_only", "fox_pro_fixed_gate", "fox_pro_no_forget_gate", "fox_pro_rope", "fox_llama_rope",
    "fox_pro_no_output_gate", "fox_pro_no_k_shift", "fox_pro_no_kv_shift", "fox_pro_no_v_shift", "fox_llama_qk_norm",
    "fox_llama_qk_norm_output_gate", "transformer_llama_no_rope",
)  # fmt: skip
NO_HYBRIDS = [name for name in MODELS if not name.startswith("hybrid")]


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
    found = differences(contrasts(study, "models"))
    variants = differences(contrasts(study, "variants"))
    losses = {name: losses_by_seed(study["models"][name]) for name in MODELS}
    kda = losses_by_seed(study["models"]["kda"])
    pooled = statistics.against_baseline(losses, "fox_pro").against["fox_pro_muon"]

    def claimed(text: str, model: str) -> str:
        """What a claim that begins so measured for a model."""
        claim = next(one for one in study["claims"] if one["claim"].startswith(text) and model in one["models"])
        (finding,) = [one for one in findings(study, claim) if one.model == model]
        assert finding.measured is not None, "the losses are there"
        return finding.measured.text("+")

    above = [losses["hybrid_mamba2_fox"][seed] - loss for seed, loss in losses["fox_pro"].items()]
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

    return {
        "pro_gain": found["transformer_pro"].text(),
        "llama_gain": claimed("FoX is better than the Transformer", "transformer_llama").removeprefix("+"),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        **{f"variant_{name}": apart.text() for name, apart in variants.items()},
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
        "forget_gate_in_hybrids": claimed("the forget gate helps", "hybrid_gated_delta_net_transformer"),
        "hybrid_range": f"{max(losses['hybrid'].values()) - min(losses['hybrid'].values()):.2f}",
        "hybrid_pairs": in_words(
            [losses["hybrid_gated_delta_net_transformer"][seed] - loss for seed, loss in losses["hybrid"].items()], 2
        ),
        "half_hybrid": in_words(
            [dict(curve)[16_777_216] for curve in study["models"]["hybrid_mamba2_fox"]["heldout_curve"]]
        ),
        "best_hybrid": f"{min(above):.2f}",
        **{f"seeds_{name}": in_words([of[seed] for seed in sorted(of)]) for name, of in losses.items()},
        "seeds_kda": in_words([kda[seed] for seed in sorted(kda)]),
        "seeds_as_kda": in_words([losses["hybrid"][seed] for seed in sorted(kda)]),
        "pooled_all": f"{pooled.half_width:.2f}",
        "bartlett_all": f"{statistics.equal_noise([[*of.values()] for of in losses.values()]):.0e}",
        "bartlett_models": f"{statistics.equal_noise([[*losses[name].values()] for name in NO_HYBRIDS]):.2f}",
        "beyond_fox": f"{beyond['fox_pro']:+.2f}",
        "beyond_transformer_pro": f"{beyond['transformer_pro']:+.2f}",
        "beyond_transformer_llama": f"{beyond['transformer_llama']:+.2f}",
        "pruned_first": f"{100 * mean('fox_pro', 0, 'pruned'):.0f} %",
        "pruned_last": f"{100 * mean('fox_pro', -1, 'pruned'):.0f} %",
        **{f"longest_first_{name}": f"{mean(name, 0, 'longest'):,.0f}" for name in heads},
        **{f"longest_last_{name}": f"{mean(name, -1, 'longest'):,.0f}" for name in heads},
    }


def in_words(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """As in "1.234, 2.345 and 3.456"; `sign` "+" shows plus signs."""
    *first, last = [f"{value:{sign}.{digits}f}" for value in values]
    return f"{', '.join(first)} and {last}" if first else last
