"""Verdicts on the claims of a study: each from an interval, by a rule that was stated beforehand (claim_rules.py).

A claim that holds above zero is seen where the whole interval is above zero, not seen where the whole interval is below
zero, and not decidable at this size otherwise. A claim that holds near zero is seen where the whole interval is within
its margin, and not seen where the whole interval is outside of it. One seed has no interval and gives no verdict, and
neither does a model that lacks seeds of the other one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forgetting_transformer.analysis import statistics
from forgetting_transformer.analysis.statistics import Estimate
from forgetting_transformer.analysis.tables import markdown_table
from studies.engine.claim_rules import (
    FEW_SEEDS,
    NOT_RUN,
    NOT_SEEN,
    RULES,
    SEEN,
    SOME_HEADS,
    UNDECIDED,
    meaning,
)
from studies.engine.results import FINISHED, contrasts, display_name, losses_by_seed

Claim = Mapping[str, Any]
Study = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """What a study has to say on a claim about one model.

    Attributes:
        measured: None where the study lacks the numbers.
        detail: the numbers behind it, for a page.
    """

    model: str
    measured: Estimate | None
    verdict: str
    detail: str = ""


def decide(claim: Claim, measured: Estimate | None) -> str:
    """The verdict on a claim."""
    if measured is None or math.isnan(measured.value):
        return NOT_RUN
    if math.isnan(measured.half_width):
        return FEW_SEEDS
    holds, (value, half_width) = RULES[claim["rule"]].holds, measured
    if holds == "0":
        # The part of the interval that is farthest from zero, and the nearest.
        farthest, nearest = abs(value) + half_width, max(0.0, abs(value) - half_width)
        return SEEN if farthest <= claim["within"] else NOT_SEEN if nearest > claim["within"] else UNDECIDED
    towards = value if holds == "+" else -value
    return SEEN if towards > half_width else NOT_SEEN if towards < -half_width else UNDECIDED


def findings(study: Study, claim: Claim) -> list[Finding]:
    """What the study says on a claim, for each of its models."""
    found = []
    for model in claim["models"]:
        measured, detail = _MEASURES[claim["rule"]](study, claim, model)
        found.append(Finding(model, measured, decide(claim, measured), detail))
    return found


def claims_table(study: Study) -> str:
    """A row per claim and model: what was measured, with its 95 % interval, and the verdict."""
    rows = []
    for claim in study.get("claims", ()):
        percent = RULES[claim["rule"]].unit == "%"
        for finding in findings(study, claim):
            what = display_name(study, finding.model)
            if claim.get("than"):
                what += f" against {display_name(study, claim['than'])}"
            rule = claim["rule"] + (f" at {claim['at']:g} T" if claim.get("at") else "")
            rule += f" within {claim['within']:g}" if claim.get("within") else ""
            rows.append([claim["claim"], rule, what, _text(finding.measured, percent), finding.detail, finding.verdict])
    header = ["claim", "rule", "model", "measured", "from", "verdict"]
    return markdown_table(header, rows, "lllrll") if rows else "This study states no claims."


def rules_list(study: Study) -> str:
    """The rules that the study's claims are decided by, a line each."""
    used = dict.fromkeys(claim["rule"] for claim in study.get("claims", ()))
    return "\n".join(f"* `{name}`: {meaning(name)}." for name in used) or "This study states no claims."


def _text(measured: Estimate | None, percent: bool) -> str:
    if measured is None or math.isnan(measured.value):
        return ""
    value, half_width = measured
    if math.isinf(value):
        return "never"
    return f"{Estimate(100 * value, 100 * half_width).text('+', digits=1)} %" if percent else measured.text("+")


# What is measured. Each gives an estimate, None where the study lacks the numbers, and the numbers behind it.


def _change(study: Study, claim: Claim, model: str) -> tuple[Estimate | None, str]:
    """Of the loss when the context doubles at a position, minus that of another model if there is one."""
    length = _train_length(study, model)
    if length is None:
        return None, ""
    position = round(claim["at"] * length)
    for entry in study.get("changes", ()):
        if (entry["model"], entry["than"], entry["position"]) == (model, claim.get("than"), position):
            half_width = math.nan if entry["half_width"] is None else entry["half_width"]
            detail = f"position {position:,}, {_seeds(entry['seeds'])}"
            if entry.get("of_texts") is not None and entry.get("of_seeds") is not None:
                detail += f" (± {entry['of_texts']:.3f} of texts, {entry['of_seeds']:.3f} of seeds)"
            return Estimate(entry["value"], half_width), detail
    return _change_of_first_seed(study, claim, model, position)


