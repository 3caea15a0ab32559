"""Throughput: rates and MFU by hand, under the official names, and no MFU where the peak is unknown.

Peak FLOP/s are known by exact device name, dense, and absent rather than guessed.
"""

import logging

import pytest
import torch

from forgetting_transformer.training.callbacks.throughput import Throughput
from forgetting_transformer.training.execution.hardware import peak_flops
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
    throughput._steps.append(now)
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
    for peak, names in ((1, RATES | MFU), (None, RATES)):
        throughput = Throughput(peak_flops=peak, start=ZERO)
        assert after_step(throughput, counters(1, 1, 1, 1, 1)) == {}
        found = after_step(throughput, counters(2, 2, 2, 2, 2))
        assert set(found) == {*COUNTERS} | names


#: Looking at a flag takes 0.2 s, as it does where a GPU is that far behind.
SLOW = """
import time
from forgetting_transformer.training import setup
setup.synchronize = lambda device: time.sleep(0.2)
"""


def test_a_run_divides_by_the_peak_of_all_its_devices_and_waiting_for_them_is_update_time(tiny):
    """A GPU works behind the host's back: a step returns at once, and its time shows where the host waits for it."""
    tiny = changed(tiny, train__max_tokens=4 * STEP, skip_eval=True, fabric__peak_flops=1e9)
    train(tiny, 2, patch=SLOW)
    for entry in lines(tiny["output_dir"], "throughput"):
        for clock in ("total", "update"):
            rate = entry[f"throughput/flop_count_per_second_{clock}_recent"]
            assert entry[f"throughput/mfu_{clock}_recent"] == pytest.approx(rate / 2e9)
    first, *_, last = lines(tiny["output_dir"], "train")
    assert last["train/update_time"] - first["train/update_time"] >= 3 * 0.2
    assert last["train/update_time"] <= last["train/total_time"]


def test_the_peak_depends_on_the_gpu_and_the_precision_and_is_not_guessed(monkeypatch, caplog):
    """Names that begin like a listed one belong to slices, cut-down and laptop chips."""
    for name, bf16, fp32 in (
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        peak_flops.cache_clear()
        with caplog.at_level(logging.INFO):
            assert peak_flops(torch.device("cuda", 0), "bf16-mixed") == bf16
            assert peak_flops(torch.device("cuda", 0), "32-true") == fp32
    said = caplog.records[0].getMessage()
    assert said.startswith("no MFU, and no CUDA graphs with train.cuda_graphs=auto: the peak FLOP/s of ")
    assert said.endswith(f" of {name!r} is not known; set fabric.peak_flops to have them")
