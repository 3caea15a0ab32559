"""A learning-rate search at each of several sizes: scales of configs/scale, made smaller by a factor.

Shrinking by F divides the width, the number of blocks and the number of heads by F. Heads keep their dimension, so the
weights of the blocks fall by about F^3. Training tokens fall by F^3 too, which keeps the tokens per weight, and warm-up
keeps its share of the tokens. Batch, sequence length and all else stay as the base config says.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis.evaluations import Evaluation, Number, write_evaluation
from forgetting_transformer.analysis.plots.sweeps import budget
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.analysis.tables import Table
from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.files import read_yaml
from forgetting_transformer.nested import flatten
from forgetting_transformer.sweep import SweepError, runner
from forgetting_transformer.sweep.jobs import quote
from forgetting_transformer.sweep.learning_rate import LearningRateSweep, grid_value
from forgetting_transformer.training import Config, ConfigError
from forgetting_transformer.training.setup import outline
from studies.engine import scaling
from studies.engine.scaling_figures import ladder_figure

#: Fewer updates than this say little of a learning rate.
FEW_STEPS = 200
#: Sizes of a scale and of a model that are divided by the factor.
_DIVIDED = ("hidden_size", "num_hidden_layers", "num_heads", "num_kv_heads", "intermediate_size")
#: What the ladder sets itself.
_OWN = ("scale.", "train.max_tokens", "schedule.warmup_tokens", "optimizer.lr", "seed")


@dataclasses.dataclass(frozen=True)
class Rung:
    """One size of the ladder, whole and shrunk.

    Attributes:
        name: of the scale.
        overrides: of train.py, for the shrunk size.
        config: what they compose to.
        parameters, full_parameters: outside of the embedding and the output matrix, shrunk and not.
        full_tokens: the budget of the size that is not shrunk.
    """

    name: str
    overrides: tuple[str, ...]
    config: Config
    parameters: int
    full_parameters: int
    full_tokens: int

    @property
    def steps(self) -> int:
        data = self.config.datamodule
        return self.config.train.max_tokens // (data.train_batch_len * data.train_batch_size)


def read_scale(config_dir: Path, name: str) -> dict[str, Any]:
    """configs/scale/NAME.yaml.

    Raises:
        SweepError: there is none, or it has no sizes.
    """
    found = sorted(file.stem for file in (config_dir / "scale").glob("*.yaml") if file.stem != "custom")
    if name not in found:
        raise SweepError(f"--scales {name}: there is no such scale; choose among {', '.join(found)}")
    return read_yaml(config_dir / "scale" / f"{name}.yaml")


def divided(value: int, factor: int, key: str, name: str) -> int:
    """
    Raises:
        SweepError: the factor does not divide the value.
    """
    if value % factor:
        fits = [n for n in range(2, value + 1) if value % n == 0]
        raise SweepError(f"--shrink {factor} does not divide {key}={value} of {name}; {_factors(fits)} would")
    return value // factor


def _is_used(key: str, fields: Mapping[str, Any]) -> bool:
    """Whether a field of `model.config` has an effect: a hybrid's YAML also describes mixers that no block has."""
    group, _, rest = key.partition(".")
    return group != "mixers" or "pattern" not in fields or rest.partition(".")[0] in fields["pattern"]


