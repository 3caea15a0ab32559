"""A comparison of several models: each gets a learning-rate search, then a run at the rate found, then runs of its
variants at the same rate. Runs and variants may be repeated with other seeds. A model whose rate is known needs no
search.

The searches of all models share the machine, round by round. Then come the runs of the first seed, its variants, and
the other seeds last, so that what is stopped early has something of everything.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from forgetting_transformer.sweep import SweepError, composer, runner
from forgetting_transformer.sweep.jobs import Job, State, of_each_job, quote
from forgetting_transformer.sweep.learning_rate import LearningRateSweep, grid_text
from studies import SEARCH_PATH
from studies.engine.plan import StudyPlan


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
        self.failures: dict[str, str] = {}
        likely = {name: grid_text(search.start) for name, search in self.searches.items()} | self._known_rates()
        #: The runs as they will be, but for the rates that are to be searched.
        self._planned = self._runs(likely)
        runner.check_folders(self._planned)

    def run(self, machine: runner.Machine) -> list[runner.JobResult]:
        """Runs all that is not finished, and returns the results of all jobs.

        Raises:
            SweepError: the folder holds a study with other settings, or the machine cannot run one of the jobs. Nothing
                was started then.
        """
        machine.check(self._planned)
        for search in self.searches.values():
            search.open()
        rates, searching = self._known_rates(), dict(self.searches)
        results: list[runner.JobResult] = []
        while searching:
            rounds: dict[str, list[Job]] = {}
            for name, search in searching.items():
                try:
                    jobs = [dataclasses.replace(job, name=f"search/{name}/{job.name}") for job in search.next_jobs()]
                except SweepError as error:
                    self.failures[name] = str(error)
                    continue
                if jobs:
                    rounds[name] = jobs
                else:
                    rates[name] = grid_text(search.winner()[1])
            made = self._run([*itertools.chain(*rounds.values())], machine)
            results += made
            if any(result.state == State.INTERRUPTED for result in made):
                return results
            left = iter(made)
            settled = {name: searching[name].take([*itertools.islice(left, len(rounds[name]))]) for name in rounds}
            searching = {name: searching[name] for name, is_settled in settled.items() if is_settled}
        return results + self._run(self._runs(rates), machine)

    def _run(self, jobs: Sequence[Job], machine: runner.Machine) -> list[runner.JobResult]:
        return runner.run_jobs(jobs, machine, self.folder / "logs") if jobs else []

    def _known_rates(self) -> dict[str, str]:
        return {name: str(rate) for name, rate in self.plan.learning_rates.items()}

    def _runs(self, rates: Mapping[str, str]) -> list[Job]:
        """The runs and variants of these models at their learning rates, in the order of their starts."""
        own = self.plan.overrides_of("variants")
        jobs = []
        for seed, kind, model in itertools.product(self.plan.seeds, ("runs", "variants"), self.models):
            # Without settings of their own, a model among its variants would be its run.
            variants = [name for name in self.plan.variants.get(model, ()) if own or name != model]
            for name in ([model] if kind == "runs" else variants) if model in rates else ():
                place, more = f"{kind}/{name}_seed{seed}", own if kind == "variants" else []
                overrides = [*self._experiment(name), *self.shared, f"seed={seed}", *more]
                overrides.append(f"optimizer.lr={rates[model]}")
                config = composer.compose_config([*overrides, f"output_dir={quote(str(self.folder / place))}"])
                jobs.append(Job(place, of_each_job(overrides), config))
        return jobs

    def _experiment(self, name: str) -> list[str]:
        return [SEARCH_PATH, f"+experiment/{self.plan.group}={name}"]


def unfinished(results: Sequence[runner.JobResult]) -> list[runner.JobResult]:
    """Jobs that the same command would run again."""
    return [result for result in results if result.state not in (State.FINISHED, State.DIVERGED)]
