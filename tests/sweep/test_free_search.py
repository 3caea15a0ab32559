"""Optuna's search over any keys: it finds what is better, continues, and keeps to the range."""

import math
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.composition import search_space
from tests.sweep.conftest import DEMO, load_script, starts

pytestmark = pytest.mark.slow

sweep_optuna = load_script("sweep_optuna")
RATE = "optimizer.lr=tag(log, interval(1e-4, 1e-1))"


@pytest.fixture
def search(faults, tmp_path, capsys):
    """Runs scripts/sweep_optuna.py and returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = sweep_optuna.main([*DEMO, f"output_dir={tmp_path / 'search'}", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def losses(table: str) -> list[float]:
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if "| finished" in line]
    return [float(cells[-2]) for cells in lines]


def runs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "search").glob("trial*"))


def test_ranges_are_hydras():
    ranges = ["a=int(interval(2, 8))", "+b/c=x,y", "c=range(1,9,2)", "d=interval(0.5,1)", "e=range(4)"]
    fixed, space, text = search_space(["seed=1", RATE, *ranges])
    assert fixed == ["seed=1"] and text["optimizer.lr"] == "tag(log, interval(1e-4, 1e-1))"
    assert space == {
        "optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
        "a": IntDistribution(2, 8),
        "+b/c": CategoricalDistribution(["x", "y"]),
        "c": IntDistribution(1, 7, step=2),
        "d": FloatDistribution(0.5, 1.0),
        "e": IntDistribution(0, 3),
    }
    with pytest.raises(SweepError, match=r"x=range\(0.1,1\): give choices"):
        search_space(["x=range(0.1,1)"])


def test_its_table_has_the_best_run_first_and_it_continues_where_it_was(search, tmp_path):
    code, out, _ = search(RATE, "train.max_grad_norm=0.5,1.0", "--trials", "4", "hydra.launcher.jobs_at_once=2")
    assert code == 0 and runs(tmp_path) == [f"trial{n:04d}" for n in range(4)]
    assert losses(out) == sorted(losses(out)) and "train.max_grad_norm" in out
    code, out, _ = search(RATE, "train.max_grad_norm=0.5,1.0", "--trials", "7")
    assert code == 0 and len(losses(out)) == 7
    assert [len(starts(tmp_path / "search" / name)) for name in runs(tmp_path)] == [1] * 7
    best = float(out.split("best: optimizer.lr=")[1].split()[0])
    assert losses(out)[0] == pytest.approx(3 + 0.1 * math.log(best / 2e-3) ** 2 - 0.002, abs=1e-4)
    assert losses((tmp_path / "search/sweep.md").read_text()) == losses(out)
    assert (tmp_path / "search/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_other_ranges_or_settings_are_named_and_refused(search):
    assert search(RATE, "--trials", "1")[0] == 0
    code, _, err = search(RATE.replace("1e-1", "1"), "--trials", "2", "optimizer.weight_decay=0.2")
    assert code == 1 and "optimizer.weight_decay: 0.1 -> 0.2" in err
    assert "optimizer.lr: tag(log, interval(1e-4, 1e-1)) -> tag(log, interval(1e-4, 1))" in err
    assert "nothing to search" in search("--trials", "1")[2]


@pytest.mark.rare("tests/sweep/test_multirun.py::test_a_failed_job_is_reported_and_the_rest_still_run")
def test_failed_and_diverged_trials_are_told_and_the_rest_still_run(search, faults, tmp_path):
    faults |= {"fail": "trial0001", "diverge": "trial0002"}
    code, out, err = search(RATE, "--trials", "4")
    assert code == 1 and len(losses(out)) == 2 and "not all trials finished" in err
    assert "| failed" in out and "| diverged" in out


@pytest.mark.rare(
    "tests/sweep/test_free_search.py::test_its_table_has_the_best_run_first_and_it_continues_where_it_was"
)
def test_a_bad_trial_is_ended_early_if_asked(search, faults, tmp_path):
    """The median of five finished trials is needed before one can be ended."""
    faults["bad"] = "trial0005"
    code, out, _ = search(RATE, "--trials", "6", "--prune")
    assert code == 0 and len(losses(out)) == 5 and "| hopeless" in out
    lines = (tmp_path / "search/trial0005/metrics/jsonlines/train.jsonl").read_text().splitlines()
    assert 3 <= len(lines) < 10


@pytest.mark.rare(
    "tests/sweep/test_free_search.py::test_its_table_has_the_best_run_first_and_it_continues_where_it_was"
)
def test_what_was_running_is_continued_first(search, faults, tmp_path, monkeypatch):
    from forgetting_transformer.sweep import runner

    class Impatient(runner._Interrupts):
        """Somebody presses Ctrl-C when the first run has trained for a while."""

        @property
        def count(self) -> int:
            return int((tmp_path / "search/trial0000/metrics/jsonlines/train.jsonl").exists())

        @count.setter
        def count(self, _: int) -> None:
            pass

    faults["hang"] = "trial0000"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_Interrupts", Impatient)
        code, out, _ = search(RATE, "--trials", "2")
    assert code == 1 and "not finished" in out and runs(tmp_path) == ["trial0000"]
    del faults["hang"]
    code, out, _ = search(RATE, "--trials", "2")
    assert code == 0 and len(losses(out)) == 2 and len(starts(tmp_path / "search/trial0000")) == 2
