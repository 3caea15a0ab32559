"""The paper's search for a learning rate (appendix B): try {1, 2, 5} x 10^i around a guess, extend the grid until the
best rate has a worse one on either side, then do the same for every wanted head dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forgetting_transformer.analysis import statistics
from forgetting_transformer.analysis.plots.sweeps import budget, loss_against_learning_rate
from forgetting_transformer.analysis.runs import TRAIN_WINDOW, read_run
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.files import write_atomically
from forgetting_transformer.sweep import SweepError, composer, runner
from forgetting_transformer.sweep.jobs import Job, State, of_each_job
from forgetting_transformer.sweep.state import open_folder

#: Grid points from the guess at which the search gives up: a factor of 10,000.
FARTHEST = 12

_MANTISSAS = (1, 2, 5)


def grid_text(index: int) -> str:
    """Grid point `index` as text: 0 is "1e0", -1 "5e-1", -2 "2e-1", -3 "1e-1", …"""
    exponent, position = divmod(index, 3)
    return f"{_MANTISSAS[position]}e{exponent}"


def grid_value(index: int) -> float:
    return float(grid_text(index))


def nearest_grid_index(rate: float) -> int:
    """The grid point whose ratio to `rate` is closest to one.

    Raises:
        SweepError: the rate is not a positive number.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise SweepError(f"a learning rate of {rate} cannot be the start of a search; give a positive one with --guess")
    around = 3 * math.floor(math.log10(rate))
    return min(range(around - 1, around + 5), key=lambda index: abs(math.log(grid_value(index) / rate)))


@dataclass
class GridSearch:
    """Chooses the next runs of the search from the losses so far.

    Args:
        start: grid index of the guess.
        seeds: the first is run at every rate; the others at the best rate and its two neighbours.
    """

    start: int
    seeds: Sequence[int]
    #: (grid index, seed) -> loss; infinite for a run that diverged.
    losses: dict[tuple[int, int], float] = field(default_factory=dict)

    def at(self, index: int) -> list[float]:
        """The losses at a grid point, one for each seed that was run."""
        return [self.losses[index, seed] for seed in self.seeds if (index, seed) in self.losses]

    @property
    def indices(self) -> list[int]:
        return sorted({index for index, _ in self.losses})

    @property
    def best(self) -> int:
        """The grid point with the lowest mean loss; the lowest rate if all are infinite, since that is the way out."""
        return min(self.indices, key=lambda index: (self._mean(index), index))

    def needed(self) -> list[tuple[int, int]]:
        """The runs to make next, as (grid index, seed); none if the best rate has a worse one on either side, and it
        and its neighbours have all seeds.

        Raises:
            SweepError: there is no such rate within FARTHEST grid points of the guess.
        """
        best = self.best if self.losses else self.start
        if abs(best - self.start) >= FARTHEST:
            diverged = f"every run diverged, down to a learning rate of {grid_text(best)}"
            still = f"the loss does not rise yet at a learning rate of {grid_text(best)}"
            raise SweepError(
                f"{still if math.isfinite(self._mean(best)) else diverged}; the guess was {grid_text(self.start)}: "
                "check the runs, or start elsewhere with --guess"
            )
        for seeds in (self.seeds[:1], self.seeds):
            near = [(index, seed) for index in range(best - 1, best + 2) for seed in seeds]
            if missing := [key for key in near if key not in self.losses]:
                return missing
        return []

    def _mean(self, index: int) -> float:
        return sum(self.at(index)) / len(self.at(index))


