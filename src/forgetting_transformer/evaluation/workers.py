"""The processes that share an evaluation: one, or those that `fabric run` or `torchrun` started.

Work is divided by arithmetic on its number, so an interrupted evaluation may continue with another number of processes.
"""

import argparse
import datetime
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from forgetting_transformer import console
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, load_model, pick_device

T = TypeVar("T")


@dataclass(frozen=True)
class Workers:
    """This process among its peers.

    Attributes:
        rank, world_size: of this process.
        device: where its model goes; with several processes on GPUs, one each.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def shows_progress(self) -> bool:
        """Whether to draw bars: for one process, on a terminal."""
        return self.is_first and sys.stderr.isatty()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """The first process's value, on every process."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Result of `work` on the first process, on every process.

        Raises:
            EvaluationError: the first process raised an AnalysisError. Then every process does, so that none waits.
        """
        outcome: tuple[Any, str | None] = (None, None)
        if self.is_first:
            try:
                outcome = (work(), None)
            except AnalysisError as error:
                outcome = (None, str(error))
        result, refusal = self.broadcast(outcome)
        if refusal is not None:
            raise EvaluationError(refusal)
        return result

    def wait(self) -> None:
        """Waits until every process calls this."""
        self.sum(torch.zeros(1, device=self.device))


def start_workers(device: str | None = None, device_id: int | None = None) -> Workers:
    """Connects this process with others of its launch, if there are any.

    Args:
        device: "cpu", "cuda" or one GPU ("cuda:1"); default a GPU if there is one.
        device_id: number of a GPU instead; the CPU on a machine without any, and one line says so.

    Raises:
        EvaluationError: there is no such device, or `fabric run` has taken an option that was meant for the evaluation.
    """
    if "LT_PRECISION" in os.environ:
        raise EvaluationError(
            f"`fabric run` takes --precision={os.environ['LT_PRECISION']} for itself and the evaluation never sees "
            f"it: start with torchrun --nproc-per-node N SCRIPT --precision … instead"
        )
    if device_id is not None:
        device = f"cuda:{device_id}" if torch.cuda.device_count() else "cpu"
        if device == "cpu":
            print(f"--device_id={device_id}: this machine has no GPU; running on the CPU", file=sys.stderr)
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = pick_device("cpu" if os.environ.get("LT_ACCELERATOR") == "cpu" else device)
    if world_size == 1:
        return Workers(0, 1, chosen)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    else:
        # Each launcher tells every process of a node to use all cores.
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores)))
    # Processes finish their share at different times, and the last ones may have hours of generation left.
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=datetime.timedelta(hours=12))
    return Workers(rank, world_size, chosen)


def run(args: argparse.Namespace, evaluate: Callable[[EvaluatedModel, Workers], object]) -> None:
    """Loads the model of a command line (`options.add_model`) and evaluates it; errors end the script in one line.

    Args:
        evaluate: called with the model and this process.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    transformers.utils.logging.disable_progress_bar()
    try:
        workers = start_workers(args.device, args.device_id)
        model = load_model(
            args.model_path,
            name=args.model,
            step=args.step,
            tokenizer=args.tokenizer,
            device=workers.device,
            precision=args.precision,
        )
        evaluate(model, workers)
        if workers.world_size > 1:
            dist.destroy_process_group()
    except (AnalysisError, DataError) as error:
        console.fail(f"error: {error}")
