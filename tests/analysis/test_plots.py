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

from forgetting_transformer.analysis.plots import losses as plots
from forgetting_transformer.analysis.runs import (
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
            {"step": int(t), "train/loss": float(x), "train/token_count": int(t)}
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
    assert plots.format_tokens(tokens) == text


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


def test_matplotlib_settings_are_left_alone(make_run: MakeRun, tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    plots.loss_against_tokens([read_logged_run(make_run("fox"), "fox")], tmp_path / "loss.png")
    assert dict(mpl.rcParams) == before


class TestScript:
    def test_one_run(self, plot_run: ModuleType, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
        run_dir = make_run("fox")
        assert plot_run.main([str(run_dir), "--entropy", "7.5"]) == 0
        written = [run_dir / "plots" / name for name in ("loss_tokens.png", "loss_position.png")]
        assert capsys.readouterr().out.split() == list(map(str, written))
        assert all(map(is_picture, written))

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
        assert [path.name for path in (run_dir / "plots").iterdir()] == ["loss_tokens.png"]
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
    assert {text.get_text() for legend in drawn[0].legends for text in legend.get_texts()} == {
        "fox (2 seeds: mean and range)",
        "llama",
        "training length (256 tokens)",
    }
