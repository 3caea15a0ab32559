"""Claims about a run's figures: the numbers drawn are the run's, files are pictures, and what is missing is named."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from forgetting_transformer.analysis.conditions import conditions, position_label, shown_names
from forgetting_transformer.analysis.plots import heatmaps, sweeps, training
from forgetting_transformer.analysis.plots import losses as plots
from forgetting_transformer.analysis.plots.style import curve_styles, format_tokens, picture
from forgetting_transformer.analysis.runs import (
    PositionLoss,
    Run,
    read_logged_run,
    read_metrics,
    read_position_loss,
    read_run,
    run_names,
)

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str, seq_len: int = 64, logs: int = 200, validations: int = 3) -> Path:
        rng = np.random.default_rng(len(name))
        run_dir = tmp_path / name
        tokens = 1000 * np.arange(1, logs + 1)
        loss = 4 + 4 * np.exp(-tokens / 20_000) + 0.1 * rng.normal(size=logs)
        train = [
            {"step": int(t), "train/loss": float(x), "train/token_count": int(t), "train/lr": 1e-3}
            for t, x in zip(tokens, loss, strict=True)
        ]
        write_jsonl(run_dir, "train", train)
        val = [{"step": 50_000 * n, "val/loss": 4.5 - 0.1 * n} for n in range(1, validations + 1)]
        write_jsonl(run_dir, "val", val)
        if validations:
            position_loss = 3 + 4 * np.arange(1, seq_len + 1) ** -0.5 + 0.2 * rng.random(seq_len)
            write_npz(run_dir, "val", 50_000 * validations, position_loss)
        return run_dir

    return make


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


@pytest.fixture(scope="module")
def plot_run() -> ModuleType:
    script = Path(__file__).parents[2] / "scripts" / "plot_run.py"
    spec = importlib.util.spec_from_file_location("plot_run", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_jsonl(run_dir: Path, name: str, records: list[dict]) -> Path:
    path = run_dir / "metrics" / "jsonlines" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_npz(run_dir: Path, source: str, step: int, loss: np.ndarray) -> Path:
    path = run_dir / "metrics" / "npz" / source / f"step-{step:015d}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{f"{source}/loss_per_token": loss})
    return path


def texts(figure: Figure) -> list[str]:
    """What the legend says."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def is_picture(path: Path) -> bool:
    """A PNG, at least 1000 pixels wide, that is not one flat colour."""
    pixels = mpl.image.imread(path)
    return pixels.shape[1] >= 1000 and float(pixels[..., :3].std()) > 0.01


class TestSmoothing:
    def test_by_hand(self) -> None:
        loss = np.array([8.0, 6.0, 4.0, 6.0, 2.0, 4.0])
        # fraction 0.5: reaches 0, 1, 1, 2, 2, 3 to either side, cut at the end of the data.
        expected = [8, 6, 16 / 3, 22 / 5, 16 / 4, 16 / 4]
        np.testing.assert_allclose(plots.smooth(loss, 0.5), expected)

    def test_most_bounds_the_reach(self) -> None:
        loss = np.array([8.0, 6.0, 4.0, 6.0, 2.0, 4.0])
        np.testing.assert_allclose(plots.smooth(loss, 0.5, most=1), [8, 6, 16 / 3, 4, 4, 3])
        np.testing.assert_array_equal(plots.smooth(loss, 0.5, most=0), loss)

    def test_a_constant_and_the_inside_of_a_straight_line_stay_where_they_are(self) -> None:
        np.testing.assert_allclose(plots.smooth(np.full(500, 3.25), 0.1), 3.25)
        line = np.linspace(9.0, 2.0, 500)
        np.testing.assert_allclose(plots.smooth(line, 0.1)[:450], line[:450])

    def test_losses_that_are_not_finite_are_left_out(self) -> None:
        loss = np.array([8.0, 6.0, math.nan, 6.0, math.inf, 3.0])
        np.testing.assert_allclose(plots.smooth(loss, 0.5, most=1), [8, 7, 6, 6, 4.5, 3])
        assert np.isnan(plots.smooth(np.array([1.0, math.nan]), 0.1)[1])

    def test_empty(self) -> None:
        assert plots.smooth(np.array([]), 0.1).shape == (0,)


def test_prefix_perplexity_by_hand() -> None:
    loss = np.log([8.0, 2.0, 4.0])
    np.testing.assert_allclose(plots.prefix_perplexity(loss), [8, 4, 4])


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0"), (500, "500"), (1500, "1.5K"), (25e7, "250M"), (48e9, "48B"), (1.2e12, "1.2T")],
)
def test_token_counts_have_units(tokens: float, text: str) -> None:
    assert format_tokens(tokens) == text


