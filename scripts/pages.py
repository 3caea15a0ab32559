#!/usr/bin/env python
"""Fills measured numbers into README.md and docs: every table of results and every such number comes from a file.

    python scripts/pages.py            # rewrites the pages that have changed
    python scripts/pages.py --check    # changes nothing; names outdated pages and exits with 1 if there are any

The files are benchmarks/results/*.json, which the scripts in benchmarks/ write with --out, studies/*/*.json, and the
example results beside the pages in eval/. Marks in a page say where something belongs: <!-- NAME --> and
<!-- end of NAME --> enclose the lines of a table, <!-- NAME --> and <!-- end --> a number in a sentence. PAGES below
defines the names of each page.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import tables
from tables import Results

from forgetting_transformer.analysis import AnalysisError, position_loss, study_tables
from forgetting_transformer.analysis.evaluations import from_lm_eval, from_longbench
from forgetting_transformer.analysis.marked_pages import fill_in
from forgetting_transformer.analysis.published import lm_eval_table, longbench_table
from forgetting_transformer.analysis.studies import display_name, read_study
from forgetting_transformer.analysis.tables import markdown, markdown_table, rate_text

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "studies" / "seven_models"
MODEL_760M = "forgetting_transformer/pro_760m_16b"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a page would change")
    args = parser.parse_args(argv)
    try:
        changed = {page: text for page in PAGES if (text := filled(page)) != read(page)}
    except (AnalysisError, OSError, LookupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for page, text in changed.items():
        if args.check:
            print(f"error: {page} differs from the files of results; run python scripts/pages.py", file=sys.stderr)
        else:
            (ROOT / page).write_text(text, encoding="utf-8")
            print(page)
    return 1 if args.check and changed else 0


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def filled(page: str) -> str:
    """The page as the files of results say.

    Raises:
        AnalysisError: marks that do not fit.
        OSError, LookupError: a file of results, or a row in it, is missing.
    """
    try:
        return fill_in(read(page), PAGES[page]())
    except (AnalysisError, LookupError) as error:
        raise type(error)(f"{page}: {error}") from error


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def thousands(tokens_per_second: float) -> str:
    """To three digits, as precise as one run is."""
    return f"{float(f'{tokens_per_second:.3g}'):,.0f}"


# README.md and docs/performance.md.


def headline() -> dict[str, str]:
    """Numbers that sentences of README.md and docs/performance.md share."""
    run = Results("whole_run_125m*.json")
    steps = {part: run.row(part=part)["tokens_per_second"] for part in ("train", "step", "step_unpruned")}
    ours = Results("training_760m*.json").row(
        experiment=MODEL_760M, checkpointing=True, pruned=True, compiled=True, trained=False
    )
    theirs = Results("others_760m*.json").row(experiment=MODEL_760M, checkpointing=True, pruned=True)
    attention = Results("attention_triton*.json").rows(
        table="kernels", kernel="forgetting attention", shape=[1, 16384, 12, 128]
    )[-1]
    return {
        "train_rate": thousands(steps["train"]),
        "step_rate": thousands(steps["step"]),
        "unpruned_rate": thousands(steps["step_unpruned"]),
        "pruning_gain": f"{steps['step'] / steps['step_unpruned']:.1f}",
        "trained_tokens": f"{run.row(part='train')['tokens'] / 1e6:.0f}",
        "our_rate": f"{ours['tokens_per_second']:,.0f}",
        "their_rate": f"{theirs['tokens_per_second']:,.0f}",
        "attention_tflops": f"{attention['tflops']:.0f}",
        "attention_triton": attention["triton"],
    }


def performance() -> dict[str, str]:
    made = {
        "whole_run": ("whole_run*.json", tables.whole_run),
        "whole_models": ("training_760m*.json", tables.whole_models),
        "cold_start": ("cold_start*.json", tables.cold_start),
        "starts": ("start_*.json", tables.starts),
        "demo_losses": ("demo_losses*.json", tables.demo_losses),
        "attention": ("attention_triton*.json", tables.attention_kernels),
        "pruning": ("attention_triton*.json", tables.attention_pruning),
        "decoding": ("decode*.json", tables.decoding),
        "attention_errors": ("attention_errors*.json", tables.errors),
    }
    sections = headline() | {"recurrences": study_tables.NOT_RUN, "recurrences_source": ""}
    if any(tables.RESULTS.glob("recurrence*.json")):
        made["recurrences"] = ("recurrence*.json", tables.recurrences)
    for name, (pattern, table) in made.items():
        results = Results(pattern)
        sections |= {name: table(results), f"{name}_source": results.source}
    others = Results("others*.json")
    sections["against_others"] = tables.against_others(others, Results("training_760m*.json"))
    sections["against_others_source"] = others.source
    return sections


# docs/study.md.


def study() -> dict[str, str]:
    page = ROOT / "docs" / "study.md"
    content = read_study(STUDY)
    notes, seeds = (read_json(STUDY / f"{name}.json") for name in ("notes", "second_seeds"))
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
    return {**study_tables.sections(STUDY, page), **values, **second_seeds(content, seeds)}


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


# Other pages.


def longcrawl64() -> dict[str, str]:
    results = Results("data*.json")
    return {"reading": tables.reading(results), "reading_source": results.source}


def reliability() -> dict[str, str]:
    results, corruption = Results("checkpoint*.json"), Results("corruption*.json")
    seconds = results.rows()[0]["reserve_seconds"]
    return {
        "corruption": tables.corruption(corruption),
        "corruption_source": corruption.source,
        "checkpoints": tables.checkpoints(results),
        "checkpoints_source": results.source,
        "reserve_seconds": f"{seconds:.1f}",
    }


def differences() -> dict[str, str]:
    results = Results("differences*.json")
    reduction, seeds, pruning = (results.row(what=what) for what in ("reduction", "seeds", "pruning"))
    rotary = {dim: results.row(what="rotary", head_dim=dim) for dim in (64, 128)}
    short, long = sorted(results.rows(what="cumsum"), key=lambda row: row["length"])
    return {
        "steps": f"{seeds['steps']}",
        "seed_difference": f"{abs(seeds['difference']):.4f}",
        "seed_step": f"{seeds['largest_of_a_step']:.2f}",
        "reduction_error": f"{reduction['gradient_error']:.1%}",
        "reduction_difference": f"{abs(reduction['difference']):.1g}",
        "reduction_step": f"{reduction['largest_of_a_step']:.1g}",
        "pruned_bound": f"{pruning['bound']:.1e}",
        "pruned_largest": f"{pruning['largest_of_a_row']:.0e}",
        "pruned_skipped": f"{pruning['skipped']:.0%}",
        **{f"rotary_{dim}": f"{row['fp32_tables']:.2%}" for dim, row in rotary.items()},
        **{f"rotary_{dim}_coarse": f"{row['bf16_tables']:.2%}" for dim, row in rotary.items()},
        "rotary_length": f"{rotary[64]['length']:,}",
        "cumsum_short": f"{short['largest']:.2g}",
        "cumsum_short_length": f"{short['length']:,}",
        "cumsum_long": f"{long['largest']:.2g}",
        "cumsum_long_length": f"{long['length']:,}",
        "fixed_gate": f"{results.row(what='fixed gate')['largest_change']:.1%}",
        "differences_source": results.source,
    }


def sweep() -> dict[str, str]:
    search, comparison = (read_json(ROOT / "studies" / "demo" / f"{name}.json") for name in ("sweep_lr", "compare"))
    best = min(entry["heldout_loss"] for entry in search["rates"])
    rows = [
        [
            entry["rate"], f"{entry['heldout_loss']:.4f}",
            "" if entry["half_width"] is None else f"{entry['half_width']:.4f}",
            str(entry["seeds"]), f"{entry['heldout_loss'] - best:+.4f}" if entry["heldout_loss"] > best else "best",
        ]
        for entry in search["rates"]
    ]  # fmt: skip
    pairs = {**comparison["heldout_loss"], "difference": comparison["difference"]}
    return {
        "sweep_lr": markdown_table(
            ["learning rate", "held-out loss", "± 95 %", "seeds", "above the best"], rows, "rrrrr"
        ),
        **{f"compare_{name}": f"{value:.4f} ± {half_width:.4f}" for name, (value, half_width) in pairs.items()},
    }


def example(name: str) -> dict[str, Any]:
    return read_json(ROOT / "eval" / name / "example_results.json")


def eval_per_token_loss() -> dict[str, str]:
    return {"comparison": position_loss.comparison_table(example("per_token_loss")["comparison"]).markdown()}


def eval_lm_eval_harness() -> dict[str, str]:
    results = example("lm_eval_harness")["results"]
    return {"scores": markdown(*lm_eval_table({name: [from_lm_eval(found)] for name, found in results.items()}))}


def eval_longbench() -> dict[str, str]:
    results = example("longbench")["results"]
    return {"scores": markdown(*longbench_table({name: [from_longbench(found)] for name, found in results.items()}))}


def eval_niah() -> dict[str, str]:
    found = example("niah")
    return {
        "prompts": str(found["prompts"]),
        "words": f"{100 * found['words']:.1f} %",
        "exact": f"{100 * found['exact']:.0f} %",
    }


def eval_forget_gates() -> dict[str, str]:
    return {"pruned": f"{100 * example('forget_gates')['pruned']:.0f} %"}


PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "README.md": headline,
    "docs/performance.md": performance,
    "docs/study.md": study,
    "docs/longcrawl64.md": longcrawl64,
    "docs/reliability.md": reliability,
    "docs/sweep.md": sweep,
    "docs/differences.md": differences,
    "eval/per_token_loss/README.md": eval_per_token_loss,
    "eval/lm_eval_harness/README.md": eval_lm_eval_harness,
    "eval/longbench/README.md": eval_longbench,
    "eval/niah/README.md": eval_niah,
    "eval/forget_gates/README.md": eval_forget_gates,
}

if __name__ == "__main__":
    sys.exit(main())