def _change_of_first_seed(study: Study, claim: Claim, model: str, position: int) -> tuple[Estimate | None, str]:
    """From what earlier versions kept, which have no intervals over seeds."""
    detail = f"position {position:,}, {_seeds(1)}"
    if claim.get("than") is None:
        slope = study["models"].get(model, {}).get("per_token_loss", {}).get("slope", ())
        values = [entry["per_doubling"] for entry in slope if entry["position"] == position]
    else:
        names = (display_name(study, model), display_name(study, claim["than"]))
        rows = [row for row in study.get("comparison", ()) if (row["model"], row["against"]) == names]
        values = [row["change"] for row in rows if row["begin"] == position]
    return (Estimate(values[0], math.nan), detail) if values else (None, "")


def _train_length(study: Study, model: str) -> int | None:
    found = study["models"].get(model, {})
    return found.get("train_length") or found.get("per_token_loss", {}).get("train_length", study.get("train_length"))


def _difference(study: Study, claim: Claim, model: str) -> tuple[Estimate | None, str]:
    """Of held-out losses, with the intervals of the table where that compares with the same model."""
    kind = "variants" if claim.get("of") == "variants" else "models"
    families = contrasts(study, kind, claim["than"], _compared(study, claim))
    found = next((family for family in families if model in family.against), None)
    if found is None or math.isnan(found.against[model].value):
        return None, ""
    apart = found.against[model]
    if not math.isnan(apart.half_width):
        return apart, _seeds(found.seeds)
    common = len(losses_by_seed(study[kind][model]).keys() & losses_by_seed(study[kind][claim["than"]]).keys())
    return apart, _seeds(common) if common == found.seeds else f"{common} of {_seeds(found.seeds)}"


def _compared(study: Study, claim: Claim) -> set[str]:
    """The models that claims compare with the same other one: their intervals hold at once."""
    kind = claim.get("of") or "runs"
    same = [c for c in study["claims"] if (c.get("than"), c.get("of") or "runs") == (claim["than"], kind)]
    return {model for c in same if RULES[c["rule"]].compares_losses for model in c["models"]}


def _unpruned(study: Study, _claim: Claim, model: str) -> tuple[Estimate | None, str]:
    losses = study.get("pruning_loss", {}).get(model)
    if not losses:
        return None, ""
    apart = [one - other for one, other in zip(losses["pruned"], losses["unpruned"], strict=True)]
    largest = max(map(abs, apart))
    said = f"largest difference {largest:.1e}" if largest else "the same in all bits"
    return statistics.mean(apart), f"{said}, {_seeds(len(apart))}"


def _share_of_heads(which: str) -> Callable[[Study, Claim, str], tuple[Estimate | None, str]]:
    def measure(study: Study, _claim: Claim, model: str) -> tuple[Estimate | None, str]:
        shares = [heads[-1][which] for heads in _heads(study, model)]
        if not shares:
            return None, ""
        return statistics.mean([share - SOME_HEADS for share in shares]), f"{_percent(shares)}, {_seeds(len(shares))}"

    return measure


def _growth(which: str) -> Callable[[Study, Claim, str], tuple[Estimate | None, str]]:
    """From the first measurement while training to the last."""

    def measure(study: Study, _claim: Claim, model: str) -> tuple[Estimate | None, str]:
        ends = [(heads[0], heads[-1]) for heads in _heads(study, model) if len(heads) > 1 and which in heads[0]]
        if not ends:
            return None, ""
        first, last = ([end[i][which] for end in ends] for i in (0, 1))
        tokens = [f"{ends[0][i]['tokens'] / 1e6:,.3g}M" for i in (0, 1)]
        detail = f"{_percent(first)} after {tokens[0]}, {_percent(last)} after {tokens[1]} tokens, {_seeds(len(ends))}"
        return statistics.mean([end[1][which] - end[0][which] for end in ends]), detail

    return measure


