"""Models against each other: loss after the same training tokens and after the same training FLOPs, over seeds.

A model is a set of runs that differ in nothing but their seed. Its loss is the mean over them, its uncertainty what
other initial weights would change (statistics.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import AnalysisError, statistics
from forgetting_transformer.analysis.runs import TRAIN_WINDOW, Run, read_run
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.files import flatten

#: From a resolved config to its flat keys that decide what a model learns.
Decisive = Callable[[dict[str, Any]], dict[str, Any]]
#: Most differing keys that a name lists; beyond, the run's folder names the model.
_KEYS_IN_A_NAME = 3
#: Part of the schedule that may be left without a warning: evaluations are rarely due at the very last token.
_SCHEDULE_TOLERANCE = 0.005


@dataclass(frozen=True)
class Model:
    """Runs that differ in their seed alone."""

    name: str
    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        """Training tokens that all its runs have logged."""
        return min(run.tokens for run in self.runs)

    @property
    def flops_per_token(self) -> float:
        return float(self.runs[0].flops_per_token or math.nan)


@dataclass(frozen=True)
class Point:
    """One model where models are compared.

    Attributes:
        tokens: training tokens there.
        losses: of each seed there, nats per token.
        is_between: whether they are held-out losses that are interpolated between two evaluations.
    """

    model: Model
    tokens: float
    losses: Sequence[float]
    is_between: bool = False

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses).value

    @property
    def schedule_left(self) -> float:
        """Part of the learning rate's schedule that is left; 0 where so little is that it does not count."""
        schedule = self.model.runs[0].config["schedule"]
        left = 0.0 if schedule["name"] == "constant" else 1 - self.tokens / schedule["total_tokens"]
        return left if left > _SCHEDULE_TOLERANCE else 0.0


@dataclass(frozen=True)
class Comparison:
    """All models at one number of tokens or FLOPs.

    Attributes:
        what: what is equal, "training tokens" or "training FLOPs", and `amount` how many.
        heldout: whether the losses are held-out ones; otherwise training losses over the last TRAIN_WINDOW of the
            tokens.
        points: of each model.
    """

    what: str
    amount: float
    heldout: bool
    points: Sequence[Point]

    def at(self, name: str) -> Point:
        return next(point for point in self.points if point.name == name)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs among these folders and inside them, in order; what a run moved aside is left out.

    Raises:
        AnalysisError: a folder neither is a run nor contains one.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(file.parents[2] for file in path.glob("**/metrics/jsonlines/train.jsonl"))
        runs = [run for run in inside if "previous" not in run.relative_to(path).parts]
        if not runs:
            raise AnalysisError(
                f"{path}: no run there that has logged (metrics/jsonlines/train.jsonl); give output_dirs of runs"
            )
        found += [run for run in runs if run.resolve() not in {other.resolve() for other in found}]
    return found


def group(runs: Sequence[Path], decisive: Decisive = flatten) -> list[Model]:
    """Groups runs that differ only in their seed, and names each group by its difference to the others.

    Args:
        decisive: `training.continuing.decisive`, the part of a config that decides the weights; all else may differ
            too.

    Raises:
        AnalysisError: a run has no config.yaml.
    """
    groups: dict[tuple, list[Run]] = {}
    for folder in runs:
        run = _read(folder)
        groups.setdefault(tuple(sorted(_identity(run.config, decisive).items())), []).append(run)
    found = _names([members[0] for members in groups.values()], decisive)
    return [model(name, members) for name, members in zip(found, groups.values(), strict=True)]


def named_model(name: str, paths: Sequence[Path]) -> Model:
    """The model that consists of these runs, whatever their configs."""
    return model(name, [_read(folder) for folder in find_runs(paths)])


def model(name: str, runs: Sequence[Run]) -> Model:
    """
    Raises:
        AnalysisError: two runs have the same seed, so that they are no independent samples.
    """
    seeds: dict[int, Path] = {}
    for run in runs:
        seed = run.config["seed"]
        if seed in seeds:
            raise AnalysisError(
                f"{name}: {seeds[seed]} and {run.output_dir} both have seed {seed} and would count as two samples; "
                "leave one out, or make them separate models with --model NAME RUN"
            )
        seeds[seed] = run.output_dir
    return Model(name, tuple(runs))


