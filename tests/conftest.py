import os
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="what is marked long, and more rounds of what is random")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in set(long)]
        config.hook.pytest_deselected(items=long)
    # Last comes what is short, so that no worker waits long for another's last test.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder for what all workers of this session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
