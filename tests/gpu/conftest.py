import pytest
import torch

from tests.training.conftest import corpus, tiny  # noqa: F401  (fixtures)


def pytest_collection_modifyitems(items):
    """Everything in this folder needs a CUDA device and is skipped without one."""
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poisoned(monkeypatch):
    """Memory on the GPU that is handed out unwritten holds NaN, or a large negative index."""

    def poison(make):
        def make_poisoned(*args, **options):
            x = make(*args, **options)
            return x.fill_(torch.nan if x.is_floating_point() else -(2**30)) if x.is_cuda else x

        return make_poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
