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

from forgetting_transformer.analysis import outputs
from forgetting_transformer.analysis.plots.sweeps import budget
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.analysis.tables import Table
from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.files import flatten, read_yaml, write_atomically, write_json
from forgetting_transformer.sweep import SweepError, runner
from forgetting_transformer.sweep.jobs import quote
from forgetting_transformer.sweep.learning_rate import LearningRateSweep, grid_value
from forgetting_transformer.training import Config, ConfigError
from forgetting_transformer.training.setup import outline
from studies import ROOT
from studies.engine import scaling
from studies.engine.scaling_figures import ladder_figure

#: Sizes of a scale and of a model that are divided by the factor.
_DIVIDED = ("hidden_size", "num_hidden_layers", "num_heads", "num_kv_heads", "intermediate_size")
#: What the ladder sets itself.
_OWN = ("train.max_tokens", "schedule.warmup_tokens", "optimizer.lr", "seed")
Compose = Callable[[Sequence[str]], Config]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One size of the ladder, whole and shrunk.

    Attributes:
        name: of the scale.
        overrides: of train.py, for the shrunk size.
        config: what they compose to.
        parameters, full_parameters: outside of the embedding and the output matrix, shrunk and not.
    """

    name: str
    overrides: tuple[str, ...]
    config: Config
    parameters: int
    full_parameters: int

    @property
    def steps(self) -> int:
        data = self.config.datamodule
        return self.config.train.max_tokens // (data.train_batch_len * data.train_batch_size)


def check_common(overrides: Sequence[str]) -> None:
    """
    Raises:
        SweepError: an override sets what the ladder sets.
    """
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        sizes = key.startswith("model.config.") and key.rpartition(".")[2] in _DIVIDED
        if key == "scale" or key.startswith("scale.") or key in _OWN or sizes:
            flag = {"seed": "--seeds", "optimizer.lr": "--guess", "train.max_tokens": "--shrink_tokens"}.get(key)
            raise SweepError(f"{override}: the ladder sets {key} itself; {f'use {flag}' if flag else 'leave it out'}")


def rung(compose: Compose, name: str, shrink: int, shrink_tokens: float, overrides: Sequence[str]) -> Rung:
    """One size, as train.py will get it.

    Args:
        overrides: what all sizes have in common.

    Raises:
        SweepError: the scale does not exist, or cannot be shrunk so for this model.
    """
    scales = {file.stem: file for file in (ROOT / "configs/scale").glob("*.yaml") if file.stem != "custom"}
    if name not in scales:
        raise SweepError(f"--scales {name}: there is no such scale; choose among {', '.join(sorted(scales))}")
    scale = read_yaml(scales[name])
    base, named = compose(overrides), [f"scale.name={name}"]
    named += [f"scale.{key}={value}" for key, value in scale["scale"].items() if key != "name"]
    whole = compose([*overrides, *named])
    fields = whole.model.config
    smaller = {
        key: _divided(value, shrink, f"{key}={value} of {name}")
        for key, value in flatten(fields).items()
        if key.rpartition(".")[2] in _DIVIDED and isinstance(value, int) and _is_used(key, fields)
    }
    step = base.datamodule.train_batch_len * base.datamodule.train_batch_size
    tokens = int(scale["train"]["max_tokens"] / shrink_tokens) // step * step
    if not tokens:
        raise SweepError(
            f"--shrink_tokens {shrink_tokens:g} leaves {name} less than one step of {step:,} tokens; choose a smaller "
            "one, or a smaller datamodule.train_batch_size"
        )
    budgets = {
        "train.max_tokens": tokens,
        "schedule.warmup_tokens": round(tokens * base.schedule.warmup_tokens / base.train.max_tokens / step) * step,
        "log_interval": max(step, tokens // 64 // step * step),
        "train_eval_interval": tokens,
        "eval_interval": tokens,
        "checkpoint_interval": max(step, tokens // 4 // step * step),
        "checkpoint_keep_interval": tokens,
    }
    own = [*named, *(f"{key}={value}" for key, value in budgets.items())]
    own += [f"model.config.{key}={value}" for key, value in smaller.items()]
    try:
        config = compose([*overrides, *own])
        return Rung(name, (*overrides, *own), config, _parameters(config), _parameters(whole))
    except (ConfigError, ValueError) as error:
        # The cure that the message may name for a single run is nothing that the ladder could do.
        reason = str(error).partition(";")[0]
        model = whole.model.label or whole.model.name
        raise SweepError(
            f"--shrink {shrink}: {name} shrunk so is no {model} ({reason}); choose another factor"
        ) from error


def _divided(value: int, factor: int, what: str) -> int:
    if value % factor:
        fits = ", ".join(str(n) for n in range(2, min(value, 64) + 1) if value % n == 0) or "no factor"
        raise SweepError(f"--shrink {factor} does not divide {what}; {fits} would")
    return value // factor


def _is_used(key: str, fields: Mapping[str, Any]) -> bool:
    """Whether a field of `model.config` has an effect: a hybrid's YAML also describes mixers that no block has."""
    group, _, rest = key.partition(".")
    return group != "mixers" or "pattern" not in fields or rest.partition(".")[0] in fields["pattern"]


