"""Optuna's search over any keys: it finds what is better, continues, and keeps to the range."""

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.composer import search_space
from tests.processes import load_script
from tests.sweep.conftest import starts

pytestmark = pytest.mark.slow

script = load_script("sweep_optuna")
RATE = "optimizer.lr=tag(log, interval(1e-4, 1e-1))"


def losses(table: str) -> list[float]:
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if "| finished" in line]
    return [float(cells[-2]) for cells in lines]


def made(tmp_path: Path) -> list[int]:
    """How often each trial was started."""
    return [len(starts(path)) for path in sorted((tmp_path / "sweep").glob("trial*"))]


def test_ranges_are_hydras():
    ranges = ["a=int(interval(2, 8))", "+b/c=x,y", "d=interval(0.5,1)"]
    fixed, space, text = search_space(["seed=1", RATE, *ranges])
    assert fixed == ["seed=1"] and text["optimizer.lr"] == "tag(log, interval(1e-4, 1e-1))"
    assert space == {
        "optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
        "a": IntDistribution(2, 8),
        "+b/c": CategoricalDistribution(["x", "y"]),
        "d": FloatDistribution(0.5, 1.0),
    }
    with pytest.raises(SweepError, match=r"x=range\(0.1,1\): give choices"):
        search_space(["x=range(0.1,1)"])
    with pytest.raises(SweepError, match=r"^x=interval\(2,1\): `low <= high` must hold"):
        search_space(["x=interval(2,1)"])
    with pytest.raises(SweepError, match=r"^Error parsing override 'x=interval\(a,1\)' TypeError [^\n]*$"):
        search_space(["x=interval(a,1)"])


def test_it_continues_where_it_was_and_its_table_has_the_best_run_first(search, faults, tmp_path):
    faults |= {"fail": "trial0001", "diverge": "trial0002"}
    code, out, err = search(RATE, "train.max_grad_norm=0.5,1.0", "--trials", "4", "hydra.launcher.jobs_at_once=2")
    assert code == 1 and len(losses(out)) == 2 and "not all trials finished" in err
    assert "| failed" in out and "| diverged" in out
    code, out, _ = search(RATE, "train.max_grad_norm=0.5,1.0", "--trials", "7")
    assert losses(out) == sorted(losses(out)) and len(losses(out)) == 5 and made(tmp_path) == [1] * 7
    assert losses((tmp_path / "sweep/sweep.md").read_text()) == losses(out)
    code, _, err = search(RATE.replace("1e-1", "1"), "--trials", "8", "optimizer.weight_decay=0.2")
    assert code == 1 and "optimizer.weight_decay: 0.1 -> 0.2" in err
    assert "optimizer.lr: tag(log, interval(1e-4, 1e-1)) -> tag(log, interval(1e-4, 1))" in err
    assert "nothing to search" in search("--trials", "1")[2]
