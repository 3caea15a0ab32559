"""The stages of a study: corpus, train, evaluate, downstream, collect.

A stage does what it can with what is there, says what it skips, and returns whether everything worked. What is there
already is not made again, so that the same command continues a study.
"""

import importlib.util
import json
import os
import queue
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forgetting_transformer import plugins
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.sweep import runner
from forgetting_transformer.sweep.runner import visible_gpus
from forgetting_transformer.train.composer import Composer
from studies import ROOT, SEARCH_PATH, report
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
        self.composer = Composer(ROOT / "configs", [*defaults, *overrides])
        named = plugins.named_in(overrides)
        self.plugins = ["--plugins", *named] if named else []
        self.corpus_folder = self.folder / "data" / "python_code"
        self.gpus = visible_gpus() or [""]

    def corpus(self) -> bool:
        wanted = self.plan.corpus
        paths = sysconfig.get_paths()
        options = ["--glob", wanted.glob, "--tokenizer", f"train:{wanted.vocabulary}", "--dedup"]
        options += ["--doc_len", str(wanted.doc_len), "--heldout_docs", str(wanted.heldout_docs)]
        sources = wanted.sources or [paths["stdlib"], paths["purelib"]]
        return self._python("scripts/prepare_data.py", *sources, *options, "--out", str(self.corpus_folder))

    def train(self) -> bool:
        """
        Raises:
            SweepError, ConfigError: the study cannot begin.
        """
        work = Queue(
            self.plan,
            lambda overrides: self.composer.compose([SEARCH_PATH, *overrides]),
            self.folder,
            self.composer.task_overrides,
        )
        results = work.run(self.composer.machine())
        print(f"\n{runner.summary(results)}\n")
        for model, why in work.failures.items():
            print(f"{model}: its search stopped, and it was not run: {why}", file=sys.stderr)
        if left := unfinished(results):
            print(f"jobs that are not finished: {len(left)}; the same command continues them", file=sys.stderr)
        return not left and not work.failures

    def evaluate(self) -> bool:
        seeds = self.plan.speed_seeds
        positions = self._of_each_run(self._position_loss, self.plan.seeds, self.plan.evaluations_per_gpu)
        return self._of_each_run(self._speed, [seed for seed in self.plan.seeds if seed in seeds], 1) and positions

    def downstream(self) -> bool:
        """The needle and the next line of code, for runs that are finished."""
        if not self.plan.downstream:
            return True
        tasks = ["--data_path", str(self.corpus_folder), "--out", str(self.folder / "tasks")]
        # Every time: it refuses if the questions were to become others than those that models have answered.
        asked = self._python("studies/code_tasks.py", *tasks)
        actions = [self._needle, *([self._write_line, self._choose_line] if asked else [])]
        done = [self._of_each_run(action, self.plan.seeds, self.plan.evaluations_per_gpu) for action in actions]
        return asked and all(done)

    def collect(self) -> bool:
        report.collect(self.folder, self.study, self.folder / "report")
        return True

    # One run of the study, on one GPU.

    def _position_loss(self, run: Path, gpu: str) -> bool:
        results = self.folder / "position_loss" / run.name / "results.json"
        if _is_current(results, run):
            return True
        options = ["--data_path", str(self.corpus_folder), "--save_dir", str(self.folder / "position_loss")]
        options += ["--preset", "extrapolation", "--local_batch_size", str(self.plan.eval_batch)]
        # An evaluation of weights that have been trained further since is of no use.
        again = ["--no-resume"] if results.exists() else []
        return self._evaluation("eval/per_token_loss/run_per_token_loss.py", run, gpu, *options, *again)

    def _speed(self, run: Path, gpu: str) -> bool:
        """Tokens per second with and without pruning, of a model that prunes."""
        config = read_run(run).config
        if config["model"]["config"].get("log_pruning_tolerance") is None:
            return True
        length, batch = (str(config["datamodule"][f"train_batch_{key}"]) for key in ("len", "size"))
        kinds = {
            self.folder / "speed" / f"{run.name}.json": [],
            self.folder / "speed/unpruned" / f"{run.name}.json": [
                "--overrides",
                "model.config.log_pruning_tolerance=null",
            ],
        }
        worked = True
        for file, more in kinds.items():
            if _is_current(file, run) and '"status": "ok"' in file.read_text("utf-8"):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            options = ["--experiments", str(run), "--seq_len", length, "--batch_size", batch, "--checkpointing", "off"]
            options += ["--optimizer_step", "--steps", "5", "--time_limit", "120", "--replace", "--out", str(file)]
            worked &= self._python("benchmarks/training.py", *options, *self.plugins, *more, run=run, gpu=gpu)
        return worked

    def _needle(self, run: Path, gpu: str) -> bool:
        place = self.folder / "downstream" / "needle"
        # Up to nearly twice the training length, which leaves room for the answer: 8,000 tokens for 4,096.
        longest = 2 * read_run(run).config["datamodule"]["train_batch_len"] * 125 // 128
        options = ["--save_dir", str(place), "--min_length", str(longest // 8), "--max_length", str(longest)]
        options += ["--num_lengths", "8", "--num_depths", "6"]
        # Only the words right after the prompt are scored, so that the paper's 1,024 tokens would be a waste.
        options += ["--max_new_tokens", "64", "--local_batch_size", "6"]
        return all(
            _is_asked(place / run.name / mode / "scores.json", run)
            or self._evaluation("eval/niah/run_niah.py", run, gpu, "--mode", mode, *options)
            for mode in ("paper", "paper_easy")
        )

    def _write_line(self, run: Path, gpu: str) -> bool:
        place = self.folder / "downstream" / "next_line"
        options = ["--data_dir", str(self.folder / "tasks"), "--sets", "lcc", "--save_dir", str(place)]
        return _is_asked(place / run.name / "results.json", run) or self._evaluation(
            "eval/longbench/run_longbench.py", run, gpu, *options
        )

    def _choose_line(self, run: Path, gpu: str) -> bool:
        place = self.folder / "downstream" / "lm_eval"
        options = ["--include_path", str(self.folder / "tasks"), "--tasks", "next_line", "--batch_size", "16"]
        if importlib.util.find_spec("lm_eval") is None:
            print("choosing the next line is skipped: lm_eval is an extra, pip install -e '.[eval]'")
            return True
        return _is_asked(place / run.name / "results.json", run) or self._evaluation(
            "eval/lm_eval_harness/run_lm_eval.py", run, gpu, *options, "--save_dir", str(place)
        )

    # Processes.

    def _of_each_run(self, action: Callable[[Path, str], bool], seeds: Sequence[int], per_gpu: int) -> bool:
        """Calls `action` for each run of the models with these seeds, `per_gpu` of them at a time on every GPU."""
        runs = [self.folder / "runs" / f"{model}_seed{seed}" for seed in seeds for model in self.plan.models]
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for gpu in self.gpus * per_gpu:
            free.put(gpu)

        def one(run: Path) -> bool:
            if not (run / "checkpoints").is_dir():
                print(f"skipped: there is no run {run.name} yet", flush=True)
                return True
            gpu = free.get()
            try:
                return action(run, gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self.gpus) * per_gpu) as pool:
            try:
                return all([*pool.map(one, runs)])
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise

    def _evaluation(self, script: str, run: Path, gpu: str, *options: str) -> bool:
        return self._python(script, "--model_path", str(run), *options, *self.plugins, run=run, gpu=gpu)

    def _python(self, script: str, *options: str, run: Path | None = None, gpu: str = "") -> bool:
        """Runs a script of this repository; what it says of a run goes into a log."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        command = [sys.executable, str(ROOT / script), *options]
        if run is None:
            return subprocess.run(command, env=environment, check=False).returncode == 0
        slots = len(self.gpus) * self.plan.evaluations_per_gpu
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // slots))
        file = self.folder / "logs" / f"{Path(script).stem}-{run.name}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as log:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        if code:
            print(f"{Path(script).stem} of {run.name} failed: {file}", file=sys.stderr, flush=True)
        return code == 0


def _is_current(file: Path, run: Path) -> bool:
    """Whether a file is newer than the checkpoints of a run, so that it need not be made again."""
    return file.is_file() and file.stat().st_mtime > (run / "checkpoints").stat().st_mtime


def _is_asked(results: Path, run: Path) -> bool:
    """Whether there is nothing to ask of a run: it is not finished, or has been asked."""
    status = run / "status.json"
    if not status.is_file() or json.loads(status.read_text("utf-8")).get("status") != "done":
        print(f"skipped: {run.name} is asked when it is finished", flush=True)
        return True
    return _is_current(results, run)
