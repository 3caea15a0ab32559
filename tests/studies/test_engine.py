"""A study from its YAML to verdicts: which jobs come of it, and what is collected of them."""

import dataclasses
import re

import pytest

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.sweep.composer import compose_config
from forgetting_transformer.training import Config
from forgetting_transformer.training.setup import outline
from studies import ROOT, SEARCH_PATH
from studies.engine.plan import read_plan
from studies.engine.queue import Queue
from studies.engine.results import read_study
from studies.engine.stages import Stages
from studies.engine.tables import sections

rare = pytest.mark.rare("no contract: studies")
pytestmark = pytest.mark.slow


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
    plan = dataclasses.replace(read_plan(file), models={"fox_pro": ""}, learning_rates={"fox_pro": 2e-3}, variants={})
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
def test_a_job_that_failed_leaves_the_rest_and_the_same_command_goes_on(study, faults):
    faults["fail"] = "fox_pro_seed1"
    code, out, order = study("--stages", "train")
    assert code == 1 and "jobs that are not finished: 1; the same command continues them" in out
    faults.clear()
    assert len(order) == 6 and study("--stages", "train")[2] == ["runs/fox_pro_seed1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seeds: [0, 0]", "seeds=[0, 0]: give at least one, each once"),
        ("claims: [{claim: a, rule: loer, models: [fox_pro]}]", "rule='loer' must be one of falls, rises"),
        ("claims: [{claim: a, rule: lower, models: [fox_pro]}]", "the claim 'a': the rule lower needs than"),
    ],
)
@rare
def test_a_yaml_that_is_no_study_is_refused_by_key_and_value(tmp_path, line, message):
    text = f"group: demo\nmodels: {{mamba2: Mamba-2, fox_pro: FoX}}\n{line}\n"
    (file := tmp_path / "study.yaml").write_text(text)
    with pytest.raises(AnalysisError, match=re.escape(message)) as refused:
        read_plan(file)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def body_size(config: Config) -> int:
    """Weights outside of the embedding and the output matrix."""
    data = DataInfo("", 256, 0, 1, 1, config.datamodule.train_batch_len, 1, 1, 1, "", None)
    fields = {key: value for key, value in config.model.config.items() if key not in ("vocab_size", "bos_token_id")}
    model = outline(dataclasses.replace(config, model=dataclasses.replace(config.model, config=fields)), data)
    outside = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters() if id(p) not in outside)


@rare
def test_every_experiment_of_a_study_is_composed_and_bodies_have_one_size(tmp_path):
    sizes, batches = {}, set()
    for file in sorted(ROOT.glob("studies/*/study.yaml")):
        stages = Stages(file, plan := read_plan(file), tmp_path)
        for name in {*plan.models, *(name for names in plan.variants.values() for name in names)}:
            experiment = [SEARCH_PATH, f"+experiment/{plan.group}={name}", f"output_dir={tmp_path}"]
            config = compose_config([*experiment, *stages.overrides])
            if plan.group == "study" and name not in sizes:
                sizes[name] = body_size(config)
                batches.add((config.train.max_tokens, str(config.datamodule), str(config.schedule)))
    assert len(sizes) == 30 and len(batches) == 1
    assert min(sizes.values()) > 19.6e6 and max(sizes.values()) < 20.7e6
