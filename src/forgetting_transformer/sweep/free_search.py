"""A search over any keys of the config with Optuna's tree-structured Parzen estimator."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from forgetting_transformer.analysis.plots.sweeps import budget, loss_against_parameters
from forgetting_transformer.analysis.runs import Run
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.files import write_atomically
from forgetting_transformer.sweep import SweepError, runner
from forgetting_transformer.sweep.jobs import Job, State
from forgetting_transformer.sweep.state import SweepState
from forgetting_transformer.training import Config

#: A run reports its training loss to Optuna this many times, evenly over its tokens, if bad runs are to be ended early.
REPORTS = 20
#: Part of the budget before which none is ended.
PRUNE_FROM = 0.25


class FreeSearch:
    """One study with its runs in `base.output_dir`. Started again, it takes what is there and goes on.

    Args:
        script: train.py.
        overrides: what all runs have in common, as Hydra overrides.
        compose: overrides -> Config.
        machine: where the runs are made (sweep/machines.py); as many trials are asked for at a time as it has room for.
        space: config key -> what it is drawn from.
        space_text: the same as the user wrote it.
        trials: runs in all, those of earlier starts included.
        prune: end a run whose training loss is above the median of the others' at the same tokens.
    """

    study: optuna.Study  # from `run` on

    def __init__(
        self,
        script: Path,
        overrides: Sequence[str],
        compose: Callable[[Sequence[str]], Config],
        machine: runner.Machine,
        space: Mapping[str, BaseDistribution],
        space_text: Mapping[str, str],
        trials: int,
        prune: bool,
    ) -> None:
        if not space:
            raise SweepError("nothing to search: give a range, as in 'optimizer.lr=tag(log, interval(1e-4, 1e-2))'")
        self.script, self.overrides, self.compose, self.machine = script, tuple(overrides), compose, machine
        self.space, self.trials, self.prune = dict(space), trials, prune
        # A value of the space, so that keys without one in the config compose.
        self.base = compose([*overrides, *(f"{key}={_example(values)}" for key, values in space.items())])
        self.folder = Path(self.base.output_dir).expanduser().absolute()
        self.heldout = not self.base.skip_eval and self.base.final_eval
        self._state = SweepState(self.folder, "free search", self.base, list(space), space_text)

    def run(self) -> bool:
        """Makes all trials; writes sweep.md and sweep.png after every batch.

        Returns:
            whether every trial was made and none failed.

        Raises:
            SweepError: the folder holds a sweep with other settings.
        """
        self._state.open()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(self.folder / "optuna.jsonl")))
        reports = max(1, round(PRUNE_FROM * REPORTS))
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=reports) if self.prune else optuna.pruners.NopPruner()
        self.study = optuna.create_study(
            study_name="sweep", storage=storage, direction="minimize", load_if_exists=True, pruner=pruner
        )
        # The same seed again would draw the same first trials again.
        seed = self.base.seed + len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        room = self.machine.room(self._job(0, {key: _example(values) for key, values in self.space.items()}))
        # What was running when an earlier start ended is continued first.
        running = [Trial(self.study, trial._trial_id) for trial in self._with(TrialState.RUNNING)]
        while True:
            while len(running) < room and len(self.study.trials) < self.trials:
                running.append(self.study.ask(self.space))
            if not running:
                return not self._with(TrialState.FAIL)
            if not self._batch(running):
                return False
            running = []

    @property
    def loss_name(self) -> str:
        return "held-out loss" if self.heldout else "training loss"

    def best(self) -> FrozenTrial | None:
        """The finished trial with the lowest loss."""
        return min(self._with(TrialState.COMPLETE), key=_loss, default=None)

    def table(self) -> str:
        """All trials as Markdown, the best first."""
        order = sorted(self.study.trials, key=lambda trial: (trial.value is None, trial.value, trial.number))
        rows = [
            [
                _name(trial.number),
                *(
                    f"{trial.params[key]:.4g}" if isinstance(trial.params[key], float) else str(trial.params[key])
                    for key in self.space
                ),
                "" if trial.value is None else f"{trial.value:.4f}",
                trial.user_attrs.get("state", "not finished"),
            ]
            for trial in order
        ]
        return markdown_table(
            ["run", *self.space, self.loss_name, "state"], rows, "l" + "r" * (len(self.space) + 1) + "l"
        )

    def write(self) -> None:
        write_atomically(self.folder / "sweep.md", f"# Search in {self.folder.name}\n\n{self.table()}\n")
        done = self._with(TrialState.COMPLETE)
        if done:
            losses = [_loss(trial) for trial in done]
            parameters = {key: [trial.params[key] for trial in done] for key in self.space}
            log = {key for key, values in self.space.items() if getattr(values, "log", False)}
            title = f"Search over {len(parameters)} keys of {self.base.model.label or self.base.model.name}"
            figure = self.folder / "sweep.png"
            loss_against_parameters(parameters, losses, log, self.loss_name, figure, title, budget(self.base))

    def _batch(self, trials: Sequence[Trial]) -> bool:
        """Runs these trials and tells Optuna; False if one was interrupted."""
        by_name = {_name(trial.number): trial for trial in trials}
        jobs = [self._job(trial.number, trial.params) for trial in trials]

        def hopeless(job: Job, run: Run) -> str | None:
            return self._report(by_name[job.name], job, run)

        results = runner.run_jobs(jobs, self.machine, self.folder / "logs", hopeless if self.prune else None)
        for result in results:
            trial = by_name[result.job.name]
            if result.state in (State.INTERRUPTED, State.INCOMPLETE):
                continue  # Optuna knows it as running, and so it is continued at the next start
            trial.set_user_attr("state", str(result.state))
            if result.state == State.FINISHED:
                if self.prune:
                    self._report(trial, result.job, result.run)  # what came after the last look at it
                self.study.tell(trial, result.run.final_loss(self.heldout))
            elif result.state == State.FAILED:
                self.study.tell(trial, state=TrialState.FAIL)
            else:  # diverged or ended early: worse than any that finished
                self.study.tell(trial, state=TrialState.PRUNED)
        self.write()
        return all(result.state not in (State.INTERRUPTED, State.INCOMPLETE) for result in results)

    def _report(self, trial: Trial, job: Job, run: Run) -> str | None:
        """Reports what is new of a running trial; a reason if Optuna would end it."""
        budget = job.config.train.max_tokens
        known = trial.storage.get_trial(trial._trial_id).intermediate_values
        for step in range(1, REPORTS + 1):
            if step not in known and run.tokens >= step * budget / REPORTS:
                trial.report(run.train_loss_at(step * budget / REPORTS), step)
        return f"above the median of the others after {run.tokens:,} tokens" if trial.should_prune() else None

    def _job(self, number: int, parameters: Mapping[str, Any]) -> Job:
        overrides = [*self.overrides, *(f"{key}={value}" for key, value in parameters.items())]
        config = self.compose(overrides)
        config.output_dir = str(self.folder / _name(number))
        passed_on = tuple(override for override in overrides if not override.startswith("output_dir="))
        return Job(_name(number), self.script, passed_on, config)

    def _with(self, state: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(state,))


def _name(number: int) -> str:
    return f"trial{number:04d}"


def _loss(trial: FrozenTrial) -> float:
    assert trial.value is not None  # the trial is complete
    return trial.value


def _example(values: Any) -> Any:
    return values.choices[0] if hasattr(values, "choices") else values.low
