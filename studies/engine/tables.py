"""Tables of a study, and the sections that a page about it may show (studies/pages.py)."""

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis import statistics
from forgetting_transformer.analysis.tables import markdown_table, rate_text
from studies.engine.claims import claims_table
from studies.engine.results import DIVERGED, FINISHED, Study, counted_seeds, read_study
from studies.engine.scores import score_texts

#: In the place of a table or figure of which there is nothing.
NOT_RUN = "Not run yet."


def losses_table(study: Study, kind: str) -> str:
    """A row per model or variant: settings, held-out loss, and the difference to the baseline with its interval."""
    if not study[kind]:
        return NOT_RUN
    baseline, against = study.baseline(kind), study.differences(kind)
    rows = []
    for name, model in study[kind].items():
        apart = against.get(name)
        difference = "" if apart is None or math.isnan(apart.value) else apart.text("+")
        losses = [loss for loss in model["heldout_loss"] if loss is not None]
        heldout = statistics.mean(losses).text() if losses else ""
        rows.append([study.name(name), *_settings(model), heldout, difference])
    header = ["model", "body", "rate", "seeds", "held-out loss", f"against {study.name(baseline)}"]
    return markdown_table(header, rows, "l" + 5 * "r")


def _settings(model: Mapping[str, Any]) -> list[str]:
    """Cells of what a model is, and of how many seeds the losses are a mean; empty if of all."""
    counted, diverged = counted_seeds(model), model["states"].count(DIVERGED)
    seeds = f"{len(counted)} of {len(model['seeds'])}" if len(counted) < len(model["seeds"]) else ""
    return [
        f"{model['body_parameters'] / 1e6:.1f}M",
        rate_text(model["learning_rate"]),
        f"{seeds}, {diverged} diverged" if diverged else seeds,
    ]


def is_unfinished(losses: Mapping[str, float | None]) -> bool:
    """Whether a search has not tried rates on both sides of its lowest loss yet, which may then not be the lowest.

    Args:
        losses: learning rate, as text -> loss, None for a run that diverged.
    """
    rates = sorted(losses, key=float)
    tried = [math.inf if (loss := losses[rate]) is None else loss for rate in rates]
    lowest = min(tried, default=math.inf)
    return not math.isfinite(lowest) or lowest in (tried[0], tried[-1])


def missing(study: Study) -> list[str]:
    """Missing results of a study, a line each."""
    lines = [
        f"search/{name}: not finished, as its lowest loss is at an end of the rates tried ({', '.join(losses)})"
        for name, losses in study["search"].items()
        if is_unfinished(losses)
    ]
    for kind, models in (("", study["models"]), ("variant ", study["variants"])):
        for name, model in models.items():
            for seed, state, tokens in zip(model["seeds"], model["states"], model["tokens"], strict=True):
                if state != FINISHED:
                    done = (
                        "which diverged" if state == DIVERGED else f"{tokens:,} of {model['budget']:,} tokens are done"
                    )
                    lines.append(f"the rest of {kind}{name}_seed{seed}: {done}")
    for what, have in (
        ("a run", study["models"]),
        ("loss at every position", study.evaluated()),
        ("needle and tasks", study["scores"]),
    ):
        if lacking := [name for name in study.plan.models if name not in have]:
            lines.append(f"{what}: none of {', '.join(lacking)}")
    return lines


#: Figures that `collect` of studies/report.py draws, and what they show.
FIGURES = {
    "octaves": "mean loss of every octave of positions, and how far models are above the first on the same documents",
    "differences": "held-out loss of every model and variant against the baseline, with intervals",
}
TABLES: dict[str, Callable[[Study], str]] = {
    "models": functools.partial(losses_table, kind="models"),
    "variants": functools.partial(losses_table, kind="variants"),
    "claims": claims_table,
}


def sections(report: Path, page: Path) -> dict[str, str]:
    """The sections of a page about a study for `pages.fill_in`: tables and figures, each model's difference to
    the baseline, MODEL_apart, and its scores, such as MODEL_needle_easy_within_words.

    Args:
        report: folder with study.json and figures, which `collect` of studies/report.py wrote.
        page: the file that will show them, for paths to the figures.
    """
    study = read_study(report)
    found = {name: table(study) for name, table in TABLES.items()}
    found |= {
        f"{name}_apart": apart.text("+")
        for kind in ("variants", "models")
        for name, apart in study.differences(kind).items()
    }
    found |= score_texts(study)
    for name, title in FIGURES.items():
        figure = report / f"{name}.png"
        path = Path(os.path.relpath(figure, page.parent)).as_posix()
        found[f"{name}_figure"] = f"![{title}]({path})" if figure.is_file() else NOT_RUN
    return found
