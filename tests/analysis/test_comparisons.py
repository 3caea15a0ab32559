"""Comparing models: the losses are those of the named point, and the intervals those of textbook statistics."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from scipy import stats

from forgetting_transformer.analysis import comparisons, statistics
from forgetting_transformer.analysis.plots import sweeps as plots
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.training.continuing import decisive
from tests.sweep.conftest import load_script

compare_script = load_script("compare")
BUDGET = 1000


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run that falls from 5 to `final` nats in a straight line over 100 steps of 10 tokens."""

    def make(name: str, final: float, seed: int, tag: str = "fox", flops: float = 1e6, **more) -> Path:
        folder = tmp_path / name
        lines = folder / "metrics" / "jsonlines"
        lines.mkdir(parents=True)
        tokens = np.arange(10, more.get("tokens", BUDGET) + 1, 10)
        loss = 5 + (final - 5) * tokens / BUDGET
        config = {
            "tag": tag,
            "model": {"name": tag} | more.get("model", {}),
            "seed": seed,
            "output_dir": str(folder),
            "train": {"max_tokens": BUDGET},
            "datamodule": more.get("datamodule", {}),
            "optimizer": {"lr": more.get("lr", 1e-3)},
            "schedule": {"name": more.get("schedule", "warmup_cosine"), "total_tokens": BUDGET},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        train = [{"step": int(t), "train/loss": float(x)} for t, x in zip(tokens, loss, strict=True)]
        heldout = more.get("heldout", lambda tokens: 5.1 + (final - 5) * tokens / BUDGET)
        count = {"val/val_token_count": more["heldout_tokens"]} if "heldout_tokens" in more else {}
        val = [{"step": t, "val/loss": heldout(t)} | count for t in more.get("evaluated", [])]
        info = [{"step": 0, "flops_per_token": flops}]
        data = [{"step": 0, **more["data"]}] if "data" in more else []
        kinds = {"train": train, "val": val, "model_info": info, "train_data_info": data}
        for kind, entries in kinds.items():
            (lines / f"{kind}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return folder

    return make


def test_intervals_are_students_and_welchs():
    a, b = [3.01, 3.05, 2.98], [3.10, 3.12]
    interval = stats.t.interval(0.95, 2, loc=np.mean(a), scale=stats.sem(a))
    mean = statistics.mean(a)
    assert (mean.value - mean.half_width, mean.value + mean.half_width) == pytest.approx(interval)
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    apart = statistics.difference(a, b)
    assert (apart.value - apart.half_width, apart.value + apart.half_width) == pytest.approx((welch.low, welch.high))
    assert math.isnan(statistics.mean([3.0]).half_width) and math.isnan(statistics.difference([3.0], a).half_width)
    assert not statistics.difference([3.0], a).excludes_zero
    assert statistics.difference([3.0, 3.0], [2.0, 2.0]).excludes_zero


def test_losses_of_a_run_at_some_tokens(make_run):
    run = read_run(make_run("a", 3.0, seed=0, evaluated=[200, 600]))
    assert run.train_loss_at(400) == pytest.approx(5 - 2 * np.mean([390, 400]) / BUDGET), "the last 5 % before"
    share = math.log(400 / 200) / math.log(600 / 200)
    expected = (5.1 - 2 * 200 / BUDGET) * (1 - share) + (5.1 - 2 * 600 / BUDGET) * share
    assert run.heldout_loss_at(400) == pytest.approx(expected), "between two evaluations"
    assert run.heldout_loss_at(200) == pytest.approx(4.7) and run.heldout_loss_at(600) == pytest.approx(3.9)
    assert math.isnan(run.heldout_loss_at(700)) and math.isnan(run.train_loss_at(1100))
    assert run.final_loss(heldout=True) == pytest.approx(3.9)


def test_runs_that_differ_only_in_their_seed_are_one_model_named_by_what_differs(make_run):
    for seed in (0, 1):
        make_run(f"x/a{seed}", 3.0, seed)
        make_run(f"x/b{seed}", 3.1, seed, lr=2e-3)
    other = make_run("c", 3.2, 0, tag="transformer")
    moved = make_run("x/a0/previous/1/old", 3.0, 5)
    runs = comparisons.find_runs([other.parent / "x", other, other])
    assert moved not in runs and len(runs) == 5
    models = comparisons.group(runs, decisive)
    assert [(model.name, len(model.runs)) for model in models] == [
        ("fox lr=0.001", 2),
        ("fox lr=0.002", 2),
        ("transformer", 1),
    ]


def test_a_model_is_called_what_it_is_whatever_the_tag_says(make_run):
    """+experiment/demo=fox_pro model=gated_delta_net tag=mine"""
    fox = make_run("a", 3.0, 0, tag="demo_fox_pro", model={"name": "forgetting_transformer", "label": "fox_pro"})
    delta = make_run("b", 3.0, 0, tag="demo_fox_pro", model={"name": "gated_delta_net", "label": "gated_delta_net"})
    own = make_run("c", 3.0, 0, tag="demo_fox_pro", model={"name": "my_mixer", "label": ""})
    assert [model.name for model in comparisons.group([fox, delta, own], decisive)] == [
        "fox_pro",
        "gated_delta_net",
        "my_mixer",
    ]


def test_equal_tokens_and_equal_flops(make_run):
    """A model of twice the FLOPs per token is seen at half the tokens when FLOPs are equal, in mid-schedule."""
    small = comparisons.model("small", [read_run(make_run(f"s{k}", 3.0 + 0.01 * k, k)) for k in range(3)])
    large = comparisons.model("large", [read_run(make_run(f"l{k}", 2.0 + 0.01 * k, k, flops=2e6)) for k in range(3)])
    models = [small, large]
    tokens = comparisons.at_equal_tokens(models)
    assert tokens.amount == BUDGET and not tokens.heldout
    assert tokens.at("large").losses == [pytest.approx(run.train_loss_at(1000)) for run in large.runs]
    flops = comparisons.at_equal_flops(models)
    assert flops.amount == 1e9 and [point.tokens for point in flops.points] == [1000, 500]
    assert flops.at("large").losses == [pytest.approx(run.train_loss_at(500)) for run in large.runs]
    assert [point.tokens for point in comparisons.at_equal_flops(models, 5e8).points] == [500, 250]

    table = comparisons.table(flops, "small").splitlines()
    apart = statistics.difference(flops.at("large").losses, flops.at("small").losses)
    assert "1.000e+09 training FLOPs" in table[0]
    assert f"{apart.value:+.4f} ± {apart.half_width:.4f}" in table[-1] and table[-1].endswith("50% |")
    assert "**small**" in table[-2] and "baseline" in table[-2]
    (note,) = comparisons.warnings(flops, "small")
    assert "large is seen with 50% of its schedule left" in note
    assert comparisons.warnings(tokens, "small") == []


def test_a_loss_between_two_evaluations_is_marked_and_bounded(make_run):
    """Two models whose losses are the same function of FLOPs: what tells them apart is where they were evaluated."""

    def same(flops: float) -> Callable[[int], float]:
        return lambda tokens: 2 + 3 * (tokens * flops / 1e7) ** -0.4

    def runs(name: str, flops: float, evaluated: list[int]) -> comparisons.Model:
        options = {"flops": flops, "evaluated": evaluated, "heldout": same(flops)}
        return comparisons.model(name, [read_run(make_run(f"{name}{k}", 3.0, k, **options)) for k in range(2)])

    small, large = runs("small", 1e6, [100, 400, 700, 1000]), runs("large", 4e6, [100, 400, 700, 1000])
    models = [small, large]
    flops = comparisons.at_equal_flops(models, 1e9)
    assert [point.tokens for point in flops.points] == [1000, 250] and flops.heldout
    assert flops.at("large").around == pytest.approx((same(4e6)(100), same(4e6)(400))) and not flops.at("small").around
    truth, before, after = same(4e6)(250), *flops.at("large").around
    assert after < truth < before
    chord = (before + after) / 2 - truth
    assert chord > 0.06, "so much worse it would look on a straight line"
    assert 0 < flops.at("large").losses[0] - truth < chord / 3

    table = comparisons.table(flops, "small").splitlines()
    assert "| evaluated before and after |" in table[2]
    assert table[-1].rstrip(" |").endswith(f"{before:.4f}, {after:.4f}") and table[-2].count("|  ") >= 1
    assert "**" not in "".join(table), "which is better is open"
    for baseline in ("small", "large"):
        notes = "\n".join(comparisons.warnings(flops, baseline))
        assert f"large was not evaluated after 250 tokens: its loss there is interpolated between {before:.4f}" in notes
        assert "may differ by this interpolation alone" in notes
    # Where every model was evaluated there is nothing to say.
    exact = comparisons.at_equal_flops(models, 4e8)
    assert [point.tokens for point in exact.points] == [400, 100] and not any(point.around for point in exact.points)
    assert "before and after" not in comparisons.table(exact, "small")
    assert not any("interpol" in note for note in comparisons.warnings(exact, "small"))
    # A difference larger than what lies between the evaluations is one.
    far = comparisons.model(
        "far", [read_run(make_run("far", 3.0, 0, evaluated=[100, 400], heldout=lambda t: 9 - t / 1000))]
    )
    tokens = comparisons.at_equal_tokens([small, far], 250)
    notes = "\n".join(comparisons.warnings(tokens, "small"))
    assert "far was not evaluated after 250 tokens" in notes and "alone" not in notes
    assert "**small**" in comparisons.table(tokens, "small")


def test_what_is_not_known_is_not_claimed(make_run):
    one = comparisons.model("one", [read_run(make_run("one", 3.0, 0))])
    close = comparisons.model("close", [read_run(make_run(f"c{k}", 3.0 + 0.1 * k, k)) for k in range(2)])
    far = comparisons.model("far", [read_run(make_run(f"f{k}", 3.2 + 0.1 * k, k)) for k in range(2)])
    notes = comparisons.warnings(comparisons.at_equal_tokens([close, one, far]), "close")
    assert "a model with one seed has no interval: how much of a difference is noise is unknown" in notes
    assert "far and close are within seed noise of each other" in notes
    unknown = comparisons.model("unknown", [read_run(make_run("u", 3.0, 0, flops=None))])
    assert comparisons.at_equal_flops([one, unknown]) is None


def test_training_losses_of_a_later_pass_or_of_text_read_before_are_said(make_run):
    """Documents of two sequences: the second pass over them begins at 600 tokens, and the corpus again at 1,200."""
    data = {"documents": 61, "seq_len": 10, "global_batch_size": 2, "total_tokens": 1200}
    small = comparisons.model("small", [read_run(make_run("s", 3.0, 0, data=data))])
    large = comparisons.model("large", [read_run(make_run("l", 2.0, 0, flops=2e6, data=data))])

    def notes(comparison: comparisons.Comparison) -> list[str]:
        baseline = comparison.points[0].name
        return [note for note in comparisons.warnings(comparison, baseline) if "training losses" in note]

    assert notes(comparisons.at_equal_tokens([small, large], 600)) == []
    (said,) = notes(comparisons.at_equal_tokens([small, large], 700))
    assert said.startswith("small (pass 2), large (pass 2): ") and "begins every 600 tokens" in said
    later, different = notes(comparisons.at_equal_flops([small, large]))
    assert later.startswith("small (pass 2): ") and "different passes are of different texts" in different
    unknown = comparisons.model("unknown", [read_run(make_run("u", 2.0, 0))])
    assert notes(comparisons.at_equal_tokens([unknown], 700)) == []
    data = {**data, "total_tokens": 650}
    again = comparisons.model("again", [read_run(make_run("a", 3.0, 0, data=data, evaluated=[500, 1000]))])
    said = notes(comparisons.at_equal_tokens([again], 700, heldout=False))
    assert any(note.startswith("again: these training losses are of text that had been read before") for note in said)
    assert notes(comparisons.at_equal_tokens([again])) == []


def test_held_out_losses_are_compared_where_every_run_has_them(make_run):
    a = comparisons.model("a", [read_run(make_run("a", 3.0, 0, evaluated=[500, 1000]))])
    b = comparisons.model("b", [read_run(make_run("b", 3.1, 0, evaluated=[1000], flops=2e6))])
    assert comparisons.at_equal_tokens([a, b]).heldout and comparisons.at_equal_tokens([a, b]).at("a").losses == [
        pytest.approx(3.1)
    ]
    assert not comparisons.at_equal_flops([a, b]).heldout, "b was not evaluated at half its tokens"
    assert not comparisons.at_equal_tokens([a, b], heldout=False).heldout


def test_losses_on_other_held_out_texts_are_said_not_to_compare(make_run):
    """Of two models, and of two seeds of one."""
    given = [("a", 0, 640), ("b", 1, 1280)]
    runs = [read_run(make_run(n, 3.0, seed, evaluated=[1000], heldout_tokens=k)) for n, seed, k in given]
    for models in (
        [comparisons.model("a", runs)],
        [comparisons.model(n, [r]) for n, r in zip("ab", runs, strict=True)],
    ):
        said = comparisons.warnings(comparisons.at_equal_tokens(models), "a")
        assert any(note.startswith("the runs have different held-out texts: their losses on them") for note in said)
    same = [comparisons.model("a", runs[:1])]
    assert "held-out texts" not in str(comparisons.warnings(comparisons.at_equal_tokens(same), "a"))


def test_the_script_writes_tables_and_a_figure(make_run, tmp_path, capsys):
    for k in range(2):
        make_run(f"fox/{k}", 3.0 + 0.01 * k, k, evaluated=[500, 1000])
        make_run(f"tr/{k}", 3.2 + 0.01 * k, k, tag="transformer", evaluated=[500, 1000])
    arguments = ["--model", "FoX (Pro)", str(tmp_path / "fox"), "--out", str(tmp_path / "out")]
    assert (
        compare_script.main([*arguments, "--model", "Transformer", str(tmp_path / "tr/0"), str(tmp_path / "tr/1")]) == 0
    )
    printed = capsys.readouterr().out
    assert "## 1,000 training tokens: held-out loss" in printed and "+0.2000 ± " in printed
    assert (tmp_path / "out/compare.md").read_text().strip() in printed
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    assert compare_script.main([str(tmp_path / "fox"), str(tmp_path / "tr"), *arguments[-2:]]) == 0
    assert "| transformer " in capsys.readouterr().out


def test_the_script_says_what_it_cannot_compare(make_run, tmp_path, capsys):
    run = str(make_run("a", 3.0, 0))
    make_run("b", 3.0, 0)

    def error(*arguments: str) -> str:
        assert compare_script.main([*arguments, "--out", str(tmp_path / "out")]) == 1
        return capsys.readouterr().err

    assert "both have seed 0 and would count as two samples" in error(str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert "no run there that has logged" in error(str(tmp_path / "empty"))
    assert "--tokens 2,000: fox has logged 1,000 tokens" in error(run, "--tokens", "2e3")
    assert "--flops 2.000e+09: fox has done 1.000e+09 FLOPs" in error(run, "--flops", "2e9")
    assert "or --loss train" in error(run, "--loss", "heldout")
    assert "--baseline 'gpt' be one of them" in error(run, "--baseline", "gpt")
    assert not (tmp_path / "out").exists()


def test_the_figure_has_the_mean_the_range_of_seeds_and_the_points_of_comparison(make_run, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    runs = [read_run(make_run(f"a{k}", 3.0 + k, k, evaluated=[500, 1000])) for k in range(2)]
    plots.loss_against_tokens_and_flops([comparisons.model("a", runs)], tmp_path / "x.png", tokens=900, flops=9e8)
    left, right = drawn[0].axes
    mean, heldout, point = left.lines
    assert mean.get_xdata()[-1] == 1000 and mean.get_ydata()[50] == pytest.approx(5 - 1.5 * 510 / BUDGET, abs=1e-6)
    assert list(heldout.get_xdata()) == [500, 1000] and heldout.get_ydata() == pytest.approx([4.35, 3.6])
    assert point.get_xdata()[0] == 900 and right.lines[-1].get_xdata()[0] == 9e8
    assert right.lines[0].get_xdata()[-1] == 1000 * 1e6
    (legend,) = drawn[0].legends
    assert "dashed: where the models are compared" in [text.get_text() for text in legend.get_texts()]
    shade = left.collections[0].get_paths()[0].vertices
    assert shade[:, 1].min() < 3.1 and 3.9 < shade[shade[:, 0] > 990][:, 1].max() < 4.1


def test_losses_of_contexts_of_different_length_are_told_apart(make_run):
    lengths = {"short": 128, "long": 512}
    models = [
        comparisons.named_model(
            name,
            [make_run(name, 3.0, 0, evaluated=[1000], datamodule={"eval_batch_len": n, "train_batch_len": 2 * n})],
        )
        for name, n in lengths.items()
    ]
    for heldout, said in (
        (True, "datamodule.eval_batch_len=128 and 512"),
        (False, "datamodule.train_batch_len=256 and 1024"),
    ):
        comparison = comparisons.at_equal_tokens(models, 1000, heldout=heldout)
        (note,) = [note for note in comparisons.warnings(comparison, "short") if "of different length" in note]
        assert said in note
    alone = comparisons.at_equal_tokens(models[:1], 1000)
    assert not any("of different length" in note for note in comparisons.warnings(alone, "short"))
