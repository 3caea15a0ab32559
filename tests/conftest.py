import os
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="what is marked rare, and more rounds of what is random")


@pytest.hookimpl(trylast=True)  # after -m has left some out
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        rare = [item for item in items if item.get_closest_marker("rare")]
        items[:] = [item for item in items if item not in set(rare)]
        config.hook.pytest_deselected(items=rare)
    items[:] = _slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Reports that xdist can send: it takes no text that is not UTF-8, such as a path in a message that was logged."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def _slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """In an order that leaves no worker waiting long for another's last test.

    Each worker gets a stretch of the list and begins at its front; one that is done takes from the ends of the others'.
    So every stretch begins with its share of the slow tests, whole files, and ends with short ones.
    """
    slow: dict[Path, list[pytest.Item]] = {}
    short = []
    for item in items:
        if item.get_closest_marker("slow") is None:
            short.append(item)
        else:
            slow.setdefault(item.path, []).append(item)
    ordered = []
    for worker in range(workers):
        mine = [item for file in list(slow)[worker::workers] for item in slow[file]]
        length = (len(items) - len(ordered)) // (workers - worker)
        filling = max(0, length - len(mine))
        ordered += mine + short[:filling]
        short = short[filling:]
    return ordered + short


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder for what all workers of this session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
