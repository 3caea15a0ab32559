"""A study: which jobs come of which, in what order, and what is kept of them."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError, position_loss
from forgetting_transformer.sweep import learning_rate
from forgetting_transformer.training.continuing import decisive
from studies import report as report_command
from studies import run as run_command
from studies.engine import results as studies
from studies.engine import tables as study_tables
from studies.engine.plan import StudyPlan
from tests.sweep.conftest import starts

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

MODELS = ["--group", "demo", "--models", "mamba2", "fox_pro", "--guess", "2e-3"]


@pytest.fixture
def study(faults, tmp_path, monkeypatch, capfd):
    """Runs studies/run.py on two models of the demo; returns exit code, output and the jobs in the order of start."""

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.chdir(tmp_path)
        code = run_command.main(["output_dir=out", "data_dir=data", "fabric.accelerator=cpu", *MODELS, *arguments])
        out, err = capfd.readouterr()
        return code, out + err, [line.split()[1] for line in err.splitlines() if line.startswith("started")]

    return run


def tables_of(found: dict) -> dict[str, list[list[str]]]:
    """Name of a table -> its rows as cells; the first and the last are empty."""
    return {
        name: [[cell.strip() for cell in line.split("|")] for line in table(found).splitlines()]
        for name, table in study_tables.TABLES.items()
    }


def test_each_model_is_searched_run_at_its_best_rate_and_then_its_variants(study, tmp_path):
    variants = ["--variants", "fox_pro", "fox_llama", "fox_pro", "--variant", "exp=short"]
    code, out, order = study("--search", "train.max_tokens=4096", *variants)
    assert code == 0, out
    searched = [f"lr{rate}_seed0" for rate in ("1e-3", "2e-3", "5e-3")]
    # The run of a model that is searched starts before the search of the next model, and variants wait until the end.
    assert order == [
        *(f"search/mamba2/{name}" for name in searched), "runs/mamba2_seed0",
        *(f"search/fox_pro/{name}" for name in searched), "runs/fox_pro_seed0",
        "variants/fox_llama_seed0", "variants/fox_pro_seed0",
    ]  # fmt: skip
    budgets = {}
    for folder in ("search/fox_pro/lr2e-3_seed0", "runs/fox_pro_seed0", "variants/fox_pro_seed0"):
        config = json.loads(json.dumps(studies.read_run(tmp_path / "out" / folder).config))
        assert config["optimizer"]["lr"] == 2e-3
        budgets[folder.split("/")[0]] = (config["train"]["max_tokens"], config["exp"])
    assert budgets == {"search": (4096, "demo"), "runs": (1572864, "demo"), "variants": (1572864, "short")}


def test_a_model_whose_rate_is_known_is_not_searched(study, tmp_path):
    code, out, order = study("--rates", "mamba2=3e-3", "--variants", "mamba2", "hgrn2")
    assert code == 0, out
    assert [job for job in order if job.startswith("search/mamba2")] == [] and "search/fox_pro/lr2e-3_seed0" in order
    for folder in ("runs/mamba2_seed0", "variants/hgrn2_seed0"):
        assert studies.read_run(tmp_path / "out" / folder).config["optimizer"]["lr"] == 3e-3
    assert study("--rates", "mamba2=3e-3", "--variants", "mamba2", "hgrn2")[2] == []
    # Seeds at two rates would be averaged.
    code, out, order = study("--rates", "mamba2=1e-3", "--seeds", "0", "1")
    assert (code, order) == (
        1,
        [],
    ) and "mamba2_seed0 was trained with a learning rate of 0.003, and the study now" in out


def test_variants_are_run_without_the_runs_where_all_rates_are_known(study, tmp_path):
    code, out, order = study("--no_runs", "--rates", "fox_pro=3e-3", "--variants", "fox_pro", "fox_llama", "fox_pro")
    assert code == 0, out
    # mamba2 has no variants, so nothing is searched for it.
    assert order == ["variants/fox_llama_seed0", "variants/fox_pro_seed0"] and not (tmp_path / "out/runs").exists()
    found = studies.collect(tmp_path / "out", tmp_path / "none", [], decisive)
    assert found["models"] == {} and [*found["variants"]] == ["fox_llama", "fox_pro"]
    assert found["variants"]["fox_llama"]["learning_rate"] == 3e-3


@pytest.mark.parametrize("given", [["mamba2=1e-3", "mamba2=2e-3"], ["mamba2=1e-3", "optimizer.lr=0.1"]])
def test_a_rate_is_given_once(study, given, capfd):
    rates, overrides = [one for one in given if "lr" not in one], [one for one in given if "lr" in one]
    with pytest.raises(SystemExit):
        study(*overrides, "--rates", *rates)
    assert "names a model twice" in (error := capfd.readouterr().err) or "both set the learning rate" in error


@pytest.mark.parametrize("rate", ["mamba2", "mamba2=", "mamba2=-1", "mamba2=inf", "=1e-3", "mamba2=fast"])
def test_a_known_rate_is_a_model_and_a_positive_number(study, rate):
    with pytest.raises(SystemExit):
        study("--rates", rate)


def test_started_again_it_runs_only_what_is_missing(study, faults, tmp_path):
    faults["preempt"] = "search/fox_pro/lr5e-3"
    code, out, _ = study()
    assert code == 1 and "1 job is not finished; the same command goes on with it" in out
    # One model's trouble does not keep another from being run.
    assert starts(tmp_path / "out/runs/mamba2_seed0") and not starts(tmp_path / "out/runs/fox_pro_seed0")
    del faults["preempt"]
    code, _, order = study()
    assert code == 0 and order == ["search/fox_pro/lr5e-3_seed0", "runs/fox_pro_seed0"]
    assert study()[2] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--variants hgrn2 fox_llama", "variants of hgrn2"),
        ("--rates hgrn2=1e-3", "learning rates of hgrn2: the study has the models mamba2, fox_pro"),
        ("--no_runs", "nothing left to run: none of the models has variants"),
        ("--no_runs --variants fox_pro fox_llama", "without runs the learning rates of fox_pro must be known"),
        ("--variants fox_pro no_such_experiment", "no_such_experiment"),
        ("--variants fox_pro fox_llama --variants mamba2 fox_llama", "would both write to output_dir="),
        ("--variants fox_pro fox_llama --variant train.max_tokns=4096", "train.max_tokns"),
        ("--variants fox_pro fox_llama --variants fox_pro", "--variants fox_pro names no variant"),
        ("--variants fox_pro fox_llama fox_llama", "--variants fox_pro names fox_llama twice"),
        ("--seeds 1 2 1", "seeds 1, 2, 1: at least one, each once, none negative"),
        ("--seeds -1", "seeds -1: "),
        ("seed=3 --seeds 0 1", "seed=3 and --seeds 0 1 both set the seed"),
        ("--models fox_pro mamba2 fox_pro", "--models names fox_pro twice"),
        (
            "--variants fox_pro fox_llama --variant fabric.accelerator=cuda",
            "variants/fox_llama_seed0: fabric.accelerator=cuda",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_search(study, tmp_path, arguments, message):
    """A variant starts hours after the study."""
    code, out, order = study(*arguments.split())
    assert code == 1 and message in out and not order and not (tmp_path / "out").exists()


def test_variants_of_a_model_may_be_given_in_several_lists(study, tmp_path):
    assert study("--variants", "fox_pro", "fox_llama", "--variants", "fox_pro", "fox_pro")[0] == 0
    assert {path.name for path in (tmp_path / "out/variants").iterdir()} == {"fox_llama_seed0", "fox_pro_seed0"}


def test_a_search_that_cannot_go_on_leaves_the_other_models_alone(study, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(learning_rate, "FARTHEST", 2)
    faults["diverge"] = "search/mamba2"
    code, out, order = study()
    why = "mamba2: its search stopped, and it was not run: every run diverged, down to a learning rate of 5e-4"
    assert code == 1 and why in out and why in (tmp_path / "out/study.md").read_text()
    assert order[-1] == "runs/fox_pro_seed0" and not (tmp_path / "out/runs/mamba2_seed0").exists()
    # Started again, it says the same, with nothing to run.
    code, out, order = study()
    assert code == 1 and why in out and not order


def test_seeds_add_runs_and_variants_after_all_of_the_first_and_leave_searches_alone(study, tmp_path):
    variants = ("--variants", "fox_pro", "fox_llama")
    searched = {name: [f"search/{name}/lr{rate}_seed5" for rate in ("1e-3", "2e-3", "5e-3")] for name in MODELS[3:5]}
    # What is stopped early has everything once.
    first = [
        *searched["mamba2"], "runs/mamba2_seed5", *searched["fox_pro"], "runs/fox_pro_seed5",
        "variants/fox_llama_seed5",
    ]  # fmt: skip
    second = ["runs/mamba2_seed4", "runs/fox_pro_seed4", "variants/fox_llama_seed4"]
    assert study("output_dir=at_once", *variants, "--seeds", "5", "4")[2] == [*first, *second]
    assert study(*variants, "--seeds", "5")[2] == first
    code, out, order = study(*variants, "--seeds", "5", "4")
    assert code == 0 and order == second, out
    runs = studies.runs_in(tmp_path / "out", "runs")["fox_pro"]
    assert [studies.read_run(path).config["seed"] for path in runs] == [5, 4]
    # The searches would be made again with it.
    code, out, order = study(*variants, "--seeds", "4", "5")
    assert code == 1 and "first seed: 5 -> 4" in out and not order


def test_seeds_of_different_settings_are_not_averaged(study, tmp_path):
    study("--models", "fox_pro")
    config = (tmp_path / "out/runs/fox_pro_seed0/config.yaml").read_text()
    other = tmp_path / "out/runs/fox_pro_seed1"
    shutil.copytree(tmp_path / "out/runs/fox_pro_seed0", other)
    (other / "config.yaml").write_text(config.replace("seed: 0", "seed: 1").replace("lr: 0.002", "lr: 0.005"))
    with pytest.raises(AnalysisError, match=r"fox_pro_seed0 and .*fox_pro_seed1 differ in optimizer\.lr, and seeds"):
        studies.collect(tmp_path / "out", tmp_path / "positions", decisive=decisive)


def test_what_is_kept_has_the_losses_rates_and_speeds_of_the_runs(study, faults, tmp_path):
    faults["noise"] = 0
    arguments = ("--search", "train.max_tokens=4096", "--variants", "fox_pro", "fox_pro", "fox_llama")
    assert study(*arguments, "--seeds", "0", "1")[0] == 0
    for name in ("mamba2_seed0", "fox_pro_seed0", "fox_pro_seed1"):
        folder = tmp_path / "positions" / name
        folder.mkdir(parents=True)
        slope = [
            {"position": 256, "before": 3.0, "after": 2.5, "per_doubling": -0.5, "standard_error": 0.01, "per_token": 0}
        ]
        (folder / "results.json").write_text(json.dumps({"data": "x", "slope": slope, "source": str(folder)}))
        octaves = np.full((4, 7), {"mamba2_seed0": 3.0, "fox_pro_seed0": 2.5, "fox_pro_seed1": 2.7}[name])
        octaves += np.arange(4)[:, None]
        np.savez(folder / "results.npz", **{"val/loss_per_token": np.ones(512), "val/loss_per_octave": octaves})
    row = {"status": "ok", "trained": True, "experiment": "out/runs/mamba2_seed0", "tokens_per_second": 123456.0}
    row |= {"mfu": None, "peak_memory_bytes": 0, "tokens_per_step": 1}
    (tmp_path / "speed.json").write_text(json.dumps({"rows": [row, {"status": "out of memory"}]}))
    log = tmp_path / "out/variants/fox_pro_seed1/metrics/jsonlines/val.jsonl"
    log.write_text(log.read_text().replace('"val/loss": 3.0', '"val/loss": 3.2'))
    plan = StudyPlan("demo", {"fox_pro": "FoX (Pro)", "mamba2": "Mamba-2"})
    found = studies.collect(tmp_path / "out", tmp_path / "positions", [tmp_path / "speed.json"], decisive, plan)
    found["pruned"] = {"fox_pro": {"4,096": 0.25}}
    assert json.loads(json.dumps(found)) == found
    assert str(tmp_path) not in json.dumps(found), "a report is published, and folders of this machine are not"
    runs = studies.runs_in(tmp_path / "out", "runs")
    assert {model: [path.name for path in paths] for model, paths in runs.items()} == {
        "fox_pro": ["fox_pro_seed0", "fox_pro_seed1"],
        "mamba2": ["mamba2_seed0", "mamba2_seed1"],
    }
    positions = studies.read_positions(found, tmp_path / "positions")
    studies.save_positions(positions, tmp_path / "positions.npz")
    assert set(np.load(tmp_path / "positions.npz")) >= {"fox_pro_seed1", "fox_pro_seed1/octaves"}
    tables = tables_of(found)
    fox, mamba = tables["models"][2:]
    wanted = "|FoX (Pro)|0.8M|2e-3|1.6M|2|3.0000 ± 0.0000|3.0000 ± 0.0000|20.086|||25% (4,096)|"
    assert fox == wanted.split("|")
    assert tables["models"][0][9] == "against FoX (Pro)" and mamba[9:11] == ["+0.1000 ± 0.0000", "123,456"]
    fox, llama = tables["variants"][2:]
    # Student's t of one degree of freedom, 12.706, times the standard error of the mean, 0.1.
    assert (fox[6], fox[8], llama[8]) == ("3.1000 ± 1.2706", "", "-0.1000 ± 1.2706")
    assert "a run is 0.1000 (pooled; degrees of freedom: 1; of one" in study_tables.noise(found, "variants")
    assert "**3.0000**" in tables["search"][2] and tables["search"][0][2:5] == ["1e-3", "2e-3", "5e-3"]
    assert "-0.500 ± 0.010" in tables["positions"][2] and "2.5000" in tables["octaves"][2]
    found["comparison"] = position_loss.compare([*positions.values()], 256)
    assert "| Mamba-2 | FoX (Pro) | 256 to 512 | +0.4000 ± 0.0000 |" in study_tables.comparison_table(found)


def test_seeds_that_are_not_finished_or_diverged_are_not_in_the_mean(study, faults, tmp_path):
    faults |= {"preempt": "runs/fox_pro_seed1", "diverge": "runs/fox_pro_seed2"}
    study("--models", "fox_pro", "--seeds", "0", "1", "2", "3")
    shutil.rmtree(tmp_path / "out/runs/fox_pro_seed3")
    found = studies.collect(tmp_path / "out", tmp_path / "positions", decisive=decisive)
    (row,) = tables_of(found)["models"][2:]
    assert row[4:8] == ["1.6M", "1 of 3, 1 diverged", "2.9980", "2.9980"]
    assert [run for run, _ in studies.evaluated_runs(found)] == ["fox_pro_seed0"]
    assert study_tables.missing(found)[:2] == [
        "the rest of fox_pro_seed1: 786,432 of 1,572,864 tokens are done",
        "the rest of fox_pro_seed2: which diverged",
    ]


def test_a_model_whose_only_run_is_not_finished_is_shown_with_what_it_has(study, faults, tmp_path):
    faults["preempt"] = "runs/fox_pro"
    study("--models", "fox_pro", "mamba2", "--seeds", "0", "1")
    shutil.rmtree(tmp_path / "out/runs/fox_pro_seed1")
    found = studies.collect(tmp_path / "out", tmp_path / "positions", decisive=decisive)
    fox, mamba = tables_of(found)["models"][2:]
    assert fox[4:8] == ["0.8M", "1", "4.9980", ""] and mamba[5] == "2"
    assert "fox_pro_seed1: others have a run with it" in study_tables.missing(found)


def test_a_folder_without_a_seed_in_its_name_is_refused(study, tmp_path):
    assert study("--models", "fox_pro")[0] == 0
    (tmp_path / "out/runs/fox_pro_seed0").rename(tmp_path / "out/runs/fox_pro")
    with pytest.raises(AnalysisError, match="'fox_pro' is not the name of a study's run"):
        studies.collect(tmp_path / "out", tmp_path / "positions", decisive=decisive)


def test_a_study_without_evaluation_is_collected_and_its_page_shows_the_figures_there_are(study, tmp_path, capfd):
    assert study("--search", "train.max_tokens=4096")[0] == 0
    report = report_command
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    names = [*study_tables.TABLES, "source", *(f"{name}_figure" for name in study_tables.FIGURES)]
    page.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in names))
    collect = ["collect", "out", "--data_path", "nowhere", "--position_loss", "nowhere", "--out", "report"]
    assert report.main(collect) == 0
    skipped = [line for line in capfd.readouterr().err.splitlines() if line.startswith("skipped: ")]
    assert [line.removeprefix("skipped: ").partition(":")[0] for line in skipped] == [
        "the share of tiles that is pruned", "loss at every position", "speed", "needle and tasks", "variants",
    ]  # fmt: skip
    assert all("fox_pro, mamba2" in line for line in skipped[1:4])
    assert report.main(["tables", "report", str(page)]) == 0
    shown = re.findall(r"!\[.+\]\((.+)\)", page.read_text())
    assert shown == ["../report/compare.png", "../report/search.png", "../report/differences.png"]
    assert all((page.parent / image).is_file() for image in shown)


def test_runs_of_a_grid_of_recipes_are_a_line_each(study, faults, tmp_path, capfd):
    faults["noise"] = 0
    faults["preempt"] = "runs/fox_pro_seed1"
    study("--models", "fox_pro", "--seeds", "0", "1")
    info = tmp_path / "out" / "runs" / "fox_pro_seed0" / "metrics" / "jsonlines" / "train_data_info.jsonl"
    info.write_text('{"step": 0, "fingerprint": "of the corpus"}\n')
    assert report_command.main(["recipes", "out/runs", "out/search", "--out", "recipes.jsonl"]) == 0
    assert "runs/fox_pro_seed1: not finished" in capfd.readouterr().err
    found = [json.loads(line) for line in (tmp_path / "recipes.jsonl").read_text().splitlines()]
    # 131,072 tokens of warm-up in steps of 4,096.
    assert [(one["rate"], one["warmup"], one["seed"]) for one in found] == [
        (1e-3, 32, 0), (2e-3, 32, 0), (2e-3, 32, 0), (5e-3, 32, 0),
    ]  # fmt: skip
    assert sorted(one["corpus"] or "not said" for one in found) == ["not said"] * 3 + ["of the corpus"]
    assert found[1]["heldout_loss"] == [3.0] and found[0]["heldout_loss"] == [pytest.approx(3 + 0.1 * np.log(2) ** 2)]


def test_recipes_replace_no_file_of_others_and_are_those_of_one_model(study, faults, tmp_path, capfd):
    faults["noise"] = 0
    study("--models", "fox_pro", "mamba2", "--seeds", "0")
    recipes, out = report_command.main, tmp_path / "recipes.jsonl"
    assert recipes(["recipes", "out/runs", "--out", "recipes.jsonl"]) == 1 and not out.exists()
    assert "runs/mamba2_seed0 is a run of another model than" in capfd.readouterr().err
    for others in ("my notes\n", '{"mine": 1}\n'):
        out.write_text(others)
        assert recipes(["recipes", "out/runs/fox_pro_seed0", "--out", "recipes.jsonl"]) == 1
        assert "recipes.jsonl holds something else than recipes" in capfd.readouterr().err
        assert out.read_text() == others
    out.unlink()
    for _ in range(2):
        assert recipes(["recipes", "out/runs/fox_pro_seed0", "--out", "recipes.jsonl"]) == 0
    before = out.read_text()
    faults["preempt"] = "runs/fox_pro_seed1"
    study("--models", "fox_pro", "--seeds", "0", "1")
    assert recipes(["recipes", "out/runs/fox_pro_seed1", "--out", "recipes.jsonl"]) == 1 and out.read_text() == before
    assert "error: none of the runs is finished" in capfd.readouterr().err


def test_a_second_study_is_a_second_yaml(faults, tmp_path, monkeypatch, capfd):
    """From its YAML to its page: no library code knows its models."""
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text(
        "group: demo\nmodels: {mamba2: A state space model, fox_pro: With gates}\nslowest_first: [fox_pro, mamba2]\n"
        "seeds: [0, 1]\nstart_rate: 2.0e-3\noverrides: {search: {train.max_tokens: 4096}, variants: {exp: short}}\n"
        "variants: {fox_pro: [fox_pro, fox_llama]}\nbaseline: fox_llama\n"
    )
    started = ["output_dir=out", "data_dir=data", "fabric.accelerator=cpu", "--study", "two.yaml"]
    assert run_command.main(started) == 0
    order = [line.split()[1] for line in capfd.readouterr().err.splitlines() if line.startswith("started")]
    assert order[0] == "search/fox_pro/lr1e-3_seed0" and "variants/fox_llama_seed1" in order
    report = report_command
    collect = ["collect", "out", "--data_path", "nowhere", "--position_loss", "nowhere", "--out", "report"]
    assert report.main(collect) == 0
    Path("page.md").write_text("<!-- models -->\n<!-- end of models -->\n<!-- variants -->\n<!-- end of variants -->\n")
    assert report.main(["tables", "report", "page.md"]) == 0
    rows = [line for line in Path("page.md").read_text().splitlines() if line.startswith("| ")]
    names = [row.split("|")[1].strip() for row in rows if "---" not in row]
    assert names == ["model", "A state space model", "With gates", "model", "With gates", "fox_llama"]
    assert rows[4].endswith(" against fox_llama |")


def test_a_models_run_is_its_variant_where_variants_have_no_settings_of_their_own(faults, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    plan = "group: demo\nmodels: {fox_pro: With gates}\nlearning_rates: {fox_pro: 2.0e-3}\n"
    Path("one.yaml").write_text(f"{plan}variants: {{fox_pro: [fox_llama, fox_pro]}}\nbaseline: fox_pro\n")
    started = ["data_dir=data", "fabric.accelerator=cpu", "--study", "one.yaml"]
    study, report = run_command, report_command
    collect = ["--data_path", "nowhere", "--position_loss", "nowhere", "--plan", "one.yaml"]

    def variants(*command: str) -> dict:
        assert report.main([*command, "--out", command[1] + "_report"]) == 0
        return studies.read_study(Path(command[1] + "_report"))["variants"]

    def started_by(*arguments: str) -> list[str]:
        assert study.main([*started, *arguments]) == 0
        return [line.split()[1] for line in capfd.readouterr().err.splitlines() if line.startswith("started")]

    assert started_by("output_dir=whole") == ["runs/fox_pro_seed0", "variants/fox_llama_seed0"]
    whole = variants("collect", "whole", *collect)
    assert [*whole] == ["fox_llama", "fox_pro"]  # in the order of the YAML
    # The same from two folders.
    assert started_by("output_dir=a", "--no_variants") == ["runs/fox_pro_seed0"]
    assert started_by("output_dir=b", "--no_runs") == ["variants/fox_llama_seed0"]
    assert variants("collect", "a", *collect) == {}
    assert [*variants("collect", "b", *collect)] == ["fox_llama"]
    # With settings of their own the model is run again, and stays what variants are compared with.
    short = ["--variant", "train.max_tokens=32768", "schedule.warmup_tokens=2048"]
    assert "variants/fox_pro_seed0" in started_by("output_dir=c", "--no_runs", *short)
    assert "of_run" not in variants("collect", "c", *collect)["fox_pro"]
    # Without it, a run of other settings is not put in its place.
    shutil.rmtree("c/variants/fox_pro_seed0")
    shutil.copytree("c/variants", "a/variants")
    assert [*variants("collect", "a", *collect)] == ["fox_llama"]
    shutil.rmtree("a/variants")
    variants("collect", "a", *collect)
    for part in map(Path, ("a_report/study.json", "b_report/study.json", "whole_report/study.json")):
        part.write_text(json.dumps(json.loads(part.read_text()) | {"corpus": {"fingerprint": "same"}}))
    assert variants("join", "a_report", "b_report", "--plan", "one.yaml") == whole and whole["fox_pro"]["of_run"]
    # Without a plan, what the reports say of the groups counts. What was found for one report is found again.
    assert report.main(["join", "b_report", "a_report", "--out", "again"]) == 0
    assert studies.read_study(Path("again"))["variants"] == whole
    assert report.main(["join", "a_report", "a_report", "--out", "twice"]) == 1
    assert "names a report twice" in capfd.readouterr().err


def test_the_first_seed_is_the_plans_where_nothing_was_searched(study, tmp_path):
    assert study("--rates", "mamba2=2e-3", "fox_pro=2e-3", "--seeds", "1", "0")[0] == 0
    row = {"status": "ok", "trained": True, "experiment": "out/runs/mamba2_seed1", "tokens_per_second": 5.0}
    row |= {"mfu": None, "peak_memory_bytes": 0, "tokens_per_step": 1}
    (tmp_path / "speed.json").write_text(json.dumps({"rows": [row]}))
    plan = StudyPlan("demo", {"fox_pro": "FoX (Pro)", "mamba2": "Mamba-2"}, seeds=[1, 0])
    found = studies.collect(tmp_path / "out", tmp_path / "none", [tmp_path / "speed.json"], decisive, plan)
    assert found["models"]["mamba2"]["seeds"] == [1, 0] and found["speed"]["mamba2"]["tokens_per_second"] == 5.0


def test_what_the_user_keeps_in_the_folder_of_a_study_stays(faults, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "two.yaml"
    plan.write_text("group: demo\nmodels: {mamba2: A}\nlearning_rates: {mamba2: 2.0e-3}\n")
    out = tmp_path / "out"
    out.mkdir()
    started = ["output_dir=out", "data_dir=data", "fabric.accelerator=cpu", "--study"]
    run = run_command.main
    for name in ("study.md", "study.yaml"):
        (out / name).write_text("# My own\n")
        assert run([*started, str(plan)]) == 1 and (out / name).read_text() == "# My own\n"
        assert f"{name} is not as studies/run.py has written it" in capfd.readouterr().err
        assert not (out / "runs").exists()
        (out / name).unlink()
    assert run([*started, str(plan)]) == 0 and (out / "study.yaml").read_bytes() == plan.read_bytes()
    # The copy may be given too.
    assert run([*started, "out/study.yaml"]) == 0 and (out / "study.md").read_text().startswith("| job ")
    plan.write_text(plan.read_text().replace("A", "Another name"))
    assert run([*started, str(plan)]) == 0 and (out / "study.yaml").read_bytes() == plan.read_bytes()
