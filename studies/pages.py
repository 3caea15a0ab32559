#!/usr/bin/env python
"""Fills measured numbers into README.md and docs: every table of results and every such number comes from a file.

    python -m studies.pages            # rewrites the pages that have changed
    python -m studies.pages --check    # changes nothing; names outdated pages and exits with 1 if there are any

The files are benchmarks/results/*.json, which the scripts in benchmarks/ write with --out, and studies/*/*.json. Marks
in a page say where something belongs: <!-- NAME --> and <!-- end of NAME --> enclose a table, <!-- NAME --> and
<!-- end --> a number in a sentence. PAGES below defines the names of each page.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import tables
from tables import Results

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.statistics import difference
from forgetting_transformer.analysis.tables import markdown_table
from studies import adding_gates_page
from studies.engine import tables as study_tables
from studies.engine.claims import UNDECIDED, verdicts
from studies.engine.noise import against_baseline
from studies.engine.results import Study, read_study

ROOT = Path(__file__).resolve().parents[1]
RETROFIT = ROOT / "studies" / "retrofit" / "results.json"
#: A table stands on separate lines between <!-- NAME --> and <!-- end of NAME -->, a number in a sentence between
#: <!-- NAME --> and <!-- end -->.
_MARKED = re.compile(r"<!-- (\w+) -->(?:\n.*?<!-- end of \1 -->|[^\n]*?<!-- end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (?:end|end of \w+|\w+) -->")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a page would change")
    args = parser.parse_args(argv)
    try:
        changed = {page: text for page in PAGES if (text := filled(page)) != read(page)}
    except (AnalysisError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for page, text in changed.items():
        if args.check:
            print(f"error: {page} differs from the files of results; run python -m studies.pages", file=sys.stderr)
        else:
            try:
                (ROOT / page).write_text(text, encoding="utf-8")
            except OSError as error:
                print(f"error: {page} cannot be written ({error.strerror or error})", file=sys.stderr)
                return 1
            print(page)
    return 1 if args.check and changed else 0


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def filled(page: str) -> str:
    """The page as the files of results say.

    Raises:
        AnalysisError: marks that do not fit, or results that are damaged or lack something.
        OSError: a file of results is missing.
    """
    try:
        return fill_in(read(page), PAGES[page]())
    except json.JSONDecodeError as error:
        raise AnalysisError(f"{page}: a file of its results is damaged ({error})") from error
    except KeyError as error:
        raise AnalysisError(f"{page}: a file of its results lacks {error}") from error
    except (LookupError, ValueError) as error:
        raise AnalysisError(f"{page}: {error}") from error


def fill_in(page: str, sections: Mapping[str, str]) -> str:
    """A page in which what stands between marks is replaced by the section of that name.

    Args:
        page: Markdown with marks, `<!-- NAME -->` and `<!-- end of NAME -->` around lines, `<!-- NAME -->` and `<!--
            end -->` within a line.
        sections: tables and numbers by name.

    Raises:
        AnalysisError: the page has marks for a section that is not there, or a mark without the one that ends it.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in sections:
            raise AnalysisError(
                f"the page wants {name!r}, and there is no such section; there are {', '.join(sections)}"
            )
        text = sections[name].strip()
        if match[0].endswith("<!-- end -->"):
            return f"<!-- {name} -->{text}<!-- end -->"
        return f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"

    if unpaired := _MARK.search(_MARKED.sub("", page)):
        raise AnalysisError(f"the mark {unpaired[0]} has no other one to pair with")
    return _MARKED.sub(replace, page)


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def thousands(tokens_per_second: float) -> str:
    """To three digits, as precise as one run is."""
    return f"{float(f'{tokens_per_second:.3g}'):,.0f}"


# README.md and docs/performance.md.


def front() -> dict[str, str]:
    return trained() | authors() | leads()