def rung(
    compose: Callable[[Sequence[str]], Config],
    config_dir: Path,
    name: str,
    shrink: int,
    shrink_tokens: float,
    overrides: Sequence[str],
) -> Rung:
    """One size, as train.py will get it.

    Args:
        overrides: what all sizes have in common.

    Raises:
        SweepError: the scale does not exist, or cannot be shrunk so for this model.
    """
    scale = read_scale(config_dir, name)
    base, full_tokens = compose(overrides), int(scale["train"]["max_tokens"])
    scaled = {key: value for key, value in scale["scale"].items() if key != "name"}
    named = [f"scale.name={name}", *(f"scale.{key}={value}" for key, value in scaled.items())]
    whole = compose([*overrides, *named])
    model = whole.model.label or whole.model.name
    sizes = {
        f"model.config.{key}": value
        for key, value in flatten(whole.model.config).items()
        if key.rpartition(".")[2] in _DIVIDED and isinstance(value, int) and _is_used(key, whole.model.config)
    }

    def shrunk(factor: int) -> dict[str, int]:
        keys = {key: key.removeprefix("model.config.") for key in sizes}
        return {key: divided(value, factor, keys[key], f"{name} of {model}") for key, value in sizes.items()}

    smaller = shrunk(shrink)
    step = base.datamodule.train_batch_len * base.datamodule.train_batch_size
    tokens = int(full_tokens / shrink_tokens) // step * step
    if not tokens:
        raise SweepError(
            f"--shrink_tokens {shrink_tokens:g} leaves {name} less than one step of {step:,} tokens; choose a smaller "
            "one, or a smaller datamodule.train_batch_size"
        )
    warmup = round(tokens * base.schedule.warmup_tokens / base.train.max_tokens / step) * step
    quarter = max(step, tokens // 4 // step * step)
    budgets = {
        "train.max_tokens": tokens,
        "schedule.warmup_tokens": warmup,
        "log_interval": max(step, tokens // 64 // step * step),
        "train_eval_interval": tokens,
        "eval_interval": tokens,
        "checkpoint_interval": quarter,
        "checkpoint_keep_interval": tokens,
    }
    own = [*named, *(f"{key}={value}" for key, value in (budgets | smaller).items())]
    try:
        config = compose([*overrides, *own])
        parameters, full = _parameters(config), _parameters(whole)
    except (ConfigError, ValueError) as error:

        def fits(factor: int) -> bool:
            try:
                _parameters(compose([*overrides, *named, *(f"{key}={n}" for key, n in shrunk(factor).items())]))
            except (ConfigError, ValueError):
                return False
            return True

        # The cure that the message may name for a single run is nothing that the ladder could do.
        reason = str(error).partition(";")[0]
        possible = [n for n in range(2, shrink) if all(value % n == 0 for value in sizes.values()) and fits(n)]
        raise SweepError(
            f"--shrink {shrink}: {name} shrunk so is no {model} ({reason}); "
            + (f"{_factors(possible)} would do" if possible else "leave --shrink out")
        ) from error
    return Rung(name, (*overrides, *own), config, parameters, full, full_tokens)


def _parameters(config: Config) -> int:
    """Weights outside of the embedding and the output matrix."""
    # Of the corpus only the vocabulary matters, and that only to what is left out.
    data = DataInfo("", 256, 0, 1, 1, config.datamodule.train_batch_len, 1, 1, 1, "", None)
    fields = {key: value for key, value in config.model.config.items() if key not in ("vocab_size", "bos_token_id")}
    model: Any = outline(dataclasses.replace(config, model=dataclasses.replace(config.model, config=fields)), data)
    outside = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters() if id(p) not in outside)


class Ladder:
    """Searches at all sizes, one after another, in `folder/SCALE`; started again, it goes on.

    A search starts from the best rate of the size before it.

    Args:
        folder: of the ladder; it gets evaluation.json, table.md and figure.png after every search.
        make: a rung, a guess (None: the config's rate) and the folder of its search -> the search.

    Raises:
        SweepError: sizes are too few or given twice, or the folder holds something else.
    """

    def __init__(
        self, rungs: Sequence[Rung], folder: Path, shrink: int, make: Callable[[Rung, float | None], LearningRateSweep]
    ) -> None:
        names = [one.name for one in rungs]
        if len(rungs) < 2 or len(set(names)) < len(names):
            raise SweepError(f"--scales {' '.join(names)}: at least two, each once")
        self.rungs = sorted(rungs, key=lambda one: one.parameters)
        self.folder, self.shrink, self._make = folder, shrink, make
        present = list(folder.iterdir()) if folder.is_dir() else []
        if (folder / "sweep.json").is_file() or (present and not any((p / "sweep.json").is_file() for p in present)):
            raise SweepError(f"output_dir={folder} is not empty and holds no ladder; choose another folder")
        self.searches: dict[str, LearningRateSweep] = {}
        self._complete: set[str] = set()

    def run(self) -> bool:
        """Returns whether all searches are complete."""
        guess: float | None = None
        for one in self.rungs:
            print(f"\n{one.name}: {one.parameters:,} parameters, {one.steps:,} steps", flush=True)
            search = self._make(one, guess)
            complete = search.run()
            self.searches[one.name] = search
            self._complete |= {one.name} if complete else set()
            self.write()
            if not complete:
                return False
            guess = grid_value(search.winner()[1])
        return True

    def sizes(self) -> list[scaling.Size]:
        """What the searches found so far, those that have not begun included."""
        found = []
        for one in self.rungs:
            search = self.searches.get(one.name)
            grid = next(iter(search.searches.values()), None) if search else None
            losses, flops, tokens = {}, math.nan, one.config.train.max_tokens
            if search is not None and grid is not None and grid.losses:
                losses = {grid_value(index): grid.at(index) for index in grid.indices}
                any_run = next(iter(sorted(search.folder.glob("lr*_seed*"))))
                flops = read_run(any_run).flops_per_token or math.nan
            complete = one.name in self._complete
            found.append(scaling.Size(one.name, one.parameters, tokens, flops * tokens, losses, complete))
        return found

    def write(self) -> None:
        """Writes evaluation.json, table.md and figure.png of what is known."""
        sizes = self.sizes()
        if not any(size.losses for size in sizes):
            return
        first = self.rungs[0].config
        search = next(iter(self.searches.values()))
        full = {one.name: one.full_parameters for one in self.rungs if one.full_parameters != one.parameters}
        result = scaling.fit(sizes, full)
        numbers = [
            Number(name, metric, value, at={"parameters": parameters})
            for name, parameters, values in result.numbers()
            for metric, value in values.items()
            if math.isfinite(value)
        ]
        settings = {
            "shrink": self.shrink,
            "scales": {
                one.name: {
                    "tokens": one.config.train.max_tokens,
                    "tokens_before": one.full_tokens,
                    "parameters": one.parameters,
                    "parameters_before": one.full_parameters,
                    "model": dict(one.config.model.config),
                }
                for one in self.rungs
            },
            "loss": search.loss_name,
            "seeds": list(search.seeds),
            "unfinished": list(result.unfinished),
            "losses": {s.name: {f"{rate:g}": list(map(_json, v)) for rate, v in s.losses.items()} for s in sizes},
        }
        label = first.model.label or first.model.name
        notes = [f"width, blocks and heads divided by {self.shrink}", *budget(first)[::2], *result.notes()]
        evaluation = Evaluation("learning_rate_ladder", label, numbers, {}, settings)
        write_evaluation(
            evaluation,
            self.folder,
            result.table(),
            lambda path: ladder_figure(
                result, search.loss_name, path, f"Learning rates of {label} across sizes", notes
            ),
        )


def _json(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _factors(fits: Sequence[int]) -> str:
    return ", ".join(map(str, fits[:6])) or "no factor"


def check_common(overrides: Sequence[str]) -> None:
    """
    Raises:
        SweepError: an override sets what the ladder sets.
    """
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        sizes = key.startswith("model.config.") and key.rpartition(".")[2] in _DIVIDED
        if key == "scale" or key.startswith(_OWN[0]) or key in _OWN[1:] or sizes:
            flag = {"seed": "--seeds", "optimizer.lr": "--guess", "train.max_tokens": "--shrink_tokens"}.get(key)
            raise SweepError(f"{override}: the ladder sets {key} itself; {f'use {flag}' if flag else 'leave it out'}")


def warnings(rungs: Sequence[Rung]) -> list[str]:
    """What stands between the numbers and a conclusion from them."""
    return [
        f"{one.name} trains for {one.steps:,} steps, which say little of a learning rate; a smaller "
        "datamodule.train_batch_size or --shrink_tokens gives more"
        for one in rungs
        if one.steps < FEW_STEPS
    ]


def search_of(
    script: Path,
    compose: Callable[[Sequence[str]], Config],
    machine: runner.Machine,
    folder: Path,
    seeds: Sequence[int],
    guess: float | None,
) -> Callable[[Rung, float | None], LearningRateSweep]:
    """What makes the searches of a `Ladder`."""

    def make(one: Rung, before: float | None) -> LearningRateSweep:
        overrides = [*one.overrides, f"output_dir={quote(str(folder / one.name))}"]
        start = before or guess or one.config.optimizer.lr
        return LearningRateSweep(script, overrides, compose, machine, start, seeds)

    return make


def plan(rungs: Sequence[Rung], shrink: int) -> Table:
    """What shrinking made of every size, before anything runs."""
    rows = []
    for one in rungs:
        fields: Mapping[str, Any] = flatten(one.config.model.config)
        kept = ", ".join(f"{key} {fields[key]}" for key in fields if key.rpartition(".")[2] in _DIVIDED and fields[key])
        rows.append(
            [
                one.name,
                f"{one.full_parameters:,}",
                f"{one.parameters:,}",
                kept,
                f"{one.config.train.max_tokens:,}",
                f"{one.steps:,}",
            ]
        )
    header = ["scale", "parameters", f"shrunk by {shrink}", "sizes", "tokens", "steps"]
    return Table(header, rows, "lrrlrr")
