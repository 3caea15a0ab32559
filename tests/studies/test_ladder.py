"""Learning rates across sizes: shrunk scales are valid or refused by name, and laws through them know how little they
know."""

import math
import re

import numpy as np
import pytest

from forgetting_transformer.analysis.evaluations import read_evaluation
from studies import ladder as sweep_ladder
from studies.engine.scaling import Size, fit, optimum, power_law
from tests.sweep.conftest import DEMO, starts

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

SCALES = ["125m_2b", "360m_7b", "760m_16b"]


@pytest.fixture
def climb(faults, tmp_path, capsys):
    """Runs studies/ladder.py and returns (exit code, stdout, stderr)."""

    def run(*arguments: str, scales=SCALES, shrink="4", overrides=DEMO) -> tuple[int, str, str]:
        flags = ["--scales", *scales, "--shrink", shrink]
        code = sweep_ladder.main([*overrides, f"output_dir={tmp_path / 'ladder'}", *flags, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


# The arithmetic.


def test_the_best_rate_is_the_minimum_of_the_parabola():
    rates = [5e-4, 1e-3, 2e-3, 5e-3, 1e-2]
    best = optimum({rate: [3 + 0.1 * math.log(rate / 1.6e-3) ** 2] for rate in rates})
    assert best.vertex and best.rate == pytest.approx(1.6e-3) and best.loss == pytest.approx(3)
    assert (best.low, best.high) == (1e-3, 5e-3)


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({1e-3: [3.0], 2e-3: [2.0]}, 2e-3),
        ({1e-3: [3.0], 2e-3: [2.0], 5e-3: [math.inf]}, 2e-3),
        ({1e-3: [3.0], 2e-3: [2.9], 5e-3: [1.0]}, 5e-3),
    ],
)
def test_without_a_minimum_near_it_the_best_rate_is_the_grids(losses, rate):
    best = optimum(losses)
    assert not best.vertex and best.rate == rate and best.loss == losses[rate][0]


def test_where_every_run_diverged_there_is_no_best_rate():
    assert optimum({1e-3: [math.inf]}) is None
    size = Size("a", 1e6, 1e6, 1e12, {1e-3: [math.inf]})
    assert fit([size], {"a": 1e8}).rate is None


def test_a_power_law_and_its_interval_are_those_of_a_regression():
    """Against SciPy's, and by the share of new measurements that the interval covers."""
    from scipy import stats

    generator, x = np.random.default_rng(0), np.array([1e6, 3e6, 1e7, 4e7])
    covered = 0
    for _ in range(400):
        y = 0.5 * x**-0.3 * np.exp(0.2 * generator.standard_normal(4))
        law, reference = power_law(x, y), stats.linregress(np.log(x), np.log(y))
        assert law.exponent == pytest.approx(reference.slope)
        assert law.half_width == pytest.approx(stats.t.ppf(0.975, 2) * reference.stderr)
        low, high = law.interval(1e9)
        covered += low <= 0.5 * 1e9**-0.3 * math.exp(0.2 * generator.standard_normal()) <= high
    assert covered / 400 == pytest.approx(0.95, abs=0.04)


def test_two_sizes_have_no_interval_and_three_a_wide_one():
    two = power_law([1e6, 1e7], [2e-3, 1e-3])
    assert two.at(1e6) == pytest.approx(2e-3) and math.isnan(two.half_width) and math.isnan(two.interval(1e8)[0])
    three = power_law([1e6, 1e7, 1e8], [2e-3, 1.1e-3, 5e-4])
    near, far = three.interval(1e7), three.interval(1e10)
    assert near[0] < three.at(1e7) < near[1]
    assert far[1] / far[0] > 10 * near[1] / near[0], "wider the farther away"


CLIFF = {
    name: Size(name, parameters, 1e6, 6e6 * parameters, {1e-3: [a], 2e-3: [a - 0.1], 5e-3: [a - 0.2], 1e-2: [math.inf]})
    for name, parameters, a in [("s", 1e5, 3.2), ("m", 3e5, 3.0), ("l", 1e6, 2.8)]
}


def test_a_grid_point_is_known_to_its_cell_only():
    """Up to the rate that diverged, and not at all where there is none beside it."""
    best = optimum(CLIFF["s"].losses)
    assert not best.vertex and (best.low, best.rate, best.high) == (2e-3, 5e-3, 1e-2)
    open_end = optimum({1e-3: [3.0], 2e-3: [2.9], 5e-3: [1.0]})
    assert open_end.low == 2e-3 and math.isnan(open_end.high)
    level = optimum({1e-3: [3.0], 2e-3: [2.0], 5e-3: [2.0], 1e-2: [2.5]})
    assert level.vertex or (level.low, level.high) == (1e-3, 1e-2)
    only = optimum({1e-3: [2.0]})
    assert math.isnan(only.low) and math.isnan(only.high)


