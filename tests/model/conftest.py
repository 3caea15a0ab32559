import pytest
import torch
from torch import Tensor


@pytest.fixture
def ids() -> Tensor:
    """Two sequences of twelve tokens."""
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
