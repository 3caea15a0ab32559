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
from collections.abc import Generator, Sequence
from pathlib import Path

from forgetting_transformer.sweep import SweepError, composer, runner
from forgetting_transformer.sweep.jobs import Job, State, of_each_job, quote
from forgetting_transformer.sweep.learning_rate import LearningRateSweep, grid_text
from studies import SEARCH_PATH
from studies.engine.plan import StudyPlan

# Order of the starts of one seed.
_RUN, _SEARCH, _VARIANT = 2, 1, 0


class Queue:
    """Runs go to `folder/search/MODEL/lr…_seed…`, `folder/runs/MODEL_seed…` and `folder/variants/VARIANT_seed…`.

    Args:
        plan: of the study.
        folder: of the study; started again in it, the study goes on.
        shared: overrides of every run, besides those of the plan.

    Attributes:
        failures: model -> why its search could not go on; the other models are not affected.

    Raises:
        SweepError: two runs would share a folder.
        ConfigError: a run or variant that train.py would refuse. All are composed here, since they start hours later.
    """

    def __init__(self, plan: StudyPlan, folder: Path, shared: Sequence[str]) -> None:
        self.plan, self.folder = plan, folder
        self.models = list(plan.slowest_first or plan.models)
        self.shared = [*plan.overrides_of("runs"), *shared]
        self.searches: dict[str, LearningRateSweep] = {}
        for name in self.models:
            if name not in plan.learning_rates:
                place = f"output_dir={quote(str(folder / 'search' / name))}"
                first = [f"seed={plan.seeds[0]}", *plan.overrides_of("search"), place]
                overrides = [*self._experiment(name), *self.shared, *first]
                self.searches[name] = LearningRateSweep(overrides, plan.start_rate, plan.seeds[:1])
        self._rounds: dict[str, Generator[list[Job], list[runner.JobResult], bool]] = {}
        #: Model -> results of the round that its search is in, in the round's order; None: not yet.
        self._results: dict[str, dict[str, runner.JobResult | None]] = {}
        self._model_of: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        likely = {name: grid_text(search.start) for name, search in self.searches.items()}
        likely |= {name: str(rate) for name, rate in plan.learning_rates.items()}
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
        for search in self.searches.values():
            search.open()
        first = []
        for name in self.models:
            if name in self.searches:
                self._rounds[name] = self.searches[name].rounds()
                first += self._advance(name, None)
            else:
                first += self._planned[name]
        return runner.run_jobs(first, machine, self.folder / "logs", on_result=self._on_result)

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
                rate = grid_text(self.searches[name].winner()[1]) if end.value else ""
                return self._runs(name, rate) if rate else []
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

    def _runs(self, model: str, rate: str) -> list[Job]:
        """The runs of a model and its variants at a learning rate."""
        own = self.plan.overrides_of("variants")
        jobs = []
        for number, seed in enumerate(self.plan.seeds):
            named: list[tuple[str, str, int, list[str]]] = [("runs", model, _RUN, [])]
            for name in self.plan.variants.get(model, ()):
                if own or name != model:  # else the model's run is what the model would be among its variants
                    named.append(("variants", name, _VARIANT, own))
            for kind, name, priority, more in named:
                place = f"{kind}/{name}_seed{seed}"
                overrides = [*self._experiment(name), *self.shared, f"seed={seed}", *more, f"optimizer.lr={rate}"]
                config = composer.compose_config([*overrides, f"output_dir={quote(str(self.folder / place))}"])
                rank = self._priority(number, priority, model)
                jobs.append(Job(place, of_each_job(overrides), config, rank))
        return jobs

    def _experiment(self, name: str) -> list[str]:
        return [SEARCH_PATH, f"+experiment/{self.plan.group}={name}"]

    def _priority(self, seed_number: int, kind: int, model: str) -> int:
        """By seed, of one seed by kind of job, and of one kind by the order of the models."""
        rank = 3 * (len(self.plan.seeds) - seed_number) + kind
        return rank * len(self.models) - self.models.index(model)


def unfinished(results: Sequence[runner.JobResult]) -> list[runner.JobResult]:
    """Jobs that the same command would run again."""
    return [result for result in results if result.state not in (State.FINISHED, State.DIVERGED)]
