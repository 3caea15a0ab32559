"""A comparison of several models in one queue of jobs: each gets its own learning-rate search, then a run at the rate
found, then runs of its variants at the same rate. Runs and variants may be repeated with other seeds. A model whose
rate is known needs no search.

The searches, runs and variants of all models wait together. One model's long run goes on while another is still
searched, and GPUs are idle only when nothing is left to start. Runs with the first seed start before searches, since
the longest chain decides when all is done; then come the variants, and the other seeds of runs and variants last, so
that what is stopped early has something of everything.
"""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.sweep import SweepError, runner
from forgetting_transformer.sweep.jobs import Job, State, quote
from forgetting_transformer.sweep.learning_rate import LearningRateSweep, grid_text
from forgetting_transformer.training import Config

# What starts first, of one seed.
_RUN, _SEARCH, _VARIANT = 2, 1, 0


class Study:
    """Runs go to `folder/search/MODEL/lr…_seed…`, `folder/runs/MODEL_seed…` and `folder/variants/VARIANT_seed…`.

    Args:
        script: train.py.
        compose: overrides -> Config.
        folder: of the study; started again in it, the study goes on.
        models: name -> overrides that make the model, in the order in which searches start: the slowest model first.
        shared: overrides of every run.
        search: overrides of the runs of searches, such as a smaller budget.
        seeds: of the runs and variants; the searches have the first.
        guess: learning rate to start the searches from; None: each model's own.
        variants: model -> (name -> overrides) of runs at that model's rate.
        variant: overrides of these runs.
        rates: model -> its learning rate, of models that are not to be searched.
        with_runs: False leaves out the runs of the models: only their variants are run, at rates that are known.

    Attributes:
        failures: model -> why its search could not go on; the other models are not affected.

    Raises:
        SweepError: two runs would share a folder, a seed is negative or given twice, variants or a rate are of a
            model that is not in the study, or there would be nothing to run, or nothing to search a rate for.
        ConfigError: a run or variant that train.py would refuse. All are composed here, since they start hours later.
    """

    def __init__(
        self,
        script: Path,
        compose: Callable[[Sequence[str]], Config],
        folder: Path,
        models: Mapping[str, Sequence[str]],
        shared: Sequence[str],
        search: Sequence[str],
        seeds: Sequence[int],
        guess: float | None = None,
        variants: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
        variant: Sequence[str] = (),
        rates: Mapping[str, float] | None = None,
        with_runs: bool = True,
    ) -> None:
        self.script, self.compose, self.folder = script, compose, folder
        self.models, self.shared, self.seeds, self.with_runs = models, shared, seeds, with_runs
        if len(set(seeds)) < len(seeds) or min(seeds, default=-1) < 0:
            raise SweepError(f"seeds {', '.join(map(str, seeds))}: at least one, each once, none negative")
        self.variants, self.variant = variants or {}, variant
        if unknown := sorted(self.variants.keys() - models.keys()):
            raise SweepError(
                f"variants of {', '.join(unknown)}: their rate is that of a model of the study, {', '.join(models)}"
            )
        self.rates = rates or {}
        if unknown := sorted(self.rates.keys() - models.keys()):
            raise SweepError(f"learning rates of {', '.join(unknown)}: the study has the models {', '.join(models)}")
        if not with_runs:
            # Of the others there is nothing to run.
            self.models = {name: own for name, own in models.items() if self.variants.get(name)}
            if not self.models:
                raise SweepError("without runs there is nothing left to run: none of the models has variants")
            if unknown := sorted(self.models.keys() - self.rates.keys()):
                raise SweepError(
                    f"without runs the learning rates of {', '.join(unknown)} must be known: give them as "
                    "learning_rates of the study's YAML, or with --rates"
                )
        self.searches: dict[str, LearningRateSweep] = {}
        for name, own in self.models.items():
            if name in self.rates:
                continue
            first = f"seed={seeds[0]}"
            overrides = [*own, *shared, first, *search, f"output_dir={quote(str(folder / 'search' / name))}"]
            rate = compose(overrides).optimizer.lr if guess is None else guess
            self.searches[name] = LearningRateSweep(script, overrides, compose, None, rate, seeds[:1])
        self._rounds: dict[str, Generator[list[Job], list[runner.JobResult], bool]] = {}
        #: Model -> results of the round that its search is in, in the round's order; None: not yet.
        self._results: dict[str, dict[str, runner.JobResult | None]] = {}
        self._model_of: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        likely = {name: grid_text(search.start) for name, search in self.searches.items()}
        likely |= {name: str(rate) for name, rate in self.rates.items()}
        #: Model -> its jobs as they will be, but for the rate where that is to be searched.
        self._planned = {name: self._runs(name, likely[name]) for name in self.models}
        runner.check_folders([*itertools.chain(*self._planned.values())])

    def run(self, machine: runner.Machine) -> list[runner.JobResult]:
        """Runs all that is not finished, and returns the results of all jobs.

        Raises:
            SweepError: the folder holds a study with other settings, or the machine cannot run one of the jobs. Nothing
                was started then.
        """
        machine.check([*itertools.chain(*self._planned.values())])
        self._check_rates()
        for search in self.searches.values():
            search.open()
        first = []
        for name in self.models:
            if name in self.rates:
                first += self._planned[name]
            else:
                self._rounds[name] = self.searches[name].rounds()
                first += self._advance(name, None)
        return runner.run_jobs(first, machine, self.folder / "logs", on_result=self._on_result)

    def _check_rates(self) -> None:
        """A run whose rate is known keeps the one that it was trained with.

        Raises:
            SweepError: it was trained with another one.
        """
        for job in itertools.chain(*(jobs for name, jobs in self._planned.items() if name in self.rates)):
            if (job.output_dir / "config.yaml").is_file():
                before, now = read_run(job.output_dir).config["optimizer"]["lr"], job.config.optimizer.lr
                if before != now:
                    raise SweepError(
                        f"{job.output_dir} was trained with a learning rate of {before:g}, and the study now says "
                        f"{now:g}: give the rate that it had, or another output_dir"
                    )

    def rate(self, model: str) -> str:
        """The best learning rate of a model's search, as text."""
        return grid_text(self.searches[model].winner()[1])

    def _on_result(self, result: runner.JobResult) -> list[Job]:
        name = self._model_of.get(result.job.name)
        if name is None:
            return []
        self._results[name][result.job.name] = result
        results = [one for one in self._results[name].values() if one is not None]
        return self._advance(name, results) if len(results) == len(self._results[name]) else []

    def _advance(self, name: str, results: list[runner.JobResult] | None) -> list[Job]:
        """The next jobs of a model: a round of its search, or, when that has ended, its runs."""
        while True:
            try:
                rounds = self._rounds[name]
                jobs = next(rounds) if results is None else rounds.send(results)
            except StopIteration as end:
                return self._runs(name, self.rate(name)) if end.value else []
            except SweepError as error:
                self.failures[name] = str(error)
                return []
            if jobs:
                break
            results = []  # a round of nothing but runs that are known to have diverged
        priority = self._priority(0, _SEARCH, name)
        jobs = [dataclasses.replace(job, name=f"search/{name}/{job.name}", priority=priority) for job in jobs]
        self._results[name] = dict.fromkeys(job.name for job in jobs)
        self._model_of |= dict.fromkeys(self._results[name], name)
        return jobs

    def _runs(self, name: str, rate: str) -> list[Job]:
        """The runs of a model and its variants at a learning rate."""
        rate = f"optimizer.lr={rate}"
        jobs = []
        for number, seed in enumerate(self.seeds):
            shared = [*self.shared, f"seed={seed}"]
            if self.with_runs:
                overrides = [*self.models[name], *shared, rate]
                jobs.append(self._job(f"runs/{name}_seed{seed}", overrides, self._priority(number, _RUN, name)))
            for variant, own in self.variants.get(name, {}).items():
                overrides = [*own, *shared, *self.variant, rate]
                priority = self._priority(number, _VARIANT, name)
                jobs.append(self._job(f"variants/{variant}_seed{seed}", overrides, priority))
        return jobs

    def _priority(self, seed_number: int, kind: int, model: str) -> int:
        """By seed, of one seed by kind of job, and of one kind by the order of the models."""
        rank = 3 * (len(self.seeds) - seed_number) + kind
        return rank * len(self.models) - list(self.models).index(model)

    def _job(self, name: str, overrides: Sequence[str], priority: int) -> Job:
        config = self.compose([*overrides, f"output_dir={quote(str(self.folder / name))}"])
        return Job(name, self.script, tuple(overrides), config, priority)


def unfinished(results: Sequence[runner.JobResult]) -> list[runner.JobResult]:
    """Those that the same command would run again."""
    return [result for result in results if result.state not in (State.FINISHED, State.DIVERGED)]
