"""The callback `lm_eval`: lm-evaluation-harness on the model that is being trained.

    python train.py … callbacks=[lm_eval] callbacks.lm_eval.tasks=[arc_easy,piqa] callbacks.lm_eval.interval=1000000000

Writes lm_eval.jsonl: `lm_eval/<task>/<metric>` for every metric of every task, `…/<metric>_stderr` where lm_eval knows
the standard error, and `lm_eval/<task>/chance`, the accuracy of a guess, for tasks that offer answers to choose from.
What was asked stands beside them: `lm_eval/<task>/examples`, how many; `lm_eval/<task>/texts`, a fingerprint of the
first of them; `lm_eval/max_length`. A line with others is a point of another curve.
It is reached by its name in plugins.py, since training imports no evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.ranges import COUNT, TOKENS, within
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.metrics import duration

if TYPE_CHECKING:
    from forgetting_transformer.evaluation.harness import HarnessModel
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


@dataclass
class LmEvalConfig:
    #: lm_eval's names.
    tasks: list[str]
    #: Training tokens between evaluations; the last one follows config.final_eval.
    interval: int = within(TOKENS)
    #: Sequences in one forward pass of one rank.
    batch_size: int = within(COUNT, 8)
    #: Examples of each task; null: all.
    limit: int | None = within(COUNT, None)
    #: Longest sequence; null: as in training.
    max_length: int | None = within(COUNT, None)
    #: Folder of your own task files. Task files can run Python: use no others.
    include_path: str | None = None
    #: Folder or hub id; null: the corpus's.
    tokenizer: str | None = None

    def check(self) -> None:
        if not self.tasks:
            raise ValueError("callbacks.lm_eval.tasks=[] is empty; name a task, as in [arc_easy]")


#: Resamples for the standard error of a metric that has no formula for it, such as a perplexity.
_BOOTSTRAP = 100
#: Examples of a task whose offered answers are counted.
_COUNTED = 1000
#: What a line says of the test of each task.
_SAID = (names.EXAMPLES, names.TEXTS)


@plugins.CALLBACKS.register("lm_eval", config=LmEvalConfig, free=[plugins.ALL])
class LmEval(Callback):
    """With ddp ranks share the requests. With fsdp every rank answers all of them: a shard alone is no model."""

    all_ranks = True
    evaluates = True
    kinds = (names.LM_EVAL,)

    def __init__(self, config: LmEvalConfig) -> None:
        self.config, self.interval = config, config.interval

    def on_start(self, trainer: TrainerInterface) -> None:
        """Looks whether package, tokenizer, tasks and their data are there: not after hours.

        Raises:
            ConfigError: naming what is missing.
        """
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError("callbacks=[lm_eval] needs lm-evaluation-harness: pip install 'lm_eval>=0.4.13,<0.5'")
        from forgetting_transformer.evaluation import harness
        from forgetting_transformer.evaluation.in_training import (
            evaluated_model,
            fingerprint,
            share,
            warn_of_another_test,
        )
        from forgetting_transformer.evaluation.models import EvaluationError

        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else a page at every evaluation
        self._evaluated = evaluated_model(trainer, "lm_eval", self.config.tokenizer)
        log.info("lm_eval: looking for %s and their data", ", ".join(self.config.tasks))
        self._workers = share(trainer)
        #: What every line says of the tasks, since a later start may change them.
        self._test: dict[str, Any] = {names.name_of(names.LM_EVAL, names.MAX_LENGTH): self._max_length(trainer)}
        include_path = self.config.include_path
        try:
            self._manager = harness.task_manager(Path(include_path) if include_path else None)
            harness.check_names(self.config.tasks, self._manager, "callbacks.lm_eval.tasks")
            for name in self.config.tasks:
                parts = harness.load_task(name, self._manager)
                for key, task in parts.items():
                    if (chance := _chance(task)) is not None:
                        self._test[names.name_of(names.LM_EVAL, key, names.CHANCE)] = chance
                    examples = min(len(task.eval_docs), self.config.limit or sys.maxsize)
                    self._test[names.name_of(names.LM_EVAL, key, names.EXAMPLES)] = examples
                    self._test[names.name_of(names.LM_EVAL, key, names.TEXTS)] = _texts(task, examples)
                    if examples < self._workers.world_size:
                        raise EvaluationError(
                            f"task {name} has {examples} examples for {self._workers.world_size} ranks; raise "
                            "callbacks.lm_eval.limit or leave the task out"
                        )
                if name not in parts:  # a group
                    whole = {
                        what: [self._test[names.name_of(names.LM_EVAL, key, what)] for key in parts] for what in _SAID
                    }
                    self._test[names.name_of(names.LM_EVAL, name, names.EXAMPLES)] = sum(whole[names.EXAMPLES])
                    self._test[names.name_of(names.LM_EVAL, name, names.TEXTS)] = fingerprint(*whole[names.TEXTS])
        except EvaluationError as error:
            raise ConfigError(str(error)) from error
        warn_of_another_test(trainer, names.LM_EVAL, self._test)

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        import lm_eval

        from forgetting_transformer.evaluation.in_training import BrokenOff

        trainer.model.eval()
        started, tokens = time.perf_counter(), f"{trainer.counters.token_count:,}"
        log.info("lm_eval after %s tokens: %s", tokens, ", ".join(self.config.tasks))
        try:
            with trainer.uncompiled(), _one_process():  # requests have many lengths
                found = lm_eval.simple_evaluate(
                    self._adapter(trainer),
                    tasks=self.config.tasks,
                    task_manager=self._manager,
                    limit=self.config.limit,
                    bootstrap_iters=_BOOTSTRAP,
                    log_samples=False,
                )
        except BrokenOff:
            log.info("lm_eval after %s tokens was broken off", tokens)
            return
        # lm_eval gives results to its first process.
        values = trainer.fabric.broadcast(_numbers(found["results"]) if found else None) or {}
        trainer.report(names.LM_EVAL, values | self._test)
        log.info("lm_eval after %s tokens took %s", tokens, duration(time.perf_counter() - started))

    def _adapter(self, trainer: TrainerInterface) -> HarnessModel:
        from forgetting_transformer.evaluation.harness import HarnessModel
        from forgetting_transformer.evaluation.in_training import beat, precision

        max_length = self._max_length(trainer)
        batch_size, workers = self.config.batch_size, self._workers
        on_batch = functools.partial(beat, trainer)
        return HarnessModel(self._evaluated, max_length, batch_size, precision(trainer), workers, on_batch)

    def _max_length(self, trainer: TrainerInterface) -> int:
        return self.config.max_length or trainer.config.datamodule.train_batch_len


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """lm_eval resamples in this process: its pool would fork one that holds a GPU and threads. It prints nothing."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def _chance(task: Any) -> float | None:
    """The accuracy of a guess among the answers that a task offers; None where it offers none."""
    if task.OUTPUT_TYPE != "multiple_choice" or not hasattr(task, "doc_to_choice"):
        return None
    offered = [len(task.doc_to_choice(doc)) for doc in itertools.islice(task.eval_docs, _COUNTED)]
    return sum(1 / number for number in offered) / len(offered) if all(offered) and offered else None


def _texts(task: Any, examples: int) -> str:
    """A fingerprint of what the first `examples` of a task ask and expect, or the first _COUNTED of them."""
    from forgetting_transformer.evaluation.in_training import fingerprint

    docs = itertools.islice(task.eval_docs, min(examples, _COUNTED))
    asked = (str(text) for doc in docs for text in (task.doc_to_text(doc), task.doc_to_target(doc)))
    return fingerprint(task.OUTPUT_TYPE, task.config.num_fewshot, *asked)


def _numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`lm_eval/<task>/<metric>` -> value."""
    return {
        names.name_of(names.LM_EVAL, task, metric.removesuffix(",none")): float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if "," in metric and isinstance(value, (int, float))
    }