def differing_settings(one: Run, other: Run, decisive: Decisive = flatten) -> list[str]:
    """Keys in which two runs differ, except their seed and what does not decide a model's weights."""
    first, second = _identity(one.config, decisive), _identity(other.config, decisive)
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def at_equal_tokens(models: Sequence[Model], tokens: float | None = None, heldout: bool | None = None) -> Comparison:
    """All models after as many tokens as each of them has logged, or after `tokens`.

    Args:
        heldout: which loss; None takes held-out loss if every run has one there.

    Raises:
        AnalysisError: a run has not come that far.
    """
    shortest = min(models, key=lambda model: model.tokens)
    amount = shortest.tokens if tokens is None else tokens
    if amount > shortest.tokens:
        raise AnalysisError(
            f"--tokens {amount:,.0f}: {shortest.name} has logged {shortest.tokens:,} tokens; choose at most that"
        )
    return _comparison("training tokens", amount, [(model, amount) for model in models], heldout)


def at_equal_flops(
    models: Sequence[Model], flops: float | None = None, heldout: bool | None = None
) -> Comparison | None:
    """The same for training FLOPs (of the architecture's formula); None if a run has not recorded its FLOPs per token.

    Raises:
        AnalysisError: a run has not come that far.
    """
    if any(math.isnan(model.flops_per_token) for model in models):
        return None
    least = min(models, key=lambda model: model.tokens * model.flops_per_token)
    common = least.tokens * least.flops_per_token
    amount = common if flops is None else flops
    if amount > common * (1 + 1e-9):
        raise AnalysisError(f"--flops {amount:.3e}: {least.name} has done {common:.3e} FLOPs; choose at most that")
    # The division may end a rounding error past what was logged.
    places = [(model, min(amount / model.flops_per_token, model.tokens)) for model in models]
    return _comparison("training FLOPs", amount, places, heldout)


def _comparison(what: str, amount: float, places: Sequence[tuple[Model, float]], heldout: bool | None) -> Comparison:
    def losses(heldout: bool) -> list[list[float]]:
        return [[run.loss_at(tokens, heldout) for run in model.runs] for model, tokens in places]

    if heldout is None:
        heldout = all(math.isfinite(loss) for several in losses(heldout=True) for loss in several)
    points = []
    for (model, tokens), found in zip(places, losses(heldout), strict=True):
        if lacking := [run for run, loss in zip(model.runs, found, strict=True) if not math.isfinite(loss)]:
            series, other = (lacking[0].heldout, "train") if heldout else (lacking[0].train, "heldout")
            having = series.tokens[np.isfinite(series.values)]
            there = f"has some from {having[0]:,} to {having[-1]:,} tokens" if having.size else "has none at all"
            raise AnalysisError(
                f"{model.name}: {lacking[0].output_dir} has no {'held-out' if heldout else 'finite training'} loss at "
                f"{tokens:,.0f} tokens, and {there}; choose another point (--tokens, --flops), or --loss {other}"
            )
        # Evaluations are at whole steps, and a point of equal FLOPs need not be.
        near = [np.isclose(run.heldout.tokens, tokens, rtol=1e-3).any() for run in model.runs]
        points.append(Point(model, tokens, found, heldout and not all(near)))
    return Comparison(what, amount, heldout, points)


def table(comparison: Comparison, baseline: str) -> str:
    """A Markdown table with a title; differences are to `baseline`, with Welch's 95 % interval. The best is bold."""
    amount = f"{comparison.amount:,.0f}" if comparison.what == "training tokens" else f"{comparison.amount:.3e}"
    loss_name = "held-out loss" if comparison.heldout else f"training loss over the last {TRAIN_WINDOW:.0%} of tokens"
    best = min(comparison.points, key=lambda point: point.mean)
    rows = []
    for point in comparison.points:
        apart = statistics.difference(point.losses, comparison.at(baseline).losses)
        flops = point.tokens * point.model.flops_per_token
        rows.append(
            [
                f"**{point.name}**" if point is best else point.name,
                str(len(point.losses)),
                f"{point.tokens:,.0f}",
                "" if math.isnan(flops) else f"{flops:.3e}",
                statistics.mean(point.losses).text(),
                "baseline" if point.name == baseline else apart.text("+"),
                f"{point.schedule_left:.0%}" if point.schedule_left else "",
            ]
        )
    header = ["model", "seeds", "tokens", "FLOPs", "loss ± 95 %", f"against {baseline}", "schedule left"]
    return f"## {amount} {comparison.what}: {loss_name}, nats per token\n\n{markdown_table(header, rows, 'lrrrrrr')}"


