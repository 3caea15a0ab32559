"""The search of the paper: on the grid, until the best rate is strictly inside, and it can be stopped and added to."""

import contextlib
import math
from pathlib import Path

import pytest

from forgetting_transformer import command_line
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.learning_rate import (
    GridSearch,
    grid_text,
    grid_value,
    nearest_grid_index,
)
from tests.processes import load_script
from tests.sweep.conftest import DEMO, starts

pytestmark = pytest.mark.slow

script = load_script("sweep_lr")


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


@pytest.mark.parametrize(("optimum", "seeds"), [(1e-5, (0,)), (1.4e-3, (0, 1, 2)), (3e-2, (0, 1, 2))])
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


@pytest.mark.parametrize(
    ("loss", "best"),
    [
        (lambda index: math.inf if index > -3 else abs(index + 4), -4),  # diverged rates are worse than any
        (lambda index: {-1: 1.0, 0: 1.0, 1: 1.0}.get(index, 2.0), -1),  # of rates that are as good, the lowest
        (lambda index: -index, "the loss does not rise yet at a learning rate of 1e4; the guess was 1e0"),
        (lambda index: math.inf, "every run diverged, down to a learning rate of 1e-4"),
    ],
)
def test_the_best_rate_has_a_worse_one_on_either_side_or_there_is_none(loss, best):
    search = GridSearch(0, (0,))
    try:
        while todo := search.needed():
            search.losses |= {key: loss(key[0]) for key in todo}
    except SweepError as error:
        assert str(best) in str(error)
    else:
        assert search.best == best and {best - 1, best + 1} <= set(search.indices)


def test_the_script_finds_the_rate_and_started_again_makes_only_what_is_missing(search, faults, tmp_path):
    faults |= {"fail": "lr5e-3", "diverge": "lr1e-2"}
    code, out, err = search("--guess", "5e-3")
    assert code == 1 and "RuntimeError: the GPU fell off the bus" in out and "not complete" in err
    assert runs(tmp_path) == ["lr1e-2_seed0", "lr2e-3_seed0", "lr5e-3_seed0"], "the others still ran"
    del faults["fail"]
    code, out, err = search("--guess", "5e-3")
    assert code == 0 and "best: optimizer.lr=2e-3, strictly inside the grid" in out
    assert [len(starts(tmp_path / "sweep" / name)) for name in runs(tmp_path)] == [1, 1, 1, 2], "nor one that diverged"
    table = rows(out)
    assert list(table) == ["1e-3", "2e-3", "5e-3", "1e-2"]
    assert table["2e-3"][1] == "2.9980" and table["2e-3"][-1] == "best" and "seed 0 diverged" in table["1e-2"][-1]
    assert table["1e-3"][-2] == f"+{0.1 * math.log(2) ** 2:.4f}"
    assert "one seed: how much of these differences is noise is unknown" in err
    assert rows((tmp_path / "sweep/sweep.md").read_text()) == table
    assert (tmp_path / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    # More seeds, another guess: added to what is there.
    code, out, err = search("--guess", "2e-3", "--seeds", "0,1,2")
    assert code == 0 and [cells[3] for cells in rows(out).values()] == ["3", "3", "3"] and "warning" not in err
    assert [len(starts(tmp_path / f"sweep/lr{rate}_seed0")) for rate in ("1e-3", "2e-3", "5e-3")] == [1, 1, 2]


def test_started_again_with_other_settings_it_says_what_differs_and_changes_nothing(search, tmp_path):
    assert search("skip_eval=true")[1].count("training loss, last 5% of tokens") == 1
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, _, err = search("skip_eval=true", "train.max_tokens=819200", "optimizer.weight_decay=0.2", "--seeds", "1")
    assert code == 1 and "holds a search with other settings" in err and "first seed: 0 -> 1" in err
    assert "optimizer.weight_decay: 0.1 -> 0.2" in err and "train.max_tokens: 1572864 -> 819200" in err
    code, _, err = search("resume=false")
    assert code == 1 and "choose another output_dir" in err
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(SweepError, match="is not empty and holds no search"):
        script.main([*DEMO, f"output_dir={tmp_path / 'sweep/lr2e-3_seed0'}"])


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


def test_what_cannot_be_searched_is_refused_in_one_line(tmp_path, capsys):
    for arguments, message in (
        (["optimizer.lr=1e-3,2e-3"], "Ambiguous value for argument 'optimizer.lr=1e-3,2e-3'; "),
        (["hydra/launcher=basic"], "hydra/launcher=basic: the runs of a search share this machine; leave it out"),
        (["--seeds", "0,0"], "--seeds 0,0: each seed once"),
    ):
        given = [*DEMO, f"output_dir={tmp_path / 'sweep'}", *arguments]
        with contextlib.suppress(SystemExit):
            assert command_line.run(lambda given=given: script.main(given)) == 1
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said and not list(tmp_path.iterdir())
