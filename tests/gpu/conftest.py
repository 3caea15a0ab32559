import os

import pytest
import torch

from forgetting_transformer.ops import backends
from tests.ops.kernels import poisoned_memory
from tests.training.conftest import corpus, tiny  # noqa: F401  (fixtures)


def spread_workers() -> None:
    """Let each worker of pytest-xdist begin with another GPU, and its processes too.

    Plug-ins of pytest may have started CUDA, which then knows no change of CUDA_VISIBLE_DEVICES: this process chooses
    by number, and the variable is for those that it starts.
    """
    count = torch.cuda.device_count()
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % max(1, count)
    if first:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        torch.cuda.set_device(first)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:] + names[:first])


spread_workers()


def pytest_collection_modifyitems(items):
    """Everything in this folder needs a CUDA device and is skipped without one."""
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_faults(monkeypatch):
    """No backend is ruled out, here and in the tests that follow."""
    monkeypatch.setattr(backends, "_faults", {})


@pytest.fixture
def poisoned():
    """Memory on the GPU that is handed out unwritten holds NaN, or a large negative index."""
    with poisoned_memory():
        yield
