import gc
import math
import os
import re
import signal
import subprocess
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

#: Cases of a test that --fast takes, and programs that it has no time for.
CASES, PROGRAMS = 4, re.compile("python|bash|fabric|g?cc|[gc]\\+\\+|clang")


@pytest.fixture(autouse=True)
def kept_signals():
    """Handlers are after each test as they were before: processes that later tests start inherit what is ignored."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="what is not marked slow and starts no process; few cases")
    parser.addoption("--all", action="store_true", help="what is marked rare, and more rounds of what is random")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    if not any("::" in argument for argument in config.args):  # whole files
        _check_rare(items)
    yield  # -m and -k leave some out
    left = items if config.getoption("--all") else [item for item in items if not item.get_closest_marker("rare")]
    left = _fast(left) if config.getoption("--fast") else left
    config.hook.pytest_deselected(items=[*{*items} - {*left}])
    items[:] = _slow_first(left, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish():
    """Imported modules stay in memory. The garbage collector need not search them, and may run less often."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _check_rare(items: list[pytest.Item]) -> None:
    """
    Raises:
        pytest.UsageError: a test is marked rare, and the test that it names is not there, or is always rare itself.
    """
    default = {item.nodeid.partition("[")[0] for item in items if not item.get_closest_marker("rare")}
    files = {item.nodeid.partition("::")[0] for item in items}
    for shown_by in {mark.args[0] for item in items for mark in item.iter_markers("rare")}:
        file, _, name = shown_by.partition("::")
        if file.startswith("no contract: "):
            continue
        path = Path(__file__).parents[1] / file
        if not path.is_file() or f"\ndef {name}(" not in path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"tests are marked rare, and there is no test {shown_by}, which is to show it")
        if file in files and shown_by not in default:
            raise pytest.UsageError(f"tests are marked rare, and so is {shown_by}, which is to show it")


def _fast(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that are not slow; of one with many cases the first and some at equal distances."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None or item.get_closest_marker("quick"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in tests.values() for item in cases[:: math.ceil(len(cases) / CASES)]]


@pytest.fixture(scope="session", autouse=True)
def skipped_where_a_process_starts(request):
    """With --fast a test ends at the start of an interpreter or compiler, which takes ten seconds."""
    start = subprocess.Popen.__init__

    def skip(*_):
        pytest.skip("starts a process, so not with --fast")

    def start_or_skip(self, args, *rest, **options):
        words = [args] if isinstance(args, str | bytes | os.PathLike) else args
        if PROGRAMS.match(Path(os.fsdecode(words[0])).name):
            skip()
        start(self, args, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--fast"):
            patch.setattr(ForkServerProcess, "_Popen", staticmethod(skip))
            patch.setattr(subprocess.Popen, "__init__", start_or_skip)
        yield


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
