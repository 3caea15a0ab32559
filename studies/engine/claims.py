"""The claims of a study: the rules that decide them, stated beforehand, and their verdicts, each from an interval.

A claim that holds above zero is seen where the whole interval is above zero, not seen where the whole interval is below
zero, and not decidable at this size otherwise. A claim that holds near zero is seen where the whole interval is within
its margin, and not seen where the whole interval is outside of it. One seed has no interval and gives no verdict, and
neither does a model that lacks seeds of the other one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forgetting_transformer.analysis import statistics
from forgetting_transformer.analysis.statistics import Estimate
from forgetting_transformer.analysis.tables import markdown_table
from studies.engine.plan import Claim
from studies.engine.results import FINISHED, Study

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "not decidable at this size"
#: In the place of a verdict.
FEW_SEEDS, NOT_RUN = "none (too few seeds)", "not run"
#: Share of all heads that must be local, or global.
SOME_HEADS = 0.05
#: A measure: an estimate with its interval, None where the study lacks the numbers.
Measured = Estimate | None


def decide(claim: Claim, measured: Estimate | None) -> str:
    """The verdict on a claim."""
    if measured is None or math.isnan(measured.value):
        return NOT_RUN
    if math.isnan(measured.half_width):
        return FEW_SEEDS
    holds, (value, half_width) = RULES[claim.rule].holds, measured
    if holds == "0":
        assert claim.within is not None
        # The part of the interval that is farthest from zero, and the nearest.
        farthest, nearest = abs(value) + half_width, max(0.0, abs(value) - half_width)
        return SEEN if farthest <= claim.within else NOT_SEEN if nearest > claim.within else UNDECIDED
    towards = value if holds == "+" else -value
    return SEEN if towards > half_width else NOT_SEEN if towards < -half_width else UNDECIDED


def measure(study: Study, claim: Claim, model: str) -> Measured:
    """The measure of a claim about one of its models."""
    return RULES[claim.rule].measure(study, claim, model)


def claims_table(study: Study) -> str:
    """A row per claim and model: what was measured, with its 95 % interval, and the verdict."""
    header = ["claim", "rule", "model", "measured", "verdict"]
    rows = verdicts(study)
    return markdown_table(header, rows, "lllrl") if rows else "This study states no claims."


def verdicts(study: Study) -> list[list[str]]:
    """Claim, rule, models, measure and verdict of each claim about each of its models."""
    rows = []
    for claim in study.plan.claims:
        for model in claim.models:
            measured = measure(study, claim, model)
            what = study.name(model) + (f" against {study.name(claim.than)}" if claim.than else "")
            rule = claim.rule + (f" at {claim.at:g} T" if claim.at else "")
            rule += f" within {claim.within:g}" if claim.within else ""
            text = _text(measured, RULES[claim.rule].percent)
            rows.append([claim.claim, rule, what, text, decide(claim, measured)])
    return rows


def _text(measured: Estimate | None, percent: bool) -> str:
    if measured is None or math.isnan(measured.value):
        return ""
    value, half_width = measured
    if math.isinf(value):
        return "never"
    return f"{Estimate(100 * value, 100 * half_width).text('+', digits=1)} %" if percent else measured.text("+")


# Measures.


def _change(study: Study, claim: Claim, model: str) -> Measured:
    """Change of the loss when the context doubles at a position, minus that of another model if there is one."""
    length = study["models"].get(model, {}).get("train_length")
    assert claim.at is not None
    for entry in study["changes"]:
        if (entry["model"], entry["than"], entry["position"]) == (model, claim.than, round(claim.at * (length or 0))):
            return Estimate(entry["value"], math.nan if entry["half_width"] is None else entry["half_width"])
    return None


def _difference(study: Study, claim: Claim, model: str) -> Measured:
    """Difference of held-out losses, with the intervals of the table where that compares with the same model."""
    same = [c for c in study.plan.claims if (c.than, c.of) == (claim.than, claim.of) and RULES[c.rule].of_losses]
    together = {name for c in same for name in c.models}
    families = study.contrasts(claim.kind, claim.than, together)
    found = next((family.against[model] for family in families if model in family.against), None)
    return None if found is None or math.isnan(found.value) else found


def _unpruned(study: Study, _claim: Claim, model: str) -> Measured:
    """Held-out loss with pruning minus that without, of the same weights on the same texts."""
    losses = study["pruning_loss"].get(model)
    if not losses:
        return None
    return statistics.mean([one - other for one, other in zip(losses["pruned"], losses["unpruned"], strict=True)])


def _share_of_heads(which: str) -> Callable[[Study, Claim, str], Measured]:
    """Share of heads at the end, less SOME_HEADS."""

    def share(study: Study, _claim: Claim, model: str) -> Measured:
        shares = [heads[-1][which] - SOME_HEADS for heads in _heads(study, model)]
        return statistics.mean(shares) if shares else None

    return share


def _growth(which: str) -> Callable[[Study, Claim, str], Measured]:
    """From the first measurement while training to the last."""

    def growth(study: Study, _claim: Claim, model: str) -> Measured:
        ends = [(heads[0], heads[-1]) for heads in _heads(study, model) if len(heads) > 1 and which in heads[0]]
        return statistics.mean([last[which] - first[which] for first, last in ends]) if ends else None

    return growth


def _heads(study: Study, model: str) -> list[list[dict[str, Any]]]:
    """Records of the heads of each finished seed."""
    found = study["models"].get(model, {"heads": [], "states": []})
    recorded = zip(found["heads"], found["states"], strict=True)
    return [heads for heads, state in recorded if heads and state == FINISHED]


def _pruning_speed(study: Study, _claim: Claim, model: str) -> Measured:
    """Tokens per second with pruning relative to those without, less 1."""
    speeds = study["pruning_speed"].get(model)
    if not speeds:
        return None
    return statistics.mean([one / other - 1 for one, other in zip(speeds["pruned"], speeds["unpruned"], strict=True)])


def _sooner(study: Study, claim: Claim, model: str) -> Measured:
    """Training tokens to the other model's final held-out loss, relative to its budget, less 1."""
    shares = list(equal_loss(study, model, str(claim.than)).values())
    if not shares:
        return None
    reached = [share for share in shares if math.isfinite(share)]
    if len(reached) < len(shares):  # no mean over seeds of which some never do
        return Estimate(math.inf, math.nan if len(shares) == 1 else math.inf if reached else 0.0)
    return statistics.mean([share - 1 for share in reached])


