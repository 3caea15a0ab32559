"""studies/pages.py: what pages say of measurements is what files in the repository say."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from studies import pages as pages_command

ROOT = Path(__file__).parents[2]
PAGES_WITH_MARKS = [
    path.relative_to(ROOT).as_posix()
    for path in [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("eval/**/*.md"),
        *ROOT.glob("studies/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
    if re.search(r"<!-- end\b", path.read_text(encoding="utf-8"))
]
RESULTS = [
    *ROOT.glob("benchmarks/results/*.json"),
    *ROOT.glob("studies/*/[!.]*.json"),
    *ROOT.glob("eval/*/example_results.json"),
]


@pytest.fixture(scope="module")
def pages():
    return pages_command


def test_pages_say_what_the_files_say(pages, capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().err
    assert sorted(pages.PAGES) == sorted(PAGES_WITH_MARKS)


@pytest.mark.parametrize("folder", ["studies", "benchmarks", "scripts", "eval"])
def test_a_file_hides_no_module_from_python_that_is_started_beside_it(folder):
    """As numbers.py did, without which numpy cannot be imported."""
    files = [file for file in (ROOT / folder).rglob("*.py") if not (file.parent / "__init__.py").exists()]
    assert files and not [file for file in files if file.stem in sys.stdlib_module_names]


def test_a_number_that_is_typed_into_a_page_is_noticed(pages, monkeypatch, capsys):
    read, rows = pages.read, json.loads((ROOT / "benchmarks/results/authors_760m.json").read_text())["rows"]
    right = f"{rows[0]['tokens_per_second']:,.0f}"
    monkeypatch.setattr(pages, "read", lambda page: read(page).replace(right, f"{right[:-1]}x"))
    assert pages.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "README.md differs from the files of results; run python -m studies.pages" in said
    assert "docs/performance.md" in said and "studies/seven_models/README.md" not in said


@pytest.fixture
def copy(pages, monkeypatch, tmp_path):
    """A copy of the repository's pages and results, which the script works on; the folder."""
    for folder in ("benchmarks/results", "docs", "eval", "studies"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages.tables, "RESULTS", tmp_path / "benchmarks" / "results")
    return tmp_path


def change(file: Path, edit) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.slow
def test_a_new_measurement_changes_the_pages_that_show_it(pages, copy, capsys):
    def edit(content):
        next(row for row in content["rows"] if row["code"] == "ours")["tokens_per_second"] = 512_345.0

    change(copy / "benchmarks/results/authors_760m.json", edit)
    assert pages.main(["--check"]) == 1 and "docs/performance.md" in capsys.readouterr().err
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
    assert all("512,345" in (copy / page).read_text() for page in ("README.md", "docs/performance.md"))
    change(
        copy / "studies/seven_models/study.json", lambda study: study["models"]["fox_llama"].update(heldout_loss=[1.0])
    )
    assert pages.main([]) == 0
    assert ">0.23<" not in (copy / "studies/seven_models/README.md").read_text()


def test_another_triton_adds_rows_and_a_column(pages, copy):
    folder = copy / "benchmarks/results"
    content = json.loads((folder / "attention_triton_3.6.0.json").read_text())
    content["environment"]["versions"]["triton"] = "3.10.1"
    content.pop("source", None)
    content["environment"]["commit"] = "0123456789"
    for row in content["rows"]:
        row["speedup"] = 7.77
    (folder / "attention_triton_3.10.1.json").write_text(json.dumps(content))
    assert pages.main([]) == 0
    page = (copy / "docs/performance.md").read_text()
    rows = [
        [c.strip() for c in line.split("|")[1:4]]
        for line in page.splitlines()
        if re.match(r"\| 1,16384,24,64 +\|", line)
    ]
    assert [row[2] for row in rows if row[1] == "forgetting attention"] == ["3.6.0", "3.7.1", "3.9.0", "3.10.1"]
    assert [row[2] for row in rows if row[1] == "cuDNN, no gate"] == [""], "it does not depend on Triton"
    assert (
        re.search(r"speed-up, Triton 3\.9\.0 +\| +speed-up, Triton 3\.10\.1", page)
        and "Triton 3.10.1, fla-core 0.6.0" in page
    )


