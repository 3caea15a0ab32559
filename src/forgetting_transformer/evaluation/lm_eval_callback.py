"""The callback `lm_eval`: lm-evaluation-harness on the model that is being trained.

    python train.py … callbacks=[lm_eval] callbacks.lm_eval.tasks=[arc_easy,piqa] callbacks.lm_eval.interval=1000000000

Writes lm_eval.jsonl: `lm_eval/<task>/<metric>` for every metric of every task, `…/<metric>_stderr` where lm_eval knows
the standard error, and `lm_eval/<task>/chance`, the accuracy of a guess, for tasks that offer answers to choose from.
The settings are beside them: `lm_eval/<task>/examples`, their number, and `lm_eval/max_length`. A line with other
settings is a point of another curve.
"""

import contextlib
import functools
import importlib.util
import io
import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.evaluation.in_training import EvaluationCallback, beat, evaluated_model, precision, team
from forgetting_transformer.evaluation.models import EvaluationError
from forgetting_transformer.training.config import ConfigError, Count, Text, Tokens
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


@dataclass
class LmEvalConfig:
    #: lm_eval's names.
    tasks: Annotated[list[str], Field(min_length=1)]
    #: Training tokens between evaluations; the last one follows config.final_eval.
    interval: Tokens
    #: Sequences in one forward pass of one rank.
    batch_size: Count = 8
    #: Examples of each task; null: all.
    limit: Count | None = None
    #: Longest sequence; null: as in training.
    max_length: Count | None = None
    #: Folder of your own task files. Task files can run Python: use no others.
    include_path: Text | None = None
    #: Folder or hub id; null: the corpus's.
    tokenizer: Text | None = None


#: Examples of a task in which offered answers are counted.
_COUNTED = 1000


@plugins.CALLBACKS.register("lm_eval", config=LmEvalConfig, free=[plugins.ALL])
class LmEval(EvaluationCallback):
    kind = names.LM_EVAL

    def prepare(self, trainer: TrainerInterface) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError("callbacks=[lm_eval] needs lm-evaluation-harness: pip install 'lm_eval>=0.4.13,<0.5'")
        from forgetting_transformer.evaluation import harness

        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else a page at every evaluation
        # Its pool for resampling would fork a process with a GPU and threads.
        os.environ["DISABLE_MULTIPROC"] = "1"
        config, model = self.config, evaluated_model(trainer, "lm_eval", self.config.tokenizer)
        log.info("lm_eval: looking for %s and their data", ", ".join(config.tasks))
        workers, length = team(trainer), config.max_length or trainer.config.datamodule.train_batch_len
        manager = harness.task_manager(Path(config.include_path) if config.include_path else None)
        harness.check_names(config.tasks, manager, "callbacks.lm_eval.tasks")
        #: Settings in every line, since a later start may change them.
        self._test: dict[str, Any] = {_name(names.MAX_LENGTH): length}
        for name in config.tasks:
            tasks = harness.load_task(name, manager)
            counts = {key: min(len(task.eval_docs), config.limit or len(task.eval_docs)) for key, task in tasks.items()}
            if min(counts.values()) < workers.world_size:
                raise EvaluationError(
                    f"task {name} has {min(counts.values())} examples for {workers.world_size} ranks; raise "
                    "callbacks.lm_eval.limit or leave the task out"
                )
            counts.setdefault(name, sum(counts.values()))  # of a group
            self._test |= {_name(key, names.EXAMPLES): count for key, count in counts.items()}
            chances = {key: _chance(task) for key, task in tasks.items()}
            self._test |= {_name(key, names.CHANCE): chance for key, chance in chances.items() if chance is not None}
        on_batch = functools.partial(beat, trainer)
        self._adapter = harness.HarnessModel(model, length, config.batch_size, precision(trainer), workers, on_batch)
        self._run = functools.partial(harness.run_tasks, self._adapter, config.tasks, manager, config.limit)

    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()):  # a table
            found = self._run()
        scores = {
            _name(task, metric.removesuffix(",none")): float(value)
            for task, metrics in (found["results"] if found else {}).items()  # which lm_eval gives its first process
            for metric, value in metrics.items()
            if "," in metric and isinstance(value, (int, float))
        }
        return trainer.fabric.broadcast(scores) | self._test


def _name(*parts: str) -> str:
    return names.name_of(names.LM_EVAL, *parts)


def _chance(task: Any) -> float | None:
    """The accuracy of a guess among the answers that a task offers; None where it offers none."""
    if task.OUTPUT_TYPE != "multiple_choice" or not hasattr(task, "doc_to_choice"):
        return None
    offered = [len(task.doc_to_choice(doc)) for doc in itertools.islice(task.eval_docs, _COUNTED)]
    return sum(1 / number for number in offered) / len(offered) if all(offered) and offered else None
