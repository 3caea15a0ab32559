"""TorchInductor, the compiler behind torch.compile: its settings, and its start on threads.

Keys of its caches include a hash of all files of PyTorch, and of Triton. Hashing takes seconds, for which whatever
compiles would wait. So threads begin as soon as PyTorch is loaded, beside the other imports.
"""

import contextlib
import contextvars
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from forgetting_transformer.training.config import Config

log = logging.getLogger(__name__)

#: Versions of one function that are compiled before torch.compile gives up on it: kinds of blocks x shapes x (training,
#: evaluation). PyTorch's own limit, 8, is reached by two kinds of blocks and three lengths.
_MAX_VERSIONS = 64
#: Most processes that compile kernels for one rank, TorchInductor's own limit.
_MAX_WORKERS = 32
_hashing: list[threading.Thread] = []


def hash_beside_imports(config: Config) -> None:
    """Loads PyTorch, and begins to hash it where the run may compile for a GPU. Call it before other imports."""
    from forgetting_transformer.training.execution.hardware import expected_device

    if config.train.compile is not False and expected_device(config).type == "cuda":
        _start_hashing()


def configure(world_size: int) -> None:
    """The compiler's settings, of this thread and those that it starts.

    Args:
        world_size: processes that train.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_VERSIONS
    # Lets the cache hold graphs with custom autograd functions, such as `split_columns`. Without it every start traces
    # forward and backward of each block again.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # Otherwise it keeps whichever tiling of a sum or padding was fastest, which decides about the last bits. Caches
    # hide that until a run resumes without them.
    torch._inductor.config.deterministic = True
    # It would cut a block into pieces as large as DDP's buckets, for sums over ranks to begin before the block ends.
    torch._dynamo.config.optimize_ddp = False
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # Its default ignores the other ranks of this node.
        ranks = max(1, world_size // int(os.environ.get("LT_NUM_NODES", 1)))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch._inductor.config.compile_threads = max(1, min(_MAX_WORKERS, cores // ranks))


def start() -> list[threading.Thread]:
    """Starts the compiler and its processes, which are there when the threads that it returns have ended."""
    if not _hashing:
        _start_hashing()
    return [*_hashing, start_thread(_start_compiler)]


def start_thread(action: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Starts a thread, which takes PyTorch's settings over: they belong to a thread."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(action, *arguments), daemon=True)
    thread.start()
    return thread


def _start_hashing() -> None:
    with contextlib.suppress(Exception):  # what is missing or broken is reported where it is used
        # Not on the threads: two that import what imports each other may find half of it.
        torch_key = importlib.import_module("torch._inductor.codecache").torch_key
        triton_key = importlib.import_module("triton.runtime.cache").triton_key
        # In this order: `_start_compiler` waits for the first.
        _hashing.extend([start_thread(_fill, torch_key), start_thread(_fill, triton_key, _look_up_files)])


def _fill(*caches: Callable[[], Any]) -> None:
    """Calls functions that keep what they find."""
    with contextlib.suppress(Exception):
        for find in caches:
            find()


def _look_up_files() -> None:
    """Has Python look up the files of all modules, as it does whenever an operator is registered."""
    inspect.getmodule(None, "")


def _start_compiler() -> None:
    try:
        for thread in _hashing[:1]:
            thread.join()  # its processes get PyTorch's hash
        importlib.import_module("torch._inductor.async_compile").maybe_warm_pool()
        importlib.import_module("torch._inductor.compile_fx")
    except Exception as error:  # the first step will fail too, and report the error
        log.debug("the compiler did not start early: %s", error)