class TestReading:
    def test_a_half_written_last_line_is_left_out(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path, "train", [{"step": 1, "train/loss": 9.0}])
        for half in ('{"step": 2, "train/lo', '{"step": 2, "train/loss": 8.', "{", '{"step"', "\ud800é"):
            path.write_bytes(b'{"step": 1, "train/loss": 9.0}\n' + half.encode("utf-8", "surrogatepass")[:-1])
            assert read_metrics(path) == [{"step": 1, "train/loss": 9.0}]

    def test_a_whole_last_line_without_newline_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}')
        assert [record["step"] for record in read_metrics(path)] == [1, 2]

    @pytest.mark.parametrize("line", ["{broken", '{"loss": 3}', "[1]", "7", '{"step": null}'])
    def test_another_broken_line_is_an_error_with_its_number(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "train.jsonl"
        path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
            read_metrics(path)

    def test_what_a_resumed_run_logged_again_replaces_the_first_time(self, tmp_path: Path) -> None:
        records = [{"step": s, "try": 1} for s in (1, 2, 3, 4)] + [{"step": s, "try": 2} for s in (3, 4, 5)]
        path = write_jsonl(tmp_path, "train", records)
        assert [(r["step"], r["try"]) for r in read_metrics(path)] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]

    def test_history_takes_the_records_that_have_a_loss(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path, "train", [{"step": 1}, {"step": 2, "train/loss": 5.0}, {"step": 3, "train/loss": 4.0}])
        history = read_logged_run(tmp_path, "run")
        assert history.train_tokens.tolist() == [2, 3] and history.train_loss.tolist() == [5.0, 4.0]
        assert history.heldout_loss.size == 0

    def test_position_loss_is_the_newest_and_held_out_comes_first(self, tmp_path: Path) -> None:
        write_npz(tmp_path, "train_eval", 900, np.array([9.0, 8.0]))
        assert read_position_loss(tmp_path, "run").source == "train_eval"
        write_npz(tmp_path, "val", 100, np.array([7.0, 6.0]))
        write_npz(tmp_path, "val", 1000, np.array([5.0, 4.0]))
        newest = read_position_loss(tmp_path, "run")
        assert (newest.source, newest.train_tokens, newest.loss.tolist()) == ("val", 1000, [5.0, 4.0])

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no folder 'metrics': give a run's output_dir"):
            read_logged_run(tmp_path, "run")
        (tmp_path / "metrics").mkdir()
        with pytest.raises(FileNotFoundError, match=r"no 'train/loss' in train\.jsonl"):
            read_logged_run(tmp_path, "run")
        with pytest.raises(FileNotFoundError, match="after the run's first validation"):
            read_position_loss(tmp_path, "run")

    def test_a_broken_array_file_is_named(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path, "val", 5, np.ones(1000))
        whole = path.read_bytes()
        for broken in (b"", whole[:100], whole[:-30]):
            path.write_bytes(broken)
            with pytest.raises(ValueError, match=r"step-000000000000005\.npz: cannot read"):
                read_position_loss(tmp_path, "run")
        np.savez(path, other=np.ones(2))
        with pytest.raises(ValueError, match="val/loss_per_token"):
            read_position_loss(tmp_path, "run")

    def test_names_are_as_short_as_they_can_be(self, tmp_path: Path) -> None:
        assert run_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
        assert run_names([tmp_path / "x" / "lr1", tmp_path / "y" / "lr1"]) == ["x/lr1", "y/lr1"]
        with pytest.raises(ValueError, match="same run is given twice"):
            run_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