def leads() -> dict[str, str]:
    """Losses of models above FoX (Pro), in a study of three seeds and in one at 125M."""
    study = read_study(ROOT / "studies" / "three_seeds_100m")
    apart = study.differences("models")
    recurrent = sorted(apart[name].value for name in ("mamba2", "hgrn2", "delta_net"))
    return {
        "pro_gain": apart["transformer_pro"].text(),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        "longer_gain": longer_sequences()["longer_gain"],
        **equal_rates(study),
    }


def longer_sequences() -> dict[str, str]:
    """FoX's lead at 125M, with its interval as studies/longer_sequences/study.yaml states it."""
    study = read_study(ROOT / "studies" / "longer_sequences")
    above, below = ([*study.losses("models", name).values()] for name in ("transformer_pro", "fox_pro"))
    return {"longer_gain": difference(above, below).text(digits=3)}


def equal_rates(study: Study) -> dict[str, str]:
    """The Transformer (Pro) above FoX (Pro) where both have the same learning rate; rates_*.jsonl have a line per run.

    The noise is that of the study's runs and these, and each interval holds for itself.
    """
    losses = {
        f"{name} {model['learning_rate']}": study.losses("models", name) for name, model in study["models"].items()
    }
    for name in ("fox_pro", "transformer_pro"):
        lines = (ROOT / "studies" / "three_seeds_100m" / f"rates_{name}.jsonl").read_text("utf-8").splitlines()
        for run in map(json.loads, lines):
            losses.setdefault(f"{name} {run['rate']}", {})[run["seed"]] = run["heldout_loss"][0]
    found = {}
    for which, rate in (("low", 1e-3), ("high", 2e-3)):
        above, below = (f"{name} {rate}" for name in ("transformer_pro", "fox_pro"))
        found[f"lead_{which}"] = against_baseline(losses, below, compared={above}).against[above].text()
    return found


def trained() -> dict[str, str]:
    """Speeds of train.py, started as in README.md on one and two GPUs."""
    one, two = Results("readme_1_gpu.json"), Results("readme_2_gpus.json")
    run = one.row()
    return {
        "one_gpu_rate": thousands(run["tokens_per_second"]),
        "two_gpus_rate": thousands(two.row()["tokens_per_second"]),
        "trained_parameters": f"{run['parameters'] / 1e6:.0f}M",
        "trained_vocabulary": f"{one.files[-1]['settings']['vocabulary']:,}",
        "trained_tokens": f"{run['tokens'] / 1e6:.0f}M",
        "trained_gpu": gpu(one),
    }


def gpu(results: Results) -> str:
    """The short name of the GPU, as in "H100"."""
    return tables.device_name(results.files[-1]["environment"]).split()[1]


def authors() -> dict[str, str]:
    """Our FoX (Pro) beside that of the paper's authors, in README.md."""
    results = Results("authors.json")
    commit = results.files[-1]["settings"]["authors_commit"]
    return {"authors": tables.authors(results), "authors_commit": commit, "authors_gpu": gpu(results)}


def performance() -> dict[str, str]:
    attention = Results("attention*.json")
    found = {"steps": Results("steps.json"), "attention": attention}
    sections = {name: getattr(tables, name)(results) for name, results in found.items()}
    sections |= {f"{name}_conditions": results.conditions for name, results in found.items()}
    return sections | {"layouts": tables.layouts(attention)} | trained() | sentences()


def sentences() -> dict[str, str]:
    """Numbers in the sentences of docs/performance.md."""
    attention, start = Results("attention*.json"), Results("start.json")
    pruning = {
        gates: attention.row(table="pruning", shape=[1, 16384, 24, 64], bounds="weights", gates=gates)
        for gates in ("half", "spread", "one")
    }
    authors = Results("authors.json")
    modes = [{"pruned": pruned, "checkpointing": saves} for pruned in (True, False) for saves in (True, False)]
    gains = [ratio(authors, {"code": "ours"} | mode, {"code": "authors"} | mode) for mode in modes]
    return {
        **{f"pruning_{gates}": f"{row['speedup']:.2g}" for gates, row in pruning.items()},
        "authors_least": f"{min(gains):.1f}",
        "authors_most": f"{max(gains):.1f}",
        "authors_gpu": gpu(authors),
        **{f"start_{row['caches']}": f"{row['first_line_seconds']:.0f}" for row in start.rows()},
        "start_imports": f"{start.row(caches='empty')['imports_seconds']:.0f}",
        "start_gpu": gpu(start),
    }


