"""Numbers in the sentences of README.md, from study.json and the files beside it; studies/pages.py puts them there."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis.statistics import detectable, equal_noise, mean
from forgetting_transformer.analysis.tables import markdown_table, rate_text
from studies.engine import tables as study_tables
from studies.engine.results import display_name, read_study


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    content = read_study(folder)
    notes, seeds = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("notes", "second_seeds"))
    models, variants, search = content["models"], content["variants"], content["search"]

    def loss(group: dict[str, Any], name: str, which: str = "heldout_loss") -> float:
        return statistics.mean(value for value in group[name][which] if value is not None)

    def gap(name: str, other: str, group: dict[str, Any] = models) -> float:
        return loss(group, name) - loss(group, other)

    def slope(name: str, position: int) -> dict[str, float]:
        return next(entry for entry in models[name]["per_token_loss"]["slope"] if entry["position"] == position)

    def beyond(name: str) -> float:
        """From the octave before the training length to the second after it."""
        return slope(name, 8192)["after"] - slope(name, 2048)["after"]

    def change(name: str, digits: int, sign: str = "") -> str:
        """How it falls behind the first model in the last doubling before the training length."""
        row = next(r for r in content["comparison"] if r["model"] == display_name(content, name) and r["end"] == 4096)
        return f"{row['change']:{sign}.{digits}f} ± {row['change_error']:.{digits}f}"

    def fox_at(position: int, sign: str) -> str:
        found = slope("fox_pro", position)
        return f"{found['per_doubling']:{sign}.2f} ± {found['standard_error']:.2f}"

    def neighbour(name: str, rate: str) -> float:
        return search[name][rate] - min(search[name].values())

    recurrent = ("mamba2", "hgrn2", "delta_net")
    behind, lost = ([f(name) for name in recurrent] for f in (lambda name: gap(name, "fox_pro"), beyond))
    heldout_better = [loss(models, name, "train_loss") - loss(models, name) for name in models]
    speed = {name: entry["tokens_per_second"] for name, entry in content["speed"].items()}
    after = notes["train_loss_after_16_8m_tokens"]
    values = {
        "llama_gain": f"{gap('transformer_llama', 'fox_llama'):.2f}",
        "pro_gain": f"{gap('transformer_pro', 'fox_pro'):.2f}",
        "behind_least": f"{min(behind):.2f}",
        "behind_most": f"{max(behind):.2f}",
        "pruned_pro": f"{100 * content['pruned']['fox_pro']['4,096']:.0f} %",
        "pruned_llama": f"{100 * content['pruned']['fox_llama']['4,096']:.0f} %",
        "speed_pro": f"{speed['fox_pro'] / speed['transformer_pro']:.1f}",
        "speed_llama": f"{speed['fox_llama'] / speed['transformer_llama']:.1f}",
        "searched": str(sum(map(len, search.values()))),
        "variants_run": str(len(variants)),
        "better_least": f"{min(heldout_better):.2f}",
        "better_most": f"{max(heldout_better):.2f}",
        "first_rows": f"{notes['first_64_held_out_rows_better_by']:.2f}",
        "pro_over_llama": f"{gap('transformer_llama', 'transformer_pro'):.2f}",
        "fox_pro_over_llama": f"{gap('fox_llama', 'fox_pro'):.2f}",
        "fox_at_4096": fox_at(4096, "z"),
        "fox_at_8192": fox_at(8192, "+"),
        "lost_pro": f"{beyond('transformer_pro'):.2f}",
        "lost_llama": f"{beyond('transformer_llama'):.2f}",
        "lost_least": f"{min(lost):.2f}",
        "lost_most": f"{max(lost):.2f}",
        "near_fox": f"{neighbour('fox_pro', '1e-3'):.2f}",
        "near_transformer": f"{neighbour('transformer_pro', '2e-3'):.3f}",
        "no_rope": f"{gap('transformer_llama_no_rope', 'transformer_llama', variants):.2f}",
        "no_gate": f"{gap('fox_pro_no_forget_gate', 'fox_pro', variants):.2f}",
        "rope_pro": f"{gap('fox_pro_rope', 'fox_pro', variants):z.2f}",
        "rope_pro_again": f"{seeds['heldout_loss']['fox_pro_rope'] - seeds['heldout_loss']['fox_pro']:+.2f}",
        "rope_llama": f"{gap('fox_llama_rope', 'fox_llama', variants):+.2f}",
        "qk_norm": f"{gap('fox_llama_qk_norm', 'fox_llama', variants):.2f}",
        "output_gate": f"{gap('fox_llama', 'fox_llama_qk_norm_output_gate', variants):.2f}",
        **{f"behind_{name}": change(name, 2) for name in recurrent},
        **{f"behind_{name}": change(name, 3, "+") for name in ("transformer_pro", "transformer_llama")},
        **{f"perplexity_{name}": f"{math.exp(loss(models, name)):.2f}" for name in models},
        **{f"seconds_{stage}": str(seconds) for stage, seconds in notes["seconds"].items()},
        **{f"{kind}_{name}": f"{value:.2f}" for name, both in after.items() for kind, value in both.items()},
    }
    values |= {
        "power_two": f"{detectable(0.05, seeds=3, freedom=math.inf):.2f}",
        "power_seven": f"{detectable(0.05, seeds=3, freedom=12, comparisons=6):.2f}",
        "power_five": f"{detectable(0.05, seeds=5, freedom=24, comparisons=6):.2f}",
    }
    found = study_tables.sections(folder, folder / "README.md") | values | second_seeds(content, seeds)
    return found | {"recipes": recipes(folder / "recipes.jsonl")} | recipes_apart(folder / "recipes.jsonl")


def second_seeds(study: dict[str, Any], seeds: dict[str, Any]) -> dict[str, str]:
    """The variants that were run with another seed too, and how far two runs of one model may be apart."""
    from scipy import stats

    def spread(names: Sequence[str]) -> tuple[float, float]:
        """Standard deviation of a single run, and what 95 % of the differences of two runs stay below."""
        deviation = math.sqrt(statistics.mean(differences[name] ** 2 for name in names) / 2)
        return deviation, float(stats.t.ppf(0.975, len(names))) * deviation * math.sqrt(2)

    differences, rows, variants = {}, [], study["variants"]
    for name, loss in seeds["heldout_loss"].items():
        first = variants[name]["heldout_loss"][0]
        differences[name] = loss - first
        rate = rate_text(variants[name]["learning_rate"])
        rows.append([display_name(study, name), rate, f"{first:.4f}", f"{loss:.4f}", f"{loss - first:+.3f}"])
    at_2e3 = [name for name in differences if variants[name]["learning_rate"] == 2e-3]
    (deviation, apart), (deviation_2e3, apart_2e3) = spread([*differences]), spread(at_2e3)
    others = [abs(difference) for name, difference in differences.items() if name not in at_2e3]
    return {
        "second_seeds": markdown_table(["model", "rate", "seed 0", "seed 1", "difference"], rows, "lrrrr"),
        "seed_deviation": f"{deviation:.3f}",
        "seed_noise": f"{apart:.2f}",
        "seed_pairs": str(len(differences)),
        "seed_deviation_2e3": f"{deviation_2e3:.3f}",
        "seed_noise_2e3": f"{apart_2e3:.2f}",
        "seed_pairs_2e3": str(len(at_2e3)),
        "seed_most_1e3": f"{max(others):.3f}",
    }


def recipes(file: Path) -> str:
    """FoX (Pro) with several seeds for each learning rate and warm-up: a row per recipe, from a JSON line per run."""
    if not file.is_file():
        return study_tables.NOT_RUN
    rows = []
    for (rate, warmup), runs in _by_recipe(file):
        losses, train = ([run[which][0] for run in runs] for which in ("heldout_loss", "train_loss"))
        rows.append(
            [
                rate_text(rate),
                str(warmup),
                str(len(runs)),
                mean(losses).text(),
                _deviation(losses),
                f"{statistics.mean(losses) - statistics.mean(train):+.3f}",
            ]
        )
    header = ["rate", "warm-up steps", "seeds", "held-out loss", "standard deviation of a run", "above training loss"]
    return markdown_table(header, rows, "rrrrrr")


def recipes_apart(file: Path) -> dict[str, str]:
    """Whether recipes differ in their noise, and how far the one with the least noise is above the lowest loss."""
    losses = [[run["heldout_loss"][0] for run in runs] for _, runs in (_by_recipe(file) if file.is_file() else [])]
    if min(map(len, losses), default=0) < 2:
        return dict.fromkeys(("recipes_bartlett", "recipes_above"), study_tables.NOT_RUN)
    quietest = min(losses, key=statistics.stdev)
    return {
        "recipes_bartlett": f"{equal_noise(losses):.2f}",
        "recipes_above": f"{statistics.mean(quietest) - min(map(statistics.mean, losses)):.2f}",
    }


def _by_recipe(file: Path) -> list[tuple[tuple[float, int], list[dict[str, Any]]]]:
    """The runs of each rate and warm-up, in steps."""
    found: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for line in file.read_text("utf-8").splitlines():
        run = json.loads(line)
        found.setdefault((run["rate"], run["warmup"]), []).append(run)
    return sorted(found.items())


def _deviation(losses: Sequence[float]) -> str:
    """Standard deviation of a run and its 95 % interval by the chi-squared distribution; a dash for a single run."""
    from scipy import stats

    freedom = len(losses) - 1
    if not freedom:
        return "–"
    deviation = statistics.stdev(losses)
    low, high = (deviation * math.sqrt(freedom / stats.chi2.ppf(p, freedom)) for p in (0.975, 0.025))
    return f"{deviation:.4f} ({low:.4f} to {high:.4f})"
