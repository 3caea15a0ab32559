"""The search of the paper: on the grid, until the best rate is strictly inside, and it can be stopped and added to."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.learning_rate import (
    GridSearch,
    check_overrides,
    grid_text,
    grid_value,
    nearest_grid_index,
)
from tests.sweep.conftest import DEMO, load_script, starts

pytestmark = pytest.mark.slow

sweep_lr = load_script("sweep_lr")


@pytest.fixture
def search(faults, tmp_path, capsys):
    """Runs scripts/sweep_lr.py and returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = sweep_lr.main([*DEMO, f"output_dir={tmp_path / 'sweep'}", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def runs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "sweep").glob("*seed*"))


def rows(markdown: str) -> dict[str, list[str]]:
    """Cells of a one-dimensional search's table by learning rate."""
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if "e-" in line]
    return {cells[0]: cells for cells in lines if len(cells) > 2}


def test_the_grid_is_one_two_five_of_every_power_of_ten():
    assert [grid_text(i) for i in range(-4, 3)] == ["5e-2", "1e-1", "2e-1", "5e-1", "1e0", "2e0", "5e0"]
    for rate, nearest in [(1e-3, 1e-3), (3e-3, 2e-3), (3.3e-3, 5e-3), (7.5e-4, 1e-3), (6.9e-4, 5e-4), (9.9e-10, 1e-9)]:
        assert grid_value(nearest_grid_index(rate)) == nearest
    for rate in (0.0, -1e-3, math.nan, math.inf):
        with pytest.raises(SweepError, match="cannot be the start of a search"):
            nearest_grid_index(rate)


@pytest.mark.parametrize("optimum", [1e-5, 1e-3, 1.4e-3, 3e-2])
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_search_ends_with_the_best_rate_strictly_inside_and_no_run_too_many(optimum, seeds):
    search, made = GridSearch(nearest_grid_index(1e-3), seeds), []
    while todo := search.needed():
        for index, seed in todo:
            made.append((index, seed))
            search.losses[index, seed] = abs(math.log(grid_value(index) / optimum)) + 0.01 * seed
    assert abs(math.log(grid_value(search.best) / optimum)) < math.log(2)
    assert {search.best - 1, search.best + 1} <= set(search.indices)
    assert len(set(made)) == len(made)
    assert len(made) == len(search.indices) + 3 * (len(seeds) - 1), "other seeds only at the best and its neighbours"
    # From one side to the other: nothing beyond the guess's neighbour and the optimum's.
    assert len(search.indices) <= abs(search.start - search.best) + 3


def test_a_seed_that_changes_the_best_rate_moves_the_search():
    search = GridSearch(0, (0, 1))
    losses = {0: [1.0, 2.0], 1: [1.1, 1.1], -1: [1.5, 1.5], 2: [1.4, 1.4]}
    while todo := search.needed():
        for index, seed in todo:
            search.losses[index, seed] = losses[index][seed]
    assert search.best == 1 and search.indices == [-1, 0, 1, 2]


def test_diverged_rates_are_worse_than_any_and_an_endless_slope_is_given_up():
    search = GridSearch(0, (0,))
    while todo := search.needed():
        search.losses |= {key: math.inf if key[0] > -3 else abs(key[0] + 4) for key in todo}
    assert search.best == -4
    search = GridSearch(0, (0,))
    with pytest.raises(SweepError, match="the loss still falls at a learning rate of 1e4; the guess was 1e0"):
        while todo := search.needed():
            search.losses |= {key: -key[0] for key in todo}


def test_rates_that_are_as_good_as_the_best_have_a_worse_one_on_either_side():
    losses = {-2: 3.0, -1: 1.0, 0: 1.0, 1: 1.0, 2: 2.0}
    for start in (-1, 0, 1):
        search = GridSearch(start, (0,))
        while todo := search.needed():
            search.losses |= {key: losses[key[0]] for key in todo}
        assert search.best == -1 and search.indices == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (math.inf, "every run diverged, down to a learning rate of 1e-4"),
        (3.0, "the loss is the same at all learning rates from 1e-4 to"),
    ],
)
def test_a_search_without_a_best_rate_says_why(loss, why):
    search = GridSearch(0, (0,))
    with pytest.raises(SweepError, match=why):
        while todo := search.needed():
            search.losses |= dict.fromkeys(todo, loss)


