"""Supervision of a run from its launch to its end: every error ends in one line with its fix."""

import contextlib
import platform
import re
import threading
from types import TracebackType

import torch

from forgetting_transformer.files import explain
from forgetting_transformer.ranges import divisors
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.errors import DeviceError, TrainingError
from forgetting_transformer.training.faults.peers import STOPPED, Peers
from forgetting_transformer.training.faults.watchdog import Watchdog
from forgetting_transformer.training.feed import DataWorkerError
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.run_directory import RunDirectory


class Supervisor:
    """A context manager around a run, which hears signals and notes how the run ends.

    Attributes:
        directory: folder of the run. peers: ranks of the job. watchdog: hears signals, notices what hangs.
        trainer: once it is built; until then whatever fails has failed to start.
        outcome: "done", "preempted" or "failed", once status.json says so.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.directory, self.peers = RunDirectory(config.output_dir), Peers()
        self.watchdog = Watchdog(config.strategy.timeout_seconds)
        self.watchdog.on_end = self._ended_by_watchdog
        self.trainer: TrainerInterface | None = None
        self.outcome: str | None = None
        # The loop and the watchdog's thread may end the run at the same moment: the first one decides how.
        self._ending = threading.Lock()

    def __enter__(self) -> "Supervisor":
        self.watchdog.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Returns whether the error only means that a signal has stopped another rank."""
        try:
            return error is not None and self._failed(error)
        finally:
            if self.trainer is not None:
                self.trainer.close()
            self.directory.release()
            self.watchdog.__exit__()

    def running(self) -> None:
        with self._ending:
            if self.outcome is None:
                self._write("running")

    def end(self, outcome: str, reason: str = "") -> None:
        """Records how the run ends, unless it has ended. A failure after training still counts."""
        with self._ending:
            if self.outcome is None or (outcome == "failed" and self.outcome != "failed"):
                self._write(outcome, reason)
                self.outcome = outcome

    def _write(self, name: str, reason: str = "") -> None:
        step = self.directory.newest_step() if self.trainer is None else self.trainer.counters.token_count
        self.directory.write_status(name, step, reason)

    def _ended_by_watchdog(self, outcome: str, reason: str) -> str:
        if self.outcome is None:  # else that is how the run ended, whatever hangs behind it
            outcome, reason = self.peers.ended(outcome, reason)
            self.end(outcome, self._with_checkpoint(reason))
        return self.outcome or outcome

    def _with_checkpoint(self, reason: str) -> str:
        return reason if self.trainer is None else f"{reason}; {self.trainer.last_good_checkpoint}"

    def _failed(self, error: BaseException) -> bool:
        blame = self.peers.explain(error)
        if blame is not None and STOPPED in blame:
            self.end("preempted", self._with_checkpoint(blame))
            return True
        problem = self._problem(error, blame)
        reason = f"{type(problem).__name__}: {problem}"
        self.peers.failed(reason)
        self.end("failed", reason)
        self.watchdog.closing()  # the process's last messages may take as long as a step
        if problem is error:
            return False
        raise problem from error

    def _problem(self, error: BaseException, blame: str | None) -> BaseException:
        """The error with its fix; the error itself where it has one, or where none is known.

        Args:
            blame: what another rank did, where that is behind the error.
        """
        trainer = self.trainer
        kind, fix = TrainingError, ". Start the same command again"
        if blame is not None:
            what = blame
        elif isinstance(error, OSError | DataWorkerError):  # a full disk, for one; saves that may fail end elsewhere
            what = explain(error) if isinstance(error, OSError) else str(error)
            fix = ". Mend this and start the same command again"
        elif isinstance(error, torch.OutOfMemoryError):
            what, fix = _out_of_memory(error, self.config, trainer), ""
        elif (said := device_error(error)) is not None:
            device = "a GPU" if trainer is None else trainer.fabric.device
            kind, what = DeviceError, f"{device} of {platform.node()} failed: {said}"
        else:
            return error
        if trainer is None:
            return kind(f"cannot start: {what}{fix}")
        if blame is None:
            with contextlib.suppress(RuntimeError):  # of a GPU that failed; what was copied can still be written
                trainer.checkpointer.take_result(wait=True)
        return kind(f"{what}; {trainer.last_good_checkpoint}{fix}")


_DEVICE_ERROR = re.compile(r"(?:CUDA error|Triton Error \[CUDA\]): (.+)")
#: Errors of the program, or of too little memory, which would recur.
_OF_THE_PROGRAM = re.compile("device-side assert|invalid|no kernel image|out of (memory|resource)|ALLOC_FAILED")


def device_error(error: BaseException) -> str | None:
    """Words of PyTorch, Triton or cuBLAS about a GPU that failed; None for any other error."""
    said = _DEVICE_ERROR.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if said is None or _OF_THE_PROGRAM.search(said[1]) else said[1]


def _out_of_memory(error: torch.OutOfMemoryError, config: Config, trainer: TrainerInterface | None) -> str:
    """One line: the keys that lower the memory in use, with the values to try."""
    data, train = config.datamodule, config.train
    during = "the start" if trainer is None else "training"
    ways = ["train.cuda_graphs=false"] if trainer is not None and trainer.graphs.on else []
    if trainer is not None and trainer.clock.category == "evaluation":
        during, half = "evaluation", data.eval_local_batch_size // 2
        ways += [f"datamodule.eval_local_batch_size={half}"] if half else []
        ways.append(f"a smaller datamodule.eval_batch_len than {data.eval_batch_len:,}")
    else:
        sequences = config.sequences_at_once(1 if trainer is None else trainer.ranks.data_size)
        if sequences > 1:
            fewer = divisors(sequences)[-2]
            now = sequences * data.train_batch_len
            ways.append(f"train.grad_acc_tokens={fewer * data.train_batch_len} (now {now})")
        if not train.gradient_checkpointing:
            # With `auto` graphs are off where they cannot be.
            ways.append("train.gradient_checkpointing=true" + " train.cuda_graphs=false" * (train.cuda_graphs is True))
        elif sequences == 1 and not train.block_inputs_on_host:
            ways.append("train.block_inputs_on_host=true")
    ways.append("more GPUs" if config.strategy.name == "fsdp" else "strategy=fsdp on several GPUs")
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    needed = f" for {asked[1]} more" if asked else ""
    return f"out of memory in {during}{needed}. Start the same command again with {' or '.join(ways)}"
