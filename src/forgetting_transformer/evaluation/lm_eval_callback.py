"""The callback `lm_eval`: lm-evaluation-harness on the model that is being trained.

    python train.py … callbacks=[lm_eval] callbacks.lm_eval.tasks=[arc_easy,piqa] callbacks.lm_eval.interval=1000000000

Writes lm_eval.jsonl, a line `lm_eval/<task>/<metric>` for every metric of every task. It is reached by its name in
plugins.py, since training imports no evaluation.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetting_transformer import plugins
from forgetting_transformer.ranges import COUNT, TOKENS, within
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError

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


class _BrokenOff(Exception):
    """All ranks stop here."""


@plugins.CALLBACKS.register("lm_eval", config=LmEvalConfig, free=[plugins.ALL])
class LmEval(Callback):
    """With ddp ranks share the requests. With fsdp every rank answers all of them: a shard alone is no model."""

    all_ranks = True
    evaluates = True
    kinds = ("lm_eval",)

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
        from forgetting_transformer.evaluation.models import EvaluationError
        from forgetting_transformer.training.export import tokenizer_of_run

        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else a page at every evaluation
        trainer.fabric.barrier()  # rank 0 has copied the corpus's tokenizer then
        model: Any = trainer.model.module
        fields = model.config.to_dict()
        try:
            state = {"config": trainer.resolved, "model_config": fields}
            self._tokenizer = tokenizer_of_run(trainer.directory, state, self.config.tokenizer)
        except (OSError, ValueError) as error:
            raise ConfigError(f"callbacks.lm_eval.tokenizer={self.config.tokenizer}: {error}") from error
        include_path = self.config.include_path
        self._manager = harness.task_manager(Path(include_path) if include_path else None)
        self._workers = self._share(trainer)
        try:
            harness.check_names(self.config.tasks, self._manager, "callbacks.lm_eval.tasks")
            for name in self.config.tasks:
                for task in harness.load_task(name, self._manager).values():
                    examples = min(len(task.eval_docs), self.config.limit or sys.maxsize)
                    if examples < self._workers.world_size:
                        raise EvaluationError(
                            f"task {name} has {examples} examples for {self._workers.world_size} ranks; raise "
                            "callbacks.lm_eval.limit or leave the task out"
                        )
        except EvaluationError as error:
            raise ConfigError(str(error)) from error

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        import lm_eval

        trainer.model.eval()
        log.info("lm_eval after %s tokens: %s", f"{trainer.counters.token_count:,}", ", ".join(self.config.tasks))
        try:
            with trainer.uncompiled():  # requests have many lengths
                found = lm_eval.simple_evaluate(
                    self._adapter(trainer),
                    tasks=self.config.tasks,
                    task_manager=self._manager,
                    limit=self.config.limit,
                    bootstrap_iters=0,  # no standard errors: resampling forks the process
                    log_samples=False,
                )
        except _BrokenOff:
            log.info("lm_eval after %s tokens was broken off", f"{trainer.counters.token_count:,}")
            return
        # lm_eval gives results to its first process.
        values = trainer.fabric.broadcast(_numbers(found["results"]) if found else None)
        trainer.report("lm_eval", values or {})

    @staticmethod
    def _share(trainer: TrainerInterface) -> Any:
        from lightning.fabric.strategies import ModelParallelStrategy

        from forgetting_transformer.evaluation.workers import Workers

        fabric = trainer.fabric
        if isinstance(fabric.strategy, ModelParallelStrategy):
            return Workers(0, 1, fabric.device)
        return Workers(fabric.global_rank, fabric.world_size, fabric.device)

    def _adapter(self, trainer: TrainerInterface) -> HarnessModel:
        from forgetting_transformer.evaluation.harness import HarnessModel
        from forgetting_transformer.evaluation.models import EvaluatedModel

        def beat() -> None:
            if trainer.beat():
                raise _BrokenOff

        config, tokens = trainer.config, trainer.counters.token_count
        length = config.datamodule.train_batch_len
        source = str(trainer.directory.root)
        evaluated = EvaluatedModel(trainer.model.module, self._tokenizer, config.tag, source, length, tokens)
        precision = "bf16" if config.fabric.precision == "bf16-mixed" else "fp32"
        max_length = self.config.max_length or length
        return HarnessModel(evaluated, max_length, self.config.batch_size, precision, self._workers, beat)


def _numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`lm_eval/<task>/<metric>` -> value."""
    return {
        f"lm_eval/{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if "," in metric and isinstance(value, (int, float))
    }