def _heads(study: Study, model: str) -> list[list[dict[str, float]]]:
    """What was recorded of the heads of each finished seed."""
    found = study["models"].get(model, {})
    recorded = zip(found.get("heads", ()), found.get("states", ()), strict=False)
    return [heads for heads, state in recorded if heads and state == FINISHED]


def _pruning_speed(study: Study, _claim: Claim, model: str) -> tuple[Estimate | None, str]:
    speeds = study.get("pruning_speed", {}).get(model)
    if not speeds:
        return None, ""
    ratios = [one / other - 1 for one, other in zip(speeds["pruned"], speeds["unpruned"], strict=True)]
    means = [float(np.mean(speeds[which])) for which in ("pruned", "unpruned")]
    return statistics.mean(ratios), f"{means[0]:,.0f} and {means[1]:,.0f} tokens/s, {_seeds(len(ratios))}"


def _sooner(study: Study, claim: Claim, model: str) -> tuple[Estimate | None, str]:
    shares = list(equal_loss(study, model, claim["than"]).values())
    if not shares:
        return None, ""
    reached = [share for share in shares if math.isfinite(share)]
    if len(reached) < len(shares):  # no mean over seeds of which some never do
        half_width = math.nan if len(shares) == 1 else math.inf if reached else 0.0
        return Estimate(math.inf, half_width), f"not reached by {len(shares) - len(reached)} of {_seeds(len(shares))}"
    return statistics.mean([share - 1 for share in reached]), _seeds(len(reached))


def equal_loss(study: Study, model: str, other: str) -> dict[int, float]:
    """Training tokens after which a model has the other's final held-out loss, relative to the other's budget, by seed.

    Between two evaluations the loss is linear in the logarithm of the tokens. Infinite where the model never has it.
    """
    found, reference = study["models"].get(model), study["models"].get(other)
    if not found or not reference:
        return {}
    ends = losses_by_seed(reference)
    shares = {}
    for seed, curve in zip(found["seeds"], found.get("heldout_curve", ()), strict=False):
        if len(curve) > 1 and seed in ends and found["states"][found["seeds"].index(seed)] == FINISHED:
            shares[seed] = _first_reached(curve, ends[seed]) / reference["budget"]
    return shares


def _first_reached(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Tokens at which a curve of (tokens, loss) is first not above a loss; infinite where it never is."""
    before: Sequence[float] | None = None
    for tokens, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return tokens
            part = (before[1] - loss) / (before[1] - value)
            return math.exp(math.log(before[0]) + part * (math.log(tokens) - math.log(before[0])))
        before = (tokens, value)
    return math.inf


def equal_loss_table(study: Study) -> str:
    """A row per pair of the study's `equal_loss`: final losses, and tokens to the other's final loss."""
    rows = []
    for model, other in study.get("equal_loss", {}).items():
        shares = equal_loss(study, model, other)
        if not shares:
            continue
        both = [study["models"][name] for name in (model, other)]
        losses = [statistics.mean([loss for loss in one["heldout_loss"] if loss is not None]) for one in both]
        reached = all(math.isfinite(share) for share in shares.values())
        mean = statistics.mean([*shares.values()]) if reached else None
        tokens = "" if mean is None else f"{mean.value * both[1]['budget'] / 1e6:,.3g}M"
        share = "not reached" if mean is None else _text(mean, True).removeprefix("+")
        names = [display_name(study, name) for name in (model, other)]
        rows.append([*names, *(loss.text() for loss in losses), tokens, share, str(len(shares))])
    header = [
        "model",
        "against",
        "held-out loss",
        "that of the other",
        "tokens to equal loss",
        "of its budget",
        "seeds",
    ]
    return markdown_table(header, rows, "llrrrrr") if rows else "Not run yet."


def _percent(shares: Sequence[float]) -> str:
    return f"{np.mean(shares):.0%}"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


_MEASURES: dict[str, Callable[[Study, Claim, str], tuple[Estimate | None, str]]] = {
    "falls": _change,
    "rises": _change,
    "falls_behind": _change,
    "lower": _difference,
    "higher": _difference,
    "same": _difference,
    "same_unpruned": _unpruned,
    "local_heads": _share_of_heads("local"),
    "global_heads": _share_of_heads("global"),
    "more_global_heads": _growth("global"),
    "prunes_more": _growth("pruned"),
    "prunes_faster": _pruning_speed,
    "sooner": _sooner,
}