class TestLossAgainstTokens:
    def test_draws_the_logged_numbers(self, make_run: MakeRun, drawn: list[Figure], tmp_path: Path) -> None:
        run = read_logged_run(make_run("fox"), "fox")
        plots.loss_against_tokens([run], tmp_path / "new folder" / "loss.png", entropy=7.5)
        assert is_picture(tmp_path / "new folder" / "loss.png")
        axes = drawn[0].axes[0]
        logged, smoothed, heldout, entropy = axes.lines
        np.testing.assert_array_equal(logged.get_xydata(), np.stack([run.train_tokens, run.train_loss], axis=1))
        np.testing.assert_array_equal(smoothed.get_ydata(), plots.smooth(run.train_loss, 0.25, most=5))
        np.testing.assert_allclose(heldout.get_xydata(), [[50_000, 4.4], [100_000, 4.3], [150_000, 4.2]])
        assert set(entropy.get_ydata()) == {7.5}
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("training tokens", "loss (nats per token)")
        low, high = axes.get_ylim()
        assert low < run.train_loss.min() and high > 7.5

    def test_the_first_steps_do_not_flatten_the_rest(self, drawn: list[Figure], tmp_path: Path) -> None:
        tokens = np.arange(1, 1001)
        loss = np.where(tokens <= 5, 11.0, 3.0 - tokens / 2000)
        run = Run("run", tokens, loss, tokens[:0], loss[:0])
        plots.loss_against_tokens([run], tmp_path / "loss.png")
        assert drawn[0].axes[0].get_ylim()[1] < 3.5

    def test_legend_names_every_run_and_fits(self, drawn: list[Figure], make_run: MakeRun, tmp_path: Path) -> None:
        names = ["fox", "_transformer", "mamba2 $1_$2", "hgrn2_" + "a_long_name_" * 15, "delta net"]
        runs = [read_logged_run(make_run(name[:20]), name) for name in names]
        plots.loss_against_tokens(runs, tmp_path / "loss.png", entropy=5.0)
        figure = drawn[0]
        labels = [
            text.get_text().replace("\n", "").replace(r"\$", "$").strip() for text in figure.legends[0].get_texts()
        ]
        assert labels[:5] == names
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width
        assert figure.axes[0].get_window_extent().height > 0.6 * 4.0 * figure.dpi

    def test_one_log_and_gaps_are_drawn(self, tmp_path: Path) -> None:
        one = Run("one", np.array([100]), np.array([9.0]), np.array([], int), np.array([]))
        gaps = Run("gaps", np.arange(4), np.array([9, math.nan, 7, 6.0]), np.array([3]), np.array([math.inf]))
        plots.loss_against_tokens([one, gaps], tmp_path / "loss.png")
        assert is_picture(tmp_path / "loss.png")

    @pytest.mark.parametrize(
        ("entropy", "where"), [(3.5, None), (8.5, None), (1.0, "below the axis"), (15.0, "above the axis")]
    )
    def test_an_entropy_far_from_the_losses_is_named_and_does_not_flatten_them(
        self, make_run: MakeRun, drawn: list[Figure], tmp_path: Path, entropy: float, where: str | None
    ) -> None:
        run = read_logged_run(make_run("fox"), "fox")
        plots.loss_against_tokens([run], tmp_path / "loss.png", entropy=entropy)
        low, high = drawn[0].axes[0].get_ylim()
        assert (low < entropy < high) == (where is None)
        assert high - low < 1.7 * np.ptp(run.train_loss), "the losses take most of the axis"
        lines = [line for line in drawn[0].axes[0].lines if set(line.get_ydata()) == {entropy}]
        assert len(lines) == (where is None)
        (label,) = [text for text in texts(drawn[0]) if text.startswith("token frequencies alone")]
        assert label == f"token frequencies alone ({entropy:.2f} nats{f', {where}' if where else ''})"

    def test_one_logged_loss_has_a_mark_that_no_held_out_loss_has(self, drawn: list[Figure], tmp_path: Path) -> None:
        one = Run("one", np.array([100]), np.array([9.0]), np.array([100]), np.array([8.5]))
        two = Run("two", np.array([100, 200]), np.array([9.0, 8.0]), np.array([100]), np.array([8.5]))
        plots.loss_against_tokens([one], tmp_path / "one.png", conditions=["seed 0"])
        training, heldout = drawn[0].axes[0].lines
        assert training.get_xydata().tolist() == [[100, 9]] and training.get_marker() == "x" != heldout.get_marker()
        assert texts(drawn[0]) == ["training loss, logged once", "held-out loss"]
        assert drawn[0].texts[1].get_text() == "seed 0", "nothing was smoothed"
        plots.loss_against_tokens([one, two], tmp_path / "both.png")
        assert "cross: training loss, logged once" in texts(drawn[1])

    def test_nothing_finite_is_an_error(self, tmp_path: Path) -> None:
        run = Run("diverged", np.array([1]), np.array([math.nan]), np.array([], int), np.array([]))
        with pytest.raises(ValueError, match=r"no finite loss \(diverged\)"):
            plots.loss_against_tokens([run], tmp_path / "loss.png")
        with pytest.raises(ValueError, match="no runs given"):
            plots.loss_against_tokens([], tmp_path / "loss.png")


