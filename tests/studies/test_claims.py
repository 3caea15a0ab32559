"""Claims: every rule measures what it says, and a verdict comes from the interval alone."""

import math

import pytest

from forgetting_transformer.analysis.statistics import Estimate
from studies.engine.claims import FEW_SEEDS, NOT_RUN, NOT_SEEN, RULES, SEEN, UNDECIDED, claims_table, decide, measure
from studies.engine.plan import RULES as KEYS
from studies.engine.plan import Claim, StudyPlan
from studies.engine.results import FINISHED, Study

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]


def claim(rule: str, model: str = "a", **keys) -> Claim:
    return Claim(claim=rule, rule=rule, models=[model], **keys)


@pytest.mark.parametrize(
    ("rule", "value", "half_width", "verdict"),
    [
        ("higher", 0.3, 0.2, SEEN), ("higher", -0.3, 0.2, NOT_SEEN), ("higher", 0.1, 0.2, UNDECIDED),
        ("lower", -0.3, 0.2, SEEN), ("lower", 0.3, 0.2, NOT_SEEN),
        ("same", 0.01, 0.03, SEEN), ("same", 0.2, 0.1, NOT_SEEN), ("same", 0.0, 0.06, UNDECIDED),
        ("lower", -0.3, math.nan, FEW_SEEDS), ("sooner", math.inf, 0.0, NOT_SEEN), ("lower", math.nan, 0.1, NOT_RUN),
    ],
)  # fmt: skip
def test_a_verdict_is_the_place_of_the_whole_interval(rule, value, half_width, verdict):
    assert decide(claim(rule, within=0.05), Estimate(value, half_width)) == verdict


def test_every_rule_has_its_keys():
    assert RULES.keys() == KEYS.keys()


def model(*losses: float, **more) -> dict:
    seeds = list(range(len(losses)))
    found = {"seeds": seeds, "heldout_loss": list(losses), "train_loss": list(losses), "budget": 100, "heads": []}
    found |= {"states": [FINISHED] * len(seeds), "train_length": 64, "heldout_curve": [[] for _ in seeds]}
    return found | more


@pytest.fixture
def study() -> Study:
    heads = [[{"tokens": 1e6, "local": 0.5, "global": 0.1, "pruned": 0.8},
              {"tokens": 2e6, "local": 0.4, "global": 0.3, "pruned": 0.7}]] * 3  # fmt: skip
    curve = [[[25, 4.0], [50, 3.0], [100, 2.0]]] * 3
    content = {
        "models": {
            "a": model(2.0, 2.1, 2.2, heads=heads, heldout_curve=curve),
            "b": model(3.0, 3.1, 3.2),
            "c": model(4.0),
        },
        "variants": {},
        "changes": [
            {"model": "a", "than": than, "position": 32, "value": value, "half_width": half_width, "of_texts": 0.1,
             "of_seeds": 0.2, "seeds": 3} for than, value, half_width in ((None, -0.5, 0.2), ("b", 0.1, None))
        ],
        "pruning_loss": {"a": {"pruned": [1.0, 1.0], "unpruned": [1.0, 1.0]}},
        "pruning_speed": {"a": {"pruned": [130.0, 131.0], "unpruned": [100.0, 100.0]}},
    }  # fmt: skip
    return Study(StudyPlan("g", {"a": "A", "b": "B", "c": "C"}), content)


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        (claim("lower", than="b"), -1.0),
        (claim("higher", "c", than="a"), 2.0),
        (claim("falls", at=0.5), -0.5),
        (claim("falls_behind", at=0.5, than="b"), 0.1),
        (claim("same_unpruned", within=0.001), 0.0),
        (claim("local_heads"), 0.35),
        (claim("more_global_heads"), 0.2),
        (claim("prunes_more"), -0.1),
        (claim("prunes_faster"), 0.305),
        # The loss 3.0, 3.1, 3.2 lies at or before 50 of 100 tokens, on a line in the logarithm.
        (claim("sooner", than="b"), (0.5 + 2**-0.1 * 0.5 + 2**-0.2 * 0.5) / 3 - 1),
    ],
    ids=lambda asked: asked.rule if isinstance(asked, Claim) else "",
)
def test_a_rule_measures_what_it_says(study, asked, value):
    study.plan.claims.append(asked)
    assert measure(study, asked, asked.models[0]).value == pytest.approx(value)


def test_what_lacks_numbers_is_not_run_and_fewer_seeds_give_no_verdict(study):
    study.plan.claims.extend(
        [claim("falls", "c", at=0.5), claim("lower", "c", than="a"), claim("sooner", "c", than="b")]
    )
    verdicts = [line.split("|")[-2].strip() for line in claims_table(study).splitlines()[2:]]
    assert verdicts == [NOT_RUN, FEW_SEEDS, NOT_RUN]


def test_intervals_hold_at_once_for_claims_with_the_same_other_model(study):
    alone = claim("lower", than="b")
    study.content["models"]["c"] = model(4.0, 4.05, 4.3)
    study.plan.claims.append(alone)
    one, both = measure(study, alone, "a"), claim("higher", "c", than="b")
    study.plan.claims.append(both)
    assert measure(study, alone, "a").half_width > one.half_width
    study.plan.families.append(["a", "b"])
    assert measure(study, both, "c") is None, "they are in no family together"
