"""A study whose parts were made at several times is, joined, the study made at once."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError, position_loss
from studies import report as report_command
from studies.engine import parts as study_parts
from studies.engine import tables as study_tables
from studies.engine.parts import _BY_SEED
from studies.engine.results import read_study
from tests.sweep.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

STUDY = ROOT / "studies" / "three_seeds"


def part_of(models, seeds, variants=False) -> dict:
    """The committed study, as if only these models and seeds had been run, and variants or none."""
    study = json.loads((STUDY / "study.json").read_text(encoding="utf-8"))
    part = copy.deepcopy(study) | {"changes": [], "comparison": []}
    for key in ("models", "pruned", "pruning_loss"):
        part[key] = {name: value for name, value in part[key].items() if name in models}
    for key in ("scores", "needles"):
        asked = {name: {f"{name}_seed{seed}" for seed in seeds} & {*part[key].get(name, {})} for name in models}
        part[key] = {name: {run: part[key][name][run] for run in runs} for name, runs in asked.items() if runs}
    for name, model in part["models"].items():
        kept = [model["seeds"].index(seed) for seed in seeds]
        part["models"][name] = {k: [v[i] for i in kept] if k in _BY_SEED else v for k, v in model.items()}
    # A model among its own variants is its run.
    for name in study["variants"]:
        if name in part["models"]:
            part["variants"][name] = part["models"][name]
        elif name in study["models"] or not variants:
            del part["variants"][name]
    for name, losses in part["pruning_loss"].items():
        part["pruning_loss"][name] = {which: [values[i] for i in seeds] for which, values in losses.items()}
    return part


def write(folder: Path, part: dict) -> str:
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps(part), encoding="utf-8")
    shutil.copyfile(STUDY / "study.yaml", folder / "study.yaml")
    runs = {f"{name}_seed{seed}" for name, model in part["models"].items() for seed in model["seeds"]}
    with np.load(STUDY / "positions.npz") as arrays:
        np.savez(folder / "positions.npz", **{k: arrays[k] for k in arrays if k.partition("/")[0] in runs})
    return str(folder)


def test_parts_by_model_and_by_seed_give_the_tables_of_the_whole(tmp_path, capfd):
    models = [*json.loads((STUDY / "study.json").read_text(encoding="utf-8"))["models"]]
    reports = [
        write(tmp_path / "first", part_of(models[3:], [0, 1, 2])),
        write(tmp_path / "second", part_of(models[:3], [0])),
        write(tmp_path / "third", part_of(models[:3], [1, 2])),
        write(tmp_path / "fourth", part_of([], [], variants=True)),
    ]
    joined = tmp_path / "joined"
    report = report_command
    # In two steps: what was joined can be joined again.
    assert report.main(["join", *reports[:2], "--out", str(tmp_path / "two")]) == 0
    plan = ["--plan", str(STUDY / "study.yaml")]
    assert report.main(["join", str(tmp_path / "two"), *reports[2:], *plan, "--out", str(joined)]) == 0
    found, whole = read_study(joined), read_study(STUDY)
    assert [*found["models"]] == models
    for name, table in study_tables.TABLES.items():
        assert table(found) == table(whole), name
    assert found["needles"] == whole["needles"] and [*found["needles"]] == [*whole["needles"]]
    for kind in ("models", "variants"):
        assert study_tables.noise(found, kind) == study_tables.noise(whole, kind)
    with np.load(joined / "positions.npz") as ours, np.load(STUDY / "positions.npz") as theirs:
        assert {*ours} == {*theirs} and all(np.array_equal(ours[key], theirs[key]) for key in ours)
    figures = {file.name for file in joined.glob("*.png")}
    assert figures == {"octaves.png", "differences.png", "heads.png", "per_token_loss.png", "search.png", "needle.png"}
    assert "claims:" in capfd.readouterr().out


def test_a_figure_of_several_seeds_names_none_of_them(tmp_path):
    folder = Path(write(tmp_path / "report", part_of(["fox_pro"], [0, 1, 2])))
    study = read_study(folder)
    results = study_parts.read_positions({folder: study}, study)
    assert {run: result.summary["seed"] for run, result in results.items()} == {f"fox_pro_seed{s}": s for s in range(3)}
    made_with = position_loss.made_with([result.summary for result in results.values()])
    assert "after 33,554,432 training tokens" in made_with and not [one for one in made_with if "seed" in one]


def test_names_are_those_of_every_part_or_of_the_plan(tmp_path):
    reports = [write(tmp_path / "a", part_of(["fox_pro"], [0, 1])), write(tmp_path / "b", part_of(["mamba2"], [0, 1]))]
    for report, plan in zip(reports, ("{fox_pro: FoX}", "{mamba2: Mamba}"), strict=True):
        (Path(report) / "study.yaml").write_text(f"group: study\nmodels: {plan}\n", encoding="utf-8")
    plan = tmp_path / "plan.yaml"
    plan.write_text("group: study\nmodels: {fox_pro: With gates, mamba2: State space}\n", encoding="utf-8")
    join = report_command.main
    for out, options, names in (
        ("own", [], ("FoX", "Mamba")),
        ("plan", ["--plan", str(plan)], ("With gates", "State space")),
    ):
        assert join(["join", *reports, "--out", str(tmp_path / out), *options]) == 0
        joined = read_study(tmp_path / out)
        assert joined["names"] == dict(zip(("fox_pro", "mamba2"), names, strict=True))
        assert {(row["model"], row["against"]) for row in joined["comparison"]} == {names[::-1]}


def test_a_report_without_loss_by_position_leaves_no_old_figure_of_it(tmp_path, capfd):
    report, out = write(tmp_path / "a", part_of(["fox_pro", "mamba2"], [0])), tmp_path / "joined"
    plan = ["--plan", str(STUDY / "study.yaml")]
    join = report_command.main
    assert join(["join", report, *plan, "--out", str(out)]) == 0 and (out / "per_token_loss.png").is_file()
    (out / "memory.png").write_bytes(b"another command's")
    (Path(report) / "positions.npz").unlink()
    assert join(["join", report, *plan, "--out", str(out)]) == 0
    assert f"loss at every position of {report}: its positions.npz is not there" in capfd.readouterr().err
    assert not {"per_token_loss.png", "octaves.png", "positions.npz"} & {file.name for file in out.iterdir()}
    assert (out / "memory.png").is_file()


def test_losses_by_position_of_another_study_are_noticed(tmp_path, capfd):
    report = Path(write(tmp_path / "a", part_of(["fox_pro"], [0])))
    with np.load(report / "positions.npz") as arrays:
        np.savez(report / "positions.npz", **{key: arrays[key] + 0.1 for key in arrays if "/" not in key})
    assert report_command.main(["join", str(report), "--out", str(tmp_path / "b")]) == 1
    assert "is not of the study.json beside it: fox_pro_seed0 has a mean loss of" in capfd.readouterr().err


def test_a_plan_that_lies_where_a_study_is_joined_is_not_taken_for_its_own(tmp_path, capfd):
    report, out = write(tmp_path / "a", part_of(["fox_pro"], [0])), tmp_path / "joined"
    out.mkdir()
    (out / "study.yaml").write_text("group: study\nmodels: {fox_pro: Mine}\n", encoding="utf-8")
    join = report_command.main
    assert join(["join", report, "--out", str(out)]) == 1
    assert "would be read as that of the joined study; give it as --plan" in capfd.readouterr().err
    assert [file.name for file in out.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is no study: it lacks models, variants"),
        ("[]", "is no study"),
        ("{", "not valid JSON"),
        (None, "no report"),
    ],
)
def test_what_is_no_study_is_one_line(tmp_path, capfd, content, said):
    if content is not None:
        (tmp_path / "study.json").write_text(content, encoding="utf-8")
    for command in (["figures", str(tmp_path)], ["join", str(tmp_path), "--out", str(tmp_path / "out")]):
        assert report_command.main(command) == 1
        error = capfd.readouterr().err
        assert said in error and error.count("\n") == 1


def change(part: dict, key: str, value) -> dict:
    part["models"]["fox_pro"][key] = value
    return part


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: part_of(["fox_pro"], [1, 2]), "has fox_pro with seed 1, and so has an earlier report"),
        (lambda: change(part_of(["fox_pro"], [2]), "learning_rate", 1e-3), "with learning_rate 0.001 and not 0.002"),
        (lambda: part_of(["mamba2"], [0]) | {"corpus": {"fingerprint": "x"}}, "is of another corpus than"),
        (lambda: part_of(["mamba2"], [0]) | {"corpus": {}}, "does not say on which corpus it was made"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path, capfd, other, message):
    reports = [write(tmp_path / "a", part_of(["fox_pro"], [0, 1])), write(tmp_path / "b", other())]
    out = tmp_path / "joined"
    assert report_command.main(["join", *reports, "--out", str(out)]) == 1
    error = capfd.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1 and not out.exists()


def test_runs_that_were_made_again_count_once_and_bring_what_was_missing(tmp_path):
    first, again = part_of(["fox_pro", "mamba2"], [0, 1, 2]), part_of(["fox_pro"], [0])
    del first["models"]["fox_pro"]["per_token_loss"]
    first["scores"], first["needles"] = {}, {}
    again["scores"] = {"fox_pro": {"fox_pro_seed0": {"needle": {"easy": 0.5}}}}
    again["needles"] = {"fox_pro": {"fox_pro_seed0": {"easy": {"words": [[0.5]]}}}}
    found = study_parts.join({"first": first, "again": again})
    fox = found["models"]["fox_pro"]
    assert fox["seeds"] == [0, 1, 2] and fox["heldout_loss"] == first["models"]["fox_pro"]["heldout_loss"]
    assert fox["per_token_loss"] == again["models"]["fox_pro"]["per_token_loss"]
    assert found["scores"] == again["scores"] and found["needles"] == again["needles"]
    first["needles"] = {"fox_pro": {"fox_pro_seed0": {"standard": {"words": [[0.25]]}}}}
    both = study_parts.join({"first": first, "again": again})["needles"]["fox_pro"]["fox_pro_seed0"]
    assert both == {"standard": {"words": [[0.25]]}, "easy": {"words": [[0.5]]}}
    assert found["pruning_loss"]["fox_pro"] == first["pruning_loss"]["fox_pro"]
    again["models"]["fox_pro"]["heldout_loss"][0] += 1e-9
    with pytest.raises(AnalysisError, match="again has fox_pro with seed 0, and so has an earlier report"):
        study_parts.join({"first": first, "again": again})


def test_a_report_is_not_joined_into_itself(tmp_path, capfd):
    reports = [write(tmp_path / "a", part_of(["fox_pro"], [0])), write(tmp_path / "b", part_of(["fox_pro"], [1]))]
    assert report_command.main(["join", *reports, "--out", reports[0]]) == 1
    assert "is one of the reports" in capfd.readouterr().err
    assert [*read_study(tmp_path / "a")["models"]["fox_pro"]["seeds"]] == [0]


def test_figures_of_a_joined_study_name_the_machines_of_all_parts():
    parts = {name: part_of([model], [0]) for name, model in (("first", "fox_pro"), ("second", "mamba2"))}
    for part, machine, rates in zip(parts.values(), ("H200", "H100"), ("1e-3, 2e-3", "1e-2"), strict=True):
        del part["parts"], part["models"]["fox_pro" if machine == "H200" else "mamba2"]["machines"]
        part["environment"] = {"machine": {"device": machine}}
        part["search_made_with"] = ["python_code", f"learning rate {rates}", "seed 0", f"on {machine}"]
    joined = study_parts.join(parts)
    assert joined["search_made_with"] == ["python_code", "seed 0", "on H200, H100"]
    again = study_parts.join({"joined": joined, "second": parts["second"]})
    assert again["search_made_with"] == joined["search_made_with"]
    made_on = report_command.made_on
    for study in (joined, again):
        assert made_on(study, study["models"].values()) == ["on H200, H100"]
        assert made_on(study, [study["models"]["mamba2"]]) == ["on H100"]
    assert made_on(parts["second"], parts["second"]["models"].values()) == ["on H100"]


def test_a_difference_on_the_same_questions_is_kept_where_it_holds_for_the_joined_study():
    """A part has the scores of its own runs alone, and may have another baseline."""

    def asked(models: list[str], seeds: list[int], value: float) -> dict:
        part = part_of(models, seeds) | {"baseline": "fox_pro"}
        part["scores"] = {m: {f"{m}_seed{s}": {"next_line/acc": 50.0} for s in seeds} for m in models}
        apart = {"value": value, "half_width": 1.0, "questions": 9, "seeds": len(seeds)}
        others = models[1:]
        return part | {"score_differences": {model: {"next_line/acc": apart} for model in others}}

    whole = asked(["fox_pro", "hgrn2"], [0], -9.0)
    other = asked(["mamba2", "delta_net"], [0], 5.0)  # whose own baseline is Mamba-2
    found = study_parts.join({"whole": whole, "other": other})["score_differences"]
    assert found == whole["score_differences"]
    second = asked(["fox_pro", "hgrn2"], [1], 5.0)
    assert study_parts.join({"whole": whole, "second": second})["score_differences"] == {}, "of one seed each"
    # A report of the same run that was asked for other things takes nothing away.
    needle = part_of(["fox_pro", "hgrn2"], [0])
    needle["scores"] = {m: {f"{m}_seed0": {"needle/easy/within/words": 5.0}} for m in ("fox_pro", "hgrn2")}
    found = study_parts.join({"needle": needle, "whole": whole})
    assert found["score_differences"] == whole["score_differences"]
