"""torch.compile in a training run: warnings about uncompiled code, and early compilation.

torch.compile works when a block is first called, and blocks of a kind share one compilation. So a block of each kind,
and the loss, are called once on made-up tokens of the run's shapes, on a thread, while kernels are tested and weights
are drawn: the first step finds them compiled. The thread returns nothing, and the first step compiles what it could
not.
"""

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.selftest import find_backend
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.execution import graphs, inductor

log = logging.getLogger(__name__)


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
            inductor.configure(world_size)
            if on_cuda:
                self._starting = inductor.start()

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
    thread = inductor.start_thread(_attempt, fabric, copy.deepcopy(model), rows, length)
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
