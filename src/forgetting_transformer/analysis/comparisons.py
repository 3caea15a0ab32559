"""Models against each other: loss after the same training tokens and after the same training FLOPs, over seeds.

A model is a set of runs that differ in nothing but their seed. Its loss is the mean over them, its uncertainty what
other initial weights would change (statistics.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis import AnalysisError, statistics
from forgetting_transformer.analysis.runs import TRAIN_WINDOW, Run, read_run
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.nested import flatten

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
    def eval_set(self) -> str:
        """That its held-out losses are of; "" for the corpus's own."""
        return self.runs[0].eval_set

    def on(self, eval_set: str) -> "Model":
        """The same model, with its losses on another held-out set as the held-out ones."""
        return Model(self.name, tuple(run.on(eval_set) for run in self.runs))

    @property
    def flops_per_token(self) -> float:
        return float(self.runs[0].flops_per_token or math.nan)

    @property
    def schedule_tokens(self) -> int | None:
        """Tokens at which the learning rate reaches its end; None for a constant one."""
        config = self.runs[0].config
        return config["schedule"]["total_tokens"] if config["schedule"]["name"] != "constant" else None


@dataclass(frozen=True)
class Comparison:
    """The models at one point.

    Attributes:
        what: what is equal, "training tokens" or "training FLOPs", and `amount` how many.
        heldout: whether the losses are held-out ones; otherwise training losses over the last
            TRAIN_WINDOW of the tokens.
        tokens: model name -> training tokens at the point.
        losses: model name -> loss of each seed there, nats per token.
        passes: model name -> which pass over the documents its last batch there is from, from 1; None if unknown.
            Training losses of different passes are of different texts (`Run.pass_tokens`).
        repeats: names of the models that had read that batch before, since the corpus began again.
        between: models that were not evaluated there -> their held-out losses at the evaluations before and after,
            means over seeds. Their `losses` lie between.
    """

    what: str
    amount: float
    heldout: bool
    tokens: Mapping[str, float]
    losses: Mapping[str, Sequence[float]]
    passes: Mapping[str, int | None]
    repeats: frozenset[str]
    between: Mapping[str, tuple[float, float]]

    def depends_on_evaluations(self, one: str, other: str) -> bool:
        """Whether the order of two models is open because one of them was not evaluated there."""

        def around(name: str) -> Sequence[float]:
            return self.between.get(name, [statistics.mean(self.losses[name]).value])

        apart = max(around(one)) < min(around(other)) or max(around(other)) < min(around(one))
        return not apart and bool({one, other} & self.between.keys())


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
    """Puts runs that differ only in their seed together, and names each group by what tells it from the others.

    Args:
        decisive: `training.continuing.decisive`, which takes a config to what decides the weights; all else may differ
            too.

    Raises:
        AnalysisError: a run has no config.yaml.
    """
    groups: dict[tuple, list[Run]] = {}
    for folder in runs:
        run = _read(folder)
        groups.setdefault(tuple(sorted(_identity(run.config, decisive).items())), []).append(run)
    names = _names([members[0] for members in groups.values()], decisive)
    return [model(name, members) for name, members in zip(names, groups.values(), strict=True)]


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


def named_model(name: str, paths: Sequence[Path]) -> Model:
    """The model that consists of these runs, whatever their configs."""
    return model(name, [_read(folder) for folder in find_runs(paths)])


def at_equal_tokens(models: Sequence[Model], tokens: float | None = None, heldout: bool | None = None) -> Comparison:
    """All models after as many tokens as each of them has logged, or after `tokens`.

    Args:
        heldout: which loss; None takes held-out loss if every run has one there.

    Raises:
        AnalysisError: a run has not come that far.
    """
    common = min(model.tokens for model in models)
    if tokens is None:
        tokens = common
    if tokens > common:
        short = min(models, key=lambda model: model.tokens).name
        raise AnalysisError(f"--tokens {tokens:,.0f}: {short} has logged {common:,} tokens; choose at most that")
    return _comparison("training tokens", tokens, models, dict.fromkeys((m.name for m in models), tokens), heldout)


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
    if flops is None:
        flops = common
    if flops > common * (1 + 1e-9):
        raise AnalysisError(f"--flops {flops:.3e}: {least.name} has done {common:.3e} FLOPs; choose at most that")
    # The division may end a rounding error past what was logged.
    tokens = {model.name: min(flops / model.flops_per_token, model.tokens) for model in models}
    return _comparison("training FLOPs", flops, models, tokens, heldout)