@pytest.mark.quick
def test_the_script_finds_the_rate_and_writes_a_table_and_a_figure(search, tmp_path):
    code, out, err = search("--guess", "1e-2")
    assert code == 0 and "best: optimizer.lr=2e-3, strictly inside the grid" in out
    assert runs(tmp_path) == [f"lr{rate}_seed0" for rate in ("1e-2", "1e-3", "2e-2", "2e-3", "5e-3")]
    table = rows(out)
    assert list(table) == ["1e-3", "2e-3", "5e-3", "1e-2", "2e-2"]
    assert table["2e-3"][1] == "2.9980" and table["2e-3"][-1] == "best"
    assert table["1e-3"][1] == f"{2.998 + 0.1 * math.log(2) ** 2:.4f}"
    assert table["1e-3"][-2] == f"+{0.1 * math.log(2) ** 2:.4f}"
    assert "one seed: how much of these differences is noise is unknown" in err
    assert rows((tmp_path / "sweep/sweep.md").read_text()) == table
    assert (tmp_path / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_started_again_it_makes_only_what_is_missing(search, faults, tmp_path):
    faults["fail"] = "lr5e-3"
    code, out, err = search("--guess", "2e-3")
    assert code == 1 and "RuntimeError: the GPU fell off the bus" in out and "not complete" in err
    assert runs(tmp_path) == ["lr1e-3_seed0", "lr2e-3_seed0", "lr5e-3_seed0"], "the others still ran"
    del faults["fail"]
    code, out, _ = search("--guess", "2e-3")
    assert code == 0 and "best: optimizer.lr=2e-3" in out
    assert [len(starts(tmp_path / "sweep" / name)) for name in runs(tmp_path)] == [1, 1, 2]
    # More seeds, another guess: added to what is there.
    code, out, _ = search("--guess", "5e-3", "--seeds", "0,1,2")
    assert code == 0 and [cells[3] for cells in rows(out).values()] == ["3", "3", "3", "1"]
    assert [len(starts(tmp_path / "sweep" / f"lr{rate}_seed0")) for rate in ("1e-3", "2e-3", "5e-3")] == [1, 1, 2]


def test_started_again_with_other_settings_it_says_what_differs_and_changes_nothing(search, tmp_path):
    assert search()[0] == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, _, err = search("train.max_tokens=819200", "optimizer.weight_decay=0.2")
    assert code == 1 and "holds a sweep with other settings" in err
    assert "optimizer.weight_decay: 0.1 -> 0.2" in err and "train.max_tokens: 1572864 -> 819200" in err
    code, _, err = search("resume=false")
    assert code == 1 and "choose another output_dir" in err
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code = sweep_lr.main([*DEMO, f"output_dir={tmp_path / 'sweep/lr2e-3_seed0'}"])
    assert code == 1, "a folder with something else in it"


def test_head_dimensions_are_searched_around_one_after_another(search, tmp_path):
    """Hidden size 128: dimension 64 is two heads, which the stand-in likes, and 32 four."""
    code, out, _ = search("--head_dims", "32,64", "--guess", "1e-2")
    assert code == 0 and "best: optimizer.lr=2e-3 with head dimension 64, strictly inside" in out
    assert len([name for name in runs(tmp_path) if name.startswith("head_dim32_")]) == 5
    around_the_best = [f"head_dim64_lr{rate}_seed0" for rate in ("1e-3", "2e-3", "5e-3")]
    assert [name for name in runs(tmp_path) if name.startswith("head_dim64_")] == around_the_best
    code, _, err = search("--head_dims", "48")
    assert code == 1 and "--head_dims 48 does not divide model.config.hidden_size=128" in err
    code, _, err = search("--head_dims", "64", "model=mamba2")
    assert code == 1 and "does not choose its head dimension by model.config.num_heads" in err


def test_diverged_runs_count_as_worst_and_are_not_started_again(search, faults, tmp_path):
    faults["diverge"] = "lr5e-3"
    for _ in range(2):
        code, out, _ = search()
        assert code == 0 and "best: optimizer.lr=2e-3" in out and "seed 0 diverged" in rows(out)["5e-3"][-1]
    assert len(starts(tmp_path / "sweep/lr5e-3_seed0")) == 1


def test_a_hopeless_run_is_ended_early_if_asked(search, faults, tmp_path):
    faults["bad"] = "lr5e-3"
    code, out, _ = search("--hopeless", "0.5")
    assert code == 0 and "best: optimizer.lr=2e-3" in out
    note = rows(out)["5e-3"][-1]
    assert "seed 0 ended early: training loss" in note and "where the best run had" in note
    lines = (tmp_path / "sweep/lr5e-3_seed0/metrics/jsonlines/train.jsonl").read_text().splitlines()
    assert 3 <= len(lines) < 10, "not before a quarter of the budget, and not at its end"
    assert search("--hopeless", "0.5")[0] == 0 and len(starts(tmp_path / "sweep/lr5e-3_seed0")) == 1


def test_a_best_rate_within_seed_noise_of_its_neighbour_is_called_that(search, faults, tmp_path):
    code, _, err = search("--seeds", "0,1,2")
    assert code == 0 and "warning" not in err, "0.05 nats apart at a noise of 0.002"
    faults["noise"] = 50
    code = sweep_lr.main([*DEMO, f"output_dir={tmp_path / 'noisy'}", "--seeds", "0,1,2"])
    text = (tmp_path / "noisy/sweep.md").read_text()
    assert code == 0 and "2e-3 is within seed noise of learning rate 1e-3: it is better by 0.0480 ± " in text


def test_a_config_that_does_not_evaluate_is_judged_by_its_training_loss(search):
    code, out, _ = search("skip_eval=true")
    assert code == 0 and "training loss, last 5% of tokens" in out and rows(out)["2e-3"][1] == "2.9980"


def test_a_search_needs_a_launcher_that_waits(search, tmp_path):
    assert "use fabric or slurm" in search("hydra/launcher=basic")[2]
    assert "wait=false: a search needs the results" in search("hydra/launcher=slurm", "hydra.launcher.wait=false")[2]
    code, _, err = search("optimizer.larning_rate=1")
    assert code == 1 and "larning_rate" in err and "Traceback" not in err


@pytest.mark.parametrize("flag", ["--seeds", "--head_dims"])
def test_a_list_of_numbers_that_is_none_is_refused_by_its_flag(capsys, flag):
    with pytest.raises(SystemExit):
        sweep_lr.main([*DEMO, "output_dir=sweep", flag, "0,x"])
    said = capsys.readouterr().err
    assert f"argument {flag}: '0,x': give whole numbers from 0 on with commas between them, as in 0,1,2" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.lr=1e-3,2e-3",
            "the search chooses the rates itself; give the one to start from with --guess, or train at each of these "
            "with train.py -m",
        ),
        ("optimizer.lr=interval(1e-3,2e-3)", "the search chooses the rates itself; "),
        ("seed=0,1", "several seeds are given with --seeds"),
        ("tag=a,b", "these are several values, and all runs of a search have the same; choose one, or make a run of "),
        ("+experiment/demo=fox_pro,hgrn2", "these are several values, and all runs of a search have the same; "),
    ],
)
def test_several_values_are_answered_with_what_this_script_has_for_them(tmp_path, capsys, override, message):
    base = DEMO[1:] if override.startswith("+experiment") else DEMO
    assert sweep_lr.main([*base, f"output_dir={tmp_path / 'sweep'}", override]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"SweepError: {override}: {message}") and said.count("\n") == 1 and "multirun" not in said
    assert not list(tmp_path.iterdir())


