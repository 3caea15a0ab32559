"""torch.compile in a training run: its settings, and warnings about uncompiled code."""

import contextvars
import importlib
import logging
import os
import threading
from typing import Any

import torch

from forgetting_transformer.training.config import Config

log = logging.getLogger(__name__)

#: Versions of one function that are compiled before torch.compile gives up on it: kinds of blocks x shapes x (training,
#: evaluation). PyTorch's own limit, 8, is reached by two kinds of blocks and three lengths.
_MAX_VERSIONS = 64
#: Most processes that compile kernels for one rank, TorchInductor's own limit.
_MAX_WORKERS = 32
#: Seconds of the first step on an H200 with nothing in the caches and nothing compiled early, for this package's
#: architectures at 760M. Blocks of a kind share one compilation, so depth changes little.
_MOST_SECONDS = 25


class Compilation:
    """torch.compile in one run. Logs on rank 0.

    Where something may be compiled, making one prepares it: limits, and on a thread, since it takes seconds,
    the compiler and its processes.

    Args:
        config: of the run. device: of this rank.
    """

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self._talks = rank == 0
        self._warned_of: set[str] = set()
        self._starting: threading.Thread | None = None
        on_cuda = device.type == "cuda"
        if config.train.compile is True or (config.train.compile == "auto" and on_cuda):
            _configure(world_size)
            if on_cuda:
                # PyTorch's settings belong to a thread and what it takes over.
                settings = contextvars.copy_context()
                self._starting = threading.Thread(target=settings.run, args=(_start_compiler,), daemon=True)
                self._starting.start()
        self._on_cuda = on_cuda

    def compile(self, model: Any) -> None:
        """Compile blocks and loss of the model, as the strategy left it, at their first call; None: nothing."""
        if self._starting is not None:
            # Data workers are forked soon: not while another thread holds locks.
            self._starting.join()
        if model is not None:
            model.run_compiled()

    def announce(self) -> None:
        """Logs that the first step compiles."""
        if self._talks:
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            how_long = f"up to {_MOST_SECONDS} s on an H200" if self._on_cuda else "up to some minutes"
            log.info("compiling, %s; the next start finds the code in %s", how_long, cache_dir())

    def warn_of_uncompiled(self) -> None:
        """One WARNING for each reason for which torch.compile left something uncompiled, which it does silently.

        Kernels that are meant to stay outside of graphs are no such reason.
        """
        from torch._dynamo.utils import counters

        for kind in ("graph_break", "unimplemented"):
            for reason in counters[kind]:
                if "torch.compiler.disable" not in reason and reason not in self._warned_of:
                    self._warned_of.add(reason)
                    if self._talks:
                        log.warning("a part of the model runs uncompiled, which is slower: %s", _first_lines(reason))


def _first_lines(reason: str) -> str:
    """The part that torch.compile could not compile, and its explanation."""
    return " ".join(line.strip() for line in reason.strip().splitlines()[:2])


def _configure(world_size: int) -> None:
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_VERSIONS
    # Else the next start traces forward and backward of each block again: `split_columns` is such a function.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # It would cut a block into pieces as large as DDP's buckets, for sums over ranks to begin before the block ends.
    torch._dynamo.config.optimize_ddp = False
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # Its default ignores the other ranks of this node.
        ranks = max(1, world_size // int(os.environ.get("LT_NUM_NODES", 1)))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch._inductor.config.compile_threads = max(1, min(_MAX_WORKERS, cores // ranks))


def _start_compiler() -> None:
    try:
        importlib.import_module("torch._inductor.async_compile").maybe_warm_pool()
        importlib.import_module("torch._inductor.compile_fx")
    except Exception as error:  # the first step will fail too, and report the error
        log.debug("the compiler did not start early: %s", error)