def table(comparison: Comparison, models: Sequence[Model], baseline: str) -> str:
    """A Markdown table with a title; differences are to `baseline`, with Welch's 95 % interval.

    The best model is bold, unless that may be due to where models were evaluated.
    """
    amount = f"{comparison.amount:,.0f}" if comparison.what == "training tokens" else f"{comparison.amount:.3e}"
    loss_name = "held-out loss" if comparison.heldout else f"training loss over the last {TRAIN_WINDOW:.0%} of tokens"
    if comparison.heldout and models[0].eval_set:
        loss_name = f"held-out loss on {models[0].eval_set}"
    lowest = min(comparison.losses, key=lambda name: statistics.mean(comparison.losses[name]).value)
    open_order = any(comparison.depends_on_evaluations(lowest, name) for name in comparison.losses if name != lowest)
    best = None if open_order else lowest
    rows = []
    for one in models:
        losses, tokens = comparison.losses[one.name], comparison.tokens[one.name]
        mean = statistics.mean(losses)
        apart = statistics.difference(losses, comparison.losses[baseline])
        left = _schedule_left(one, tokens)
        rows.append(
            [
                f"**{one.name}**" if one.name == best else one.name,
                str(len(losses)),
                f"{tokens:,.0f}",
                "" if math.isnan(one.flops_per_token) else f"{tokens * one.flops_per_token:.3e}",
                mean.text(),
                "baseline" if one.name == baseline else apart.text("+"),
                "" if left <= _SCHEDULE_TOLERANCE else f"{left:.0%}",
                ", ".join(f"{loss:.4f}" for loss in comparison.between.get(one.name, ())),
            ]
        )
    header = ["model", "seeds", "tokens", "FLOPs", "loss ± 95 %", f"against {baseline}", "schedule left"]
    header.append("evaluated before and after")
    return f"## {amount} {comparison.what}: {loss_name}, nats per token\n\n{markdown_table(header, rows, 'lrrrrrrr')}"


def warnings(comparison: Comparison, models: Sequence[Model], baseline: str) -> list[str]:
    """What a reader of the table must know."""
    found = []
    for one in models:
        left = _schedule_left(one, comparison.tokens[one.name])
        if left > _SCHEDULE_TOLERANCE:
            found.append(
                f"{one.name} is seen with {left:.0%} of its schedule left, before its learning rate has decayed; a "
                f"run made for {comparison.tokens[one.name]:,.0f} tokens would be better there"
            )
    for one in models:
        if one.name in comparison.between:
            before, after = comparison.between[one.name]
            found.append(
                f"{one.name} was not evaluated after {comparison.tokens[one.name]:,.0f} tokens: its loss there is "
                f"interpolated between {before:.4f} and {after:.4f}; a smaller eval_interval narrows it"
            )
        if one.name != baseline and comparison.depends_on_evaluations(one.name, baseline):
            found.append(f"{one.name} and {baseline} may differ by this interpolation alone")
    if comparison.heldout and len({text for one in models for run in one.runs for text in _texts(run)}) > 1:
        whose = (
            f"called different texts {models[0].eval_set}" if models[0].eval_set else "have different held-out texts"
        )
        found.append(
            f"the runs {whose}: their losses on {'it' if models[0].eval_set else 'them'} cannot be compared, nor taken "
            "together as seeds; use one corpus and one datamodule.eval_tokens"
        )
    key = "eval_batch_len" if comparison.heldout else "train_batch_len"
    lengths = {run.config.get("datamodule", {}).get(key) for one in models for run in one.runs} - {None}
    if len(lengths) > 1:
        values = " and ".join(map(str, sorted(lengths)))
        found.append(
            f"these losses are of contexts of different length (datamodule.{key}={values}): the context alone changes "
            "the loss; eval/per_token_loss compares models at one length"
        )
    if not comparison.heldout:
        found += _pass_warnings(comparison, models)
    if any(len(losses) < 2 for losses in comparison.losses.values()):
        found.append("a model with one seed has no interval: how much of a difference is noise is unknown")
    for one in models:
        apart = statistics.difference(comparison.losses[one.name], comparison.losses[baseline])
        if one.name != baseline and math.isfinite(apart.half_width) and not apart.excludes_zero:
            found.append(f"{one.name} and {baseline} are within seed noise of each other")
    return found


def common_sets(models: Sequence[Model]) -> list[str]:
    """The held-out sets besides the corpus's own that every run has losses of."""
    first, *others = (run.eval_sets for one in models for run in one.runs)
    return [name for name in first if all(name in sets for sets in others)]


def _texts(run: Run) -> set[tuple[Any, Any]]:
    """What identifies the held-out documents of its evaluations, of every one that says it: fingerprint and tokens."""
    kind = run.heldout_kind
    own = None if run.eval_set else run.info("val_data").get("fingerprint")
    lines = [line for line in run.records(kind) if line.get(f"{kind}/val_token_count") is not None]
    return {(line.get(f"{kind}/fingerprint", own), line[f"{kind}/val_token_count"]) for line in lines}