def ratio(results: Results, above: Mapping[str, Any], below: Mapping[str, Any]) -> float:
    """Tokens per second of one row over those of another."""
    return results.row(**above)["tokens_per_second"] / results.row(**below)["tokens_per_second"]


def study_page(name: str) -> dict[str, str]:
    folder = ROOT / "studies" / name
    found = study_tables.sections(folder, folder / "README.md")
    if name == "longer_sequences":
        return found | longer_sequences()
    return found | (equal_rates(read_study(folder)) if name == "three_seeds_100m" else {})


#: Studies with several seeds -> columns of docs/results.md, and what their numbers in its sentences begin with.
STUDIES = {
    "three_seeds": ("20M, 33.6M tokens", "short"),
    "three_seeds_100m": ("20M, 100.7M tokens", "long"),
    "longer_sequences": ("125M, 314.6M tokens", "large"),
}


def results() -> dict[str, str]:
    """Claims with their verdicts in all studies, and single numbers of each study."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    found = longer_sequences() | equal_rates(read_study(ROOT / "studies" / "three_seeds_100m")) | retrofit()
    for name, (column, begin) in STUDIES.items():
        folder = ROOT / "studies" / name
        found |= {f"{begin}_{key}": text for key, text in study_tables.sections(folder, folder / "README.md").items()}
        found[f"{begin}_deviation"] = f"{(study := read_study(folder)).contrasts('models')[0].deviation:.3f}"
        for claim, rule, models, measured, verdict in verdicts(study):
            row = cells.setdefault((claim, rule, models.replace(" 125M", "")), {})
            row[column] = f"{measured} {'open' if verdict == UNDECIDED else f'**{verdict}**'}" if measured else ""
    columns = [column for column, _ in STUDIES.values()]
    rows: list[list[str]] = []
    for claim, rule, models in cells:
        known = any(row[0] == claim for row in rows)
        of_studies = [cells[claim, rule, models].get(column, "") for column in columns]
        rows.append(["" if known else claim, rule, models, *of_studies])
    return found | {"claims": markdown_table(["claim", "rule", "model", *columns], rows, "lllrrr")}


# Other pages.


def operations() -> dict[str, str]:
    rows = Results("interruptions_4_gpus.json").rows()
    (continued,) = (row["largest_difference"] for row in rows if row["check"] == "world_sizes")
    four, two = (row["losses"] for row in rows if row["check"] == "straight")
    return {
        "continued_difference": f"{continued:.1e}",
        "straight_difference": f"{max(abs(a - b) for a, b in zip(four, two, strict=True)):.1e}",
    }


def retrofit() -> dict[str, str]:
    """Tables and numbers of the study of forget gates that are added to a pretrained model."""
    return {f"retrofit_{name}": text for name, text in adding_gates_page.sections(RETROFIT).items()}


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


PAGES: dict[str, Callable[[], dict[str, str]]] = {
    **{
        f"studies/{file.parent.name}/README.md": functools.partial(study_page, file.parent.name)
        for file in sorted(ROOT.glob("studies/*/README.md"))
        if (file.parent / "study.json").is_file()
    },
    "README.md": front,
    "docs/results.md": results,
    "docs/performance.md": performance,
    "benchmarks/results/README.md": lambda: {"files": tables.files()},
    "docs/operations.md": operations,
    "docs/sweep.md": sweep,
    "docs/use_a_model.md": retrofit,
    "studies/retrofit/README.md": retrofit,
}

if __name__ == "__main__":
    sys.exit(main())
