"""A study from its YAML to verdicts: which jobs come of it, and what is collected of them."""

import dataclasses
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from forgetting_transformer import command_line
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.sweep.composer import compose_config
from studies import ROOT, SEARCH_PATH, run
from studies.engine.figures import _end_axis
from studies.engine.plan import read_plan
from studies.engine.queue import Queue
from studies.engine.results import read_study
from studies.engine.stages import Stages
from studies.engine.tables import sections
from tests.sweep.conftest import faults  # noqa: F401 (a fixture)

rare = pytest.mark.rare("no contract: studies")
pytestmark = pytest.mark.slow
YAML = """
group: demo
models: {mamba2: Mamba-2, fox_pro: FoX (Pro)}
seeds: [0, 1, 2]
learning_rates: {mamba2: 5e-3, fox_pro: 2e-3}
baseline: fox_pro
claims:
  - {claim: FoX is better, rule: higher, models: [mamba2], than: fox_pro}
  - {claim: Mamba-2 is better, rule: lower, models: [mamba2], than: fox_pro}
  - {claim: FoX forgets, rule: local_heads, models: [fox_pro]}
"""


@pytest.fixture
def study(faults, tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, list[str]]]:  # noqa: F811
    """Runs studies/run.py in `study`; returns exit code, output and the jobs in the order of start."""

    def start(*arguments: str, yaml: str = YAML) -> tuple[int, str, list[str]]:
        monkeypatch.chdir(tmp_path)
        Path("study.yaml").write_text(textwrap.dedent(yaml))
        code = command_line.run(lambda: run.main(["study.yaml", "study", "fabric.accelerator=cpu", *arguments]))
        out, err = capfd.readouterr()
        return code, out + err, [line.split()[1] for line in err.splitlines() if line.startswith("started")]

    return start


def test_a_yaml_becomes_runs_numbers_figures_and_verdicts(study, tmp_path):
    code, out, order = study("--stages", "train", "collect")
    assert code == 0, out
    assert order == [f"runs/{model}_seed{seed}" for seed in range(3) for model in ("mamba2", "fox_pro")]
    folder = tmp_path / "study/report"
    assert {"study.json", "study.yaml", "differences.png"} <= {file.name for file in folder.iterdir()}
    found = read_study(folder)
    assert found["models"]["mamba2"]["seeds"] == [0, 1, 2] and found["models"]["fox_pro"]["learning_rate"] == 2e-3
    found = sections(folder, tmp_path / "page.md")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found["claims"].splitlines()]
    assert [(row[0], row[2], row[-1]) for row in rows[2:]] == [
        ("FoX is better", "Mamba-2 against FoX (Pro)", "seen"),
        ("Mamba-2 is better", "Mamba-2 against FoX (Pro)", "not seen"),
        ("FoX forgets", "FoX (Pro)", "not run"),
    ]
    assert found["octaves_figure"] == "Not run yet." and "(study/report/differences.png)" in found["differences_figure"]
    assert study("--stages", "train")[2] == [], "what is finished is not run again"


def test_jobs_find_the_experiments_of_studies(tmp_path):
    """By itself train.py finds only the library's configs."""
    file = ROOT / "studies/three_seeds/study.yaml"
    one = {"models": {"fox_pro": ""}, "learning_rates": {"fox_pro": 2e-3}, "seeds": [0]}
    plan = dataclasses.replace(read_plan(file), variants={}, **one)
    jobs = Queue(plan, tmp_path, [f"data_dir={tmp_path}"])._planned
    assert compose_config([*jobs[0].overrides, "output_dir=out"]).model == jobs[0].config.model


@rare
def test_a_model_is_searched_run_at_its_best_rate_and_then_its_variants(study, tmp_path):
    yaml = """
    group: demo
    models: {mamba2: Mamba-2, fox_pro: FoX (Pro)}
    seeds: [0, 1]
    start_rate: 2e-3
    learning_rates: {mamba2: 5e-3}
    overrides: {search: {train.max_tokens: 4096}, variants: {exp: short}}
    variants: {fox_pro: [fox_pro, fox_llama]}
    """
    code, out, _ = study("optimizer.lrr=1", yaml=yaml)
    assert code == 1 and out.startswith("error: unknown config key 'optimizer.lrr'; did you mean 'optimizer.lr'?")
    code, out, order = study("--stages", "train", yaml=yaml)
    assert code == 0, out
    # All of the first seed comes first, and variants last.
    variants = ["variants/fox_pro", "variants/fox_llama"]
    assert order == [
        *(f"search/fox_pro/lr{rate}_seed0" for rate in ("1e-3", "2e-3", "5e-3")),
        *(f"{name}_seed{seed}" for seed in (0, 1) for name in ("runs/mamba2", "runs/fox_pro", *variants)),
    ]
    variant = read_run(tmp_path / "study/variants/fox_llama_seed1").config
    assert variant["optimizer"]["lr"] == 2e-3 and variant["exp"] == "short" and variant["seed"] == 1
    assert read_run(tmp_path / "study/search/fox_pro/lr2e-3_seed0").config["train"]["max_tokens"] == 4096
    assert study("--stages", "train", yaml=yaml)[2] == []


@rare
def test_a_yaml_that_is_no_study_is_refused_by_key_and_value(tmp_path):
    file = tmp_path / "study.yaml"
    for line, message in (
        ("seeds: [0, 0]", "seeds=[0, 0]: give at least one, each once"),
        ("claims: [{claim: a, rule: loer, models: [fox_pro]}]", "rule='loer' must be one of falls, rises"),
        ("claims: [{claim: a, rule: lower, models: [fox_pro]}]", "the claim 'a': the rule lower needs than"),
    ):
        file.write_text(f"group: demo\nmodels: {{mamba2: Mamba-2, fox_pro: FoX}}\n{line}\n")
        with pytest.raises(AnalysisError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
            read_plan(file)


@rare
def test_every_experiment_of_a_study_is_composed(tmp_path):
    composed = set()
    for file in sorted(ROOT.glob("studies/*/study.yaml")):
        stages = Stages(file, plan := read_plan(file), tmp_path)
        for name in {*plan.models, *(name for names in plan.variants.values() for name in names)}:
            experiment = [SEARCH_PATH, f"+experiment/{plan.group}={name}", f"output_dir={tmp_path}"]
            compose_config([*experiment, *stages.overrides])
            composed.add(f"{plan.group}/{name}")
    assert len(composed) > 30


def test_an_axis_of_octaves_shows_all_models_but_one_that_rises_far_above_the_first_octave():
    curves = {"fox": [1.34, 1.20], "mamba2": [1.46, 1.55], "delta_net": [1.89, 1.99], "transformer": [1.71, 4.40]}
    axes = Figure().subplots()
    assert _end_axis(axes, curves) == {"transformer"}
    low, high = axes.get_ylim()
    assert low < 1.20 and 1.99 < high < 2.3
