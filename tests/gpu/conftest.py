import pytest
import torch

from tests.ops.kernels import poisoned_memory
from tests.training.conftest import corpus, tiny  # noqa: F401  (fixtures)


def pytest_collection_modifyitems(items):
    """Everything in this folder needs a CUDA device and is skipped without one."""
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poisoned():
    """Memory on the GPU that is handed out unwritten holds NaN, or a large negative index."""
    with poisoned_memory():
        yield