def test_text_with_commas_and_what_cannot_be_read_are_left_to_hydra(tmp_path, capsys):
    check_overrides([*DEMO, "tag='a,b'", "optimizer.betas=[0.9,0.95]", "~eval_sets"])
    assert sweep_lr.main([*DEMO, f"output_dir={tmp_path / 'sweep'}", "tag=ä"]) == 1
    assert capsys.readouterr().err.startswith("SweepError: tag=ä cannot be read: Hydra stops at ä; ")


def test_the_figure_shows_every_rate_every_seed_and_what_diverged(monkeypatch, tmp_path):
    from forgetting_transformer.analysis.plots import sweeps as plots

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    curves = {
        "head dimension 64": {1e-3: [3.1, 3.2], 2e-3: [3.0, 3.05], 5e-3: [3.2, math.inf]},
        "head dimension 128": {1e-3: [3.3]},
    }
    plots.loss_against_learning_rate(curves, "held-out loss", tmp_path / "x.png")
    (axes,) = drawn[0].axes
    drawn_points = {(x, round(float(y), 6)) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
    assert {
        (1e-3, 3.15),
        (2e-3, 3.025),
        (2e-3, 3.0),
        (2e-3, 3.05),
        (5e-3, 3.2),
        (1e-3, 3.3),
        (5e-3, 0.97),
    } <= drawn_points
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["head dimension 64", "head dimension 128", "best", "one seed", "diverged or ended early"]

    def rings(figure):
        return [
            (*line.get_xdata(), round(float(*line.get_ydata()), 6))
            for line in figure.axes[0].lines
            if line.get_mfc() == "none"
        ]

    # One search over head dimensions has one best; searches of several models have one each.
    assert rings(drawn[0]) == [(2e-3, 3.025)]
    plots.loss_against_learning_rate(curves, "held-out loss", tmp_path / "x.png", ring_each=True)
    assert rings(drawn[1]) == [(2e-3, 3.025)], "the other search has not tried a rate below its lowest loss"
    assert "dotted ring: lowest so far, at an end of the rates tried" in drawn[1].texts[-1].get_text().replace(
        "\n", " "
    )
