"""Throughput: rates and MFU by hand, under the official names, and no MFU where the peak is unknown."""

import pytest

from forgetting_transformer.training.callbacks.throughput import Throughput
from tests.training.conftest import STEP, changed, lines, train

COUNTERS = ("token_count", "batch_count", "flop_count", "total_time", "update_time")
RATES = {
    f"throughput/{count}_per_second_{clock}_{span}"
    for count in ("token_count", "batch_count", "flop_count")
    for clock in ("total", "update")
    for span in ("recent", "cum")
}
MFU = {f"throughput/mfu_{clock}_{span}" for clock in ("total", "update") for span in ("recent", "cum")}


def counters(*values: float) -> dict[str, float]:
    return dict(zip(COUNTERS, map(float, values), strict=True))


ZERO = counters(0, 0, 0, 0, 0)


def after_step(throughput: Throughput, now: dict[str, float]) -> dict[str, float]:
    """What is reported after a step that leaves these counters."""
    throughput.step(now)
    return throughput.metrics(now)


def test_rates_and_mfu_are_what_one_computes_by_hand():
    throughput = Throughput(peak_flops=2000, start=ZERO)
    after_step(throughput, counters(100, 1, 5_000, 10, 5))
    metrics = after_step(throughput, counters(300, 3, 15_000, 20, 15))
    # 200 tokens, 2 batches and 10,000 FLOPs in 10 s of either clock since the first sample
    for clock in ("total", "update"):
        assert metrics[f"throughput/token_count_per_second_{clock}_recent"] == 20
        assert metrics[f"throughput/batch_count_per_second_{clock}_recent"] == 0.2
        assert metrics[f"throughput/flop_count_per_second_{clock}_recent"] == 1000
        assert metrics[f"throughput/mfu_{clock}_recent"] == 0.5
    # 300 tokens and 15,000 FLOPs in 20 s of wall time, 15 s of it steps
    assert metrics["throughput/token_count_per_second_total_cum"] == 15
    assert metrics["throughput/token_count_per_second_update_cum"] == 20
    assert metrics["throughput/mfu_total_cum"] == 0.375
    assert metrics["throughput/mfu_update_cum"] == 0.5


def test_names_are_the_official_ones_and_an_unknown_peak_gives_no_mfu():
    for peak_flops, names in ((1, RATES | MFU), (None, RATES)):
        throughput = Throughput(peak_flops=peak_flops, start=ZERO)
        assert after_step(throughput, counters(1, 1, 1, 1, 1)) == {}
        found = after_step(throughput, counters(2, 2, 2, 2, 2))
        assert set(found) == {f"throughput/{name}" for name in COUNTERS} | names


def test_recent_counts_steps_and_not_lines_of_the_log():
    """A second for each of the first 200 steps, two for the others, and a line every 50 steps."""
    throughput, seconds, recent = Throughput(peak_flops=None, start=ZERO), 0, {}
    for step in range(1, 301):
        seconds += 1 if step <= 200 else 2
        now = counters(step, step, 0, seconds, seconds)
        throughput.step(now)
        if step % 50 == 0:
            recent[step] = throughput.metrics(now)["throughput/batch_count_per_second_total_recent"]
    assert recent == {50: 1, 100: 1, 150: 1, 200: 1, 250: 100 / 150, 300: 100 / 200}


def test_a_run_divides_by_the_peak_of_all_its_devices(tiny):
    tiny = changed(tiny, train__max_tokens=4 * STEP, skip_eval=True, fabric__peak_flops=1e9)
    train(tiny, world_size=2)
    for entry in lines(tiny["output_dir"], "throughput"):
        for clock in ("total", "update"):
            rate = entry[f"throughput/flop_count_per_second_{clock}_recent"]
            assert entry[f"throughput/mfu_{clock}_recent"] == pytest.approx(rate / 2e9)


#: Looking at a flag takes 0.2 s, as it does where a GPU is that far behind.
SLOW = """
import time
from forgetting_transformer.training import setup
setup.synchronize = lambda device: time.sleep(0.2)
"""


def test_waiting_for_the_device_counts_as_update_time(tiny):
    """A GPU works behind the host's back: a step returns at once, and its time shows where the host waits for it."""
    tiny = changed(tiny, train__max_tokens=4 * STEP, skip_eval=True)
    train(tiny, patch=SLOW)
    first, *_, last = lines(tiny["output_dir"], "train")
    assert last["train/update_time"] - first["train/update_time"] >= 3 * 0.2
    assert last["train/update_time"] <= last["train/total_time"]
