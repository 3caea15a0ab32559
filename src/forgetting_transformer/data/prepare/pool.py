"""Worker processes: started clean, silent on Ctrl-C, gone when the parent is."""

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.errors import CorpusError
from forgetting_transformer.data.worker import leave_with_parent, sharing_memory


class InlineExecutor(Executor):
    """One worker needs no process: `submit` does the work before it returns."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def open_pool(workers: int) -> Executor:
    """An executor for `workers` workers, to be used as a context manager.

    Raises:
        CorpusError: there is too little shared memory for more than one.
    """
    if workers == 1:
        return InlineExecutor()
    # Not fork: the parent has threads by now. The fork server imports this package once for all workers.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["forgetting_transformer.data.prepare.stream"])
    try:
        with sharing_memory(", or use --workers 1"):
            return ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    except DataError as error:
        raise CorpusError(f"{error}.") from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool; no traceback per worker
    leave_with_parent()