def equal_loss(study: Study, model: str, other: str) -> dict[int, float]:
    """Training tokens after which a model has the other's final held-out loss, relative to the other's budget, by seed.

    Between two evaluations the loss is linear in the logarithm of the tokens. Infinite where the model never has it.
    """
    found, reference = study["models"].get(model), study["models"].get(other)
    if not found or not reference:
        return {}
    ends = study.losses("models", other)
    curves = zip(found["seeds"], found["states"], found["heldout_curve"], strict=True)
    return {
        seed: _first_reached(curve, ends[seed]) / reference["budget"]
        for seed, state, curve in curves
        if len(curve) > 1 and seed in ends and state == FINISHED
    }


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


@dataclass(frozen=True)
class Rule:
    """Decision of a claim; docs/results.md describes each rule.

    Attributes:
        measure: the measure of a claim about a model.
        holds: sign of the measure where the claim holds, "+" or "-"; "0" where it holds near zero.
        of_losses: whether it compares held-out losses at the end, of runs or variants.
        percent: whether the measure is a share; else it is in nats.
    """

    measure: Callable[[Study, Claim, str], Measured]
    holds: str
    of_losses: bool = False
    percent: bool = False


RULES: dict[str, Rule] = {
    "falls": Rule(_change, "-"),
    "rises": Rule(_change, "+"),
    "falls_behind": Rule(_change, "+"),
    "lower": Rule(_difference, "-", of_losses=True),
    "higher": Rule(_difference, "+", of_losses=True),
    "same": Rule(_difference, "0", of_losses=True),
    "same_unpruned": Rule(_unpruned, "0"),
    "local_heads": Rule(_share_of_heads("local"), "+", percent=True),
    "global_heads": Rule(_share_of_heads("global"), "+", percent=True),
    "more_global_heads": Rule(_growth("global"), "+", percent=True),
    "prunes_more": Rule(_growth("pruned"), "+", percent=True),
    "prunes_faster": Rule(_pruning_speed, "+", percent=True),
    "sooner": Rule(_sooner, "-", percent=True),
}
