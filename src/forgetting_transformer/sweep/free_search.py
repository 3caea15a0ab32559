"""A search over any keys of the config with Optuna's tree-structured Parzen estimator."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.files import write_atomically
from forgetting_transformer.sweep import SweepError, composer, runner
from forgetting_transformer.sweep.jobs import Job, State, of_each_job
from forgetting_transformer.sweep.state import open_folder


class FreeSearch:
    """One study with its runs in `base.output_dir`. Started again, it continues from what is there.

    Args:
        overrides: of train.py, and of hydra.launcher. Those with a range are searched.
        trials: runs in all, those of earlier starts included.

    Raises:
        SweepError, ConfigError: a range that cannot be searched, or none; a run that train.py would refuse.
    """

    study: optuna.Study  # from `run` on

    def __init__(self, overrides: Sequence[str], trials: int) -> None:
        self.overrides, self.space, self.space_text = composer.search_space(overrides)
        if not self.space:
            raise SweepError("nothing to search: give a range, as in 'optimizer.lr=tag(log, interval(1e-4, 1e-2))'")
        self.trials = trials
        # A value of the space, so that keys without one in the config compose.
        self._example = {key: _example(values) for key, values in self.space.items()}
        self.base = composer.compose_config([*self.overrides, *_overrides(self._example)])
        self.folder = Path(self.base.output_dir).expanduser().absolute()
        self.heldout = not self.base.skip_eval and self.base.final_eval
        self.loss_name = "held-out loss" if self.heldout else "training loss"

    def run(self) -> bool:
        """Makes all trials; writes sweep.md after every batch.

        Returns:
            whether every trial was made and none failed.

        Raises:
            SweepError: the folder holds a search with other settings.
        """
        machine = composer.machine(self.overrides)
        open_folder(self.folder, self.base, self.space, {"search": "free", **self.space_text})
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(self.folder / "optuna.jsonl")))
        self.study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)
        # The same seed again would draw the same first trials again.
        seed = self.base.seed + len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        room = machine.room(self._job(0, self._example))
        while True:
            # Trials that were running when an earlier start ended are continued first.
            trials = [Trial(self.study, trial._trial_id) for trial in self._with(TrialState.RUNNING)]
            while len(trials) < room and len(self.study.trials) < self.trials:
                trials.append(self.study.ask(self.space))
            if not trials:
                return not self._with(TrialState.FAIL)
            jobs = [self._job(trial.number, trial.params) for trial in trials]
            for trial, result in zip(trials, runner.run_jobs(jobs, machine, self.folder / "logs"), strict=True):
                if result.state in (State.INTERRUPTED, State.INCOMPLETE):
                    continue  # Optuna knows it as running, and so it is continued at the next start
                trial.set_user_attr("state", str(result.state))
                if result.state == State.FINISHED:
                    self.study.tell(trial, result.run.final_loss(self.heldout))
                else:  # Optuna takes a pruned trial for worse than any that finished
                    failed = result.state == State.FAILED
                    self.study.tell(trial, state=TrialState.FAIL if failed else TrialState.PRUNED)
            self.write()
            if self._with(TrialState.RUNNING):
                return False

    def best(self) -> FrozenTrial | None:
        """The finished trial with the lowest loss."""
        return self.study.best_trial if self._with(TrialState.COMPLETE) else None

    def table(self) -> str:
        """All trials as Markdown, the best first."""
        rows = []
        for trial in sorted(self.study.trials, key=lambda trial: (trial.value is None, trial.value, trial.number)):
            values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in map(trial.params.get, self.space)]
            loss = "" if trial.value is None else f"{trial.value:.4f}"
            rows.append([_name(trial.number), *values, loss, trial.user_attrs.get("state", "not finished")])
        return markdown_table(
            ["run", *self.space, self.loss_name, "state"], rows, "l" + "r" * (len(self.space) + 1) + "l"
        )

    def write(self) -> None:
        write_atomically(self.folder / "sweep.md", f"# Search in {self.folder.name}\n\n{self.table()}\n")

    def _job(self, number: int, parameters: Mapping[str, Any]) -> Job:
        overrides = [*self.overrides, *_overrides(parameters)]
        config = composer.compose_config(overrides)
        config.output_dir = str(self.folder / _name(number))
        return Job(_name(number), of_each_job(overrides), config)

    def _with(self, state: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(state,))


def _overrides(parameters: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in parameters.items()]


def _name(number: int) -> str:
    return f"trial{number:04d}"


def _example(values: Any) -> Any:
    return values.choices[0] if hasattr(values, "choices") else values.low
