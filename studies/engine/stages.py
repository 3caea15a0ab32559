"""The stages of a study: corpus, train, evaluate, downstream, collect.

A stage does what it can with what is there, says what it skips, and returns whether everything worked. What is there
already is not made again, so that the same command continues a study.
"""

import functools
import importlib.util
import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from forgetting_transformer import plugins
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.sweep import runner
from forgetting_transformer.sweep.composer import machine
from forgetting_transformer.sweep.jobs import Command, State
from studies import ROOT, report
from studies.engine.plan import StudyPlan
from studies.engine.queue import Queue, unfinished


class Stages:
    """
    Args:
        study: the YAML of the study.
        plan: what it says, or a part of its models and seeds.
        folder: of the study; everything is written in it, the report into `folder/report`.
        overrides: of train.py for all runs, and of the launcher.

    Raises:
        SweepError: a plug-in that the overrides name cannot be loaded.
    """

    def __init__(self, study: Path, plan: StudyPlan, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.study, self.plan, self.folder = study, plan, folder.absolute()
        defaults = [f"data_dir={self.folder / 'data'}", "fabric.devices=1"]
        defaults.append(f"hydra.launcher.jobs_per_gpu={plan.jobs_per_gpu}")
        given = {override.partition("=")[0] for override in overrides}
        defaults = [default for default in defaults if default.partition("=")[0] not in given]
        self.overrides = [*defaults, *overrides]
        named = plugins.named_in(overrides)
        self.plugins = ["--plugins", *named] if named else []
        self.corpus_folder = self.folder / "data" / "python_code"

    @functools.cached_property
    def queue(self) -> Queue:
        return Queue(self.plan, self.folder, self.overrides)

    def corpus(self) -> bool:
        wanted = self.plan.corpus
        paths = sysconfig.get_paths()
        options = ["--glob", "*.py", "--tokenizer", "train:8192", "--dedup"]
        options += ["--doc_len", str(wanted.doc_len), "--heldout_docs", str(wanted.heldout_docs)]
        sources = paths["stdlib"], paths["purelib"]
        return self._python("scripts/prepare_data.py", *sources, *options, "--out", str(self.corpus_folder))

    def train(self) -> bool:
        """
        Raises:
            SweepError, ConfigError: the study cannot begin.
        """
        results = self.queue.run(machine(self.overrides))
        print(f"\n{runner.summary(results)}\n")
        for model, why in self.queue.failures.items():
            print(f"{model}: its search stopped, and it was not run: {why}", file=sys.stderr)
        if left := unfinished(results):
            print(f"jobs that are not finished: {len(left)}; the same command continues them", file=sys.stderr)
        return not left and not self.queue.failures

    def evaluate(self) -> bool:
        positions = self._run(self._of_each_run(self._position_loss, self.plan.seeds), self.plan.evaluations_per_gpu)
        timed = [seed for seed in self.plan.seeds if seed in self.plan.speed_seeds]
        return self._run(self._of_each_run(self._speed, timed), 1) and positions

    def downstream(self) -> bool:
        """The needle and the next line of code, for runs that are finished."""
        tasks = ["--data_path", str(self.corpus_folder), "--out", str(self.folder / "tasks")]
        # Every time: it refuses if the questions were to become others than those that models have answered.
        asked = self._python("studies/code_tasks.py", *tasks)
        if asked and importlib.util.find_spec("lm_eval") is None:
            print("choosing the next line is skipped: lm_eval is an extra, pip install -e '.[eval]'")
        jobs = self._of_each_run(lambda run: self._downstream(run, asked), self.plan.seeds)
        return self._run(jobs, self.plan.evaluations_per_gpu) and asked

    def collect(self) -> bool:
        report.collect(self.folder, self.study, self.folder / "report")
        return True

    # One run of the study.

    def _position_loss(self, run: Path) -> list[Command]:
        results = self.folder / "position_loss" / run.name / "results.json"
        if _is_current(results, run):
            return []
        options = ["--data_path", str(self.corpus_folder), "--save_dir", str(self.folder / "position_loss")]
        options += ["--local_batch_size", str(self.plan.eval_batch)]
        # An evaluation of weights that have been trained further since is of no use.
        options += ["--no-resume"] if results.exists() else []
        script = "eval/per_token_loss/run_per_token_loss.py"
        return [self._command(f"position_loss-{run.name}", script, results, "--model_path", str(run), *options)]

    def _speed(self, run: Path) -> list[Command]:
        """Tokens per second with and without pruning, of a model that prunes."""
        config = read_run(run).config
        if config["model"]["config"].get("log_pruning_tolerance") is None:
            return []
        length, batch = (str(config["datamodule"][f"train_batch_{key}"]) for key in ("len", "size"))
        unpruned = ["--overrides", "model.config.log_pruning_tolerance=null"]
        jobs = []
        for place, more in (("speed", []), ("speed/unpruned", unpruned)):
            file = self.folder / place / f"{run.name}.json"
            if _is_current(file, run) and '"status": "ok"' in file.read_text("utf-8"):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            options = ["--experiments", str(run), "--seq_len", length, "--batch_size", batch, "--checkpointing", "off"]
            options += ["--optimizer_step", "--steps", "5", "--time_limit", "120", "--replace", "--out", str(file)]
            name = f"{place.replace('/', '-')}-{run.name}"
            jobs.append(self._command(name, "benchmarks/training.py", file, *options, *more))
        return jobs

    def _downstream(self, run: Path, has_tasks: bool) -> list[Command]:
        """The needle, and the questions of code_tasks.py if they are there; nothing of a run that is not finished."""
        status = run / "status.json"
        if not status.is_file() or json.loads(status.read_text("utf-8")).get("status") != "done":
            print(f"skipped: {run.name} is asked when it is finished", flush=True)
            return []
        place, tasks = self.folder / "downstream", str(self.folder / "tasks")
        # Up to nearly twice the training length, which leaves room for the answer: 8,000 tokens for 4,096.
        longest = 2 * read_run(run).config["datamodule"]["train_batch_len"] * 125 // 128
        needle = ["--save_dir", str(place / "needle"), "--min_length", str(longest // 8), "--max_length", str(longest)]
        needle += ["--num_lengths", "8", "--num_depths", "6"]
        # Only the words right after the prompt are scored, so that the paper's 1,024 tokens would be a waste.
        needle += ["--max_new_tokens", "64", "--local_batch_size", "6"]
        asked: dict[str, tuple[str, ...]] = {
            f"needle/{run.name}/{mode}/scores.json": ("eval/niah/run_niah.py", "--mode", mode, *needle)
            for mode in ("paper", "paper_easy")
        }
        if has_tasks and importlib.util.find_spec("lm_eval") is not None:
            choice = ("--tasks", "next_line", "--batch_size", "16", "--save_dir", str(place / "lm_eval"))
            asked[f"lm_eval/{run.name}/results.json"] = (
                "eval/lm_eval_harness/run_lm_eval.py",
                "--include_path",
                tasks,
                *choice,
            )
        return [
            self._command(str(Path(file).parent).replace("/", "-"), script, results, "--model_path", str(run), *options)
            for file, (script, *options) in asked.items()
            if not _is_current(results := place / file, run)
        ]

    # Processes.

    def _of_each_run(self, commands: Callable[[Path], list[Command]], seeds: Sequence[int]) -> list[Command]:
        """Jobs for each run of the models with these seeds that there is."""
        found = []
        for run in (self.folder / "runs" / f"{model}_seed{seed}" for seed in seeds for model in self.plan.models):
            if (run / "checkpoints").is_dir():
                found += commands(run)
            else:
                print(f"skipped: there is no run {run.name} yet", flush=True)
        return found

    def _command(self, name: str, script: str, results: Path, *options: str) -> Command:
        return Command(name, (str(ROOT / script), *options, *self.plugins), results)

    def _run(self, jobs: Sequence[Command], per_gpu: int) -> bool:
        """Runs commands, so many at a time on every GPU; whether all worked."""
        if not jobs:
            return True
        gpus = runner.visible_gpus()
        machine = runner.Machine(gpus, None if gpus else per_gpu, per_gpu)
        results = runner.run_jobs(jobs, machine, self.folder / "logs")
        if any(result.state == State.INTERRUPTED for result in results):
            raise KeyboardInterrupt
        return not unfinished(results)

    def _python(self, script: str, *options: str) -> bool:
        """Runs a script of this repository by itself, and shows what it says."""
        return subprocess.run([sys.executable, str(ROOT / script), *options], check=False).returncode == 0


def _is_current(file: Path, run: Path) -> bool:
    """Whether a file is newer than the checkpoints of a run, so that it need not be made again."""
    return file.is_file() and file.stat().st_mtime > (run / "checkpoints").stat().st_mtime
