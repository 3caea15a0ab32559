"""benchmarks/decode.py: what can be said about it without a GPU."""

import pytest
import torch

from tests.benchmarks.conftest import load


@pytest.fixture(scope="module")
def benchmark():
    return load("decode")


def test_help_explains_every_kernel_and_column(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args(["--help"])
    printed = capsys.readouterr().out
    assert all(f"  {kernel}" in printed or f", {kernel}" in printed for kernel in benchmark.KERNELS)
    assert all(f"`{name}`" in printed for name in ("us", "tokens/s", "GB/s", "error") if name in benchmark.HEADER)


@pytest.mark.parametrize("shape, message", [("1,24,64", "five numbers"), ("1,24,5,64,128", "multiple of key heads")])
def test_shapes_that_are_none_are_refused(benchmark, shape, message):
    with pytest.raises(SystemExit, match=message):
        benchmark.main(["--shapes", shape])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(benchmark, capsys):
    assert benchmark.main([]) == 2
    assert "PyTorch sees no GPU" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measures_every_kernel(benchmark, tmp_path, capsys):
    assert benchmark.main(["--shapes", "2,4,2,64,512", "--repeats", "2", "--min_mib", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(benchmark.KERNELS) + 2


def test_rows_say_what_was_measured_and_what_could_not_be(benchmark):
    row = {"us": 25.0, "tokens_per_second": 40000.0, "gb_per_second": 4000.0, "share_of_peak": 0.8333, "error": 2e-3}
    pruned = row | {"gb_per_second": None, "share_of_peak": None}
    rows = [
        {"shape": (1, 24, 24, 64, 16384), "kernel": "decode", **row},
        {"shape": (1, 24, 24, 64, 16384), "kernel": "half", **pruned},
        {"shape": (1, 24, 24, 64, 16384), "kernel": "cudnn", "unavailable": "No available kernel."},
    ]
    lines = [*benchmark.HEADER.splitlines(), *map(benchmark.describe_row, rows)]
    assert lines[2] == "| 1,24,24,64,16384 | decode | 25.0 | 40000 | 4000 | 83% | 2.0e-03 |"
    assert lines[3] == "| 1,24,24,64,16384 | half | 25.0 | 40000 | – | – | 2.0e-03 |"
    assert lines[4] == "| 1,24,24,64,16384 | cudnn | – | – | – | – | No available kernel. |"
    assert {line.count("|") for line in lines[:5]} == {8}
