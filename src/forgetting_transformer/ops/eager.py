"""Check whether a call may go straight to its kernels, past PyTorch's dispatcher.

A custom operator is what torch.compile, FLOP counters, selective checkpointing and fake tensors see of a kernel. Its
way through the dispatcher, several layers of Python, takes the host longer than launching the kernel does, and in eager
mode nothing looks at it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

# These have no public name. Without them every call goes through the operators, which is slower and as right.
_num_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_has_transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
_PLAIN = (Tensor, torch.nn.Parameter)


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether only autograd observes operations on these tensors.

    False for tensors of other classes (fake, distributed), while a compiler traces, under `torch.func` transforms, and
    under modes that see every operator or function: FLOP counters, selective checkpointing.
    """
    if torch.compiler.is_compiling() or _num_dispatch_modes is None or _has_transforms is None:
        return False
    if _num_dispatch_modes() or _has_transforms() or torch.jit.is_tracing():
        return False
    for x in tensors:
        if type(x) not in _PLAIN:
            return False
    return not has_torch_function(tensors)
