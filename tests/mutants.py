"""Small mistakes in src and which tests notice them: what a smaller suite loses shows in the mistakes it misses.

A mutant is one edit of one file (LIST, at the end). `record` notes which test runs which line of src, with coverage.
`run` makes each mutant in a copy of the tree and runs the tests that reach the edited line, short ones first, until one
fails. A failure counts only if the same test then passes without the edit. `report` is a table.

    python tests/mutants.py check
    python tests/mutants.py record --map MAP.jsonl --layer default --jobs 16 -- PYTEST_ARGUMENTS_OF_THE_LAYER
    python tests/mutants.py run    --map MAP.jsonl --layer default --jobs 16 --results RESULTS.jsonl
    python tests/mutants.py report --results RESULTS.jsonl

A layer is a name and the arguments of pytest that choose its tests, without those of xdist. Record and run `default`
first: a later layer tries what is left, with the tests that have not run. All commands continue where they stopped;
`--seconds` stops them in time. Map and results are of one state of the tree.

Caches need no care: Triton and Inductor look code up by its contents, and Python by the time of the file, which every
edit here changes.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/forgetting_transformer"
SEED = 0
#: Tests of one pytest process of `record`, all of one file.
UNIT = 40
#: Seconds of the first chunk of tests that a mutant is tried with, and of the longest; each has twice the last one's.
FIRST_CHUNK, LAST_CHUNK = 20, 240
#: Seconds without a new test, to the first one and later; a test has twenty times what it took besides.
START_LIMIT, TEST_LIMIT = 300, 60
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
_NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".venv", "output", "outputs", "multirun")
#: Runs at the start of every Python process and fork while `record` runs. The file says which test is running.
_STARTER = """
import os, coverage
coverage.process_startup()
def switch():
    try:
        with open(os.environ["MUTANTS_CURRENT"]) as file:
            label = file.read()
        coverage.Coverage.current().switch_context("@" + label if label else "")
    except (OSError, KeyError, AttributeError):  # in an environment or at a time that knows nothing of tests
        pass