def _parameters(config: Config) -> int:
    """Weights outside of the embedding and the output matrix."""
    # Of the corpus only the vocabulary matters, and that only to what is left out.
    data = DataInfo("", 256, 0, 1, 1, config.datamodule.train_batch_len, 1, 1, 1, "", None)
    fields = {key: value for key, value in config.model.config.items() if key not in ("vocab_size", "bos_token_id")}
    model: Any = outline(dataclasses.replace(config, model=dataclasses.replace(config.model, config=fields)), data)
    outside = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters() if id(p) not in outside)


def plan(rungs: Sequence[Rung], shrink: int) -> Table:
    """What shrinking made of every size, before anything runs."""
    rows = []
    for one in rungs:
        fields: Mapping[str, Any] = flatten(one.config.model.config)
        kept = ", ".join(f"{key} {fields[key]}" for key in fields if key.rpartition(".")[2] in _DIVIDED and fields[key])
        numbers = [f"{one.full_parameters:,}", f"{one.parameters:,}", kept]
        rows.append([one.name, *numbers, f"{one.config.train.max_tokens:,}", f"{one.steps:,}"])
    return Table(["scale", "parameters", f"shrunk by {shrink}", "sizes", "tokens", "steps"], rows, "lrrlrr")


class Ladder:
    """Searches at all sizes, one after another, in `folder/SCALE`; started again, it goes on.

    A search starts from the best rate of the size before it. The folder gets ladder.json (losses by rate), table.md and
    figure.png after every search.

    Args:
        guess: where the first search starts; None: the config's rate.

    Raises:
        SweepError: sizes are too few or given twice, or the folder holds something else.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        folder: Path,
        shrink: int,
        compose: Compose,
        machine: runner.Machine,
        seeds: Sequence[int],
        guess: float | None,
    ) -> None:
        names = [one.name for one in rungs]
        if len(rungs) < 2 or len(set(names)) < len(names):
            raise SweepError(f"--scales {' '.join(names)}: at least two, each once")
        present = list(folder.iterdir()) if folder.is_dir() else []
        if (folder / "sweep.json").is_file() or (present and not any((p / "sweep.json").is_file() for p in present)):
            raise SweepError(f"output_dir={folder} is not empty and holds no ladder; choose another folder")
        self.rungs = sorted(rungs, key=lambda one: one.parameters)
        self.folder, self.shrink, self.compose, self.machine = folder, shrink, compose, machine
        self.seeds, self.guess = seeds, guess
        self.sizes: list[scaling.Size] = []

    def run(self) -> bool:
        """Returns whether all searches are complete."""
        guess = self.guess
        for one in self.rungs:
            print(f"\n{one.name}: {one.parameters:,} parameters, {one.steps:,} steps", flush=True)
            overrides = [*one.overrides, f"output_dir={quote(str(self.folder / one.name))}"]
            start = guess or one.config.optimizer.lr
            search = LearningRateSweep(ROOT / "train.py", overrides, self.compose, self.machine, start, self.seeds)
            complete = search.run()
            self._add(one, search, complete)
            if not complete:
                return False
            guess = grid_value(search.winner()[1])
        return True

    def _add(self, one: Rung, search: LearningRateSweep, complete: bool) -> None:
        """Adds what a search found, and writes what is known."""
        grid = next(iter(search.searches.values()), None)
        if grid is None or not grid.losses:
            return
        losses = {grid_value(index): grid.at(index) for index in grid.indices}
        flops = read_run(next(iter(sorted(search.folder.glob("lr*_seed*"))))).flops_per_token or math.nan
        compute = flops * one.config.train.max_tokens
        self.sizes.append(scaling.Size(one.name, one.parameters, compute, losses, complete))
        full = {rung.name: rung.full_parameters for rung in self.rungs if rung.full_parameters != rung.parameters}
        result = scaling.fit(self.sizes, full)
        first = self.rungs[0].config
        label = first.model.label or first.model.name
        found = {
            size.name: {f"{rate:g}": [v if math.isfinite(v) else None for v in of] for rate, of in size.losses.items()}
            for size in self.sizes
        }
        notes = [f"width, blocks and heads divided by {self.shrink}", *budget(first)[::2], *result.notes()]
        title = f"Learning rates of {label} across sizes"
        with outputs.writing(self.folder, "studies/ladder.py") as new:
            write_json(new / "ladder.json", {"model": label, "shrink": self.shrink, "losses": found})
            write_atomically(new / "table.md", f"{result.table().markdown(padded=True)}\n", durable=False)
            ladder_figure(result, search.loss_name, new / "figure.png", title, notes)
