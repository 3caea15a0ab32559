import os

import pytest
import torch


def visible_to_this_worker() -> str:
    """All GPUs, for each worker of pytest-xdist from another one on."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    names = gpus.split(",")
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(names)
    return ",".join(names[first:] + names[:first])


# Before anything below asks CUDA for its devices.
if gpus := visible_to_this_worker():
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus

from forgetting_transformer.ops import backends  # noqa: E402
from tests.ops.kernels import poisoned_memory  # noqa: E402
from tests.training.conftest import corpus, tiny  # noqa: E402, F401  (fixtures)


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
