"""Tables of a study, and the sections that a page about it may show (marked_pages.py)."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

from forgetting_transformer.analysis import position_loss, statistics
from forgetting_transformer.analysis.tables import markdown_table, rate_text
from studies.engine.claims import claims_table, rules_list
from studies.engine.noise import equal_noise
from studies.engine.results import DIVERGED, FINISHED, Study, counted_seeds, read_study
from studies.engine.scores import downstream_table, needle_table

#: In the place of a table or figure of which there is nothing.
NOT_RUN = "Not run yet."
#: A page says that models differ in their noise where chance makes such differences less often than this.
UNEQUAL = 0.01


def models_table(study: Study) -> str:
    """One row per model: losses and speed."""
    models = study["models"]
    if not models:
        return NOT_RUN
    baseline = study.baseline("models")
    against = _against(study, "models")
    rows = []
    for name, model in models.items():
        speed = study["speed"].get(name, {})
        rows.append(
            [
                study.name(name),
                *_settings(model),
                _text(_mean(model, "train_loss")),
                *_heldout(model),
                against.get(name, ""),
                f"{speed['tokens_per_second']:,.0f}" if speed else "",
                f"{speed['mfu']:.0%}" if speed and speed["mfu"] else "",
                ", ".join(f"{share:.0%} ({length})" for length, share in study["pruned"].get(name, {}).items()),
            ]
        )
    header = ["model", "body", "rate", "tokens", "seeds", "training loss", "held-out loss", "perplexity"]
    header += [f"against {study.name(baseline)}", "tokens/s", "MFU", "tiles pruned (text length)"]
    return markdown_table(header, rows, "l" + 11 * "r")


def search_table(study: Study) -> str:
    """Loss of every model at every learning rate tried, the best bold; none of a search that is not finished is."""
    rates = sorted({rate for losses in study["search"].values() for rate in losses}, key=float)
    rows = []
    for name, losses in study["search"].items():
        best = None if is_unfinished(losses) else min(loss for loss in losses.values() if loss is not None)
        cells = [("diverged" if losses[r] is None else f"{losses[r]:.4f}") if r in losses else "" for r in rates]
        rows.append(
            [
                study.name(name),
                *(
                    f"**{c}**" if c and best is not None and losses.get(r) == best else c
                    for r, c in zip(rates, cells, strict=True)
                ),
            ]
        )
    return markdown_table(["model", *rates], rows, "l" + "r" * len(rates)) if rows else NOT_RUN


def octaves_table(study: Study) -> str:
    """Mean loss in every octave of positions from 128 on, per model."""
    octaves = {
        name: {entry["position"]: f"{entry['after']:.4f}" for entry in model["per_token_loss"]["slope"]}
        for name, model in study.evaluated().items()
    }
    positions = sorted({position for found in octaves.values() for position in found if position >= 128})
    rows = [[study.name(name), *(found.get(position, "") for position in positions)] for name, found in octaves.items()]
    header = ["model", *(f"{position:,} to {2 * position:,}" for position in positions)]
    return markdown_table(header, rows, "l" + "r" * len(positions)) if rows else NOT_RUN


def variants_table(study: Study) -> str:
    """One row per variant, the baseline's differences left out."""
    if not study["variants"]:
        return NOT_RUN
    baseline = study.baseline("variants")
    against = _against(study, "variants")
    rows = [
        [
            study.name(name),
            *_settings(variant),
            *_heldout(variant),
            against.get(name, ""),
        ]
        for name, variant in study["variants"].items()
    ]
    header = ["model", "body", "rate", "tokens", "seeds", "held-out loss", "perplexity"]
    return markdown_table([*header, f"against {study.name(baseline)}"], rows, "l" + 7 * "r")