class TestLossAgainstPosition:
    @pytest.mark.parametrize(("seq_len", "first"), [(2, 1), (64, 1), (100, 1), (16_384, 32), (65_536, 128)])
    def test_draws_loss_and_perplexity(self, drawn: list[Figure], tmp_path: Path, seq_len: int, first: int) -> None:
        loss = 2 + np.random.default_rng(0).random(seq_len)
        plots.loss_against_position({"fox": loss}, tmp_path / "position.png")
        assert is_picture(tmp_path / "position.png")
        for axes, values in zip(drawn[0].axes, (plots.smooth(loss, 0.1), plots.prefix_perplexity(loss)), strict=True):
            position, y = axes.lines[0].get_data()
            assert (position[0], position[-1]) == (first, seq_len)
            np.testing.assert_array_equal(y, values[position - 1])
            assert axes.get_xscale() == "log"

    def test_curves_of_different_lengths_and_the_training_length(self, drawn: list[Figure], tmp_path: Path) -> None:
        curves = {"short": np.linspace(5, 4, 64), "long": np.linspace(5, 2, 65_536)}
        plots.loss_against_position(curves, tmp_path / "position.png", train_length=16_384)
        left = drawn[0].axes[0]
        short, long, training = left.lines
        assert short.get_xdata()[-1] == 64 and short.get_xdata().size > 20
        assert long.get_xdata()[-1] == 65_536
        assert set(training.get_xdata()) == {16_384}
        assert [t.get_text() for t in drawn[0].legends[0].get_texts()][2] == "training length (16,384 tokens)"

    @pytest.mark.parametrize("loss", [np.ones((2, 3, 4)), np.ones((2, 1)), np.ones(1), np.array([1.0, math.nan])])
    def test_what_is_no_curve_is_an_error(self, tmp_path: Path, loss: np.ndarray) -> None:
        with pytest.raises(ValueError, match="'fox': expected a vector"):
            plots.loss_against_position({"fox": loss}, tmp_path / "position.png")

    def test_no_curve_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no curve"):
            plots.loss_against_position({}, tmp_path / "position.png")

    def test_training_lengths_that_differ_have_a_line_each(self, drawn: list[Figure], tmp_path: Path) -> None:
        curves = {"a": np.linspace(5, 4, 64), "b": np.linspace(5, 2, 64), "c": np.linspace(5, 3, 64)}
        plots.loss_against_position(curves, tmp_path / "position.png", {"a": 16, "b": 32, "c": 16})
        left = drawn[0].axes[0]
        assert [line.get_xdata()[0] for line in left.lines[3:]] == [16, 32]
        assert texts(drawn[0])[3:] == ["training length of a, c (16 tokens)", "training length of b (32 tokens)"]

    def test_a_model_that_cannot_extrapolate_does_not_flatten_the_others(
        self, drawn: list[Figure], tmp_path: Path
    ) -> None:
        curves = {"flat": np.linspace(2.5, 1.5, 1024), "rising": np.concatenate([np.full(512, 2.0), np.full(512, 9.0)])}
        plots.loss_against_position(curves, tmp_path / "position.png", 512)
        left = drawn[0].axes[0]
        assert left.get_ylim()[1] < 3.5
        assert [text.get_text() for text in left.texts] == ["rising ends at 9"]
        # Alone it hides nothing.
        plots.loss_against_position({"rising": curves["rising"]}, tmp_path / "position.png", 512)
        assert drawn[1].axes[0].get_ylim()[1] > 9 and not drawn[1].axes[0].texts

    def test_a_model_that_has_diverged_does_not_flatten_the_others(self, drawn: list[Figure], tmp_path: Path) -> None:
        wild = "wild, held-out, after many more tokens than the other two"
        curves = {"good": np.linspace(5.0, 4.0, 64), "poor": np.full(64, 6.0), wild: np.full(64, 100.0)}
        plots.loss_against_position(curves, tmp_path / "position.png", of="runs")
        left, right = drawn[0].axes
        assert 6 < left.get_ylim()[1] < 7
        assert math.exp(6) < right.get_ylim()[1] < math.exp(7)
        for axes, end in ((left, "100"), (right, "2.69e+43")):
            (label,) = axes.texts
            assert label.get_text().replace("\n", " ") == f"{wild} ends at {end}"
            assert label.get_window_extent().x1 <= drawn[0].bbox.width
        assert drawn[0].texts[0].get_text() == "Loss at every position of 3 runs"

    def test_a_single_curve_is_named_once(self, drawn: list[Figure], tmp_path: Path) -> None:
        curve = PositionLoss("run3 (fox_pro)", np.linspace(5.0, 4.0, 64), 5120, "val")
        assert position_label(curve) == "run3 (fox_pro), held-out, after 5.12K tokens"
        plots.loss_against_position({position_label(curve): curve.loss}, tmp_path / "position.png")
        assert drawn[0].texts[0].get_text() == f"Loss at every position of {position_label(curve)}"
        assert not drawn[0].legends


class TestDiverging:
    def test_a_run_that_diverges_does_not_flatten_the_others_and_is_marked(
        self, make_run: MakeRun, drawn: list[Figure], tmp_path: Path
    ) -> None:
        tokens = 1000 * np.arange(1, 201)
        wild = Run("wild", tokens, 8 * 1.1 ** np.arange(200), tokens[[99]], np.array([900.0]))
        good = read_logged_run(make_run("fox"), "fox")
        plots.loss_against_tokens([good, wild], tmp_path / "loss.png")
        axes = drawn[0].axes[0]
        assert axes.get_ylim()[1] < 10
        (arrow,) = axes.texts
        assert arrow.get_text() == "wild ends at 1.1e+09", "the last value of the smoothed loss"
        assert axes.lines[-1].get_marker() == r"$\uparrow$", "no marker of a held-out loss looks like it"
        plots.loss_against_tokens([good], tmp_path / "loss.png")
        assert not drawn[1].axes[0].texts

    def test_a_held_out_loss_that_rises_again_is_shown(self, drawn: list[Figure], tmp_path: Path) -> None:
        tokens = 1000 * np.arange(1, 101)
        run = Run("overfit", tokens, 6 - np.arange(100) / 20, tokens[[9, 99]], np.array([4.0, 5.9]))
        plots.loss_against_tokens([run], tmp_path / "loss.png")
        assert drawn[0].axes[0].get_ylim()[1] > 5.9


def describe(run_dir: Path, seed: int = 0, label: str = "fox_pro") -> None:
    """Gives a run the files that say how it was made."""
    data = {"dataset": "code", "train_batch_len": 512, "train_batch_size": 8}
    config = {"seed": seed, "model": {"label": label}, "optimizer": {"lr": 0.003}, "datamodule": data}
    (run_dir / "config.yaml").write_text(json.dumps(config))
    (run_dir / "starts.jsonl").write_text(json.dumps({"machine": {"device": "abacus"}}) + "\n")