switch()
os.register_at_fork(after_in_child=switch)
"""
#: The static context serves processes that find coverage's own start-up file and not this one.
_COVERAGERC = """[run]
core = ctrace
parallel = true
patch = fork, _exit
context = ${{PYTEST_CURRENT_TEST-}}
data_file = {folder}/.coverage
include = {src}/*
disable_warnings = no-data-collected, couldnt-parse, trace-changed, module-not-python, module-not-imported,
    module-not-measured, already-imported, include-ignored, dynamic-conflict
"""


class Mutant(NamedTuple):
    area: str
    name: str
    file: str
    old: str
    new: str
    why: str


# A plugin of pytest ----------------------------------------------------------------------------------------------


def _note(**entry: Any) -> None:
    _append(Path(os.environ["MUTANTS_LOG"]), entry)


def _switch(label: str) -> str:
    """What runs from now on, in other processes too, is recorded under this label. Returns the one before."""
    if (current := os.environ.get("MUTANTS_CURRENT")) is None:
        return ""
    import coverage

    before = Path(current).read_text(encoding="utf-8")
    Path(f"{current}.new").write_text(label, encoding="utf-8")
    os.replace(f"{current}.new", current)
    coverage.Coverage.current().switch_context(f"@{label}" if label else "")
    return before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    yield
    if wanted := Path(os.environ["MUTANTS_TESTS"]).read_text(encoding="utf-8").splitlines():
        known = {item.nodeid: item for item in items}
        items[:] = [known[name] for name in wanted if name in known]
    _note(collected=[item.nodeid for item in items])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    defs = [known[-1] for known in item._fixtureinfo.name2fixturedefs.values() if known]
    _note(start=item.nodeid, fixtures=[_shared(one) for one in defs if one.scope != "function"])
    before = _switch(item.nodeid)
    try:
        return (yield)
    finally:
        _switch(before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """What a fixture of several tests runs is run for all of them."""
    before = None if fixturedef.scope == "function" else _switch(_shared(fixturedef))
    try:
        return (yield)
    finally:
        if before is not None:
            _switch(before)


def _shared(fixturedef) -> str:
    return f"fixture {fixturedef.baseid}::{fixturedef.argname}"


def pytest_runtest_logreport(report):
    why = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "")).strip().partition("\n")[0][:200]
    _note(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), why=why)


# Runs of pytest --------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """How tests ended: passed, failed (also a crash, or while they were collected), timeout, or stopped in time."""

    outcome: str
    test: str
    why: str
    seconds: float
    entries: list[dict[str, Any]]


class Slot:
    """One of several workers, with a folder of its own and perhaps a copy of the tree."""

    def __init__(self, folder: Path, number: int, jobs: int, deadline: float, arguments: list[str]) -> None:
        self.folder, self.tree, self.deadline, self.arguments = folder / f"{number}", ROOT, deadline, arguments
        # Tests that run beside each other take their ports by the number of their xdist worker.
        self.worker = {"PYTEST_XDIST_WORKER": f"gw{number}", "PYTEST_XDIST_WORKER_COUNT": str(jobs)}
        self.folder.mkdir()

    def copy_tree(self) -> None:
        self.tree = self.folder / "tree"
        shutil.copytree(ROOT, self.tree, symlinks=True, ignore=_NOT_COPIED)
        if (ROOT / ".git").exists():  # some tests ask git for the files
            for command in ("init -q", "add -A", "-c user.name=m -c user.email=m@localhost commit -q -m copy"):
                subprocess.run(["git", *command.split()], cwd=self.tree, check=True, capture_output=True)

    def pytest(self, tests: list[str], limits: Callable[[str], float], *more: str, recorded: bool = False) -> Run:
        """Runs tests in this order, or with none all of the arguments; `limits`: seconds that each may take."""
        temporary, given = self.folder / "temporary", os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(self.tree / "src"), *(path for path in given if path not in ("", str(ROOT / "src")))]
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        (log := temporary / "log").touch()
        (temporary / "tests").write_text("\n".join(tests), encoding="utf-8")
        own = {"MUTANTS_LOG": str(log), "MUTANTS_TESTS": str(temporary / "tests")} | self.worker
        if recorded:
            (temporary / "current").touch()
            (temporary / "sitecustomize.py").write_text(_STARTER)
            (temporary / "coveragerc").write_text(_COVERAGERC.format(folder=temporary, src=ROOT / "src"))
            own["MUTANTS_CURRENT"] = str(temporary / "current")
            own["COVERAGE_PROCESS_START"] = str(temporary / "coveragerc")
            paths.insert(0, str(temporary))
        own["PYTHONPATH"] = os.pathsep.join(paths)
        files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
        chosen = [word for word in self.arguments if not (tests and word.startswith("tests"))] + files
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants", "-p", "no:cacheprovider", "-q"]
        command += [f"--basetemp={temporary / 'run'}", *more, *chosen]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | ENVIRONMENT | own
        began = time.monotonic()
        with (temporary / "output").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.tree, env=clean, stdout=output, stderr=output, start_new_session=True
            )
            try:
                outcome = self._watch(process, log, limits)
                for _ in range(50 if recorded else 0):  # other processes write what they have recorded
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        entries = _entries(log)
        test = next((entry["start"] for entry in reversed(entries) if "start" in entry), "")
        why = "" if outcome != "failed" else "it crashed, or could not be collected"
        failed = [entry for entry in entries if entry.get("outcome") == "failed"]
        if failed and outcome != "stopped":
            outcome, test, why = "failed", failed[0]["test"], failed[0]["why"]
        return Run(outcome, test, why, round(time.monotonic() - began, 1), entries)

    def _watch(self, process: subprocess.Popen, log: Path, limits: Callable[[str], float]) -> str:
        size, since, limit = -1, time.monotonic(), float(START_LIMIT)
        while (code := process.poll()) is None:
            if time.monotonic() > self.deadline:
                return "stopped"
            if (now := log.stat().st_size) != size:
                size, since = now, time.monotonic()
                limit = next((limits(one["start"]) for one in reversed(_entries(log)) if "start" in one), limit)
            if time.monotonic() - since > limit:
                return "timeout"
            time.sleep(0.05)
        return "passed" if code in (0, 5) else "failed"  # 5: there was no test


def _work(options: argparse.Namespace, arguments: list[str], tasks: list[Any], do: Callable, copy: bool) -> None:
    """`do(slot, task)` for all tasks in several threads, each with a slot."""
    deadline = time.monotonic() + options.seconds

    def loop(folder: Path, number: int) -> None:
        slot = Slot(folder, number, options.jobs, deadline, arguments)
        if copy and tasks:
            slot.copy_tree()
        with contextlib.suppress(IndexError):
            while time.monotonic() < deadline:
                do(slot, tasks.pop(0))

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        with ThreadPoolExecutor(options.jobs) as pool:
            ended = [pool.submit(loop, Path(name), number) for number in range(options.jobs)]
        for one in ended:
            one.result()
    print("complete" if time.monotonic() < deadline else "the time is up: start again to continue")


def _entries(file: Path) -> list[dict[str, Any]]:
    """Lines of a file, without one that is being written."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _append(file: Path, entry: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _of_this_tree(file: Path) -> list[dict[str, Any]]:
    """Entries of a map or of results."""
    sources = [path.read_bytes() for part in ("src", "tests") for path in sorted((ROOT / part).rglob("*.py"))]
    digest = hashlib.sha256(b"\0".join(sources)).hexdigest()
    if not (entries := _entries(file)):
        _append(file, {"tree": digest})
    elif entries[0]["tree"] != digest:
        sys.exit(f"{file} is of other files in src or tests: give another one")
    return entries[1:]


# Which tests run which lines -------------------------------------------------------------------------------------


class Map:
    """What `record` has written.

    Attributes:
        layers: name -> arguments of pytest, tests.
        tests: test -> seconds, outcome, fixtures of several tests.
        lines: file -> test or fixture -> lines, as the bits of a number.
    """

    def __init__(self, file: Path) -> None:
        self.layers: dict[str, tuple[list[str], list[str]]] = {}
        self.tests: dict[str, tuple[float, str, list[str]]] = {}
        self.lines: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for entry in _of_this_tree(file):
            if "layer" in entry:
                self.layers[entry["layer"]] = entry["arguments"], entry["tests"]
            else:
                self.tests |= entry["tests"]
                for source, labels in entry["lines"].items():
                    for label, bits in labels.items():
                        self.lines[source][label] |= int(bits, 16)

    def usable(self, layer: str) -> list[str]:
        return [test for test in self.layers[layer][1] if test in self.tests and self.tests[test][1] == "passed"]


def _lines_of(folder: Path) -> dict[str, dict[str, str]]:
    """File -> label -> lines, from the data files that the processes of a run have left."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    query = "select path, context, numbits from line_bits join file on file.id = file_id join context"
    for data in folder.glob(".coverage.*"):
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(data)) as base:  # one was killed
            for path, context, bits in base.execute(f"{query} on context.id = context_id"):
                label = context.rpartition("|@")[2] if "|@" in context else context.removeprefix("@")
                if label:
                    label = re.sub(r" \((setup|call|teardown)\)$", "", label)
                    found[str(Path(path).relative_to(ROOT))][label] |= int.from_bytes(bits, "little")
    return {file: {label: f"{bits:x}" for label, bits in of.items()} for file, of in found.items()}


def record(options: argparse.Namespace) -> None:
    try:
        from coverage import version_info
    except ImportError:
        version_info = (0,)
    if version_info < (7, 10):
        sys.exit("record needs coverage 7.10 or later, which follows forks: pip install 'coverage>=7.10'")
    known = Map(options.map)
    if options.layer not in known.layers:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            collected = Slot(Path(folder), 0, 1, float("inf"), options.arguments).pytest(
                [], lambda test: START_LIMIT, "--collect-only"
            )
        tests = next((entry["collected"] for entry in collected.entries if "collected" in entry), [])
        if collected.outcome != "passed" or not tests:
            sys.exit(f"pytest finds no tests with {' '.join(options.arguments)}: {collected.why}")
        known.layers[options.layer] = options.arguments, tests
        _append(options.map, {"layer": options.layer, "arguments": options.arguments, "tests": tests})
    arguments, tests = known.layers[options.layer]
    if options.arguments not in ([], arguments):
        sys.exit(f"the layer {options.layer} of {options.map} has the arguments {arguments}: give another name")
    files = defaultdict(list)
    for test in tests:
        if test not in known.tests:
            files[test.partition("::")[0]].append(test)
    units = [of[n : n + UNIT] for of in files.values() for n in range(0, len(of), UNIT)]
    lock = threading.Lock()

    def one(slot: Slot, unit: list[str]) -> None:
        run = slot.pytest(unit, lambda test: 600.0, recorded=True)
        if run.outcome == "stopped":
            return
        ended: dict[str, Any] = {test: [0.0, "failed", []] for test in unit}  # also those behind a crash
        for test in unit:
            own = [entry for entry in run.entries if entry.get("test") == test]
            outcomes = {entry["outcome"] for entry in own}
            fixtures = next((entry["fixtures"] for entry in run.entries if entry.get("start") == test), [])
            if own:
                outcome = next(found for found in ("failed", "skipped", "passed") if found in outcomes)
                ended[test] = [round(sum(entry["seconds"] for entry in own), 3), outcome, fixtures]
        with lock:
            _append(options.map, {"tests": ended, "lines": _lines_of(slot.folder / "temporary")})
        print(f"{len(units):4} left  {run.seconds:5.0f} s  {unit[0].partition('::')[0]}  {run.outcome}", flush=True)

    _work(options, arguments, units, one, copy=False)
    known = Map(options.map)
    failed = [test for test in tests if test in known.tests and known.tests[test][1] == "failed"]
    print(f"layer {options.layer}: {len(tests)} tests, {len(known.usable(options.layer))} passed, {len(failed)} failed")
    print("".join(f"failed, so it takes no part: {test}\n" for test in failed), end="")


# Which tests a mutant is tried with ------------------------------------------------------------------------------


def _bits(first: int, last: int | None) -> int:
    return (1 << (last or first) + 1) - (1 << first)


def covering(mutant: Mutant, known: Map) -> list[str]:
    """Tests that reach a mutant, the likeliest and shortest first.

    They run its statement. Of a statement outside of functions, which runs once in a process, and of a Triton kernel,
    whose lines may run untraced, tests that run any function of its module follow; and if there is none for a kernel,
    tests of the modules that import it.
    """
    path = locate(mutant)
    source = path.read_text(encoding="utf-8")
    line = source[: source.index(mutant.old)].count("\n") + 1
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    bodies = 0
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bodies |= _bits(node.body[0].lineno, node.end_lineno)
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    statement = max(around, key=lambda node: node.lineno)
    inner = [node.lineno for node in nodes if node.lineno > line]  # a header ends where its body begins
    last = min([statement.end_lineno or line, *(n - 1 for n in inner)])

    def reaching(files: Iterable[str], bits: int) -> Iterator[str]:
        labels = {label for file in files for label, lines in known.lines[file].items() if lines & bits}
        yield from labels & known.tests.keys()
        yield from (test for test, (_, _, fixtures) in known.tests.items() if labels & {*fixtures})

    own, is_kernel = str(path.relative_to(ROOT)), "triton.jit" in source
    ranks = [{*reaching([own], _bits(statement.lineno, last))}]
    if is_kernel or not bodies >> line & 1:
        ranks.append({*reaching([own], bodies)})
    if is_kernel and not any(ranks):
        module = path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".")
        users = [file for file in known.lines if f"from {module} import" in (ROOT / file).read_text(encoding="utf-8")]
        ranks.append({*reaching(users, -1)})
    return list(dict.fromkeys(test for rank in ranks for test in sorted(rank, key=lambda t: (known.tests[t][0], t))))


def locate(mutant: Mutant) -> Path:
    """The file of a mutant, also if it has moved."""
    files = [path for path in sorted((ROOT / "src").rglob("*.py")) if mutant.old in path.read_text(encoding="utf-8")]
    files = [path for path in files if path == PACKAGE / mutant.file] or files
    count = sum(path.read_text(encoding="utf-8").count(mutant.old) for path in files)
    if count != 1:
        sys.exit(f"{mutant.name}: its old text is there {count} times and not once: {mutant.old}")
    return files[0]


# Mutants one after the other -------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    known, results = Map(options.map), _of_this_tree(options.results)
    if options.layer not in known.layers:
        sys.exit(f"{options.map} has no layer {options.layer}: record it first")
    usable = known.usable(options.layer)
    found = {entry["mutant"] for entry in results if entry["outcome"] != "passed"}
    passed = defaultdict(set)
    for entry in results:
        passed[entry["mutant"]] |= {*entry["tests"]}
    mutants = [mutant for mutant in chosen(options) if mutant.name not in found]
    random.Random(SEED).shuffle(mutants)  # those of a run that stopped are a fair sample
    chunks: list[tuple[int, Mutant, list[str]]] = []
    for mutant in mutants:
        tests = [test for test in covering(mutant, known) if test in {*usable}]
        if options.rest:
            tests += sorted({*usable} - {*tests}, key=lambda test: known.tests[test][0])
        if not tests:
            print(f"{mutant.name}: no test of the layer {options.layer} reaches it", flush=True)
        todo = [test for test in tests if test not in passed[mutant.name]]
        chunks += [(number, mutant, chunk) for number, chunk in enumerate(_chunks(todo, known))]
    chunks.sort(key=lambda chunk: chunk[0])  # first all mutants with a few short tests; sorting keeps their order
    lock = threading.Lock()

    def one(slot: Slot, chunk: tuple[int, Mutant, list[str]]) -> None:
        _, mutant, tests = chunk
        if mutant.name in found or (entry := _try(slot, mutant, tests, known)) is None:
            return
        with lock:
            _append(options.results, {"mutant": mutant.name, "layer": options.layer, **entry})
            if entry["outcome"] != "passed":
                found.add(mutant.name)
        what = "not found" if entry["outcome"] == "passed" else f"{entry['outcome']} {entry['by']}: {entry['why']}"
        print(f"{len(chunks):4} left  {mutant.name}  {entry['seconds']:.0f} s  {what}", flush=True)

    _work(options, known.layers[options.layer][0], chunks, one, copy=True)


def _chunks(tests: list[str], known: Map) -> Iterator[list[str]]:
    most = FIRST_CHUNK
    while tests:
        total, count = 0.0, 0
        while count < len(tests) and (not count or total + known.tests[tests[count]][0] <= most):
            total, count = total + known.tests[tests[count]][0], count + 1
        yield tests[:count]
        tests, most = tests[count:], min(2 * most, LAST_CHUNK)


def _try(slot: Slot, mutant: Mutant, tests: list[str], known: Map) -> dict[str, Any] | None:
    """The entry of a mutant and some tests; None if the time was up."""
    file = slot.tree / locate(mutant).relative_to(ROOT)
    original, broken, spent = file.read_text(encoding="utf-8"), [], 0.0

    def write(text: str) -> None:
        later = file.stat().st_mtime + 2  # so that what Python compiled of another text is not taken for this one's
        file.write_text(text, encoding="utf-8")
        os.utime(file, (later, later))

    remaining = tests
    while remaining:
        write(original.replace(mutant.old, mutant.new))
        tried = slot.pytest(remaining, lambda test: TEST_LIMIT + 20 * known.tests[test][0], "-x")
        write(original)
        spent += tried.seconds
        if tried.outcome == "stopped":
            return None
        if tried.outcome == "passed":
            break
        test = tried.test or remaining[0]  # none where the tests could not be collected
        again = slot.pytest([test], lambda test: TEST_LIMIT + 20 * known.tests[test][0]).outcome
        if again == "stopped":
            return None
        if again == "passed":
            what = {"outcome": tried.outcome, "by": test, "why": tried.why}
            return {**what, "seconds": spent, "tests": [], "broken": broken}
        broken.append(test)
        remaining = remaining[remaining.index(test) + 1 :]
    return {"outcome": "passed", "seconds": spent, "tests": tests, "broken": broken}


def report(options: argparse.Namespace) -> None:
    results = _entries(options.results)[1:]
    layers = list(dict.fromkeys(entry["layer"] for entry in results))
    print(f"| area | mutant | {' | '.join(f'found by {layer}' for layer in layers)} | seconds | mistake |")
    print("|---" * (len(layers) + 4) + "|")
    survivors = []
    for mutant in chosen(options):
        own = [entry for entry in results if entry["mutant"] == mutant.name]
        found = next((entry for entry in own if entry["outcome"] != "passed"), None)
        cells = []
        for layer in layers:
            here = found is not None and found["layer"] == layer
            count = sum(len(entry["tests"]) for entry in own if entry["layer"] == layer)
            cells.append(f"{found['outcome']}: {found['by']}" if here else f"not by {count} tests" if count else "")
        print(
            f"| {mutant.area} | {mutant.name} | {' | '.join(cells)} | {sum(e['seconds'] for e in own):.0f} | ", end=""
        )
        print(f"{mutant.why} |")
        survivors += [] if found else [mutant.name if own else f"{mutant.name} (no test)"]
    for layer in layers:
        names = {entry["mutant"] for entry in results if entry["layer"] == layer and entry["outcome"] != "passed"}
        print(f"found by {layer}: {len(names)}")
    print(f"not found: {len(survivors)}:", *survivors)
    if broken := sorted({test for entry in results for test in entry["broken"]}):
        print("failed without a mutant too, so they found nothing:", *broken, sep="\n  ")


def check(options: argparse.Namespace) -> None:
    """Every old text is there once, every new one compiles and is another program."""
    mutants = chosen(options)
    for mutant in mutants:
        source = locate(mutant).read_text(encoding="utf-8")
        changed = source.replace(mutant.old, mutant.new)
        compile(changed, mutant.file, "exec")
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            sys.exit(f"{mutant.name} changes nothing")
        if locate(mutant) != PACKAGE / mutant.file:
            print(f"{mutant.name} has moved to {locate(mutant).relative_to(PACKAGE)}")
    areas = [mutant.area for mutant in mutants]
    print(*(f"{areas.count(area):4} {area}" for area in dict.fromkeys(areas)), f"{len(areas):4} mutants", sep="\n")


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """LIST: `== area`, and for each mutant four lines: `= name file`, `- old`, `+ new`, `# what is wrong`."""
    mutants, area, lines = [], "", [line for line in LIST.splitlines() if line]
    while lines:
        if lines[0].startswith("== "):
            area = lines.pop(0)[3:]
        (name, file), rest = lines[0][2:].split(), lines[1:4]
        if [line[:2] for line in lines[:4]] != ["= ", "- ", "+ ", "# "]:
            sys.exit(f"LIST: {lines[0]!r} does not begin a mutant of four lines")
        mutants.append(Mutant(area, name, file, *(line[2:] for line in rest)))
        lines = lines[4:]
    if unknown := {*options.only} - {mutant.name for mutant in mutants}:
        sys.exit(f"there is no mutant {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not options.only or mutant.name in options.only]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (check, record, run, report):
        one = commands.add_parser(command.__name__)
        one.set_defaults(command=command)
        if command in (record, run):
            one.add_argument("--map", type=Path, required=True, help="file that `record` writes and `run` reads")
            one.add_argument("--layer", required=True)
            one.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
            one.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
        if command is record:
            one.add_argument("arguments", nargs="*", help="of pytest, after --; not needed to continue")
        else:
            one.add_argument("--only", nargs="+", default=[], metavar="MUTANT")
        if command in (run, report):
            one.add_argument("--results", type=Path, required=True)
        if command is run:
            one.add_argument("--rest", action="store_true", help="last, also tests that do not reach the mutant")
    options = parser.parse_args()
    options.command(options)


LIST = r"""
== Triton kernels

= kernels.visible ops/forgetting_attention/kernels.py
- seen = (key <= query) & (key < num_keys)
+ seen = (key < query) & (key < num_keys)
# A query no longer sees its own key.
= kernels.rescale ops/forgetting_attention/kernels.py
- rescale = tl.math.exp2(maximum - new_maximum)
+ rescale = tl.math.exp2(new_maximum - maximum)
# Earlier tiles are scaled the wrong way when the maximum rises.
= kernels.window_tiles ops/forgetting_attention/kernels.py
- tl.load(end_queries + start_n) // BLOCK_M * BLOCK_M
+ tl.cdiv(tl.load(end_queries + start_n), BLOCK_M) * BLOCK_M
# A tile that a window cuts is computed without a mask.
= kernels.column_sum ops/forgetting_attention/kernels.py
- column_sum += tl.sum(d_score_T, 1)
+ column_sum = tl.sum(d_score_T, 1)
# The gradient of gates keeps only the last tile of queries.
= kernels.diagonal ops/forgetting_attention/kernels.py
- tl.cdiv(tl.maximum(last_key - before, 0), BLOCK_M) * BLOCK_M
+ tl.maximum(last_key - before, 0) // BLOCK_M * BLOCK_M
# The last tile on the diagonal is computed without a mask.
= kernels.group ops/forgetting_attention/kernels.py
- head = key_head * GROUP + member
+ head = member * key_heads + key_head
# Query heads are matched with the wrong key heads.
= kernels.first_token ops/forgetting_attention/kernels.py
- is_real = first_key <= row + num_keys - num_queries
+ is_real = first_key < row + num_keys - num_queries
# The first token of a document counts as padding.
= decay.stretch_end ops/forgetting_attention/decay.py
- counts = (within < STRETCH - 1) & (key + 1 > lowest)
+ counts = (within < STRETCH) & (key + 1 > lowest)
# The gate of the next stretch is counted twice.
= decay.carry ops/forgetting_attention/decay.py
- tl.store(running + stretch + 1, tl.cumsum(total, axis=0) + before, mask=exists)
+ tl.store(running + stretch + 1, tl.cumsum(total, axis=0), mask=exists)
# Sums begin at 0 in every chunk of stretches.
= decay.search_sign ops/forgetting_attention/decay.py
- at_query -= tl.load(suffix + query, mask=exists, other=0.0)
+ at_query += tl.load(suffix + query, mask=exists, other=0.0)
# Pruning measures the decay from the wrong place and leaves out too much.
= decay.later_blocks ops/forgetting_attention/decay.py
- low = tl.minimum(tl.associative_scan(low, 0, _smaller, reverse=True), least_after)
+ low = tl.minimum(low, least_after)
# A block keeps less than a later one of its chunk, so the two passes prune differently.
= decay.exclusive ops/forgetting_attention/decay.py
- gradient = tl.cumsum(terms, axis=0) - terms + before
+ gradient = tl.cumsum(terms, axis=0) + before
# The running sum behind the gradient of gates includes the token itself.
= decay.log_normaliser ops/forgetting_attention/decay.py
- delta -= tl.load(d_log_normaliser_ptr
+ delta += tl.load(d_log_normaliser_ptr
# The gradient through the log-normaliser has the wrong sign.
= decode.last_split ops/forgetting_attention/decode_kernels.py
- (num_tiles * (split + 1)) // num_splits
+ num_tiles * split // num_splits + num_tiles // num_splits
# Tiles of keys between two parts are lost.
= decode.merge ops/forgetting_attention/decode_kernels.py
- total = tl.sum(totals * tl.math.exp2(maxima - maximum), 0)
+ total = tl.sum(totals, 0)
# Parts are added up as if all had the same maximum.
= decode.tile_edge ops/forgetting_attention/decode_kernels.py
- edge = start + tl.arange(0, EDGES) * BLOCK + (BLOCK - 1)
+ edge = start + tl.arange(0, EDGES) * BLOCK
# A tile is pruned by its first key, though its last one may count.
= ssd.documents ops/recurrence/ssd_kernels.py
- weight = tl.where(own == (before if READS else after), weight, 0.0)
+ weight = tl.where(own == after, weight, 0.0)
# A new document reads the state of the one before.
= scan.documents ops/recurrence/scan_kernels.py
- carry = tl.where(span < 0, 0.0, tl.exp2(A2 * tl.maximum(span, 0.0))) * carry + added
+ carry = tl.exp2(A2 * tl.maximum(span, 0.0)) * carry + added
# The state passes the beginning of a document.
= convolution.norm ops/short_convolution_triton.py
- along = tl.sum(d * s, axis=1) * scale * scale
+ along = tl.sum(d * s, axis=1) * scale
# The gradient of the L2 norm lacks a factor.
= shift_norm.walk ops/shift_norm_triton.py
- y_3 = y_before
+ pass
# The backward walk keeps the rows of its first step.

== Config

= config.pieces training/config.py
- if micro_tokens % data.train_batch_len or local_tokens % micro_tokens:
+ if micro_tokens % data.train_batch_len:
# A batch that does not split into equal micro-batches is accepted.
= config.fork_end training/config.py
- config.train.max_tokens <= config.fork_step
+ config.train.max_tokens < config.fork_step
# A fork that trains nothing is accepted.
= config.context_lengths training/config.py
- keys = ("train_batch_len", *(() if config.skip_eval else ("eval_batch_len",)))
+ keys = ("train_batch_len",)
# Evaluation sequences that ranks cannot share are accepted.

== Export

= export.average training/export/contents.py
- parameter.copy_(average[name])
+ parameter.copy_(parameter)
# The last weights are exported instead of their average.
= export.padding training/export/contents.py
- tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
+ tokenizer.padding_side = "left"
# The exported tokenizer pads on its default side when it is loaded.
= export.bos training/export/contents.py
- if bos_token_id is not None and own != [bos_token_id, *bare]:
+ if bos_token_id is not None:
# A tokenizer that puts BOS first puts it twice.

== Evaluation

= loss.shares evaluation/per_token_loss.py
- first = sums.sequences + ranks.data_rank * batch_size
+ first = sums.sequences + ranks.data_rank
# Several processes evaluate the same sequences.
= loss.reset evaluation/per_token_loss.py
- self.flat.zero_()
+ pass
# What was saved is added again at the next save.
= needle.sentence evaluation/niah.py
- place = reach + int(ends[-1]) + 1 if ends.size else place
+ place = reach + int(ends[-1]) if ends.size else place
# The needle goes before the full stop.
= needle.words evaluation/niah.py
- got = _words(prediction)[: 2 * len(wanted)]
+ got = _words(prediction)[: len(wanted)]
# An answer that comes a few words late loses its score.

== Data order

= order.columns data/order.py
- column, row = divmod(batch % self.batches, self.rows)
+ row, column = divmod(batch % self.batches, self.columns)
# Documents are read to their end before the next ones.
= order.ranks data/order.py
- first = row * self.batch_size + rank * share
+ first = row * self.batch_size + rank
# Ranks read overlapping documents.
= order.end data/order.py
- if batch >= self.batches and not self.repeat:
+ if batch > self.batches and not self.repeat:
# The batch after the last one is the first again.
= mixture.wrap data/mixture.py
- count = min(end - done, order.documents - place.first_document)
+ count = end - done
# A corpus of a mixture that begins again in a batch is read past its end.

== Learning-rate schedule

= schedule.warmup training/schedule.py
- return config.init_lr + (peak_lr - config.init_lr) * tokens / warmup
+ return config.init_lr + peak_lr * tokens / warmup
# A warm-up that begins above zero ends above the peak.
= schedule.decay_start training/schedule.py
- decay_start = total - config.decay_tokens
+ decay_start = warmup + config.decay_tokens
# The final decay begins at the wrong end of the run.
= schedule.root training/schedule.py
- lambda p: 1 - math.sqrt(p)
+ lambda p: math.sqrt(1 - p)
# The decay is another curve with the same ends.

== Step guard

= guard.in_a_row training/faults/step_guard.py
- self._in_a_row = (self._in_a_row + 1) * bad
+ self._in_a_row = self._in_a_row + bad
# Bad steps far apart count as in a row.
= guard.window training/faults/step_guard.py
- kept = torch.where(torch.isfinite(norm), norm, self._norms[-1])
+ kept = norm
# One norm that is not finite switches the spike rule off for a while.
= guard.loss training/faults/step_guard.py
- good = torch.isfinite(grad_norm) & torch.isfinite(loss_B).all()
+ good = torch.isfinite(grad_norm)
# A loss that is not finite passes.
= guard.resume training/faults/step_guard.py
- self._skipped = state["guard_skipped"].to(self._device)
+ pass
# A run that continues forgets how many updates it has left out.

== Loss by position

= position.fillers training/loss_by_position.py
- weight_BT *= weight_B[:, None]
+ pass
# Packed sequences that only fill up a batch count.
= position.counts training/loss_by_position.py
- self.sequences_T[part] += weight_B.sum()
+ self.sequences_T[part] += len(weight_B)
# Sequences that only fill up a batch are divided by.
= position.prefixes training/loss_by_position.py
- None if counts_T is None else counts_T[:length]
+ None
# Rare positions weigh as much as frequent ones in means over prefixes.

== Checkpoint write and read

= checkpoint.keep training/checkpoint/__init__.py
- for path in older[self.keep_last :]:
+ for path in older[self.keep_last + 1 :]:
# One more checkpoint is kept than was asked for.
= checkpoint.newer training/checkpoint/__init__.py
- if _NAME.fullmatch(path.name) and step_of(path) <= step and (path / MANIFEST).is_file()
+ if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
# Damaged newer checkpoints count among those to keep, and good ones are deleted.
= checkpoint.permanent training/checkpoint/__init__.py
- "permanent": permanent,
+ "permanent": False,
# Checkpoints that should stay are deleted.
= checkpoint.metrics training/checkpoint/__init__.py
- before_manifest()
+ pass
# A checkpoint is finished before the metrics up to it are on the disk.
= checkpoint.fresh_moments training/checkpoint/__init__.py
- optimizer.state.clear()
+ pass
# A fork with another optimizer begins with a count of one step.

== Continuing

= continuing.defaults training/continuing.py
- values = flatten(dataclasses.asdict(defaults_of(config_class(flat)))) | flat
+ values = flat
# A key that is younger than the run counts as a change.
= continuing.fork_shape training/continuing.py
- shape = ("datamodule.train_batch_len", "datamodule.train_batch_size", "model.")
+ shape = ("datamodule.train_batch_len", "model.")
# A fork with another batch size reads from a wrong place.
= continuing.guard training/resume.py
- parts.guard.load(windows)
+ pass
# The step guard begins with an empty window.

== Parameter groups

= groups.marks training/parameter_groups.py
- if getattr(parameter, "_no_weight_decay", False) or not _decays(module, name, config)
+ if not _decays(module, name, config)
# Parameters that modules exempt are decayed.
= groups.norms training/parameter_groups.py
- if "Norm" in type(module).__name__:
+ if isinstance(module, nn.RMSNorm | nn.LayerNorm):
# Weights of this package's norms are decayed.
= groups.matrices training/parameter_groups.py
- parameter.ndim == 2 and name not in undecayed and any(
+ parameter.ndim == 2 and any(
# Tables such as A_log are handed to an optimizer of matrices.

== Portable attention

= portable.window ops/forgetting_attention/portable.py
- first_query + start - window + 1
+ first_query + start - window + 2
# The first query of a block misses the last key of its window.
= portable.group ops/forgetting_attention/portable.py
- k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
+ k, v = (x.repeat(1, group, 1, 1) for x in (k, v))
# Query heads are matched with the wrong key heads.
= portable.bias ops/forgetting_attention/portable.py
- left = log_fgate_BHn[..., 1 : reference + 1].flip(-1).cumsum(-1).flip(-1)
+ left = log_fgate_BHn[..., :reference].flip(-1).cumsum(-1).flip(-1)
# A key is decayed by its own gate and not by the query's.
= portable.log_normaliser ops/forgetting_attention/portable.py
- (log_normaliser_BHt - to_query_BHt).masked_fill
+ (log_normaliser_BHt + to_query_BHt).masked_fill
# Log-normalisers are measured from the wrong place.

== Pruning

= pruning.mass ops/forgetting_attention/pruning.py
- mass_BHS = torch.logcumsumexp(math.log(STRETCH) - c_BHS, -1) + c_BHS
+ mass_BHS = torch.logcumsumexp(-c_BHS, -1) + c_BHS
# The bound counts one key for each stretch.
= pruning.share ops/forgetting_attention/pruning.py
- .clamp(max=num_queries - 1) + num_keys - num_queries) // STRETCH + 1
+ .clamp(max=num_queries - 1) + num_keys - num_queries) // STRETCH
# The share of what is skipped leaves the diagonal out.

== Mixers

= fox.documents model/forgetting_transformer.py
- begins_BT = None if cu_seqlens is None else positions_in_documents(cu_seqlens, hidden_BTE) == 0
+ begins_BT = None
# Keys and values are shifted from one document into the next.
= fox.output_gate model/forgetting_transformer.py
- out_BTE = ACTIVATIONS[self.ogate_act](gate_BTE) * out_BTE
+ out_BTE = gate_BTE * out_BTE
# The output gate without a norm has no activation.
= mamba2.step_limit model/mamba2.py
- F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.time_step_limit)
+ F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype))
# Bounds of step sizes have no effect.
= mamba2.norm_groups model/mamba2.py
- self.norm = GatedRMSNorm(n_groups, self.inner_size, norm_eps, gate_first=True)
+ self.norm = GatedRMSNorm(1, self.inner_size, norm_eps, gate_first=True)
# Groups are normalised together.
= hgrn2.lower_bound model/hgrn2.py
- torch.logaddexp(lower_bound_E.log(), torch.log1p(-lower_bound_E) + log_fgate_BTE)
+ torch.logaddexp(lower_bound_E.log(), log_fgate_BTE)
# Gates with a lower bound exceed 1.
= hgrn2.layers model/hgrn2.py
- step_LE[1:].cumsum(0)
+ step_LE[:-1].cumsum(0)
# Lower bounds are those of the layer below.
= delta_net.order model/delta_net.py
- q_BTHK, k_BTHK = norm(activation(q_BTHK)), norm(activation(k_BTHK))
+ q_BTHK, k_BTHK = activation(norm(q_BTHK)), activation(norm(k_BTHK))
# Norm and activation are swapped.
= transformer.position model/transformer.py
- position = num_past if position_BT is None else position_BT
+ position = 0 if position_BT is None else position_BT
# Tokens behind a cache are rotated as if they were the first.
= transformer.visible_keys model/transformer.py
- return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
+ return (window * (window - 1) / 2 + (seq_len - window) * window) / seq_len
# FLOPs leave out that a token sees itself.

== Caches

= cache.dropped model/cache.py
- self.num_dropped += surplus
+ self.num_dropped = surplus
# A window's cache forgets how many tokens it has dropped before.
= cache.recurrent model/cache.py
- self.num_tokens += num_new_tokens
+ self.num_tokens = num_new_tokens
# A recurrent cache counts the last tokens only.
= cache.key_norm model/cache.py
- self.max_key_norm = torch.maximum(self.max_key_norm, norm)
+ self.max_key_norm = norm
# The bound of scores forgets earlier keys.

== Corpus

= corpus.lengths data/corpus.py
- shares = (found * count).double() / (found * count).sum()
+ shares = count.double() / count.sum()
# FLOPs are counted with shares of documents instead of shares of tokens.
= corpus.stored_row data/token_array.py
- block = int(np.searchsorted(self._firsts, document, side="right")) - 1
+ block = int(np.searchsorted(self._firsts, document, side="left")) - 1
# The first document behind missing ones is looked for among these.

== Packing

= packing.middle data/prepare/packing.py
- self.order * self.doc_len + self.doc_len // 2, side="right"
+ self.order * self.doc_len, side="right"
# A row belongs to the group of its first token.
= packing.cut data/prepare/packing.py
- held_starts = np.insert(held_starts, place, stop - missing)
+ held_starts = np.insert(held_starts, place, stop - target)
# A cut text holds out what other groups hold out already.

== Statistics

= statistics.clusters analysis/statistics.py
- return float(deviation * math.sqrt(len(labels) / (len(labels) - 1)))
+ return float(deviation)
# The standard error over clusters is too small.
= statistics.freedom analysis/statistics.py
- freedom = max(0, (n_models - 1) * (n_seeds - 1))
+ freedom = max(0, n_models * (n_seeds - 1))
# The baseline counts as a degree of freedom.
= statistics.groups analysis/statistics.py
- quantile(len(np.unique(group_N)) - 1) * error
+ quantile(len(values_N) - 1) * error
# Texts of one group count as independent in the interval.
"""

if __name__ == "__main__":
    main()