def test_a_missing_file_is_named(pages, copy, capsys):
    (copy / "benchmarks/results/decode.json").unlink()
    assert pages.main(["--check"]) == 1
    assert "decode*.json: no such file of results" in capsys.readouterr().err


@pytest.mark.parametrize("losses", [None, [1.0, None, 2.0]])
def test_a_study_that_is_not_finished_is_named_and_changes_no_page(pages, copy, capsys, losses):
    def edit(study):
        if losses is None:
            study["models"].pop("fox_llama")
        else:
            study["models"]["fox_llama"]["heldout_loss"] = losses

    change(copy / "studies/three_seeds/study.json", edit)
    assert pages.main([]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "study.json lacks held-out losses of fox_llama: finish the study first" in error


@pytest.mark.parametrize("page", PAGES_WITH_MARKS)
def test_no_line_begins_with_a_number_in_marks(page):
    """Markdown would take the line for HTML, and show what else is on it as it is written."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.findall(r"^\s*(?:[-*] +)?<!-- \w+ -->.*<!-- end -->.*", text, re.MULTILINE)


MEASURED = r"\d(?:[\d,.]*\d)?\s*(?:tokens/s|TFLOP/s|ms\b|µs|GB\b|nats|%|seconds|s\b|times\b)"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_number_with_the_unit_of_a_measurement_is_in_marks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+) -->(?:\n.*?<!-- end of \1 -->|[^\n]*?<!-- end -->)", "", text, flags=re.DOTALL)
    assert not re.findall(rf".*{MEASURED}.*", text)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_file_of_results_says_how_it_was_made_and_names_no_machine(file):
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    place = content["environment"]
    assert place["versions"] is not None and (place.get("hardware") or place.get("machine"))
    assert re.match(r"20\d\d-\d\d-\d\d", place.get("date") or content["started"])
    # What a benchmark wrote knows its commit (BENCHMARK_COMMIT says it in a copy without .git); else `source` tells.
    assert place["commit"] or "source" in content
    assert not re.search(r"(?<![\w.…])/(?:tmp|root|home|work|mnt|var)/", text) and '"host":' not in text


def test_recipes_of_the_study_are_compared_by_how_far_their_seeds_are_apart(tmp_path):
    recipes = runpy.run_path(str(ROOT / "studies/seven_models/page.py"))["recipes"]
    assert recipes(tmp_path / "recipes.jsonl") == "Not run yet."
    runs = [
        {"rate": rate, "warmup": 16, "seed": seed, "heldout_loss": [3.0 + rate * seed], "train_loss": [3.1]}
        for rate in (1e-3, 2e-3)
        for seed in (0, 100, 200)
    ]
    (tmp_path / "recipes.jsonl").write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    first, second = recipes(tmp_path / "recipes.jsonl").splitlines()[2:]
    # Chi-squared of two degrees of freedom: 7.378 and 0.0506 at 97.5 and 2.5 %.
    assert "3.1000 ± 0.2484 |   0.1000 (0.0521 to 0.6285) |" in first and "+0.000" in first
    assert "0.2000 (0.1041 to 1.2569)" in second and "+0.100" in second
    # One seed says nothing of how far runs are apart.
    (tmp_path / "recipes.jsonl").write_text(f"{json.dumps(runs[-1])}\n")
    (only,) = recipes(tmp_path / "recipes.jsonl").splitlines()[2:]
    assert [cell.strip() for cell in only.split("|")[1:-1]] == ["2e-3", "16", "1", "3.4000", "–", "+0.300"]


def test_steps_that_did_not_fit_are_rows_and_break_no_page(pages, tmp_path, monkeypatch):
    """As on a GPU with less memory: such rows have an experiment and a status."""
    tables = pages.tables
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in ("steps_760m", "graphs_two_sequences"):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        row = content["rows"][0]
        lost = {"experiment": content["rows"][1]["experiment"], "checkpointing": False, "status": "out of memory"}
        (tmp_path / f"{name}.json").write_text(json.dumps({**content, "rows": [{**row, "status": "ok"}, lost]}))
        table = tables.steps if name == "steps_760m" else tables.graphs
        lines = table(tables.Results(f"{name}.json")).splitlines()[2:]
        assert len(lines) == 2 and sum("out of memory" in line for line in lines) == 1


def test_a_row_is_called_after_the_model_that_was_measured(pages, tmp_path, monkeypatch):
    """Gated DeltaNet has no experiment of its own: it was called DeltaNet, at two thirds of its speed."""
    tables = pages.tables
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    content = json.loads((ROOT / "benchmarks/results/steps_760m_gated_delta_net.json").read_text())
    assert content["rows"][0]["experiment"] == "delta_net/760m_16b"
    (tmp_path / "steps_760m.json").write_text(json.dumps(content))
    lost = {"experiment": "delta_net/760m_16b", "checkpointing": False, "status": "out of memory"}
    (tmp_path / "steps_760m_lost.json").write_text(json.dumps({**content, "rows": [lost]}))
    rows = cells_of(tables.steps(tables.Results("steps_760m*.json")))
    assert [row[0] for row in rows] == ["Gated DeltaNet, CUDA graphs"] * 2


def test_other_packages_stand_beside_our_steps_of_the_same_commit_and_gpu(pages, tmp_path, monkeypatch):
    tables = pages.tables
    theirs = json.loads((ROOT / "benchmarks/results/peers_760m.json").read_text())
    ours = json.loads((ROOT / "benchmarks/results/steps_760m_models.json").read_text())
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    older = {**ours, "environment": ours["environment"] | {"commit": "0" * 40}}
    for name, content in (("peers", theirs), ("steps_1", ours), ("steps_2", older)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    peers, steps = tables.Results("peers.json"), tables.Results("steps_*.json")
    rows = [row[:2] for row in cells_of(tables.peers(peers, steps))]
    fla = "flash-linear-attention"
    expected = [["HGRN2", "ours"], ["HGRN2", fla], ["DeltaNet", "ours"], ["DeltaNet", fla], ["Gated DeltaNet", fla]]
    assert rows == expected
    # Those that peers.py measured itself are not doubled.
    own = dict(theirs["rows"][0], code="ours")
    (tmp_path / "peers.json").write_text(json.dumps({**theirs, "rows": [*theirs["rows"], own]}))
    assert [row[:2] for row in cells_of(tables.peers(tables.Results("peers.json"), steps))] == expected


def test_rows_of_several_gpus_tell_their_cases_apart(pages, tmp_path, monkeypatch):
    """As measure.py has them: on 2 and on 4 GPUs, without pruning, and with another launcher."""
    tables = pages.tables
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    unpruned = {"overrides": ["model.config.log_pruning_tolerance=null"]}
    for name, table, other, told in (
        ("scaling_760m_2_gpus", tables.scaling, unpruned, (0, "FoX (Pro) 760M, no pruning")),
        ("start_760m_2_gpus", tables.starts, {"launcher": "launch.py"}, (1, "2 with launch.py")),
    ):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        content["rows"] = content["rows"][:1]
        for number, settings in enumerate(({}, {"devices": 4}, other)):
            changed = content | {"settings": content["settings"] | settings}
            (tmp_path / f"{name}_{number}.json").write_text(json.dumps(changed))
        two, four, last = cells_of(table(tables.Results(f"{name}*.json")))
        assert (two[1], four[1]) in (("2", "4"), ("1 of 2", "1 of 4")) and last[told[0]] == told[1]


def test_what_did_not_fit_on_several_gpus_is_a_row_of_its_table(pages, tmp_path, monkeypatch):
    """Beside what was measured, which has what it had without such rows."""
    tables = pages.tables
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name, table in (("scaling_125m_2_gpus", tables.scaling), ("start_760m_2_gpus", tables.starts)):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        before = cells_of(table(tables.Results(f"{name}.json")))
        lost = {key: content["rows"][0].get(key) for key in ("experiment", "case", "micro_batches", "caches")}
        content["rows"].append({**lost, "status": "out of memory"})
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        *after, last = cells_of(table(tables.Results(f"{name}.json")))
        assert after == before and last.count("out of memory") == 1 and last[:3] == before[0][:3]


def test_pages_show_no_figures_that_are_not_there():
    for page in [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("eval/**/*.md"),
        *ROOT.glob("studies/**/*.md"),
    ]:
        for image in re.findall(r"!\[[^\]]*\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / image).is_file(), f"{page} shows {image}"


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
