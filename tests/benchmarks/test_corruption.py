"""benchmarks/corruption.py measures a step with digests against one without."""

import json

from tests.benchmarks.conftest import load


def test_it_gives_the_share_of_a_run_that_digests_take(capsys):
    arguments = [
        "--experiment",
        "demo/fox_pro",
        "--device",
        "cpu",
        "--seq-len",
        "16",
        "--vocab-size",
        "64",
        "--steps",
        "3",
    ]
    assert load("corruption").main(arguments) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["tensors"] > 200 and row["parameters"] > 10**6 and row["step_seconds"] > 0
    assert row["share"] == row["digest_seconds"] / (row["compare_steps"] * row["step_seconds"])
    assert row["compare_steps"] == 100
