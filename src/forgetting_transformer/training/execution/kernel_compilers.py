"""Processes that compile this package's Triton kernels side by side.

Threads of one process wait for each other: Triton reads kernels in Python. So before anything is compiled a few
processes are forked, and while kernels are tested, what Triton is asked to compile is first compiled by one of them,
which leaves it in Triton's cache on disk. They use no GPU. Whatever fails there is compiled here, as without them.
"""

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from forgetting_transformer.data.worker import leave_with_parent

_PACKAGE = "forgetting_transformer."
#: Seconds after which a kernel is compiled here after all.
_PATIENCE = 60


class KernelCompilers:
    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), initializer=_start, initargs=()
        )
        self._pool.submit(int)  # all are forked at the first job

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Triton's kernels are compiled there while the body runs."""
        package: Any = importlib.import_module("triton.compiler")
        compile_here, pool, is_over = package.compile, self._pool, False

        def compile_first_there(source: Any, target: Any = None, options: Any = None, **given: Any) -> Any:
            kernel = source.fn.fn
            with contextlib.suppress(Exception):
                if not is_over and kernel.__module__.startswith(_PACKAGE) and not _is_compiled(source, target, options):
                    job = type(source), kernel.__module__, kernel.__qualname__, source.signature, source.constants
                    pool.submit(_compile, *job, source.attrs, target, options).result(_PATIENCE)
            return compile_here(source, target=target, options=options, **given)

        package.compile = compile_first_there
        try:
            yield
        finally:
            is_over, package.compile = True, compile_here
            pool.shutdown(wait=False, cancel_futures=True)


def _is_compiled(source: Any, target: Any, options: Any) -> bool:
    from triton.compiler import compiler
    from triton.runtime.cache import get_cache_manager

    backend = compiler.make_backend(target)
    options = backend.parse_options({**(options or {}), **source.parse_options()})
    key = compiler.get_cache_key(source, backend, options, env_vars=compiler.get_cache_invalidating_env_vars())
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return files.get_group(f"{source.name[:150]}.json") is not None


def _start() -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_with_parent()
    importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    importlib.import_module("forgetting_transformer.ops.forgetting_attention.hopper_backward")


def _compile(kind: Any, module: str, name: str, signature: Any, constants: Any, attrs: Any, target: Any, options: Any):
    import triton

    kernel = getattr(importlib.import_module(module), name)
    triton.compile(kind(kernel, signature, constants, attrs), target=target, options=options)
