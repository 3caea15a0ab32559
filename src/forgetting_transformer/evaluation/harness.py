"""lm-evaluation-harness: an adapter for the models of this project.

The harness asks for log-likelihoods; the adapter computes them without ever holding the logits of a whole text. Every
sequence begins with the beginning-of-sequence token, as in training. Needs `pip install lm_eval` (the extra `eval`).

Axes: `forgetting_transformer/ops/__init__.py`. t are the last positions.
"""

import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from forgetting_transformer import files
from forgetting_transformer.analysis import evaluations, tables
from forgetting_transformer.analysis.published import lm_eval_table
from forgetting_transformer.data.storage.hub import use_cached_datasets
from forgetting_transformer.evaluation.generation import begin, continue_prompts
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, precision_context, token_losses
from forgetting_transformer.evaluation.workers import Workers

#: Default of tasks in lm_eval's own models.
_MAX_NEW_TOKENS = 256
#: Resamples for the standard error of a metric that has no formula for it, such as a perplexity.
_BOOTSTRAP = 100
#: Files of an evaluation's folder.
_KIND = "lm_eval_harness"


class HarnessModel(TemplateLM):
    """A model as lm_eval sees one.

    Not lm_eval's HFLM, which computes the logits of whole sequences: 79 GB for 16 of 16,384 tokens.

    Args:
        evaluated: the model and its tokenizer.
        max_length: longest sequence; contexts are cut on the left.
        batch_size: sequences per forward pass.
        workers: the processes that share the requests.
        on_batch: called before every forward pass or text, equally often on all of them; may raise to end it all.
    """

    def __init__(
        self,
        evaluated: EvaluatedModel,
        max_length: int,
        batch_size: int,
        precision: str,
        workers: Workers,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.on_batch = on_batch
        self.evaluated, self.max_length, self.precision, self.workers = evaluated, max_length, precision, workers
        self.batch_size = batch_size
        self._rank, self._world_size, self._device = workers.rank, workers.world_size, workers.device
        self.tokenizer = evaluated.require_tokenizer()
        if evaluated.bos_token_id is None and self.tokenizer.eos_token_id is None:
            raise EvaluationError(f"{evaluated.source} has neither a beginning- nor an end-of-text token")

    @property
    def eot_token_id(self) -> int:
        eos, bos = self.tokenizer.eos_token_id, self.evaluated.bos_token_id
        return bos if eos is None and bos is not None else eos

    @property
    def prefix_token_id(self) -> int:
        bos = self.evaluated.bos_token_id
        return bos if bos is not None else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after the beginning-of-sequence token unless `add_special_tokens` is False."""
        ids = self.evaluated.encode(string).tolist()
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        for (_context, text), _ids, continuation in requests:
            if len(continuation) > self.max_length:
                raise EvaluationError(
                    f"a continuation of {len(continuation):,} tokens, {text[:40]!r}…, does not fit --max_len="
                    f"{self.max_length:,}, and would be scored in part; give a longer one"
                )
        inputs = [(context + continuation)[-self.max_length - 1 : -1] for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # Longest first, so that the process runs out of memory at once and not after an hour.
        order = sorted(range(len(requests)), key=lambda n: -len(inputs[n]))
        bar = tqdm(total=len(order), desc="log-likelihoods", disable=disable_tqdm or not self.workers.shows_progress)
        for start in range(0, len(order), self.batch_size):
            self.on_batch()
            chosen = order[start : start + self.batch_size]
            width = len(inputs[chosen[0]])
            # Padding is on the right, where it cannot change what comes before it.
            padded = [[*inputs[n], *[self.prefix_token_id] * (width - len(inputs[n]))] for n in chosen]
            needed = max(width - len(inputs[n]) + len(requests[n][2]) for n in chosen)
            with precision_context(self.precision, self.evaluated.device):
                logits = self.evaluated.model(
                    input_ids=torch.tensor(padded, device=self.device), use_cache=False, logits_to_keep=needed
                ).logits
            log_probs_BtV = logits[:, -needed:].float().log_softmax(-1)
            for n, log_probs_tV in zip(chosen, log_probs_BtV, strict=True):
                continuation, end = requests[n][2], needed - (width - len(inputs[n]))
                log_probs_KV = log_probs_tV[end - len(continuation) : end]
                target_K = torch.tensor(continuation, device=self.device)
                greedy = bool((log_probs_KV.argmax(-1) == target_K).all())
                answers[n] = (float(log_probs_KV.gather(-1, target_K[:, None]).sum()), greedy)
            bar.update(len(chosen))
        bar.close()
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the longest length, as the harness cuts them."""
        answers = []
        for request in tqdm(requests, desc="texts", disable=disable_tqdm or not self.workers.shows_progress):
            self.on_batch()
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            total = 0.0
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                context, predicted = make_disjoint_window(window)
                sequence = torch.tensor([[*context, *predicted]], device=self.device)
                with precision_context(self.precision, self.evaluated.device):
                    losses = token_losses(self.evaluated.model, sequence[:, :-1], sequence[:, 1:])
                total -= losses[0, -len(predicted) :].double().sum().item()
            answers.append(total)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to the first of the stop strings."""
        answers = []
        for request in tqdm(requests, desc="continuations", disable=disable_tqdm or not self.workers.shows_progress):
            self.on_batch()
            context, given = request.args
            options = self._options(given)
            count = options["max_gen_toks"]
            ids = self.tok_encode(context)[-(self.max_length - count) :]
            (text,) = continue_prompts(self.evaluated, np.array([ids]), count, self.precision)
            answers.append(postprocess_generated_text(text, options["until"], None))
        return answers

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """A task's settings of generation; a key that is null counts as left out.

        Raises:
            EvaluationError: greedy decoding within the longest sequence cannot do it.
        """
        options: Any = normalize_gen_kwargs({k: v for k, v in given.items() if v is not None}, _MAX_NEW_TOKENS)
        if not 0 < options["max_gen_toks"] < self.max_length:
            raise EvaluationError(
                f"a task generates max_gen_toks={options['max_gen_toks']:,} tokens, and its prompt needs room too in "
                f"--max_len={self.max_length:,}; give a longer one"
            )
        # Without sampling, temperature and the like have no effect.
        for key, greedy in {"do_sample": False, "num_beams": 1, "max_length": None}.items():
            if options.get(key, greedy) != greedy:
                raise EvaluationError(
                    f"a task asks for {key}={options[key]}, which this adapter does not do; leave the key out of its "
                    "generation_kwargs, or use another task"
                )
        return options

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        parts = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst=dst)
        return parts

    def barrier(self) -> None:
        self.workers.wait()


def evaluate(
    model: EvaluatedModel,
    folder: Path,
    workers: Workers,
    *,
    tasks: Sequence[str],
    max_length: int | None = None,
    batch_size: int = 1,
    precision: str = "auto",
    limit: int | None = None,
    include_path: Path | None = None,
) -> dict[str, Any]:
    """Runs the tasks that `folder/results.json` does not have yet, and writes it after each one.

    Args:
        tasks: lm_eval's names.
        max_length: longest sequence; default that of training.
        limit: examples of each task, for a quick look; None for all.
        include_path: folder of task files of your own. Such files can run Python: use your own only.

    Returns:
        Task -> lm_eval's results for it.

    Raises:
        EvaluationError: a task's data is not there and cannot be downloaded, or the folder holds
            results of other settings.
    """
    length = max_length or model.train_length
    if length is None:
        raise EvaluationError(f"{model.source} does not say at which length it was trained: set --max_len")
    settings = {"max_length": length, "limit": limit}
    settings = begin(model, folder, workers, precision, settings, _KIND)
    file = folder / "results.json"
    results = workers.on_first(lambda: evaluations.read_json(file) if file.is_file() else {})
    manager = task_manager(include_path)
    check_names(tasks, manager, "--tasks")
    adapter = HarnessModel(model, length, batch_size, precision, workers)
    for task in [task for task in tasks if task not in results]:
        if workers.is_first:
            print(f"{task} …", file=sys.stderr)
        load_task(task, manager)
        found = run_tasks(adapter, [task], manager, limit)
        if workers.is_first:
            results[task] = found["results"][task]
            files.write_json(file, results)
    if workers.is_first:
        evaluation = evaluations.from_lm_eval(results, model.name, about=model.about, settings=settings)
        rows, columns = lm_eval_table({model.name: [evaluation]})
        evaluations.write_evaluation(evaluation, folder, table=tables.score_table(rows, columns))
    return results


def run_tasks(adapter: HarnessModel, tasks: Sequence[str], manager: TaskManager, limit: int | None) -> dict[str, Any]:
    """Runs tasks; returns lm_eval's results, None on all processes but the first."""
    return lm_eval.simple_evaluate(
        adapter,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=_BOOTSTRAP,
        log_samples=False,
    )


def check_names(tasks: Sequence[str], manager: TaskManager, option: str) -> None:
    """
    Raises:
        EvaluationError: lm_eval does not know a task that `option` named.
    """
    for task in tasks:
        if task not in manager.all_tasks:
            close = difflib.get_close_matches(task, manager.all_tasks, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise EvaluationError(f"{option}={task}: lm_eval does not know it; {meant}`lm_eval ls tasks` lists all")


@functools.cache
def task_manager(include_path: Path | None) -> TaskManager:
    """lm_eval's registry of tasks, which takes seconds to make.

    Raises:
        EvaluationError: there is no such folder.
    """
    if include_path is not None and not include_path.is_dir():
        raise EvaluationError(f"include_path={include_path}: there is no such folder; give one with task files")
    return TaskManager(include_path=None if include_path is None else str(include_path))


def load_task(task: str, manager: TaskManager) -> dict[str, Any]:
    """Loads a task and its data, so that errors of loading are reported as such; returns lm_eval's objects by name.

    Raises:
        EvaluationError: it cannot be loaded.
    """
    try:
        use_cached_datasets()
        return manager.load([task])["tasks"]
    except (OSError, ValueError, ImportError) as error:  # what datasets raises without network, cache or permission
        reason = str(error).strip().splitlines()[0]
        # `hf download` would not do: without a network, datasets reads what it has itself prepared, and nothing else.
        load = f"from lm_eval.tasks import TaskManager; TaskManager().load(['{task}'])"
        raise EvaluationError(
            f"the data of task {task} cannot be loaded ({reason}). A path in a task file is relative to the "
            f'current folder. For data of the hub run `python -c "{load}"` on a machine with a network, copy its '
            "~/.cache/huggingface/datasets to the same path here (or to another one, and set HF_DATASETS_CACHE to it), "
            "and set HF_HUB_OFFLINE=1"
        ) from error
