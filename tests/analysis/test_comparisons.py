"""Comparing models: the losses are those of the named point, and the notes say what may mislead."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from forgetting_transformer.analysis import AnalysisError, comparisons, statistics
from forgetting_transformer.analysis.plots.losses import loss_of_models
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.training.config.continuing import decisive
from tests.analysis.conftest import legend, write_lines
from tests.processes import load_script

compare_script = load_script("compare")
BUDGET = 1000


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run that falls from 5 to `final` nats in a straight line over 100 steps of 10 tokens."""

    def make(name: str, final: float, seed: int = 0, tag: str = "fox", flops: float | None = 1e6, **more) -> Path:
        folder = tmp_path / name
        tokens = np.arange(10, BUDGET + 1, 10)
        loss = 5 + (final - 5) * tokens / BUDGET
        train = [{"step": int(t), "train/loss": float(x)} for t, x in zip(tokens, loss, strict=True)]
        write_lines(folder, "train", train)
        heldout = more.get("heldout", lambda tokens: 5.1 + (final - 5) * tokens / BUDGET)
        count = {"val/val_token_count": more["heldout_tokens"]} if "heldout_tokens" in more else {}
        write_lines(folder, "val", [{"step": t, "val/loss": heldout(t)} | count for t in more.get("evaluated", [])])
        write_lines(folder, "model_info", [{"step": 0, "flops_per_token": flops}])
        config = {
            "tag": tag,
            "model": {"name": tag} | more.get("model", {}),
            "seed": seed,
            "output_dir": str(folder),
            "train": {"max_tokens": BUDGET},
            "datamodule": more.get("datamodule", {}),
            "optimizer": {"lr": more.get("lr", 1e-3)},
            "schedule": {"name": "warmup_cosine", "total_tokens": BUDGET},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return folder

    return make


@pytest.fixture
def make_model(make_run) -> Callable[..., comparisons.Model]:
    """Makes a model of runs with these final losses, a seed each."""

    def make(name: str, *finals: float, **more) -> comparisons.Model:
        runs = [read_run(make_run(f"{name}{seed}", final, seed, **more)) for seed, final in enumerate(finals)]
        return comparisons.model(name, runs)

    return make


def test_losses_of_a_run_at_some_tokens(make_run):
    run = read_run(make_run("a", 3.0, evaluated=[200, 600]))
    assert run.train_loss_at(400) == pytest.approx(5 - 2 * np.mean([390, 400]) / BUDGET), "the last 5 % before"
    share = math.log(400 / 200) / math.log(600 / 200)
    assert run.heldout_loss_at(400) == pytest.approx(4.7 * (1 - share) + 3.9 * share), "between two evaluations"
    assert math.isnan(run.heldout_loss_at(700)) and math.isnan(run.train_loss_at(1100))


def test_runs_that_differ_only_in_their_seed_are_one_model_named_by_what_differs(make_run):
    for seed in (0, 1):
        make_run(f"x/a{seed}", 3.0, seed)
        make_run(f"x/b{seed}", 3.1, seed, lr=2e-3)
    # A model is called what it is, whatever the tag says: +experiment/demo=fox_pro model=gated_delta_net
    other = make_run("c", 3.2, tag="fox", model={"name": "gated_delta_net", "label": "Gated DeltaNet"})
    moved = make_run("x/a0/previous/1/old", 3.0, 5)
    runs = comparisons.find_runs([other.parent / "x", other, other])
    assert moved not in runs and len(runs) == 5
    models = comparisons.group(runs, decisive)
    names = ["fox lr=0.001", "fox lr=0.002", "Gated DeltaNet"]
    assert [(model.name, len(model.runs)) for model in models] == list(zip(names, [2, 2, 1], strict=True))


def test_equal_tokens_and_equal_flops(make_model):
    """A model of twice the FLOPs per token is seen at half the tokens when FLOPs are equal, in mid-schedule."""
    models = [make_model("small", 3.0, 3.01, 3.02), make_model("large", 2.0, 2.01, 2.02, flops=2e6)]
    large = models[1].runs
    tokens = comparisons.at_equal_tokens(models)
    assert tokens.amount == BUDGET and not tokens.heldout
    assert tokens.at("large").losses == [pytest.approx(run.train_loss_at(1000)) for run in large]
    flops = comparisons.at_equal_flops(models)
    assert flops.amount == 1e9 and [point.tokens for point in flops.points] == [1000, 500]
    assert flops.at("large").losses == [pytest.approx(run.train_loss_at(500)) for run in large]
    assert [point.tokens for point in comparisons.at_equal_flops(models, 5e8).points] == [500, 250]

    table = comparisons.table(flops, "small").splitlines()
    apart = statistics.difference(flops.at("large").losses, flops.at("small").losses)
    assert "1.000e+09 training FLOPs" in table[0]
    assert f"{apart.value:+.4f} ± {apart.half_width:.4f}" in table[-1] and table[-1].endswith("50% |")
    assert "**small**" in table[-2] and "baseline" in table[-2]
    (note,) = comparisons.warnings(flops, "small")
    assert "large is seen with 50% of its schedule left" in note
    assert comparisons.warnings(tokens, "small") == []
    assert comparisons.at_equal_flops([*models, make_model("unknown", 3.0, flops=None)]) is None


def test_a_loss_between_two_evaluations_is_interpolated_and_said_to_be(make_model):
    def same(tokens: float) -> float:
        return 2 + 3 * (tokens * 4e6 / 1e7) ** -0.4

    evaluated = {"evaluated": [100, 400, 700, 1000], "heldout": same}
    models = [make_model(name, 3.0, flops=flops, **evaluated) for name, flops in (("small", 1e6), ("large", 4e6))]
    between = comparisons.at_equal_flops(models, 1e9)
    small, large = between.points
    assert (small.tokens, large.tokens) == (1000, 250) and between.heldout
    assert (small.is_between, large.is_between) == (False, True)
    straight = same(100) + (same(400) - same(100)) / 2
    assert 0 < large.losses[0] - same(250) < (straight - same(250)) / 3, "a straight line would be far too high"
    notes = "\n".join(comparisons.warnings(between, "large"))
    assert "large was not evaluated after 250 tokens: its loss there is interpolated" in notes and "1,000" not in notes
    assert not any(
        "interpol" in note for note in comparisons.warnings(comparisons.at_equal_flops(models, 4e8), "small")
    )


def test_what_is_not_known_is_not_claimed(make_model):
    models = [make_model("close", 3.0, 3.1), make_model("one", 3.0), make_model("far", 3.2, 3.3)]
    notes = comparisons.warnings(comparisons.at_equal_tokens(models), "close")
    assert "a model with one seed has no interval: how much of a difference is noise is unknown" in notes
    assert "far and close are within seed noise of each other" in notes


def test_held_out_losses_are_compared_where_every_run_has_them(make_model):
    models = [make_model("a", 3.0, evaluated=[500, 1000]), make_model("b", 3.1, evaluated=[1000], flops=2e6)]
    tokens = comparisons.at_equal_tokens(models)
    assert tokens.heldout and tokens.at("a").losses == [pytest.approx(3.1)]
    assert not comparisons.at_equal_flops(models).heldout, "b was not evaluated at half its tokens"
    assert not comparisons.at_equal_tokens(models, heldout=False).heldout


@pytest.mark.parametrize(
    ("options", "heldout", "note"),
    [
        ([{"heldout_tokens": 640}, {"heldout_tokens": 1280}], True, "the runs have different held-out texts: their"),
        ([{"datamodule": {"eval_batch_len": n}} for n in (128, 512)], True, "datamodule.eval_batch_len=128 and 512"),
        ([{"datamodule": {"train_batch_len": n}} for n in (128, 512)], False, "datamodule.train_batch_len=128 and 512"),
    ],
)
def test_losses_on_other_texts_or_contexts_are_said_not_to_compare(make_model, options, heldout, note):
    models = [make_model(f"m{n}", 3.0, evaluated=[1000], **more) for n, more in enumerate(options)]
    said = comparisons.warnings(comparisons.at_equal_tokens(models, heldout=heldout), "m0")
    assert any(note in one for one in said)
    alone = comparisons.warnings(comparisons.at_equal_tokens(models[:1], heldout=heldout), "m0")
    assert not any("different" in one for one in alone)


@pytest.mark.slow
def test_the_script_writes_tables_and_a_figure(make_run, tmp_path, capsys):
    for k in range(2):
        make_run(f"fox/{k}", 3.0 + 0.01 * k, k, evaluated=[500, 1000])
        make_run(f"tr/{k}", 3.2 + 0.01 * k, k, tag="transformer", evaluated=[500, 1000])
    named = ["--model", "FoX (Pro)", str(tmp_path / "fox"), "--model", "Transformer", str(tmp_path / "tr/0")]
    out = ["--out", str(tmp_path / "out")]
    compare_script.main([*named, str(tmp_path / "tr/1"), *out])
    printed = capsys.readouterr().out
    assert "## 1,000 training tokens: held-out loss" in printed and "+0.2000 ± " in printed
    assert (tmp_path / "out/compare.md").read_text().strip() in printed
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    compare_script.main([str(tmp_path / "fox"), str(tmp_path / "tr"), *out])
    assert "| transformer " in capsys.readouterr().out


def test_the_script_says_what_it_cannot_compare(make_run, tmp_path):
    run = str(make_run("a", 3.0))
    make_run("b", 3.0)
    early = str(make_run("early/c", 3.0, evaluated=[200, 500]))
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([str(tmp_path)], "both have seed 0 and would count as two samples"),
        ([str(tmp_path / "empty")], "no run there that has logged"),
        ([run, "--tokens", "2e3"], "--tokens 2,000: fox has logged 1,000 tokens"),
        ([run, "--flops", "2e9"], "--flops 2.000e+09: fox has done 1.000e+09 FLOPs"),
        ([run, "--loss", "heldout"], "a has no held-out loss at 1,000 tokens, and has none at all; choose"),
        (
            [early, "--loss", "heldout"],
            "at 1,000 tokens, and has some from 200 to 500 tokens; choose another point (--tok",
        ),
        ([run, "--baseline", "gpt"], "--baseline 'gpt' be one of them"),
    ):
        with pytest.raises(AnalysisError, match=re.escape(said)):
            compare_script.main([*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_figure_has_the_mean_the_range_of_seeds_and_the_points_of_comparison(
    make_model, drawn: list[Figure], tmp_path
):
    model = make_model("a", 3.0, 4.0, evaluated=[500, 1000])
    loss_of_models([model], tmp_path / "x.png", tokens=900, flops=9e8)
    left, right = drawn[0].axes
    mean, heldout, point = left.lines
    assert mean.get_xdata()[-1] == 1000 and mean.get_ydata()[50] == pytest.approx(5 - 1.5 * 510 / BUDGET, abs=1e-6)
    assert list(heldout.get_xdata()) == [500, 1000] and heldout.get_ydata() == pytest.approx([4.35, 3.6])
    assert point.get_xdata()[0] == 900 and right.lines[-1].get_xdata()[0] == 9e8
    assert right.lines[0].get_xdata()[-1] == 1000 * 1e6
    assert "dashed: where the models are compared" in legend(drawn[0])
    shade = left.collections[0].get_paths()[0].vertices
    assert shade[:, 1].min() < 3.1 and 3.9 < shade[shade[:, 0] > 990][:, 1].max() < 4.1
