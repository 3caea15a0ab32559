"""Which YAML files of studies are read, and what is said of the others."""

from pathlib import Path

import pytest

from forgetting_transformer.analysis import AnalysisError
from studies.engine.plan import StudyPlan, read_plan
from tests.training.test_config import composed

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

ROOT = Path(__file__).resolve().parents[2]
MODELS = "group: demo\nmodels: {a: A, b: B}\n"


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> StudyPlan:
        (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
        return read_plan(tmp_path / "study.yaml")

    return read


def test_the_committed_study_is_read():
    plan = read_plan(ROOT / "studies" / "seven_models" / "study.yaml")
    assert plan.start_order[0] == "mamba2" and plan.names["fox_pro"] == "FoX (Pro)" and plan.start_rate is None
    assert plan.overrides_of("search")[2:] == ["skip_eval=true", "log_interval=65536"]


def test_only_group_and_models_are_required(read):
    assert read("group: demo\nmodels: {a: A, b: }\nseeds:\noverrides:\n") == StudyPlan("demo", {"a": "A", "b": "b"})
    assert read(f"{MODELS}overrides: {{runs: }}").overrides_of("runs") == []


@pytest.mark.parametrize("written", ["2e-3", "2.0e-3", "0.002"])
def test_a_rate_is_written_as_people_write_it(read, written):
    assert read(f"{MODELS}start_rate: {written}").start_rate == 0.002
    assert read(f"{MODELS}learning_rates: {{a: {written}}}").learning_rates == {"a": 0.002}


def test_overrides_are_what_hydra_reads(read):
    text = "{a.b: null, c: true, d: 1e-3, e: [x, null], f: '${g}', h: 100_000, i: '[1,2]', ~j: }"
    overrides = read(f"{MODELS}overrides: {{runs: {text}}}").overrides_of("runs")
    assert overrides == ["a.b=null", "c=true", "d=0.001", "e=[x,null]", "f=${g}", "h=100000", "i=[1,2]", "~j=null"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "group is missing; it must be the name of a folder of configs/experiment"),
        ("models: {a: A}", "group is missing; it must be the name of a folder of configs/experiment"),
        ("group: demo\nmodels:", "models is missing; it must be a mapping of experiments to their display names"),
        ("group: demo\nmodels: {1: A}", "models=.* must be a mapping of experiments to their display names"),
        ("group: demo\nmodels: [a]", "models=.* must be a mapping of experiments to their display names"),
        ("group: demo\nmodels: {a: {b: c}}", "models.a=.* must be the text that tables call the model"),
        ("group: demo\nmodels: {a: A, a: B}", "line 2, column 16: not valid YAML: found duplicate key a"),
        ("group: demo\nmodels: {a: A, b: A}", "models.a='A' is also what b is called; display names must differ"),
        ("group: demo\nmodels: {../a: A}", "models: '../a' must be the name of a file of configs/experiment/demo"),
        ("group: [demo]\nmodels: {a: A}", r"group=\['demo'\] must be the name of a folder"),
        ("group: de mo\nmodels: {a: A}", "group='de mo' must be the name of a folder"),
        ("group: demo\nmodels: [a", "line 2, column 11: not valid YAML"),
        ("- a", "the file must be a mapping"),
        (
            f"{MODELS}claims: [{{claim: c, rule: best, models: [a]}}]",
            r"claims\[0\]: rule='best' must be one of falls, ",
        ),
        (f"{MODELS}claims: [{{claim: c, rule: lower, models: [a]}}]", "a claim of the rule lower needs than"),
        (f"{MODELS}claims: [{{claim: c, rule: lower, models: [a], than: c}}]", "'c' is none of the models: a, b"),
        (f"{MODELS}claims: [{{claim: c, rule: lower, models: [b], than: b}}]", "each once, and not 'b'"),
        (f"{MODELS}claims: [{{claim: c, rule: falls, models: [a], at: 0.7}}]", "at=0.7 must be a power of two"),
        (f"{MODELS}claims: [{{claim: c, rule: falls, models: [a], at: 1, within: 1}}]", "falls has no within"),
        (f"{MODELS}claims: [{{rule: falls, models: [a], at: 1}}]", r"claims\[0\]: claim is missing; it must be a text"),
        (f"{MODELS}families: [[a]]", "'b' is in none of them; it must be a list of lists"),
        (f"{MODELS}families: [[a, b], [c]]", "'c' is none of the models: a, b"),
        (
            "group: demo\nmodels: {a: A, b: B, c: C}\nfamilies: [[a, b], [c]]\nclaims:\n"
            "  - {claim: x, rule: lower, models: [c], than: a}\n  - {claim: x, rule: lower, models: [b], than: c}\n",
            r"claims\[1\]: b and c are in no family together",
        ),
        (f"{MODELS}equal_loss: {{a: a}}", "equal_loss.a='a' must name two of the models: a, b"),
        ("a text", "the file"),
        (f"{MODELS}1: a", "the file has the key 1, which is no text; quote it"),
        (
            f"{MODELS}sseds: [0]",
            "unknown key 'sseds'; known are baseline, claims, equal_loss, families, group, learning_rates, models",
        ),
        (f"{MODELS}slowest_first: [a]", "slowest_first=.* must name each of the models once: a, b"),
        (f"{MODELS}slowest_first: 3", "slowest_first=3 must be a list of the models"),
        (f"{MODELS}seeds: 0 1", "seeds='0 1' must be a list of different whole numbers"),
        (f"{MODELS}seeds: [0, 0]", r"seeds=\[0, 0\] must be a list of different whole numbers"),
        (f"{MODELS}seeds: [-1]", r"seeds=\[-1\] must be a list of different whole numbers"),
        (f"{MODELS}seeds: [true]", r"seeds=\[True\] must be a list .*\(wrong is seeds\[0\]\)"),
        (f"{MODELS}seeds: []", r"seeds=\[\] must be a list .*; leave it out for the default"),
        (f"{MODELS}start_rate: fast", "start_rate='fast' must be a positive number, such as 2e-3"),
        (f"{MODELS}start_rate: -1.0", "start_rate=-1.0 must be a positive number, such as 2e-3"),
        (f"{MODELS}start_rate: .nan", "start_rate=nan must be a positive number, such as 2e-3"),
        (f"{MODELS}start_rate: ${{x}}", "start_rate='.*' must be a positive number, such as 2e-3"),
        (f"{MODELS}learning_rates: 2e-3", "learning_rates=0.002 must be a mapping of models to positive numbers"),
        (f"{MODELS}learning_rates: {{c: 2e-3}}", "learning_rates has an unknown key 'c'; known are a"),
        (f"{MODELS}learning_rates: {{a: fast}}", r"learning_rates=.* \(wrong is learning_rates.a\)"),
        (f"{MODELS}learning_rates: {{a: 0}}", "learning_rates.a=0.0 must be a positive number, such as 2e-3"),
        (f"{MODELS}variants: {{c: [a]}}", "variants has an unknown key 'c'; known are a"),
        (f"{MODELS}variants: {{a: ab}}", r"variants=.* must be a mapping .*\(wrong is variants.a\)"),
        (f"{MODELS}variants: {{a: }}", r"variants=.* must be a mapping .*\(wrong is variants.a\)"),
        (f"{MODELS}variants: [a]", r"variants=\['a'\] must be a mapping of models to lists of experiments"),
        (f"{MODELS}variants: {{a: []}}", r"variants.a=\[\] must name at least one experiment, and each once"),
        (f"{MODELS}variants: {{a: [c, c]}}", r"variants.a=\['c', 'c'\] must name at least one experiment, and each"),
        (f"{MODELS}baseline: nobody", "baseline='nobody' must be a model or variant: a, b"),
        (f"{MODELS}overrides: 3", "overrides must be a mapping of runs, search or variants"),
        (
            f"{MODELS}overrides: {{serch: {{}}}}",
            "overrides has an unknown key 'serch'; known are runs, search, variants",
        ),
        (f"{MODELS}overrides: {{runs: [a=1]}}", "overrides.runs must be a mapping of keys to values"),
        (f"{MODELS}overrides: {{runs: {{a: {{b: 1}}}}}}", "overrides.runs: a=.* group of keys; .* as in a.b: "),
        (f"{MODELS}overrides: {{runs: {{a: '100,663'}}}}", "overrides.runs: a=100,663 must be one value; a number has"),
        (f"{MODELS}overrides: {{runs: {{a: '[1'}}}}", r"overrides.runs: a=\[1 is not an override of train.py: "),
    ],
)
def test_a_yaml_that_is_no_study_is_refused_in_one_line(read, text, message):
    with pytest.raises(AnalysisError, match=message) as caught:
        read(text)
    assert "study.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted((ROOT / "studies").glob("*/study.yaml")), ids=lambda file: file.parent.name)
def test_every_study_names_experiments_that_exist(file):
    plan = read_plan(file)
    wanted = {*plan.models, *(variant for variants in plan.variants.values() for variant in variants)}
    for name in wanted:
        config = composed(f"+experiment/{plan.group}={name}", *plan.overrides_of("runs"))
        tokens = config.datamodule.train_batch_size * config.datamodule.train_batch_len
        assert config.train.max_tokens % tokens == 0 == config.datamodule.eval_tokens % config.datamodule.eval_batch_len