def _pass_warnings(comparison: Comparison, models: Sequence[Model]) -> list[str]:
    """What training losses are of, where that is not text of the first pass over the documents."""
    found = []
    if comparison.repeats:
        names = ", ".join(one.name for one in models if one.name in comparison.repeats)
        found.append(f"{names}: these training losses are of text that had been read before; compare held-out losses")
    later = {one.name: comparison.passes[one.name] for one in models if (comparison.passes[one.name] or 1) > 1}
    if later:
        said = ", ".join(f"{name} (pass {number})" for name, number in later.items())
        every = ", ".join(dict.fromkeys(f"{one.runs[0].pass_tokens:,}" for one in models if one.name in later))
        found.append(
            f"{said}: these training losses are of a later pass of the reading order, which begins every {every} "
            "tokens and reads on in documents whose beginnings are known; they jump where a pass begins"
        )
    if len(set(comparison.passes.values())) > 1:
        found.append("training losses of different passes are of different texts; held-out losses are not")
    return found


def _comparison(
    what: str, amount: float, models: Sequence[Model], tokens: Mapping[str, float], heldout: bool | None
) -> Comparison:
    def losses(from_heldout: bool) -> dict[str, list[float]]:
        return {m.name: [run.loss_at(tokens[m.name], from_heldout) for run in m.runs] for m in models}

    if heldout is None:
        heldout = all(math.isfinite(loss) for losses_of in losses(True).values() for loss in losses_of)
    found = losses(heldout)
    for name, losses_of in found.items():
        if not all(math.isfinite(loss) for loss in losses_of):
            kind = "evaluated on held-out documents" if heldout else "logged a finite training loss"
            raise AnalysisError(
                f"{name}: not all of its runs have {kind} around {tokens[name]:,.0f} tokens; choose another point "
                f"(--tokens, --flops) or --loss {'train' if heldout else 'heldout'}"
            )
    between = {}
    for one in models if heldout else ():
        around = [run.heldout_losses_around(tokens[one.name]) for run in one.runs]
        if any(before != after for before, after in around):
            before, after = (statistics.mean(losses_of).value for losses_of in zip(*around, strict=True))
            between[one.name] = before, after
    passes = {one.name: one.runs[0].pass_at(tokens[one.name]) for one in models}
    repeats = frozenset(one.name for one in models if one.runs[0].repeats_at(tokens[one.name]))
    return Comparison(what, amount, heldout, tokens, found, passes, repeats, between)


def _schedule_left(model: Model, tokens: float) -> float:
    return max(0.0, 1 - tokens / model.schedule_tokens) if model.schedule_tokens else 0.0


def differing_settings(one: Run, other: Run, decisive: Decisive = flatten) -> list[str]:
    """Keys in which two runs differ, except their seed and what does not decide a model's weights."""
    first, second = _identity(one.config, decisive), _identity(other.config, decisive)
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def _read(folder: Path) -> Run:
    run = read_run(folder)
    if not run.config:
        raise AnalysisError(f"{folder} has no config.yaml: give the output_dir of a run")
    return run


def _identity(config: Mapping[str, Any], decisive: Decisive) -> dict[str, str]:
    """What makes a run another model: all that decides its weights except the seed, and its budget."""
    kept = {key: str(value) for key, value in decisive(dict(config)).items() if key != "seed"}
    return kept | {"train.max_tokens": str(config["train"]["max_tokens"])}


def _label(config: Mapping[str, Any]) -> str:
    """The model's name and not the run's tag, which may be another model's. Earlier versions have only the tag."""
    label = config["model"].get("label")
    return config["tag"] if label is None else label or config["model"]["name"]


def _names(runs: Sequence[Run], decisive: Decisive) -> list[str]:
    """The models' names; with what differs where several have one name; the folders where that is too much."""
    labels = [_label(run.config) for run in runs]
    names = []
    for run, label in zip(runs, labels, strict=True):
        mine = _identity(run.config, decisive)
        same_label = [
            _identity(other.config, decisive) for other, its in zip(runs, labels, strict=True) if its == label
        ]
        differing = sorted(key for key in mine if len({other.get(key) for other in same_label}) > 1)
        if len(differing) > _KEYS_IN_A_NAME:
            names.append(run.output_dir.name)
        else:
            names.append(" ".join([label, *(f"{key.rpartition('.')[2]}={mine[key]}" for key in differing)]))
    if len(set(names)) < len(names):
        names = [str(run.output_dir) for run in runs]
    return names
