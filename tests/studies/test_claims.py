"""Verdicts on claims: each follows from an interval by its rule, and what a study lacks is not run."""

import math

import numpy as np
import pytest
from scipy import stats

from forgetting_transformer.analysis import position_loss, statistics
from forgetting_transformer.analysis.statistics import Estimate
from studies.engine import claims as study_claims
from studies.engine import results as studies
from studies.engine import tables as study_tables
from studies.engine.claim_rules import RULES

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "not decidable at this size"
FEW_SEEDS, NOT_RUN = "none (too few seeds)", "not run"


@pytest.mark.parametrize(
    ("rule", "value", "half_width", "verdict"),
    [
        ("higher", 0.2, 0.1, SEEN), ("higher", 0.1, 0.2, UNDECIDED), ("higher", -0.2, 0.1, NOT_SEEN),
        ("higher", 0.2, math.nan, FEW_SEEDS), ("higher", math.nan, math.nan, NOT_RUN),
        ("lower", -0.2, 0.1, SEEN), ("lower", -0.1, 0.2, UNDECIDED), ("lower", 0.2, 0.1, NOT_SEEN),
        ("same", 0.01, 0.03, SEEN), ("same", -0.04, 0.02, UNDECIDED), ("same", -0.2, 0.1, NOT_SEEN),
        ("same", 0.0, 0.2, UNDECIDED), ("same", 0.0, math.nan, FEW_SEEDS),
        ("sooner", math.inf, 0.0, NOT_SEEN), ("sooner", math.inf, math.inf, UNDECIDED),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_interval(rule, value, half_width, verdict):
    assert study_claims.decide({"rule": rule, "within": 0.05}, Estimate(value, half_width)) == verdict


def test_every_rule_is_measured_and_said():
    assert RULES.keys() == study_claims._MEASURES.keys()
    study = {"claims": [{"claim": name, "rule": name, "models": []} for name in RULES]}
    assert [line.split("`")[1] for line in study_claims.rules_list(study).splitlines()] == [*RULES]


def model(losses, **more):
    """A model of a study by the final losses of its seeds."""
    seeds = list(range(len(losses)))
    own = {"seeds": seeds, "states": ["finished"] * len(seeds), "train_loss": losses, "heldout_loss": losses}
    return own | {"budget": 1000, "train_length": 512} | more


def verdicts(study, **claim):
    filled = {"claim": "…", "than": None, "of": None, "at": None, "within": None} | claim
    study.setdefault("claims", []).append(filled)
    return [finding.verdict for finding in study_claims.findings(study, filled)]


def test_losses_are_compared_as_in_the_tables_and_pairs_beside_them_with_the_noise_of_all():
    noise = np.array([[0.01, -0.01, 0.0], [-0.02, 0.01, 0.01], [0.01, 0.0, -0.01], [0.0, 0.0, 0.0]])
    losses = noise + np.array([3.0, 3.2, 3.01, 3.5])[:, None]
    study = {"models": {}, "baseline": "a", "names": {}}
    study["variants"] = {name: model(row) for name, row in zip("abcd", losses.tolist(), strict=True)}
    asked = {"rule": "higher", "of": "variants"}
    assert verdicts(study, models=["b", "c", "d", "e"], than="a", **asked) == [SEEN, UNDECIDED, SEEN, NOT_RUN]
    against_a = studies.differences(studies.contrasts(study, "variants"))["b"]
    assert study_claims.findings(study, study["claims"][0])[0].measured == against_a
    assert verdicts(study, models=["b"], than="d", **asked) == [NOT_SEEN]
    assert verdicts(study, models=["c"], than="d", rule="lower", of="variants") == [SEEN]
    measured = study_claims.findings(study, study["claims"][1])[0].measured
    # Two claims compare with d, so that two intervals hold at once; all four models say how large the noise is.
    residual = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    deviation = math.sqrt((residual**2).sum() / 6)
    assert measured.value == pytest.approx(-0.3)
    assert measured.half_width == pytest.approx(statistics.dunnett_quantile(2, 6) * deviation * math.sqrt(2 / 3))
    assert against_a.half_width > measured.half_width, "three comparisons"
    # With fewer seeds than the model it is compared with there is no interval, and the page says how many there are.
    study["variants"]["e"] = model([3.4, 3.5])
    few = study_claims.findings(study, study["claims"][0])[-1]
    assert (few.verdict, few.detail) == (FEW_SEEDS, "2 of 3 seeds") and few.measured.value == pytest.approx(0.45)


def test_the_noise_of_a_family_is_that_of_its_models_and_the_baseline_alone():
    quiet = {"a": [3.0, 3.02, 2.98], "b": [3.2, 3.19, 3.21], "c": [3.1, 3.12, 3.11]}
    noisy = {"d": [3.5, 4.1, 3.0], "e": [3.6, 3.1, 4.4]}
    models = {name: model(losses) for name, losses in (quiet | noisy).items()}
    families = [["a", "b", "c"], ["c", "d", "e"]]
    study = {"models": models, "baseline": "a", "names": {}, "claims": [], "families": families}
    alone = statistics.against_baseline({name: dict(enumerate(losses)) for name, losses in quiet.items()}, "a")
    found = studies.contrasts(study, "models")
    assert [family.estimated_from for family in found] == [("a", "b", "c"), ("a", "c", "d", "e")]
    apart = studies.differences(found)
    assert apart["b"] == alone.against["b"] and apart["c"] == alone.against["c"], "c is in two: the first counts"
    assert apart["d"].half_width > 10 * apart["b"].half_width
    # A pair is compared within the first family that has both.
    assert verdicts(study, rule="higher", models=["b"], than="c") == [SEEN]
    assert verdicts(study, rule="higher", models=["d"], than="c") == [UNDECIDED]
    first, second = study_tables.noise(study, "models").splitlines()
    assert first.startswith("* a; b; c: the standard deviation of a run is 0.0") and "chance" not in first
    assert second.startswith("* a; c; d; e: ") and "differ more than by chance (Bartlett's test, p = 0.0" in second
    # Models that the plan does not know are one more family, and without families there is one.
    study["families"] = [["a", "b", "c"]]
    assert [family.estimated_from for family in studies.contrasts(study, "models")][1] == ("a", "d", "e")
    study["families"] = []
    assert [family.estimated_from for family in studies.contrasts(study, "models")] == [("a", "b", "c", "d", "e")]


def test_positions_have_intervals_over_seeds_and_texts():
    """Of a model's own change, and of a pair's on the same texts, where what texts have in common cancels."""
    random = np.random.default_rng(0)
    texts = random.normal(size=(12, 7))
    groups = np.repeat(np.arange(6), 2)

    def result(name, changes, seed):
        noise = np.random.default_rng(seed).normal(size=(12, 7)) * 0.01
        octaves = 3 + texts + noise + np.cumsum([0.0, *changes])
        summary = {"data": "d"}
        return position_loss.Result(name, np.ones(512), summary, octaves, group_N=groups)

    falls, flat = [-0.5] * 6, [-0.5, -0.5, -0.5, 0.0, 0.0, 0.0]
    results = {f"fox_seed{seed}": result("fox", falls, seed) for seed in range(3)}
    results |= {f"mamba_seed{seed}": result("mamba", flat, 10 + seed) for seed in range(3)}
    results["one_seed0"] = result("one", flat, 20)
    study = {"models": {"fox": model([1.0] * 3), "mamba": model([1.0] * 3), "one": model([1.0])}, "names": {}}
    assert verdicts(study, rule="falls_behind", models=["mamba"], than="fox", at=0.5) == [NOT_RUN]
    study["changes"] = studies.position_changes(study, results)
    assert position_loss.octave_edges(512) == [0, 8, 16, 32, 64, 128, 256, 512]
    # Texts differ by a unit, so that a model's own change is lost in them; a difference on the same texts is not.
    assert verdicts(study, rule="falls", models=["fox", "mamba"], at=0.5) == [UNDECIDED, UNDECIDED]
    assert verdicts(study, rule="falls_behind", models=["mamba"], than="fox", at=0.5) == [SEEN]
    assert verdicts(study, rule="falls_behind", models=["mamba"], than="fox", at=0.0625) == [UNDECIDED]
    assert verdicts(study, rule="falls", models=["one"], at=0.5) == [FEW_SEEDS]
    assert verdicts(study, rule="falls", models=["fox"], at=1.0) == [NOT_RUN], "nothing is known beyond 512"
    entry = next(e for e in study["changes"] if (e["model"], e["than"], e["position"]) == ("mamba", "fox", 256))
    apart = np.stack([results[f"mamba_seed{s}"].octaves_NO - results[f"fox_seed{s}"].octaves_NO for s in range(3)])
    change = apart[:, :, 6] - apart[:, :, 5]
    by_texts = statistics.clustered_error(change.mean(0), groups) * stats.t.ppf(0.975, len(set(groups)) - 1)
    by_seeds = stats.t.ppf(0.975, 2) * change.mean(1).std(ddof=1) / math.sqrt(3)
    assert entry["value"] == pytest.approx(0.5, abs=0.02)
    assert entry["half_width"] == pytest.approx(math.hypot(by_texts, by_seeds))


def test_heads_and_pruning_over_training():
    def heads(first, last):
        return [
            {"tokens": 100, "local": 1.0, "global": first, "pruned": 0.9},
            {"tokens": 900, "local": 0.5, "global": last, "pruned": 0.4},
        ]

    seeds = [heads(0.0, 0.3), heads(0.0, 0.32), heads(0.02, 0.34)]
    models = {"fox": model([1.0] * 3, heads=seeds), "none": model([1.0], heads=[[]])}
    study = {"models": models, "names": {}}
    assert verdicts(study, rule="local_heads", models=["fox", "none"]) == [SEEN, NOT_RUN]
    assert verdicts(study, rule="global_heads", models=["fox"]) == [SEEN]
    assert verdicts(study, rule="more_global_heads", models=["fox"]) == [SEEN]
    assert verdicts(study, rule="prunes_more", models=["fox"]) == [NOT_SEEN], "it skips less"
    study["pruning_loss"] = {"fox": {"pruned": [2.0, 2.1, 2.2], "unpruned": [2.0, 2.1, 2.2 + 1e-6]}}
    assert verdicts(study, rule="same_unpruned", models=["fox", "none"], within=0.001) == [SEEN, NOT_RUN]
    study["pruning_speed"] = {"fox": {"pruned": [150.0], "unpruned": [100.0]}}
    assert verdicts(study, rule="prunes_faster", models=["fox"]) == [FEW_SEEDS]
    assert "150 and 100 tokens/s" in study_claims.claims_table(study) and "+50.0 %" in study_claims.claims_table(study)


def test_tokens_to_equal_loss_are_between_two_evaluations():
    curves = [[[100, 3.0], [400, 2.0], [1000, 1.5]], [[100, 3.0], [400, 2.2], [1000, 1.4]]]
    models = {"muon": model([1.5, 1.4], heldout_curve=curves), "adamw": model([2.5, 2.6])}
    study = {"models": models, "names": {}, "equal_loss": {"muon": "adamw"}}
    # Halfway between 3 and 2 in the logarithm of the tokens, and in the second seed halfway between 3 and 2.2.
    assert study_claims.equal_loss(study, "muon", "adamw") == {0: pytest.approx(0.2), 1: pytest.approx(0.2)}
    assert verdicts(study, rule="sooner", models=["muon"], than="adamw") == [SEEN]
    assert "20.0 ± 0.0 %" in study_claims.equal_loss_table(study)
    models["adamw"]["heldout_loss"] = [1.45, 1.45]
    assert verdicts(study, rule="sooner", models=["muon"], than="adamw") == [UNDECIDED]
    assert "not reached" in study_claims.equal_loss_table(study)
    models["adamw"]["heldout_loss"] = [1.3, 1.3]
    assert verdicts(study, rule="sooner", models=["muon"], than="adamw") == [NOT_SEEN]
    del models["adamw"]
    assert verdicts(study, rule="sooner", models=["muon"], than="adamw") == [NOT_RUN]
    assert study_claims.equal_loss_table(study) == "Not run yet."


def test_claims_on_runs_hold_at_once_whether_they_say_runs_or_leave_it_out():
    losses = np.array([[3.0, 3.01, 2.98], [3.2, 3.19, 3.22], [3.4, 3.41, 3.4], [3.5, 3.5, 3.52]])
    study = {"variants": {}, "baseline": "a", "names": {}}
    study["models"] = {name: model(row) for name, row in zip("abcd", losses.tolist(), strict=True)}
    common = {"claim": "…", "rule": "higher", "at": None, "within": None, "than": "b"}
    study["claims"] = [{**common, "models": ["c"], "of": None}, {**common, "models": ["d"], "of": "runs"}]
    together = {**common, "models": ["c", "d"], "of": None}
    wanted = [finding.measured for finding in study_claims.findings({**study, "claims": [together]}, together)]
    assert [study_claims.findings(study, claim)[0].measured for claim in study["claims"]] == wanted
