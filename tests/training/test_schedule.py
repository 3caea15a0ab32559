"""Learning rates as functions of tokens, against values worked out by hand."""

import math
import re

import pytest

from forgetting_transformer.training.config import ConfigError, ScheduleConfig
from forgetting_transformer.training.optimization.schedule import build_schedule

STEP = 524_288


def test_the_papers_48b_schedule():
    config = ScheduleConfig(name="warmup_cosine", warmup_tokens=512 * STEP, total_tokens=92_160 * STEP)
    lr = build_schedule(config, peak_lr=2e-3)
    assert lr(0) == 0.0
    assert lr(STEP) == pytest.approx(3.90625e-6)
    assert lr(256 * STEP) == pytest.approx(1e-3)
    assert lr(512 * STEP) == pytest.approx(2e-3)
    assert lr(92_159 * STEP) == pytest.approx(5.9e-13, rel=0.01)
    assert lr(92_160 * STEP) == lr(200_000 * STEP) == 0.0


@pytest.mark.parametrize(
    ("settings", "peak", "rates"),
    [
        ({"name": "constant", "warmup_tokens": 100, "init_lr": 1e-4}, 1e-3,
         {0: 1e-4, 50: 5.5e-4, 100: 1e-3, 10**12: 1e-3}),
        ({"name": "warmup_linear", "warmup_tokens": 100, "total_tokens": 300, "end_lr": 1e-4}, 1e-3,
         {100: 1e-3, 200: 5.5e-4, 300: 1e-4, 400: 1e-4}),
        ({"name": "warmup_stable_decay", "warmup_tokens": 10, "total_tokens": 1000, "decay_tokens": 400}, 2.0,
         {10: 2.0, 599: 2.0, 600: 2.0, 700: 2 * (1 - math.sqrt(0.25)), 1000: 0.0}),
    ],
)  # fmt: skip
def test_rates_are_those_worked_out_by_hand(settings, peak, rates):
    lr = build_schedule(ScheduleConfig(**settings), peak)
    assert {tokens: lr(tokens) for tokens in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "warmup_cosine"}, "schedule.total_tokens must be set"),
        ({"name": "constant", "total_tokens": 10}, "schedule.total_tokens=10 has no meaning"),
    ],
)
def test_impossible_schedules_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(ScheduleConfig(**settings), 1e-3)


def test_lengths_that_fit_are_named_and_do():
    for total, decay, advised in (
        (1000, None, "schedule.warmup_tokens=100"),
        (1000, 901, "schedule.warmup_tokens=100 schedule.decay_tokens=200"),
        (1, 3, "schedule.warmup_tokens=0 schedule.decay_tokens=1"),
    ):
        kind = {"name": "warmup_cosine" if decay is None else "warmup_stable_decay", "total_tokens": total}
        with pytest.raises(ConfigError, match=f"do not fit.*; what fits is {advised}$"):
            build_schedule(ScheduleConfig(**kind, warmup_tokens=1000, decay_tokens=decay), 1e-3)
        fitting = {key: int(value) for key, value in re.findall(r"schedule\.(\w+)=(\d+)", advised)}
        build_schedule(ScheduleConfig(**kind | {"decay_tokens": decay} | fitting), 1e-3)
