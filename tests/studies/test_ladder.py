"""Learning rates across sizes: shrunk scales are valid or refused by name, and laws through them know how little they
know."""

import json
import math
import re

import numpy as np
import pytest

from studies import ladder
from studies.engine.scaling import Size, fit, optimum, power_law
from tests.sweep.conftest import DEMO, starts

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

SCALES = ["125m_2b", "360m_7b", "760m_16b"]


@pytest.fixture
def climb(faults, tmp_path, capsys):
    """Runs studies/ladder.py and returns (exit code, stdout, stderr)."""

    def run(*arguments: str, scales=SCALES, shrink="4", overrides=DEMO) -> tuple[int, str, str]:
        flags = ["--scales", *scales, "--shrink", shrink]
        code = ladder.main([*overrides, f"output_dir={tmp_path / 'ladder'}", *flags, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_best_rate_is_the_minimum_of_the_parabola_or_a_grid_point():
    rates = [5e-4, 1e-3, 2e-3, 5e-3, 1e-2]
    best = optimum({rate: [3 + 0.1 * math.log(rate / 1.6e-3) ** 2] for rate in rates})
    assert best.vertex and best.rate == pytest.approx(1.6e-3) and best.loss == pytest.approx(3)
    assert (best.low, best.high) == (1e-3, 5e-3)
    best = optimum({1e-3: [3.0], 2e-3: [2.0], 5e-3: [math.inf]})
    assert not best.vertex and (best.low, best.rate, best.high) == (1e-3, 2e-3, 5e-3)
    assert math.isnan(optimum({1e-3: [3.0], 2e-3: [2.9], 5e-3: [1.0]}).high)
    assert optimum({1e-3: [math.inf]}) is None


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
    two = power_law([1e6, 1e7], [2e-3, 1e-3])
    assert two.at(1e6) == pytest.approx(2e-3) and math.isnan(two.half_width) and math.isnan(two.interval(1e8)[0])


def test_the_interval_covers_a_new_size_when_optima_are_rounded_to_a_grid():
    generator, x = np.random.default_rng(0), np.array([1e6, 3e6, 1e7, 4e7])
    grid = np.log([a * 10.0**b for b in range(-6, 0) for a in (1, 2, 5)])
    covered = 0
    for _ in range(100):
        true = generator.uniform(0.05, 0.5) * x ** -generator.uniform(0.1, 0.4)
        at = np.abs(grid - np.log(true)[:, None]).argmin(axis=1)
        law = power_law(x, np.exp(grid[at]), list(zip(np.exp(grid[at - 1]), np.exp(grid[at + 1]), strict=True)))
        low, high = law.interval(1e9)
        covered += low <= power_law(x, true).at(1e9) <= high
    assert covered >= 95


def test_unfinished_and_open_searches_are_shown_as_such():
    cliff = [
        Size(name, parameters, 6e12 * parameters, {1e-3: [a], 2e-3: [a - 0.1], 5e-3: [a - 0.2], 1e-2: [math.inf]})
        for name, parameters, a in [("s", 1e5, 3.2), ("m", 3e5, 3.0), ("l", 1e6, 2.8)]
    ]
    whole = fit(cliff, {"full": 7e8})
    assert whole.rate.exponent == pytest.approx(0) and whole.rate.half_width > 0.1, "the grid is all that is known"
    begun = fit([*cliff, Size("begun", 3e6, 1.8e19, {1e-3: [2.8]}, complete=False)], {"full": 7e8})
    assert begun.rate == whole.rate and begun.table().markdown().count("not finished") == 1
    found = fit([*cliff, Size("open", 3e6, 1e19, {1e-3: [3.0], 2e-3: [2.0]})], {"full": 7e8})
    assert math.isnan(found.rate.interval(7e8)[0]) and "unknown" in found.table().markdown()


def test_the_ladder_finds_how_the_best_rate_moves_and_goes_on_where_it_stopped(climb, faults, tmp_path):
    faults |= {"width_exponent": -1.0, "fail": "360m_7b/lr1e-3"}
    code, _, err = climb(scales=SCALES[:2])
    assert code == 1 and "the ladder is not complete" in err
    assert (tmp_path / "ladder/table.md").read_text().count("not finished") == 1, "what is known is shown"
    del faults["fail"]
    code, out, _ = climb()
    assert code == 0
    made = {f"{p.parent.name}/{p.name}": len(starts(p)) for p in (tmp_path / "ladder").glob("*/lr*")}
    assert made.pop("360m_7b/lr1e-3_seed0") == 2 and set(made.values()) == {1}
    losses = json.loads((tmp_path / "ladder/ladder.json").read_text())["losses"]
    table = (tmp_path / "ladder/table.md").read_text()
    rates = [line.split("|")[4] for line in table.splitlines() if "shrunk" in line]
    for name, width, rate in zip(SCALES, (192, 256, 384), rates, strict=True):
        assert float(rate) == pytest.approx(2e-3 * 192 / width, rel=0.05) and len(losses[name]) > 2
    assert table.count("**extrapolated**") == 3 and table.count("shrunk") == 3 and table.rstrip() in out
    assert (tmp_path / "ladder/figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scales": ["125m_2b", "125m"]}, r"--scales 125m: there is no such scale; choose among 125m_2b, 360m_7b"),
        ({"scales": ["125m_2b"]}, r"--scales 125m_2b: at least two, each once"),
        ({"shrink": "5"}, r"--shrink 5 does not divide hidden_size=768 of 125m_2b; 2, 3, 4, 6"),
        ({"overrides": [*DEMO, "scale.name=x"]}, r"scale\.name=x: the ladder sets scale\.name itself; leave it out"),
        ({"overrides": [*DEMO, "model.config.num_heads=4"]}, r"the ladder sets model\.config\.num_heads itself"),
        ({"overrides": ["+experiment/demo=hybrid", DEMO[1]]}, r"--shrink 4: 125m_2b shrunk so is no hybrid \("),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(climb, tmp_path, arguments, said):
    code, _, err = climb("--dry_run", **arguments)
    assert code == 1 and re.search(said, err) and err.count("\n") == 1, err
    assert not (tmp_path / "ladder").exists()


@pytest.mark.parametrize("model", ["hgrn2", "mamba2", "samba"])
def test_every_architecture_can_be_shrunk(climb, model):
    """Architectures whose scale has other numbers of blocks and heads, too: it divides those."""
    code, out, _ = climb("--dry_run", shrink="2", overrides=[f"+experiment/demo={model}", "data_dir=d"])
    blocks = "num_hidden_layers 12, num_heads 12" if model == "mamba2" else "num_hidden_layers 6"
    assert code == 0 and f"hidden_size 384, {blocks}" in out