def test_laws_through_grid_points_are_as_uncertain_as_the_grid():
    """Equal grid points at three sizes do not make an exponent of exactly zero."""
    found = fit(list(CLIFF.values()), {"full": 7e8})
    law, (low, high) = found.rate, found.rate.interval(7e8)
    assert law.exponent == pytest.approx(0) and law.at(7e8) == pytest.approx(5e-3)
    assert law.half_width > math.log(1e-2 / 2e-3) / math.log(1e6 / 1e5) / 4
    assert low < 2e-3 and high > 1e-2, "at least the cell, which is all that is known of each size"
    again = fit(list(CLIFF.values()), {"full": 7e8}).rate
    assert again.interval(7e8) == (low, high) and again.half_width == law.half_width
    table = found.table().markdown()
    assert "0.002 to 0.01" in table and "5.0e-03 to 5.0e-03" not in table and "± 0.000" not in " ".join(found.notes())


def test_the_interval_covers_a_new_size_when_optima_are_rounded_to_a_grid():
    generator, x = np.random.default_rng(0), np.array([1e6, 3e6, 1e7, 4e7])
    grid = np.log([a * 10.0**b for b in range(-6, 0) for a in (1, 2, 5)])
    covered = 0
    for _ in range(100):
        true = generator.uniform(0.05, 0.5) * x ** -generator.uniform(0.1, 0.4)
        at = np.abs(grid - np.log(true)[:, None]).argmin(axis=1)
        cells = list(zip(np.exp(grid[at - 1]), np.exp(grid[at + 1]), strict=True))
        law = power_law(x, np.exp(grid[at]), cells)
        exact = power_law(x, true)
        low, high = law.interval(1e9)
        covered += low <= exact.at(1e9) <= high
    assert covered >= 95


def test_an_end_that_is_unknown_leaves_the_interval_unknown():
    sizes = [*CLIFF.values(), Size("open", 3e6, 1e6, 1e13, {1e-3: [3.0], 2e-3: [2.0]})]
    found = fit(sizes, {"full": 7e8})
    assert math.isnan(found.rate.half_width) and math.isnan(found.rate.interval(7e8)[0])
    assert "unknown" in found.table().markdown() and "above 0.001" in found.table().markdown()


def test_an_unfinished_search_is_shown_and_left_out_of_the_laws():
    begun = Size("begun", 3e6, 1e6, 1.8e13, {1e-3: [2.8]}, complete=False)
    waiting = Size("waiting", 1e7, 1e6, math.nan, {}, complete=False)
    whole, found = fit(list(CLIFF.values()), {"full": 7e8}), fit([*CLIFF.values(), begun, waiting], {"full": 7e8})
    for law, expected in ((found.rate, whole.rate), (found.loss, whole.loss)):
        assert (law.exponent, law.half_width) == (expected.exponent, expected.half_width)
    table = found.table().markdown()
    rows = [line for line in table.splitlines() if "not finished" in line]
    assert len(rows) == 2 and "begun, shrunk" in rows[0] and "waiting, shrunk" in rows[1]
    assert "not finished, left out of the laws: begun, waiting" in found.notes()
    assert "not finished" not in " ".join([*whole.notes(), whole.table().markdown()])


# The script.


def test_the_ladder_finds_how_the_best_rate_moves_and_says_what_is_extrapolated(climb, faults, tmp_path):
    faults["width_exponent"] = -1.0
    code, out, _ = climb("--shrink_tokens", "4096")
    assert code == 0
    found = read_evaluation(tmp_path / "ladder")
    assert found.kind == "learning_rate_ladder"
    for name, width in zip(SCALES, (192, 256, 384), strict=True):
        assert found.find(name, "best_rate").value == pytest.approx(2e-3 * 192 / width, rel=0.05)
        assert (tmp_path / "ladder" / name / "sweep.md").is_file()
        fields = found.settings["scales"][name]["model"]
        assert fields["hidden_size"] == width and fields["num_heads"] == width // 64
    whole = found.find("760m_16b", "extrapolated_rate")
    assert whole.at["parameters"] == found.settings["scales"]["760m_16b"]["parameters_before"] > 5e8
    low, high = (found.find("760m_16b", metric).value for metric in ("low_95", "high_95"))
    assert low < whole.value < high
    table = (tmp_path / "ladder/table.md").read_text()
    assert table.count("**extrapolated**") == 3 and table.count("shrunk") == 3 and table.rstrip() in out
    assert (tmp_path / "ladder/figure.png").read_bytes().startswith(b"\x89PNG")
    steps = {name: found.settings["scales"][name]["tokens"] for name in SCALES}
    assert steps == {"125m_2b": 655360, "360m_7b": 1835008, "760m_16b": 3932160}