class LearningRateSweep:
    """One search with its runs in `base.output_dir`. Started again, it continues from what is there.

    Args:
        overrides: what all runs have in common, of train.py and of hydra.launcher.
        guess: learning rate to start from; None for the config's.
        seeds: each once; None for the config's.
        head_dims: head dimensions to search around, one after another; () leaves the model as it is.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        guess: float | None = None,
        seeds: Sequence[int] | None = None,
        head_dims: Sequence[int] = (),
    ) -> None:
        self.overrides = tuple(overrides)
        self.base = composer.compose_config(overrides)
        self.start = nearest_grid_index(self.base.optimizer.lr if guess is None else guess)
        self.seeds = (self.base.seed,) if seeds is None else tuple(seeds)
        self.folder = Path(self.base.output_dir).expanduser().absolute()
        #: Whether runs are judged by held-out loss; otherwise by training loss over the last tokens.
        self.heldout = not self.base.skip_eval and self.base.final_eval
        self.loss_name = "held-out loss" if self.heldout else f"training loss, last {TRAIN_WINDOW:.0%} of tokens"
        self.head_dims: tuple[int | None, ...] = tuple(head_dims) or (None,)
        self.searches: dict[int | None, GridSearch] = {}
        self._round: dict[tuple[int, int], Job] = {}
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise SweepError(f"--seeds {','.join(map(str, self.seeds))}: each seed once, and at least one")
        for head_dim in head_dims:
            self._heads(head_dim)

    def run(self) -> bool:
        """Searches to the end, or to a failed or interrupted run; writes sweep.md and sweep.png after every round.

        Returns:
            whether the search is complete.

        Raises:
            SweepError: the folder holds a search with other settings, or the search cannot go on.
        """
        machine = composer.machine(self.overrides)
        self.open()
        while jobs := self.next_jobs():
            if not self.take(runner.run_jobs(jobs, machine, self.folder / "logs")):
                return False
        return True

    def open(self) -> None:
        """Continues the search in the folder, or begins one there.

        Raises:
            SweepError: it holds a search with other settings, or something that is no search.
        """
        own = ("optimizer.lr", "seed", "model.config.num_heads")
        # With another first seed the search would start over, beside the runs of this one.
        open_folder(self.folder, self.base, own, {"search": "learning rate", "first seed": str(self.seeds[0])})

    def next_jobs(self) -> list[Job]:
        """The jobs of the next round, whose results `take` wants; [] when the search is complete.

        Raises:
            SweepError: the search cannot go on.
        """
        start = self.start
        for head_dim in self.head_dims:
            search = self.searches.setdefault(head_dim, GridSearch(start, self.seeds))
            while todo := search.needed():
                jobs = {key: self._job(head_dim, *key) for key in todo}
                # A run that diverged would diverge again: it is a function of its settings.
                search.losses |= {key: math.inf for key, job in jobs.items() if read_run(job.output_dir).diverged}
                self._round = {key: job for key, job in jobs.items() if key not in search.losses}
                if self._round:
                    return [*self._round.values()]
            start = search.best
        return []

    def take(self, results: Sequence[runner.JobResult]) -> bool:
        """Enters the losses of the round and writes the table; returns whether every job has one."""
        search = [*self.searches.values()][-1]
        settled = [result.state in (State.FINISHED, State.DIVERGED) for result in results]
        for key, result, is_settled in zip(self._round, results, settled, strict=True):
            if is_settled:
                loss = result.run.final_loss(self.heldout)
                search.losses[key] = math.inf if result.state == State.DIVERGED or math.isnan(loss) else loss
        if any(s.losses for s in self.searches.values()):
            self.write()
        if not all(settled):
            print(f"\n{runner.summary(results)}\n", flush=True)
        return all(settled)

    def table(self) -> str:
        """All rates that were tried, as Markdown."""
        rows = []
        winner = self.winner()
        best_losses = self.searches[winner[0]].at(winner[1])
        for head_dim, search in self.searches.items():
            for index in search.indices:
                losses = search.at(index)
                mean, apart = statistics.mean(losses), statistics.difference(losses, best_losses)
                diverged = [f"seed {seed}" for seed in search.seeds if search.losses.get((index, seed)) == math.inf]
                is_best = (head_dim, index) == winner
                rows.append(
                    [
                        "" if head_dim is None else str(head_dim),
                        grid_text(index),
                        _nats(mean.value),
                        _nats(mean.half_width),
                        str(len(losses)),
                        "" if is_best else _nats(apart.value, "+"),
                        "best" if is_best else f"{', '.join(diverged)} diverged" if diverged else "",
                    ]
                )
        header = ["head dim", "learning rate", self.loss_name, "± 95 %", "seeds", "above the best", "note"]
        return markdown_table(header, rows, "rrrrrrl")

    def winner(self) -> tuple[int | None, int]:
        """Head dimension and grid index of the lowest mean loss so far."""
        best = {head_dim: search.best for head_dim, search in self.searches.items() if search.losses}
        return min(best.items(), key=lambda item: statistics.mean(self.searches[item[0]].at(item[1])).value)

    def warnings(self) -> list[str]:
        """Reasons not to conclude from the numbers yet."""
        head_dim, index = self.winner()
        search = self.searches[head_dim]
        best = search.at(index)
        if len(best) < 2:
            return ["one seed: how much of these differences is noise is unknown; --seeds 0,1,2 would tell"]
        rivals = {f"learning rate {grid_text(i)}": search.at(i) for i in (index - 1, index + 1)}
        rivals |= {
            f"head dimension {other} (at {grid_text(s.best)})": s.at(s.best)
            for other, s in self.searches.items()
            if other != head_dim and s.losses
        }
        apart = {name: statistics.difference(losses, best) for name, losses in rivals.items() if len(losses) > 1}
        return [
            f"{grid_text(index)} is within seed noise of {name}: it is better by {one.value:.4f} ± "
            f"{one.half_width:.4f} nats"
            for name, one in apart.items()
            if math.isfinite(one.value) and not one.excludes_zero
        ]

    def write(self) -> None:
        """Writes the table, the warnings and the figure of the results so far."""
        text = [f"# Learning-rate search in {self.folder.name}", "", self.table(), ""]
        text += [f"Warning: {warning}." for warning in self.warnings()]
        write_atomically(self.folder / "sweep.md", "\n".join(text).rstrip() + "\n")
        curves = {
            "" if head_dim is None else f"head dimension {head_dim}": {
                grid_value(index): search.at(index) for index in search.indices
            }
            for head_dim, search in self.searches.items()
            if search.losses
        }
        title = f"Learning-rate search of {self.base.model.label or self.base.model.name}"
        loss_against_learning_rate(
            curves, self.loss_name, self.folder / "sweep.png", title=title, conditions=budget(self.base)
        )

    def _job(self, head_dim: int | None, index: int, seed: int) -> Job:
        own = [f"optimizer.lr={grid_text(index)}", f"seed={seed}"]
        own += [] if head_dim is None else [f"model.config.num_heads={self._heads(head_dim)}"]
        overrides = [*self.overrides, *own]
        config = composer.compose_config(overrides)
        name = f"{'' if head_dim is None else f'head_dim{head_dim}_'}lr{grid_text(index)}_seed{seed}"
        config.output_dir = str(self.folder / name)
        return Job(name, of_each_job(overrides), config)

    def _heads(self, head_dim: int) -> int:
        """The number of heads that gives this head dimension.

        Raises:
            SweepError: the architecture does not split its width into heads this way, or the width does not divide.
        """
        fields = self.base.model.config
        if "num_heads" not in fields or "head_dim" in fields:
            raise SweepError(
                f"--head_dims: model {self.base.model.name!r} does not choose its head dimension by "
                "model.config.num_heads; sweep its own key with python train.py -m"
            )
        width = fields["hidden_size"]
        if head_dim < 1 or width % head_dim:
            raise SweepError(f"--head_dims {head_dim} does not divide model.config.hidden_size={width}")
        return width // head_dim


def _nats(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else ""
