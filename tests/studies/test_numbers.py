"""Numbers of a study's sentences come from study.json, and what is missing there is named."""

import pytest

from studies.engine.numbers import StudyNumbers, in_words

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]


@pytest.fixture
def numbers(tmp_path):
    def model(losses, **more):
        return {"seeds": [0, 1], "heldout_loss": losses, "states": ["finished"] * 2, **more}

    easy = {
        "train_length": 1024, "lengths": [512, 2048], "depths": [0.0, 1.0],
        "words": [[1.0, 0.5], [0.25, 0.0]], "exact": [[1.0, 0.0], [0.0, 0.0]],
    }  # fmt: skip
    heads = [[{"pruned": 0.8}, {"pruned": 0.6}], [{"pruned": 0.7}, {"pruned": 0.5}]]
    curves = [[[100, 3.0], [200, 2.0]], [[100, 3.2], [200, 2.4]]]
    slope = [{"after": loss} for loss in (3.0, 2.0, 1.9, 2.2)]
    study = {
        "models": {
            "fox": model([2.0, 2.4], heads=heads, heldout_curve=curves, per_token_loss={"slope": slope}),
            "mamba": model([2.5, None]),
        },
        "variants": {"fox_rope": model([2.1, 2.3])},
        "claims": [{"claim": "FoX is better", "rule": "higher", "models": ["mamba"], "than": "fox"}],
        "needles": {"fox": {"fox_seed0": {"easy": easy}}},
    }
    return StudyNumbers(study, tmp_path)


def test_differences_are_by_seed(numbers):
    assert numbers.apart("fox_rope", "fox", "variants") == pytest.approx([0.1, -0.1])
    assert numbers.over_training("fox") == pytest.approx({100: 3.1, 200: 2.2})
    assert numbers.beyond("fox") == pytest.approx(0.2)
    assert numbers.of_heads("fox", 0, "pruned") == pytest.approx(0.75)
    assert numbers.of_heads("fox", -1, "pruned") == pytest.approx(0.55)
    assert in_words([1.0, -0.25, 2.0], 2, "+") == "+1.00, -0.25 and +2.00" and in_words([1.0]) == "1.000"


def test_answers_are_those_within_or_beyond_the_training_length(numbers):
    assert numbers.answers("fox", "easy", beyond=False) == [(512, 12, True), (512, 3, False)]
    assert numbers.answers("fox", "easy", beyond=True) == [(2048, 6, False), (2048, 0, False)]
    assert [answer.found for answer in numbers.answers("fox", "easy", beyond=False)] == [True, False]


def test_answers_of_several_seeds_are_apart_and_in_their_order(numbers):
    runs = numbers.study["needles"]["fox"]
    other = {"easy": runs["fox_seed0"]["easy"] | {"words": [[0.5, 0.5], [0.5, 0.5]], "exact": [[0.0, 0.0], [0.0, 0.0]]}}
    none = {"easy": other["easy"] | {"words": [[0.0, 0.0], [0.0, 0.0]]}}
    asked = {"fox_seed10": other, "fox_seed3": {"standard": other["easy"]}, "fox_seed2": none, **runs}
    numbers.study["needles"]["fox"] = asked
    by_seed = numbers.answers_by_seed("fox", "easy", beyond=False)
    assert [[answer.words for answer in of_seed] for of_seed in by_seed] == [[12, 3], [0, 0], [6, 6]]
    assert numbers.answers("fox", "easy", beyond=False) == [answer for of_seed in by_seed for answer in of_seed]


def test_prompts_that_were_not_answered_are_left_out_and_no_answers_are_named(numbers):
    (easy,) = numbers.study["needles"]["fox"].values()
    easy["easy"]["words"][0][0] = None
    easy["easy"]["train_length"] = None
    assert numbers.answers("fox", "easy", beyond=False) == [(2048, 6, False), (512, 3, False), (2048, 0, False)]
    for model, mode, beyond in (("fox", "easy", True), ("fox", "standard", False), ("mamba", "easy", False)):
        with pytest.raises(LookupError, match=f"no answers of {model} to the needle in the {mode} mode"):
            numbers.answers(model, mode, beyond)


def test_what_a_claim_measured_has_its_interval(numbers):
    numbers.study["models"]["mamba"]["heldout_loss"] = [2.5, 2.8]
    numbers.study["variants"] = {}
    assert numbers.measured("FoX is better", "mamba").value == pytest.approx(0.45)
    assert numbers.claimed("FoX is", "mamba").startswith("+0.4500 ± ")


def test_a_claim_that_is_not_there_or_has_no_measurement_is_named(numbers):
    with pytest.raises(LookupError, match="no measurement of mamba for a claim that begins with 'Mamba'"):
        numbers.claimed("Mamba", "mamba")
    with pytest.raises(LookupError, match="no measurement of fox for a claim that begins with 'FoX is better'"):
        numbers.claimed("FoX is better", "fox")


def test_losses_that_are_missing_are_named(numbers, monkeypatch, tmp_path):
    monkeypatch.setattr("studies.engine.numbers.read_study", lambda folder: numbers.study)
    assert StudyNumbers.read(tmp_path, models=["fox"], variants=["fox_rope"]) == numbers
    with pytest.raises(LookupError, match=r"study\.json lacks held-out losses of mamba, none: finish the study first"):
        StudyNumbers.read(tmp_path, models=["fox", "mamba"], variants=["none"])