def _settings(model: Mapping[str, Any]) -> list[str]:
    """Cells of what a model is, how long it was trained, and how many seeds the losses are a mean of."""
    counted, diverged = counted_seeds(model), model["states"].count(DIVERGED)
    seeds = f"{len(counted)} of {len(model['seeds'])}" if len(counted) < len(model["seeds"]) else str(len(counted))
    return [
        f"{model['body_parameters'] / 1e6:.1f}M",
        rate_text(model["learning_rate"]),
        f"{min((model['tokens'][i] for i in counted), default=0) / 1e6:,.1f}M",
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


def _heldout(model: Mapping[str, Any]) -> list[str]:
    """Cells of the held-out loss and its perplexity."""
    mean = _mean(model)
    return [_text(mean), "" if mean is None else f"{math.exp(mean.value):.3f}"]


def _losses(model: Mapping[str, Any], which: str = "heldout_loss") -> list[float]:
    """Of the seeds that have one."""
    return [loss for loss in model[which] if loss is not None]


def _mean(model: Mapping[str, Any], which: str = "heldout_loss") -> statistics.Estimate | None:
    losses = _losses(model, which)
    return statistics.mean(losses) if losses else None


def _against(study: Study, kind: str) -> dict[str, str]:
    """Model -> cell of its difference to the baseline."""
    return {name: apart.text("+") for name, apart in study.differences(kind).items() if not math.isnan(apart.value)}


def noise(study: Study, kind: str) -> str:
    """What the intervals of a table are, and which differences its seeds can show; a line for each family."""
    families = study.contrasts(kind)
    lines = []
    for family in families:
        if not family.freedom:
            continue
        every = [_losses(study[kind][name]) for name in family.estimated_from]
        alone = sorted(map(stdev, every))
        text = (
            f"The standard deviation of a run is {family.deviation:.4f} (pooled; degrees of freedom: {family.freedom}; "
            f"of one model alone between {alone[0]:.4f} and {alone[-1]:.4f})."
        )
        if not math.isnan(detectable := family.detectable()):
            text += (
                f" With {family.seeds} seeds each, a difference of {detectable:.3f} is found with a probability of "
                "80 %."
            )
        if (chance := equal_noise(every)) < UNEQUAL:
            text += (
                f" These deviations differ more than by chance (Bartlett's test, p = {chance:.1g}), so that intervals "
                "are too wide for the models with little noise and too narrow for the others."
            )
        names = "; ".join(study.name(name) for name in family.estimated_from)
        lines.append(text if len(families) == 1 else f"* {names}: {text[0].lower()}{text[1:]}")
    return "\n".join(lines) or "No interval can be given: that takes two models with the same two seeds or more."


def _text(estimate: statistics.Estimate | None) -> str:
    return "" if estimate is None else estimate.text()


def comparison_table(study: Study) -> str:
    """Models against the first on the same documents, octave by octave, mean of seeds."""
    rows = study["comparison"]
    return position_loss.comparison_table(rows).markdown() if rows else NOT_RUN


def missing(study: Study) -> list[str]:
    """What a study does not have yet, a line each."""
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
        ("speed", study["speed"]),
        ("needle and tasks", study["scores"]),
    ):
        if lacking := [name for name in study.plan.models if name not in have]:
            lines.append(f"{what}: none of {', '.join(lacking)}")
    return lines


def source(study: Study) -> str:
    """On what and from what the study was made, in a sentence or two for each of its parts."""
    made = [_source(part) for part in study.content.get("parts", [study.content]) if "environment" in part]
    return made[0] if len(made) == 1 else "\n".join(f"* {text}" for text in made)


def _source(part: Mapping[str, Any]) -> str:
    environment, corpus = part["environment"], part["corpus"]
    machine, versions = environment["machine"], environment["versions"]
    day = part["started"][:10]
    text = (
        f"Started on {day} on {machine['device']}, PyTorch {versions['torch']}, commit "
        f"{(environment['commit'] or 'unknown')[:7]}; {corpus['total_tokens']:,} training tokens."
    )
    # Only where something else than `collect` wrote the file.
    return f"{text} {part['source'][0].upper()}{part['source'][1:]}." if "source" in part else text


#: Figures that `collect` of studies/report.py draws, and what they show.
FIGURES = {
    "compare": "loss against training tokens and training FLOPs",
    "octaves": "mean loss of every octave of positions, and how far models are above the first on the same documents",
    "per_token_loss": "loss at every position (mean over ± 10 %), and perplexity over the context",
    "memory": "memory length of every head of the first model that forgets",
    "search": "loss against learning rate",
    "differences": "held-out loss of every model and variant against the baseline, with intervals",
    "needle": "share of the answer's words that models find, by length of the prompt and depth of the needle",
    "heads": "memory lengths of heads, and the share of tiles that pruning skips, against training tokens",
}
TABLES: dict[str, Callable[[Study], str]] = {
    "models": models_table,
    "search": search_table,
    "octaves": octaves_table,
    "comparison": comparison_table,
    "variants": variants_table,
    "needle": needle_table,
    "downstream": downstream_table,
    "claims": claims_table,
}


def sections(report: Path, page: Path) -> dict[str, str]:
    """The sections of a page about a study for `marked_pages.fill_in`: tables, figures, how it was made, and for each
    model `MODEL_apart`, its difference to the baseline.

    Args:
        report: folder with study.json and figures, which `collect` of studies/report.py wrote.
        page: the file that will show them, for paths to the figures.
    """
    study = read_study(report)
    found = {name: table(study) for name, table in TABLES.items()} | {"source": source(study)}
    found["claim_rules"] = rules_list(study)
    found |= {
        f"{name}_apart": apart.text("+")
        for kind in ("variants", "models")
        for name, apart in study.differences(kind).items()
    }
    found |= {f"{kind}_noise": noise(study, kind) for kind in ("models", "variants")}
    for name, title in FIGURES.items():
        figure = report / f"{name}.png"
        path = Path(os.path.relpath(figure, page.parent)).as_posix()
        found[f"{name}_figure"] = f"![{title}]({path})" if figure.is_file() else NOT_RUN
    return found