def test_a_figure_says_how_its_runs_were_made(make_run: MakeRun, drawn: list[Figure], tmp_path: Path) -> None:
    folders = [make_run("a"), make_run("bb")]
    for seed, folder in enumerate(folders):
        describe(folder, seed)
    write_jsonl(folders[0], "train_data_info", [{"step": 0, "documents": 90, "seq_len": 512, "global_batch_size": 8}])
    names = shown_names(folders)
    assert names == ["a (fox_pro)", "bb (fox_pro)"], "the model is part of the name"
    runs = [read_logged_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    plots.loss_against_tokens(runs[:1], tmp_path / "one.png", conditions=conditions(runs[:1]))
    plots.loss_against_tokens(runs, tmp_path / "two.png", conditions=conditions(runs))
    title, note = (text.get_text() for text in drawn[0].texts)
    assert title == "Training and held-out loss of a (fox_pro)"
    for part in ("code", "sequences of 512 tokens", "4,096 tokens a step", "learning rate 0.003", "seed 0", "abacus"):
        assert part in note.replace("\n", " ")
    assert "smoothed: mean over ± 25% of the tokens so far" in note.replace("\n", " ")
    title, note = (text.get_text().replace("\n", " ") for text in drawn[1].texts)
    assert title == "Training and held-out loss of 2 runs" and "seed 0, 1" in note and "compare held-out losses" in note
    # 90 documents are 11 batches of 8: the order comes back to the first after 11 * 8 * 512 tokens, known of one run.
    passes = [line.get_xdata()[0] for line in drawn[0].axes[0].lines if line.get_linestyle() == ":"]
    assert passes == [45056 * n for n in (1, 2, 3, 4)]
    assert texts(drawn[0])[-1] == "dotted: back to the first document"
    assert not any("dotted" in text for text in texts(drawn[1]))


def test_a_figure_says_how_much_was_trained_and_evaluated_and_on_what(make_run: MakeRun) -> None:
    run_dir = make_run("a")
    describe(run_dir)
    machine = {"device": "x86_64", "platform": "Linux-6.1-x86_64-with-glibc2.36"}
    (run_dir / "starts.jsonl").write_text(json.dumps({"machine": machine}) + "\n")
    write_jsonl(run_dir, "model_info", [{"step": 0, "model_info/total_params": 35_732}])
    write_jsonl(run_dir, "val", [{"step": 200_000, "val/loss": 4.0, "val/val_token_count": 2048}])
    found = conditions([read_logged_run(run_dir, "a")])
    for part in ("35.7K parameters", "200K tokens of training", "2.05K held-out tokens", "CPU (x86_64)"):
        assert part in found or f"on {part}" in found
    others = conditions([read_logged_run(run_dir, "a")], heldout=False)
    assert others == [part for part in found if "held-out" not in part], "of a figure that shows other texts"


def test_an_architecture_looks_the_same_in_every_figure_and_no_two_models_do_in_one() -> None:
    names = ["FoX (Pro)", "Mamba-2", "demo_transformer_llama", "gated_delta_net", "delta_net", "my own", "another"]
    found = curve_styles(names)
    assert len(set(found)) == len(names)
    for name, style in zip(names[:5], found, strict=False):
        assert curve_styles([name])[0] == style == curve_styles(["something else", name])[1]
    seeds = curve_styles(["fox_pro_seed0", "fox_pro_seed1", "mamba2"])
    assert len(set(seeds)) == 3 and seeds[0] == found[0] and seeds[2] == found[1]
    assert len(curve_styles([f"run {n}" for n in range(40)])) == 40
    # More than there are colours: the second of two that want the same is told from the first by line and marker.
    many = curve_styles([*names, "FoX (Pro), Muon", *(f"run {n}" for n in range(9 - len(names) + 10))])
    assert len(set(many)) == 20 and many[: len(names)] == found


@pytest.mark.parametrize("notes", [0, 1, 40])
@pytest.mark.parametrize("width", [4.4, 8.4])
def test_nothing_in_a_figure_lies_over_anything_else(
    drawn: list[Figure], tmp_path: Path, notes: int, width: float
) -> None:
    with picture(tmp_path / "x.png", "A long title of several words. " * 5, (width, 3.0), columns=2) as sheet:
        for number, (axes, style) in enumerate(zip(sheet.axes[0], curve_styles(["a", "b"]), strict=True)):
            axes.set(xlabel="training tokens", ylabel="loss (nats per token)", title=f"panel {number}")
            sheet.handles += [plots.line_handle(style, f"a model with a long name, number {k}") for k in range(4)]
        sheet.notes += ["a condition of several words"] * notes
    figure = drawn[0]
    boxes = [text.get_window_extent() for text in figure.texts] + [figure.legends[0].get_window_extent()]
    boxes += [axes.get_tightbbox() for axes in figure.axes]
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


class TestTrainingMetrics:
    @pytest.fixture
    def logged(self, make_run: MakeRun) -> Path:
        run_dir = make_run("fox")
        train = [
            {
                "step": 1000 * n,
                "train/loss": 9 - n,
                "train/lr": n / 1e3,
                "train/global_grad_norm": 2.0**n,
                "train/total_time": 60.0 * n,
            }
            for n in range(1, 6)
        ]
        write_jsonl(run_dir, "train", train)
        write_jsonl(run_dir, "val", [{"step": 4000, "val/loss": 6.0, "val/train_total_time": 240.0}])
        speed = {"throughput/token_count_per_second_total_recent": 50.0, "throughput/mfu_total_recent": 0.5}
        memory = "throughput/peak_memory_bytes"
        write_jsonl(run_dir, "throughput", [{"step": n, **speed, memory: 3e9 - 1000 / n} for n in (1000, 2000)])
        write_jsonl(run_dir, "goodput", [{"step": 5000, "goodput/steps": 0.9, "goodput/data": 0.1, "goodput/hours": 1}])
        norms = {"pnorm/model.layers.0.a": 3.0, "pnorm/model.layers.0.b": 4.0, "pnorm/lm_head.weight": 2.0}
        norms |= {"gnorm/model.layers.0.a": 0.3, "gnorm/model.layers.0.b": 0.4, "gnorm/lm_head.weight": 0.2}
        write_jsonl(run_dir, "norm", [{"step": 1000, **norms}])
        return run_dir

    def test_a_panel_for_everything_that_was_logged(self, logged: Path, drawn: list[Figure], tmp_path: Path) -> None:
        training.training_metrics([read_run(logged)], tmp_path / "x.png", ["seed 7"])
        panels = {axes.get_ylabel() or axes.get_xlabel(): axes for axes in drawn[0].axes if axes.axison}
        loss = panels.pop("loss (nats per token)")
        assert loss.get_xlabel() == "wall time of training (minutes)"
        heldout, smoothed = loss.lines
        assert heldout.get_xydata().tolist() == [[4.0, 6.0]] and smoothed.get_xdata() == pytest.approx([1, 2, 3, 4, 5])
        last = {name: axes.lines[0].get_ydata()[-1] for name, axes in panels.items() if axes.lines}
        assert last == pytest.approx({
            "learning rate": 0.005, "gradient norm\nbefore clipping": 32, "tokens per second": 50, "MFU (%)": 50,
            "peak memory (GB)": 3,
        })  # fmt: skip
        low, high = panels["peak memory (GB)"].get_ylim()
        assert low == 0 and high > 3.1, "a constant does not lie on the edge"
        assert panels["gradient norm\nbefore clipping"].get_yscale() == "log"
        bars = [patch.get_width() for patch in panels["share of wall time (%)"].patches]
        assert bars == pytest.approx([90, 10])
        assert "seed 7" in drawn[0].texts[1].get_text()

    @pytest.mark.parametrize(
        ("device", "label"), [("x86_64", "peak memory of\nthe process (GB)"), ("NVIDIA H200", "peak GPU memory (GB)")]
    )
    def test_peak_memory_says_of_what(
        self, logged: Path, drawn: list[Figure], tmp_path: Path, device: str, label: str
    ) -> None:
        machine = {"device": device, "platform": "Linux-6.1-x86_64-with-glibc2.36"}
        (logged / "starts.jsonl").write_text(json.dumps({"machine": machine}) + "\n")
        training.training_metrics([read_run(logged)], tmp_path / "x.png")
        assert label in [axes.get_ylabel() for axes in drawn[0].axes]

    def test_a_run_that_has_logged_once_is_in_every_panel(
        self, logged: Path, drawn: list[Figure], tmp_path: Path
    ) -> None:
        once = {"step": 1000, "train/loss": 8.0, "train/lr": 1e-3, "train/total_time": 60.0}
        write_jsonl(logged, "train", [once])
        training.training_metrics([read_run(logged)], tmp_path / "x.png")
        panels = {axes.get_ylabel() or axes.get_xlabel(): axes for axes in drawn[0].axes if axes.axison}
        marks = {line.get_marker(): line.get_ydata().tolist() for line in panels["loss (nats per token)"].lines}
        assert marks["x"] == [8.0]
        assert "training loss, logged once" in texts(drawn[0])
        bars = panels["share of wall time (%)"]
        assert all(tick.tick1line.get_markersize() == 0 for tick in bars.yaxis.get_major_ticks()), "bars have no ticks"

    def test_learning_rates_far_apart_are_all_seen(
        self, make_run: MakeRun, drawn: list[Figure], tmp_path: Path
    ) -> None:
        folders = [make_run("low"), make_run("wild")]
        for folder, top in zip(folders, (1e-3, 10.0), strict=True):
            rates = [
                {"step": 1000 * n, "train/loss": 5.0, "train/lr": top * rate} for n, rate in enumerate((0, 1, 0.5))
            ]
            write_jsonl(folder, "train", rates)
        training.training_metrics(list(map(read_run, folders)), tmp_path / "x.png")
        (panel,) = [axes for axes in drawn[0].axes if axes.get_ylabel() == "learning rate"]
        assert panel.get_yscale() == "log"

    def test_the_norms_of_a_block_are_of_all_its_parameters(
        self, logged: Path, drawn: list[Figure], tmp_path: Path
    ) -> None:
        training.norms(read_run(logged), tmp_path / "x.png")
        left, right = drawn[0].axes
        assert [line.get_ydata()[0] for line in left.lines] == pytest.approx([5.0, 2.0])
        assert [line.get_ydata()[0] for line in right.lines] == pytest.approx([0.5, 0.2])
        assert texts(drawn[0]) == ["layer 0", "lm_head"]

    def test_what_was_never_logged_has_no_panel(self, make_run: MakeRun, drawn: list[Figure], tmp_path: Path) -> None:
        training.training_metrics([read_run(make_run("young"))], tmp_path / "x.png")
        assert [axes.get_ylabel() for axes in drawn[0].axes] == ["learning rate"]
        write_jsonl(tmp_path / "bare", "train", [{"step": 1, "train/loss": 9.0}])
        run = read_run(tmp_path / "bare")
        with pytest.raises(ValueError, match="bare has logged nothing yet"):
            training.training_metrics([run], tmp_path / "x.png")
        with pytest.raises(ValueError, match="bare has logged no norms yet"):
            training.norms(run, tmp_path / "x.png")


def test_differences_have_error_bars_and_one_model_does_not_flatten_the_others(
    drawn: list[Figure], tmp_path: Path
) -> None:
    rows = [
        {"model": model, "against": "first", "begin": begin, "end": 2 * begin, "loss": loss, "loss_error": 0.25}
        for model, losses in (("second", (0.5, 0.5)), ("third", (0.25, 4.0)))
        for begin, loss in zip((256, 512), losses, strict=True)
    ]
    plots.loss_differences(rows, tmp_path / "x.png", train_length=512)
    axes = drawn[0].axes[0]
    segments = [segment for bar in axes.containers for segment in bar.lines[2][0].get_segments()]
    assert [segment[:, 1].tolist() for segment in segments] == [[0.25, 0.75], [0.25, 0.75], [0, 0.5], [3.75, 4.25]]
    assert axes.get_ylim()[1] == pytest.approx(0.7) and axes.texts[0].get_text() == "third ends at 4"
    assert "one standard error of the differences" in drawn[0].texts[1].get_text()
    with pytest.raises(ValueError, match="same documents"):
        plots.loss_differences([], tmp_path / "x.png")


def test_the_best_of_a_free_search_stands_out(drawn: list[Figure], tmp_path: Path) -> None:
    sweeps.loss_against_parameters(
        {"lr": [1.0, 2.0, 3.0]}, [3.0, 4.0, 5.0], {"lr"}, "held-out loss", tmp_path / "x.png"
    )
    axes = drawn[0].axes[0]
    (star,) = [line for line in axes.lines if line.get_marker() == "*"]
    assert star.get_xydata().tolist() == [[1.0, 3.0]] and star.get_alpha() is None, "the first run is drawn full"
    assert min(axes.collections[0].get_alpha()) >= 0.3
    assert "best: 3.0000, run 1 of 3" in texts(drawn[0])


def test_matplotlib_settings_are_left_alone(make_run: MakeRun, tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    plots.loss_against_tokens([read_logged_run(make_run("fox"), "fox")], tmp_path / "loss.png")
    assert dict(mpl.rcParams) == before


class TestScript:
    def test_one_run(self, plot_run: ModuleType, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
        run_dir = make_run("fox")
        assert plot_run.main([str(run_dir), "--entropy", "7.5"]) == 0
        written = [run_dir / "plots" / name for name in ("loss_tokens.png", "training.png", "loss_position.png")]
        assert capsys.readouterr().out.split() == list(map(str, written))
        assert all(map(is_picture, written))

    def test_a_file_in_plots_that_is_no_figure_is_kept(
        self, plot_run: ModuleType, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_dir = make_run("fox")
        (run_dir / "config.yaml").touch()
        (run_dir / "plots").mkdir()
        (run_dir / "plots/training.png").write_text("mine")
        assert plot_run.main([str(run_dir)]) == 1
        assert "training.png is not as scripts/plot_run.py has written it" in capsys.readouterr().err
        assert [file.name for file in (run_dir / "plots").iterdir()] == ["training.png"]
        assert (run_dir / "plots/training.png").read_text() == "mine"
        Figure().savefig(run_dir / "plots/training.png")  # as an earlier version drew there
        assert plot_run.main([str(run_dir)]) == 0

    def test_several_runs_need_out(
        self, plot_run: ModuleType, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs = [str(make_run("fox")), str(make_run("transformer"))]
        with pytest.raises(SystemExit):
            plot_run.main(runs)
        assert "--out DIR" in capsys.readouterr().err
        assert plot_run.main([*runs, "--out", str(tmp_path / "compare")]) == 0
        assert is_picture(tmp_path / "compare" / "loss_position.png")

    def test_a_run_before_its_first_validation(
        self, plot_run: ModuleType, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_dir = make_run("young", validations=0)
        assert plot_run.main([str(run_dir)]) == 0
        assert {path.name for path in (run_dir / "plots").glob("*.png")} == {"loss_tokens.png", "training.png"}
        assert "after the run's first validation" in capsys.readouterr().err

    def test_nothing_to_plot_and_broken_files(
        self, plot_run: ModuleType, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plot_run.main([str(tmp_path / "nowhere")]) == 1
        assert "no folder 'metrics'" in capsys.readouterr().err
        run_dir = make_run("fox")
        (run_dir / "metrics" / "jsonlines" / "train.jsonl").write_text("broken\n")
        assert plot_run.main([str(run_dir)]) == 1
        assert "line 1" in capsys.readouterr().err

    def test_losses_that_are_all_nan_are_an_error_without_traceback(
        self, plot_run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_jsonl(tmp_path, "train", [{"step": 1, "train/loss": math.nan}])
        assert plot_run.main([str(tmp_path)]) == 1
        assert "no finite loss" in capsys.readouterr().err


def test_the_entropy_line_comes_from_the_run_when_it_is_not_given(tmp_path):
    folder = tmp_path / "metrics/jsonlines"
    folder.mkdir(parents=True)
    assert read_run(tmp_path).unigram_entropy is None
    (folder / "train_data_info.jsonl").write_text('{"step": 0, "unigram_entropy_nats": 6.5}\n')
    assert read_run(tmp_path).unigram_entropy == 6.5


def test_seeds_of_one_model_are_drawn_as_their_mean_and_a_shaded_range(tmp_path, drawn):
    seeds = np.stack([np.full(1024, 3.0), np.full(1024, 5.0)])
    plots.loss_against_position({"fox": seeds, "llama": np.full(512, 6.0)}, tmp_path / "seeds.png", 256)
    left, right = drawn[0].axes
    for axes in (left, right):
        assert len(axes.collections) == 1, "one shaded range"
    (shade,) = left.collections
    bounds = shade.get_paths()[0].vertices[:, 1]
    assert (bounds.min(), bounds.max()) == (3.0, 5.0)
    assert np.allclose(left.lines[0].get_ydata(), 4.0) and np.allclose(left.lines[1].get_ydata(), 6.0)
    plots.loss_against_position({"fox": seeds}, tmp_path / "alone.png")
    for axes, inside in zip(drawn[1].axes, (seeds[:, 0], np.exp(seeds[:, 0])), strict=True):
        low, high = axes.get_ylim()
        assert low < inside.min() and inside.max() < high, "the whole range is seen, and where it ends"
    assert {text.get_text() for legend in drawn[0].legends for text in legend.get_texts()} == {
        "fox (2 seeds: mean and range)",
        "llama",
        "training length (256 tokens)",
    }


def test_octaves_are_drawn_beside_their_differences_to_the_first_model(drawn: list[Figure], tmp_path: Path) -> None:
    losses = {"first": {128: 2.0, 256: 1.5, 512: 1.25}, "second": {128: 2.25, 256: 2.0, 512: 9.0}}
    rows = [{"model": "second", "against": "first", "begin": 256, "end": 512, "loss": 0.5, "loss_error": 0.125}]
    plots.loss_by_octave(losses, rows, tmp_path / "x.png", ["seed 0"], {"first": 512, "second": 512})
    left, right = drawn[0].axes
    assert left.lines[0].get_ydata().tolist() == [2.0, 1.5, 1.25]
    assert left.lines[0].get_xdata() == pytest.approx(np.array([128, 256, 512]) * math.sqrt(2)), "middles of octaves"
    assert left.get_ylim()[1] < 3 and [text.get_text() for text in left.texts] == ["second ends at 9"]
    (bar,) = [segment for one in right.containers for segment in one.lines[2][0].get_segments()]
    assert bar[:, 1].tolist() == [0.375, 0.625]
    assert texts(drawn[0]) == ["first", "second", "training length (512 tokens)"]
    assert drawn[0].texts[1].get_text().startswith("seed 0 · bars: ± one standard error")


def with_ema(run_dir: Path, **line) -> Path:
    """Adds what the callback ema writes."""
    write_jsonl(run_dir, "val_ema", [{"step": 50_000 * n, "val_ema/loss": 4.3 - 0.1 * n, **line} for n in (1, 2, 3)])
    write_npz(run_dir, "val_ema", 150_000, np.linspace(6, 3, 64))
    return run_dir


@pytest.mark.slow
def test_the_moving_average_is_drawn_as_weights_and_is_no_held_out_set(
    make_run: MakeRun, drawn: list, plot_run: ModuleType, tmp_path: Path
) -> None:
    from forgetting_transformer.analysis.page import write_report

    run = with_ema(make_run("run"), **{"val_ema/weights": "ema"})
    describe(run)
    assert read_run(run).eval_sets == [] and read_run(run).ema.values.tolist() == pytest.approx([4.2, 4.1, 4.0])
    written = {path.name for path in plot_run.plot(plot_run.parse_args([str(run)]))}
    assert {"loss_tokens.png", "loss_position.png"} <= written
    assert not {"loss_sets.png", "loss_position_ema.png"} & written
    said = [text for figure in drawn for text in texts(figure)]
    assert "held-out loss, EMA weights" in said
    assert any("held-out, EMA weights, after 150K tokens" in text for text in said)
    drawn.clear()
    # Beside real sets it is a curve of the corpus's own documents.
    write_jsonl(run, "val_web", [{"step": 50_000, "val_web/loss": 4.0}])
    plot_run.plot(plot_run.parse_args([str(run), "--out", str(tmp_path / "sets")]))
    (sets,) = (figure for figure in drawn if any("set by set" in text.get_text() for text in figure.texts))
    panels = [axes.get_title("left") for axes in sets.axes if axes.get_title("left")]
    assert panels == ["held-out documents of the corpus", "web"]
    assert any(
        line.get_ydata().tolist() == pytest.approx([4.2, 4.1, 4.0])
        for line in sets.axes[0].lines
        if line.get_ydata().size == 3
    )
    write_report([run], [], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().replace("<wbr>", "")
    assert "Held-out loss, EMA weights" in page and "4.0000" in page and "Held-out loss, ema" not in page
    # A set that is called so, in a run without the callback, is one.
    assert read_run(with_ema(make_run("other"))).eval_sets == ["ema"]


def test_memory_lengths_are_written_out(drawn: list[Figure], tmp_path: Path) -> None:
    heatmaps.heads_by_layer([0, 1, 2], [0.2, 40.0, 20_000.0], [False] * 3, tmp_path / "memory.png")
    drawn[0].canvas.draw()
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert "16,384" in labels and not any("e+" in label for label in labels)
