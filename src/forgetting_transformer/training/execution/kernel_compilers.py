"""Processes that compile the Triton kernels of this package where Triton's cache on disk is empty.

Triton reads kernels in Python, so threads that compile wait for each other, and for torch.compile. Processes do not.
They are forked before anything else runs, need no GPU, and leave what they compile in Triton's cache, where Triton
finds it. After the first failure there, everything is compiled here.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

from forgetting_transformer.data.worker import leave_with_parent

_MAX_PROCESSES = 8
#: Seconds after which processes count as hung. The slowest kernel takes about five.
_PATIENCE = 15


def are_useful() -> bool:
    """Whether Triton's cache is empty: a start that finds kernels there does not pay for processes."""
    folder = os.environ.get("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache"))
    is_empty = not os.path.isdir(folder) or not os.listdir(folder)
    return is_empty and "fork" in multiprocessing.get_all_start_methods()


class KernelCompilers:
    """Make it while no other thread runs that imports or compiles.

    Args:
        processes: how many at most.
    """

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(min(processes, _MAX_PROCESSES), context, initializer=_start)
        self._pool.submit(int)  # all are forked at the first job

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """While the body runs, kernels that Triton is to compile are compiled there first. Ends the processes."""
        package: Any = SimpleNamespace(compile=None)
        with contextlib.suppress(ImportError):  # without Triton nothing is compiled
            package = importlib.import_module("triton.compiler")
        compile_here, is_over = package.compile, False

        def compile_there_first(source: Any, target: Any = None, options: Any = None, **given: Any) -> Any:
            nonlocal is_over
            kernel = source.fn.fn
            if not is_over and kernel.__module__.startswith("forgetting_transformer."):
                try:
                    job = type(source), kernel.__module__, kernel.__name__, source.signature, source.constants
                    self._pool.submit(_compile, *job, source.attrs, target, options).result(_PATIENCE)
                except Exception:  # of any class; a compiler's comes again below
                    is_over = True
            return compile_here(source, target=target, options=options, **given)

        package.compile = compile_there_first  # kernels take it from there at their first launch
        try:
            yield
        finally:
            is_over, package.compile = True, compile_here
            for process in (self._pool._processes or {}).values():
                process.kill()  # they are idle, or hang
            self._pool.shutdown(wait=False, cancel_futures=True)


def _start() -> None:
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # this process's parent ends it
    leave_with_parent()
    importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")


def _compile(kind: Any, module: str, name: str, signature: Any, constants: Any, attrs: Any, target: Any, options: Any):
    source = kind(getattr(importlib.import_module(module), name), signature, constants, attrs)
    importlib.import_module("triton").compile(source, target=target, options=options)