def warnings(comparison: Comparison, baseline: str) -> list[str]:
    """Notes that a reader of the table must know."""
    than, points = comparison.at(baseline), comparison.points
    runs = [run for point in points for run in point.model.runs]
    found = [
        f"{point.name} is seen with {point.schedule_left:.0%} of its schedule left, before its learning rate has "
        f"decayed; a run made for {point.tokens:,.0f} tokens would be better there"
        for point in points
        if point.schedule_left
    ]
    found += [
        f"{point.name} was not evaluated after {point.tokens:,.0f} tokens: its loss there is interpolated between two "
        "evaluations, which may be more than a small difference; a smaller eval_interval helps"
        for point in points
        if point.is_between
    ]
    if comparison.heldout and len({text for run in runs for text in _texts(run)}) > 1:
        found.append(
            "the runs have different held-out texts: their losses on them cannot be compared, nor taken together as "
            "seeds; use one corpus and one datamodule.eval_tokens"
        )
    key = "eval_batch_len" if comparison.heldout else "train_batch_len"
    lengths = {run.setting("datamodule", key) for run in runs} - {None}
    if len(lengths) > 1:
        values = " and ".join(map(str, sorted(lengths)))
        found.append(
            f"these losses are of contexts of different length (datamodule.{key}={values}): the context alone changes "
            "the loss; eval/per_token_loss compares models at one length"
        )
    if any(len(point.losses) < 2 for point in points):
        found.append("a model with one seed has no interval: how much of a difference is noise is unknown")
    for point in points:
        apart = statistics.difference(point.losses, than.losses)
        if point is not than and math.isfinite(apart.half_width) and not apart.excludes_zero:
            found.append(f"{point.name} and {baseline} are within seed noise of each other")
    return found


def _texts(run: Run) -> set[tuple[Any, Any]]:
    """Fingerprint and number of tokens of the held-out documents of its evaluations."""
    own = run.info("val_data").get("fingerprint")
    fingerprint, tokens = (names.name_of(names.VAL, name) for name in (names.FINGERPRINT, names.TOKENS_EVALUATED))
    return {(line.get(fingerprint, own), line[tokens]) for line in run.records(names.VAL) if tokens in line}


def _read(folder: Path) -> Run:
    run = read_run(folder)
    if not run.config:
        raise AnalysisError(f"{folder} has no config.yaml: give the output_dir of a run")
    return run


def _identity(config: Mapping[str, Any], decisive: Decisive) -> dict[str, str]:
    """The settings that make a run another model: all that decide its weights except the seed, and its budget."""
    kept = {key: str(value) for key, value in decisive(dict(config)).items() if key != "seed"}
    return kept | {"train.max_tokens": str(config["train"]["max_tokens"])}


def _names(runs: Sequence[Run], decisive: Decisive) -> list[str]:
    """The models' names; with what differs where several have one name; the folders where that is too much."""
    # Not the run's tag, which may be another model's.
    labels = [run.setting("model", "label") or run.config["model"]["name"] for run in runs]
    settings = [_identity(run.config, decisive) for run in runs]
    found = []
    for run, label, mine in zip(runs, labels, settings, strict=True):
        same_label = [other for other, its in zip(settings, labels, strict=True) if its == label]
        differing = sorted(key for key in mine if len({other.get(key) for other in same_label}) > 1)
        if len(differing) > _KEYS_IN_A_NAME:
            found.append(run.output_dir.name)
        else:
            found.append(" ".join([label, *(f"{key.rpartition('.')[2]}={mine[key]}" for key in differing)]))
    return found if len(set(found)) == len(found) else [str(run.output_dir) for run in runs]
