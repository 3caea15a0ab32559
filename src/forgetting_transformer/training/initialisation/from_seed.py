"""Initial weights as a function of (seed, name of the parameter).

Models that share a parameter's name and shape start with the same values there: two variants of an architecture differ
in their computation, not in their luck. And tensors can be drawn in pieces by all cores at once.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

# Values drawn from one generator: enough to keep a core busy, few enough to share a matrix among cores. Part of what
# the initial weights are: another number gives other weights.
PIECE = 1 << 18
_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def initialise(model: PreTrainedModel, seed: int) -> None:
    """Draw the initial weights of a model that was built without them, on the CPU.

    What the architecture draws and from which law is its own (`_init_weights`). Each parameter's numbers come from
    generators seeded with (seed, its name, the piece of it), those for anything else from one seeded with it: none
    comes from PyTorch's own, whose state torch.compile keeps and restores on another thread meanwhile.
    """
    # One core is left to the caller, which tests kernels meanwhile.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as cores, _ByName(model, seed, cores):
        model.initialize_weights()


class _ByName(TorchDispatchMode):
    """Context in which a parameter of `model` that is drawn as a whole is drawn in pieces, each from its own generator.

    All other random numbers come from one generator more.
    """

    def __init__(self, model: nn.Module, seed: int, cores: ThreadPoolExecutor) -> None:
        super().__init__()
        self.seed, self.cores = seed, cores
        self.others = torch.Generator().manual_seed(seed)
        self.names = {p.data_ptr(): (name, p.numel()) for name, p in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _DRAWS:
            tensor, *law = args
            name, size = self.names.get(tensor.data_ptr(), ("", 0))
            if tensor.numel() == size and tensor.is_contiguous():
                list(self.cores.map(lambda piece: _draw(func, piece[0], piece[1], law), self._pieces(tensor, name)))
                return tensor
        if torch.Tag.nondeterministic_seeded in func.tags:
            with_generator = {"default": "generator", "low": "low_generator"}.get(func._overloadname, "")
            func = getattr(func.overloadpacket, with_generator, func)  # where it has one more, as torch.rand does
            if any(argument.name == "generator" for argument in func._schema.arguments):
                kwargs = {"generator": self.others} | (kwargs or {})
        return func(*args, **(kwargs or {}))

    def _pieces(self, tensor: Tensor, name: str) -> Iterator[tuple[Tensor, int]]:
        for number, piece in enumerate(tensor.detach().view(-1).split(PIECE)):
            digest = hashlib.blake2b(f"{self.seed}/{name}/{number}".encode(), digest_size=8).digest()
            yield piece, int.from_bytes(digest, "little", signed=True)


def _draw(func: Any, piece: Tensor, seed: int, law: list[float]) -> None:
    func(piece, *law, generator=torch.Generator().manual_seed(seed))