def test_started_again_it_makes_only_what_is_missing(climb, faults, tmp_path):
    faults["fail"] = "360m_7b/lr2e-3"
    code, _, err = climb(scales=SCALES[:2])
    assert code == 1 and "the ladder is not complete" in err
    assert (tmp_path / "ladder/table.md").read_text().count("not finished") == 1, "what is known is shown"
    found = read_evaluation(tmp_path / "ladder")
    assert found.settings["unfinished"] == ["360m_7b"]
    assert not [n for n in found.numbers if n.metric == "exponent"], "no law through one size"
    del faults["fail"]
    assert climb(scales=SCALES[:2])[0] == 0
    assert "not finished" not in (tmp_path / "ladder/table.md").read_text()
    assert read_evaluation(tmp_path / "ladder").settings["unfinished"] == []
    code, out, _ = climb()
    assert code == 0 and "760m_16b" in out
    made = {f"{p.parent.name}/{p.name}": len(starts(p)) for p in (tmp_path / "ladder").glob("*/lr*")}
    assert made.pop("360m_7b/lr2e-3_seed0") == 2 and set(made.values()) == {1}
    code, _, err = climb("--shrink_tokens", "999")
    assert code == 1 and "holds a sweep with other settings" in err and "train.max_tokens" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scales": ["125m_2b", "125m"]}, r"--scales 125m: there is no such scale; choose among 125m_2b, 360m_7b"),
        ({"scales": ["125m_2b"]}, r"--scales 125m_2b: at least two, each once"),
        ({"scales": ["125m_2b", "125m_2b"]}, r"at least two, each once"),
        ({"shrink": "5"}, r"--shrink 5 does not divide hidden_size=768 of 125m_2b of fox_pro; 2, 3, 4, 6"),
        ({"shrink": "8"}, r"--shrink 8 does not divide num_hidden_layers=12 of 125m_2b of fox_pro; 2, 3, 4, 6"),
        ({"overrides": [*DEMO, "scale.name=x"]}, r"scale\.name=x: the ladder sets scale\.name itself; leave it out"),
        (
            {"overrides": [*DEMO, "train.max_tokens=9"]},
            r"the ladder sets train\.max_tokens itself; use --shrink_tokens",
        ),
        ({"overrides": [*DEMO, "model.config.num_heads=4"]}, r"the ladder sets model\.config\.num_heads itself"),
        (
            {"overrides": ["+experiment/longcrawl64/hgrn2=125m_2b", "data_dir=d"]},
            r"--shrink 4: 125m_2b shrunk so is no hgrn2 \(",
        ),
        (
            {"overrides": ["+experiment/longcrawl64/delta_net=125m_2b", "data_dir=d"]},
            r"num_heads=6 of 125m_2b of delta_net",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(climb, tmp_path, arguments, said):
    code, _, err = climb(**arguments)
    assert code == 1 and re.search(said, err) and err.count("\n") <= 3 and "Traceback" not in err, err
    assert not (tmp_path / "ladder").exists()


def test_a_folder_with_other_files_is_refused(climb, tmp_path):
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder/notes.txt").write_text("mine")
    code, _, err = climb()
    assert code == 1 and "is not empty and holds no ladder" in err
    assert [p.name for p in (tmp_path / "ladder").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "model", ["delta_net", "gated_delta_net", "hgrn2", "kda", "mamba2", "path_fox", "samba", "transformer_llama"]
)
def test_every_architecture_can_be_shrunk(climb, model):
    """Those whose scale has other numbers of blocks and heads, too: it divides those."""
    code, out, _ = climb("--dry_run", shrink="2", overrides=[f"+experiment/demo={model}", "data_dir=d"])
    blocks = "num_hidden_layers 12, num_heads 12" if model == "mamba2" else "num_hidden_layers 6"
    assert code == 0 and f"hidden_size 384, {blocks}" in out


def test_without_shrinking_nothing_is_extrapolated():
    sizes = [Size(n, p, 1, p, {1e-3: [3.1], 2e-3: [3.0], 5e-3: [3.2]}) for n, p in (("a", 1e6), ("b", 2e6))]
    assert "extrapolated" not in fit(sizes, {}).table().markdown()
    assert "two points have no interval" in " ".join(fit(sizes, {}).notes())


# What goes wrong.


def test_a_hybrid_that_is_shrunk_too_far_is_refused_with_the_factors_that_would_do(climb):
    code, _, said = climb("--dry_run", overrides=["+experiment/demo=hybrid", DEMO[1]])
    assert code == 1 and said.count("\n") == 1
    assert "SweepError: --shrink 4: 125m_2b shrunk so is no hybrid (model.config: pattern has 4 mixers and" in said
    assert said.endswith("); 2, 3 would do\n") and "num_hidden_layers" not in said


def test_a_folder_that_cannot_be_made_is_one_line(faults, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [*DEMO, f"output_dir={tmp_path / 'file/ladder'}", "--scales", *SCALES, "--shrink", "4"]
    assert sweep_ladder.main(arguments) == 1
    said = f"error: {tmp_path / 'file/ladder/125m_2b'}: Not a directory; choose another output_dir"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("script", ["studies/ladder", "scripts/sweep_lr"])
def test_ctrl_c_while_sizes_are_composed_is_one_line(monkeypatch, capsys, script):
    import runpy
    import sys

    from forgetting_transformer.sweep import composition
    from tests.processes import ROOT

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(composition, "Composer", interrupted)
    monkeypatch.setattr(sys, "argv", [script, *DEMO, *(["--scales", *SCALES] if script == "studies/ladder" else [])])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    assert end.value.code == 130
    assert capsys.readouterr().err.startswith("interrupted: the same command goes on with the ")
