"""torch.compile in a training run: its settings, warnings about uncompiled code, and early compilation.

torch.compile works when a block is first called, and blocks of a kind share one compilation. So a block of each kind,
and the loss, are called once on made-up tokens of the run's shapes, on a thread, while kernels are tested and weights
are drawn: the first step finds them compiled. The thread returns nothing, and the first step compiles what it could
not.
"""

import contextlib
import contextvars
import copy
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.selftest import find_backend
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.execution import graphs

log = logging.getLogger(__name__)

#: Versions of one function that are compiled before torch.compile gives up on it: kinds of blocks x shapes x (training,
#: evaluation). PyTorch's own limit, 8, is reached by two kinds of blocks and three lengths.
_MAX_VERSIONS = 64
#: Most processes that compile kernels for one rank, TorchInductor's own limit.
_MAX_WORKERS = 32


class Compilation:
    """torch.compile in one run. Logs on rank 0.

    Where something may be compiled, making one prepares it: limits, and on threads, since it takes seconds, the
    compiler and its processes. So make it early.

    Args:
        config: of the run. device: of this rank; its type alone counts.
    """

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self._talks = rank == 0
        self._warned_of: set[str] = set()
        self._starting: list[threading.Thread] = []
        on_cuda = device.type == "cuda"
        if config.train.compile is True or (config.train.compile == "auto" and on_cuda):
            _configure(world_size)
            if on_cuda:
                self._starting = [_start_thread(_start_compiler), _start_thread(_hash_triton)]

    def compile(self, model: Any) -> None:
        """Compile blocks and loss of the model, as the strategy left it, at their first call; None: nothing."""
        for thread in self._starting:
            # Data workers are forked soon: not while another thread holds locks.
            thread.join()
        if model is not None:
            model.run_compiled()

    def announce(self) -> None:
        """Logs that the first step compiles."""
        if self._talks:
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            log.info("compiling; the next start finds the code in %s", cache_dir())

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
                        # Its first lines name the part that cannot be compiled, and the reason.
                        what = " ".join(line.strip() for line in reason.strip().splitlines()[:2])
                        log.warning("a part of the model runs uncompiled, which is slower: %s", what)


def _start_thread(action: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Starts a thread, which takes PyTorch's settings over: they belong to a thread."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(action, *arguments), daemon=True)
    thread.start()
    return thread


def _configure(world_size: int) -> None:
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_VERSIONS
    # Else the next start traces forward and backward of each block again: `split_columns` is such a function.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # Else it times tilings of sums and padded products, and what wins decides about the last bits. Caches would hide it
    # until a resume finds them empty.
    torch._inductor.config.deterministic = True
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


def _hash_triton() -> None:
    """Computes what each key of Triton's cache holds of Triton itself, once: threads that need it all would."""
    with contextlib.suppress(Exception):
        importlib.import_module("triton.runtime.cache").triton_key()


@contextlib.contextmanager
def compiling(config: Config, fabric: Fabric, model: Any, packed: bool) -> Iterator[None]:
    """Compile on a thread while the body tests kernels, and wait for the thread at its end.

    Args:
        model: without memory for its weights, set up as the run's.
        packed: the run keeps documents apart, as many as there happen to be in a batch: compiled when they are there.
    """
    if packed or not _serves(config, fabric, model):
        yield
        return
    before = backends.faults()
    rows, length = config.sequences_at_once(fabric.world_size), config.datamodule.train_batch_len
    thread = _start_thread(_attempt, fabric, copy.deepcopy(model), rows, length)
    try:
        yield
    finally:
        thread.join()
    if backends.faults() != before:  # which the compiled code may call
        torch._dynamo.reset()


def _serves(config: Config, fabric: Fabric, model: Any) -> bool:
    """Whether the first step calls the blocks as this does: compiled, by one process, and not as CUDA graphs, which
    belong to the thread that records them. FLA's kernels are for one thread at a time, and are being tested."""
    if fabric.device.type != "cuda" or config.train.compile is False or fabric.world_size > 1:
        return False
    if not hasattr(model, "decoder"):
        return False
    flops_per_token = model.config.flops_per_token(config.datamodule.train_batch_len)
    flops = graphs.flops_in_a_block(config, 1, flops_per_token, model.config.num_hidden_layers)
    if graphs.choose(config, fabric.device, 1, True, flops):
        return False
    # Last, because it may import FLA and test it.
    return all(find_backend(use, torch.bfloat16, fabric.device) != backends.FLA for use in model.op_uses())


def _attempt(fabric: Fabric, model: Any, rows: int, length: int) -> None:
    try:
        if fabric.device.type == "cuda":
            torch.cuda.set_device(fabric.device)  # a thread begins with the first
        # Autograd has one thread for all backward passes of a GPU, and those that test kernels are not to wait there.
        with fabric.autocast(), torch.autograd.set_multithreading_enabled(False):
            compile_blocks(model, fabric.device, rows, length)
    except Exception as error:  # the first step will fail too, and report the error
        log.debug("nothing was compiled early: %s", error)


def compile_blocks(model: Any, device: torch.device, rows: int, length: int) -> None:
    """Call a block of each kind, and the loss, forward and backward, with weights of 0. Leaves the model useless."""
    kinds = {repr(block): block for block in model.decoder.layers}
    model.decoder.layers = nn.ModuleList(kinds.values())
    model.to_empty(device=device)
    model.tie_weights(recompute_mapping=False)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.zero_()
    model.run_compiled()
    tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
    # The gradient of the decoder's own lookup switches a setting of the whole process, under which others trace now.
    embeddings_BTE = F.embedding(tokens, model.get_input_embeddings().weight)
    model(inputs_embeds=embeddings_BTE, labels=tokens).loss.mean().backward()
