"""Folders of runs as training leaves them, and the figures that a test draws."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.evaluation.conftest import quickstart  # noqa: F401 (a fixture)

MakeRun = Callable[..., Path]
#: Tokens at which runs are evaluated.
STEPS = (50_000, 100_000, 150_000)


def write_lines(run_dir: Path, kind: str, records: list[dict[str, Any]]) -> Path:
    path = run_dir / "metrics" / "jsonlines" / f"{kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_losses_by_position(run_dir: Path, kind: str, step: int, loss: np.ndarray) -> Path:
    path = run_dir / "metrics" / "npz" / kind / f"step-{step:015d}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{f"{kind}/loss_per_token": loss})
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run of 200,000 tokens that has logged what every run logs."""

    def make(name: str = "run", seed: int = 0, label: str = "fox_pro") -> Path:
        run_dir = tmp_path / name
        tokens = 1000 * np.arange(1, 201)
        loss = 4 + 4 * np.exp(-tokens / 20_000) + 0.1 * np.random.default_rng(seed).normal(size=200)
        train = [
            {"step": int(t), "train/loss": float(x), "train/lr": 1e-3, "train/total_time": t / 1000}
            | {"train/global_grad_norm": 2.0 ** (t // 50_000)}
            for t, x in zip(tokens, loss, strict=True)
        ]
        write_lines(run_dir, "train", train)
        val = [{"step": n, "val/loss": 4.5 - n / 5e5, "val/val_token_count": 2048} for n in STEPS]
        write_lines(run_dir, "val", val)
        write_losses_by_position(run_dir, "val", STEPS[-1], 3 + 4 * np.arange(1, 65) ** -0.5)
        speed = {"throughput/token_count_per_second_total_recent": 50.0, "throughput/mfu_total_recent": 0.5}
        speed |= {"throughput/token_count_per_second_total_cum": 45.0, "throughput/peak_memory_bytes": 3e9}
        write_lines(run_dir, "throughput", [{"step": n, **speed} for n in STEPS])
        write_lines(run_dir, "goodput", [{"step": 1, "goodput/steps": 0.9, "goodput/data": 0.1, "goodput/hours": 1}])
        norms = {"pnorm/model.layers.0.a": 3.0, "pnorm/model.layers.0.b": 4.0, "pnorm/lm_head.weight": 2.0}
        norms |= {"gnorm/model.layers.0.a": 0.3, "gnorm/model.layers.0.b": 0.4, "gnorm/lm_head.weight": 0.2}
        write_lines(run_dir, "norm", [{"step": n, **norms} for n in STEPS])
        write_lines(run_dir, "model_info", [{"step": 0, "model_info/total_params": 35_732}])
        data = {"dataset": "code", "train_batch_len": 512, "train_batch_size": 8}
        config = {"seed": seed, "model": {"label": label}, "optimizer": {"lr": 0.003}, "datamodule": data}
        (run_dir / "config.yaml").write_text(json.dumps(config))
        machine = {"device": "x86_64", "platform": "Linux-6.1-x86_64-with-glibc2.36"}
        (run_dir / "starts.jsonl").write_text(json.dumps({"machine": machine}) + "\n")
        return run_dir

    return make


def add_callbacks(run_dir: Path, better: float = 0.0) -> Path:
    """Adds what callbacks log: two tasks, a needle at two lengths, and gates."""
    lm_eval, needle = [], []
    for number, step in enumerate(STEPS):
        score = 0.25 + 0.1 * number + better
        arc = {"lm_eval/arc_easy/acc": score, "lm_eval/arc_easy/acc_stderr": 0.02, "lm_eval/arc_easy/chance": 0.25}
        arc |= {"lm_eval/arc_easy/acc_norm": score / 2, "lm_eval/arc_easy/acc_norm_stderr": 0.02}
        wiki = {"lm_eval/wikitext/word_perplexity": 900.0 / (number + 1), "lm_eval/wikitext/bits_per_byte": 2.0}
        strict = {"lm_eval/mine/exact_match,strict": 0.5, "lm_eval/mine/exact_match_stderr,strict": 0.1}
        lm_eval.append({"step": step, **arc, **wiki, **strict})
        found = {"needle/mode": "easy", "needle/depths": "0 100", "needle/samples": 2}
        for length in (1024, 512):
            at = f"needle/length_{length}"
            found |= {f"{at}/loss": 5.0 - number, f"{at}/loss_stderr": 0.1, f"{at}/loss_without": 5.5}
            found |= {f"{at}/accuracy": 0.2 * number, f"{at}/depth_50/loss": 4.0, f"{at}/texts": "ab"}
        needle.append({"step": step, **found})
    write_lines(run_dir, "lm_eval", lm_eval)
    write_lines(run_dir, "needle", needle)
    write_lines(run_dir, "gates", [{"step": STEPS[0], "gates/longest": 70.0, "gates/layer_0/head_0": 3.0}])
    return run_dir


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def keep(figure: Figure, *args: object, **kwargs: object) -> None:
        figures.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def legend(figure: Figure) -> list[str]:
    """The texts of its legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def title_and_note(figure: Figure) -> list[str]:
    """The title and the conditions, each in one line."""
    return [text.get_text().replace("\n", " ") for text in figure.texts]


def is_picture(path: Path) -> bool:
    """A PNG, at least 1000 pixels wide, that is not one flat colour."""
    pixels = mpl.image.imread(path)
    return pixels.shape[1] >= 1000 and float(pixels[..., :3].std()) > 0.01
