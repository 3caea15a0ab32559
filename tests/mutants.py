"""Small mistakes in src and which test files notice them: what a smaller suite loses shows in the mistakes it misses.

A mutant is one edit of one file (LIST, at the end). `record` runs each test file by itself under coverage and notes
the lines of src and studies that it executes, also in the processes that it starts. `run` makes each mutant in a copy
of the tree and runs the files that reach the edited line, then those that reach its module, short ones first, until a
test fails. A failure counts only if the same test then passes without the edit. `report` prints a table.

    pip install "coverage>=7.10"
    python tests/mutants.py check
    python tests/mutants.py record --map MAP.jsonl -- PYTEST_OPTIONS
    python tests/mutants.py run --map MAP.jsonl --layer default --results RESULTS.jsonl -- PYTEST_OPTIONS
    python tests/mutants.py report --results RESULTS.jsonl

A layer names the options that its tests are run with: another layer tries what the first has left. `record` and `run`
continue where they stopped, and begin nothing new after `--seconds`.
"""

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: Recorded seconds of the files that a mutant is tried with in one layer.
MOST = 1200
#: Seconds after which a test file counts as hanging.
HANG = 600
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
_NOT_COPIED = shutil.ignore_patterns(
    ".git", "__pycache__", ".*_cache", ".venv", ".whl", ".mutants", "output", "outputs", "multirun"
)
_COMMIT = "git init -q && git add -A && git -c user.name=m -c user.email=m@localhost commit -q -m copy"
_COVERAGE = """
[run]
core = {core}
source = src, studies
parallel = true
data_file = {folder}/data
patch = fork, _exit
disable_warnings = no-data-collected, couldnt-parse, trace-changed, module-not-python, module-not-imported,
    module-not-measured, already-imported, include-ignored
"""


class Mutant(NamedTuple):
    area: str
    name: str
    file: str
    old: str
    new: str
    why: str

    @property
    def place(self) -> Path:
        """The file of the edit, also if it has moved.

        Raises:
            ValueError: the old text is not there once.
        """
        files = sorted(path for folder in ("src", "studies") for path in (ROOT / folder).rglob("*.py"))
        texts = {path: path.read_text(encoding="utf-8") for path in files}
        texts = {path: text for path, text in texts.items() if self.old in text}
        texts = {path: text for path, text in texts.items() if str(path).endswith(f"/{self.file}")} or texts
        if sum(text.count(self.old) for text in texts.values()) != 1:
            places = ", ".join(str(path.relative_to(ROOT)) for path in texts) or "no file"
            raise ValueError(f"{self.name}: its old text is not there once, but in {places}: {self.old}")
        return next(iter(texts))


def chosen(only: Iterable[str] = ()) -> list[Mutant]:
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
    if unknown := {*only} - {mutant.name for mutant in mutants}:
        sys.exit(f"there is no mutant {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not only or mutant.name in only]


def check(options: argparse.Namespace) -> None:
    """Every old text is there once, every new one compiles and is another program."""
    problems = []
    for mutant in chosen(options.only):
        try:
            source = mutant.place.read_text(encoding="utf-8")
            changed = source.replace(mutant.old, mutant.new)
            compile(changed, mutant.file, "exec")
            if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
                problems.append(f"{mutant.name} changes nothing")
        except (ValueError, SyntaxError) as error:
            problems.append(str(error))
    print(*problems, f"{len(chosen(options.only))} mutants, {len(problems)} problems", sep="\n")
    sys.exit(bool(problems))


# Which test file executes which line.


def record(options: argparse.Namespace) -> None:
    done = {entry["tests"] for entry in _entries(options.map)}
    files = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    files = [file for file in sorted(files) if file not in done and not file.startswith("tests/gpu/")]

    def one(tests: str, tree: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
            core = "sysmon" if sys.version_info >= (3, 12) else "ctrace"
            (Path(folder) / "rc").write_text(_COVERAGE.format(core=core, folder=folder), encoding="utf-8")
            (Path(folder) / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
            start = time.monotonic()
            added = {"COVERAGE_PROCESS_START": f"{folder}/rc"}
            code, failed = _pytest([tests, *options.arguments], tree, options.jobs, added, [folder])
            entry = {"tests": tests, "code": code, "failed": failed, "seconds": round(time.monotonic() - start, 1)}
            _append(options.map, entry | {"lines": _executed(Path(folder), tree)})
        print(f"{tests}: code {code}, {entry['seconds']} s", *failed, flush=True)

    _in_copies(options, [(lambda tree, tests=file: one(tests, tree)) for file in files])


def _executed(folder: Path, tree: Path) -> dict[str, list[int]]:
    """Executed lines by file, from the data of every process."""
    from coverage import CoverageData

    lines: dict[str, set[int]] = {}
    for file in folder.glob("data.*"):
        data = CoverageData(basename=str(file))
        with contextlib.suppress(Exception):  # a process was killed while it wrote
            data.read()
            for name in data.measured_files():
                lines.setdefault(os.path.relpath(name, tree), set()).update(data.lines(name) or [])
    return {name: sorted(found) for name, found in lines.items()}


def covering(mutant: Mutant, entries: list[dict[str, Any]]) -> list[str]:
    """Test files that execute the statement of a mutant, then those that execute a function of its module.

    Files that are named after the module, or lie in the folder of its tests, come first; short ones before long ones.
    Lines of a Triton kernel are not traced: files that reach its module or one that imports it count.
    """
    file, source = mutant.place, mutant.place.read_text(encoding="utf-8")
    line = source[: source.index(mutant.old)].count("\n") + 1
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or line)]
    statement = max(around, key=lambda node: node.lineno)
    # A header ends where its body begins.
    last = min([statement.end_lineno or line, *(node.lineno - 1 for node in statements if node.lineno > line)])
    edited = set(range(statement.lineno, last + 1))
    module = file.relative_to(ROOT).with_suffix("").as_posix().removeprefix("src/").replace("/", ".")
    users = [file, *(f for f in (ROOT / "src").rglob("*.py") if f"from {module} import" in f.read_text("utf-8"))]
    bodies = {str(user.relative_to(ROOT)): _lines_in_functions(user) for user in users}
    own, ranks = str(file.relative_to(ROOT)), {}
    for entry in entries:
        executed = {name: bodies[name].intersection(entry["lines"].get(name, [])) for name in bodies}
        at_line = edited & set(entry["lines"].get(own, []))
        if at_line or any(executed.values()):
            tests = Path(entry["tests"])
            named = tests.stem.removeprefix("test_") in file.stem or file.stem in tests.stem
            elsewhere = tests.parent.name not in file.parts
            ranks[entry["tests"]] = (not at_line, not executed[own], not named, elsewhere, entry["seconds"])
    files, total = [], 0.0
    for tests in sorted(ranks, key=ranks.__getitem__):
        total += ranks[tests][-1]
        if total <= MOST or not files:
            files.append(tests)
    return files


def _lines_in_functions(file: Path) -> set[int]:
    """Lines that are not executed by importing the file."""
    functions = [n for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)]
    return {line for n in functions for line in range(n.body[0].lineno, (n.end_lineno or n.lineno) + 1)}


# Mutants: the first file of each before the second of any.


def run(options: argparse.Namespace) -> None:
    recorded, results = _entries(options.map), _entries(options.results)
    found = {entry["mutant"] for entry in results if entry["by"]}
    done = {(entry["mutant"], entry["tests"]) for entry in results if entry["layer"] == options.layer}
    red = {test for entry in recorded for test in entry["failed"]}
    mutants = chosen(options.only)
    random.Random(0).shuffle(mutants)  # those of a run that stopped are a fair sample
    tasks = [
        (rank, mutant, tests)
        for mutant in mutants
        for rank, tests in enumerate(covering(mutant, recorded))
        if (mutant.name, tests) not in done
    ]

    def one(mutant: Mutant, tests: str, tree: Path) -> None:
        if mutant.name in found:
            return
        start, by = time.monotonic(), None
        edited = tree / mutant.place.relative_to(ROOT)
        original = edited.read_text(encoding="utf-8")
        command = [tests, "-x", *(f"--deselect={test}" for test in red), *options.arguments]
        _write(edited, original.replace(mutant.old, mutant.new))
        try:
            code, failed = _pytest(command, tree, options.jobs)
        finally:
            _write(edited, original)
        if code not in (0, 5):  # 5: every test was deselected
            again = failed[0] if failed else tests
            by = again if _pytest([again, *options.arguments], tree, options.jobs)[0] == 0 else None
        entry = {"mutant": mutant.name, "layer": options.layer, "tests": tests, "by": by}
        _append(options.results, entry | {"seconds": round(time.monotonic() - start)})
        if by:
            found.add(mutant.name)
        print(f"{mutant.name}: {by or f'not by {tests}'}", flush=True)

    tasks.sort(key=lambda task: task[0])
    _in_copies(options, [(lambda tree, m=mutant, t=tests: one(m, t, tree)) for _, mutant, tests in tasks])
    reached = {name for name, _ in done} | {mutant.name for _, mutant, _ in tasks}
    print(f"{len(found)} of {len(mutants)} found; {len(mutants) - len(reached)} reached by no test file")


_lock = threading.Lock()


def _append(file: Path, entry: dict[str, Any]) -> None:
    with _lock, file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def _entries(file: Path) -> list[dict[str, Any]]:
    """Lines of a file, without one that is being written."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _in_copies(options: argparse.Namespace, tasks: list[Callable[[Path], None]]) -> None:
    """Runs each task in one of `jobs` copies of the tree."""
    began = time.monotonic()

    def one(task: Callable[[Path], None]) -> None:
        if time.monotonic() - began < options.seconds:
            tree = trees.get()
            try:
                task(tree)
            finally:
                trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        with ThreadPoolExecutor(options.jobs) as pool:
            for tree in pool.map(_copy, (Path(folder) / f"{number}" / "tree" for number in range(options.jobs))):
                trees.put(tree)
            list(pool.map(one, tasks))


def _copy(tree: Path) -> Path:
    shutil.copytree(ROOT, tree, symlinks=True, ignore=_NOT_COPIED)
    if (ROOT / ".git").exists():  # some tests ask git for the files
        subprocess.run(_COMMIT, shell=True, cwd=tree, check=True, capture_output=True)
    return tree


def _write(file: Path, text: str) -> None:
    """Writes with a new time, so that what Python compiled of another text is not taken for this one's."""
    later = file.stat().st_mtime + 2
    file.write_text(text, encoding="utf-8")
    os.utime(file, (later, later))


def _pytest(
    arguments: list[str], tree: Path, jobs: int, added: dict[str, str] | None = None, paths: Iterable[str] = ()
) -> tuple[int, list[str]]:
    """Exit code of pytest in a tree, -1 if it hangs, and the tests that failed or at which it ended."""
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    # What tests share lies beside their base folder: no run meets what another with the mutant has left there.
    shared = tree.parent / "shared"
    shutil.rmtree(shared, ignore_errors=True)
    shared.mkdir()
    command += [f"--basetemp={shared / 'run'}", *arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    known = [path.replace(str(ROOT), str(tree)) for path in clean.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Tests that run beside each other take their ports by the number of their xdist worker.
    own = {"PYTEST_XDIST_WORKER": f"gw{tree.parent.name}", "PYTEST_XDIST_WORKER_COUNT": str(jobs)}
    own["PYTHONPATH"] = os.pathsep.join([*paths, str(tree / "src"), *known])
    process = subprocess.Popen(
        command, cwd=tree, env=clean | ENVIRONMENT | own | (added or {}), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    output, code = "", -1
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=HANG)
        code = process.returncode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$", output, re.MULTILINE)
    return code, list(dict.fromkeys(failed))


def report(options: argparse.Namespace) -> None:
    results = _entries(options.results)
    layers = list(dict.fromkeys(entry["layer"] for entry in results))
    print(f"| area | mutant | {' | '.join(f'found by {layer}' for layer in layers)} | mistake |")
    print("|---" * (len(layers) + 3) + "|")
    by = {(entry["mutant"], entry["layer"]): entry["by"] for entry in results if entry["by"]}
    tried = [(entry["mutant"], entry["layer"]) for entry in results]
    for mutant in chosen(options.only):
        told = [by.get((mutant.name, layer), f"not by {tried.count((mutant.name, layer))} files") for layer in layers]
        print(f"| {mutant.area} | {mutant.name} | {' | '.join(told)} | {mutant.why} |")
    for layer in layers:
        print(f"found by {layer}: {sum(name == layer for _, name in by)}")
    print("not found:", *(m.name for m in chosen(options.only) if m.name not in {name for name, _ in by}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (check, record, run, report):
        one = commands.add_parser(command.__name__)
        one.set_defaults(command=command)
        if command is not record:
            one.add_argument("--only", nargs="+", default=[], metavar="MUTANT")
        if command in (run, report):
            one.add_argument("--results", type=Path, required=True)
        if command in (record, run):
            one.add_argument("--map", type=Path, required=True, help="JSON lines, one for each test file")
            one.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
            one.add_argument("--seconds", type=float, default=float("inf"), help="after these nothing new is begun")
            one.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
        if command is run:
            one.add_argument("--layer", required=True)
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
= decode.last_split ops/forgetting_attention/decode_triton.py
- (num_tiles * (split + 1)) // num_splits
+ num_tiles * split // num_splits + num_tiles // num_splits
# Tiles of keys between two parts are lost.
= decode.merge ops/forgetting_attention/decode_triton.py
- total = tl.sum(totals * tl.math.exp2(maxima - maximum), 0)
+ total = tl.sum(totals, 0)
# Parts are added up as if all had the same maximum.
= decode.tile_edge ops/forgetting_attention/decode_triton.py
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
= convolution.norm ops/layers/short_convolution_triton.py
- along = tl.sum(d * s, axis=1) * scale * scale
+ along = tl.sum(d * s, axis=1) * scale
# The gradient of the L2 norm lacks a factor.
= shift_norm.walk ops/layers/shift_norm_triton.py
- y_3 = y_before
+ pass
# The backward walk keeps the rows of its first step.

== Config

= config.pieces training/config/checks.py
- if micro_tokens % data.train_batch_len or local_tokens % micro_tokens:
+ if micro_tokens % data.train_batch_len:
# A batch that does not split into equal micro-batches is accepted.
= config.fork_end training/config/checks.py
- config.train.max_tokens <= config.fork_step
+ config.train.max_tokens < config.fork_step
# A fork that trains nothing is accepted.
= config.context_lengths training/config/checks.py
- keys = ("train_batch_len", *(() if config.skip_eval else ("eval_batch_len",)))
+ keys = ("train_batch_len",)
# Evaluation sequences that ranks cannot share are accepted.

== Export

= export.padding training/export/folder.py
- tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
+ tokenizer.padding_side = "left"
# The exported tokenizer pads on its default side when it is loaded.
= export.bos training/export/folder.py
- if bos_token_id is not None and own != [bos_token_id, *bare]:
+ if bos_token_id is not None:
# A tokenizer that puts BOS first puts it twice.

== Evaluation

= loss.shares evaluation/per_token_loss.py
- first = sums.sequences + workers.rank * batch_size
+ first = sums.sequences + workers.rank
# Several processes evaluate the same sequences.
= loss.reset evaluation/per_token_loss.py
- loss_T.zero_()
+ pass
# What was saved is added again at the next save.
= needle.sentence evaluation/needle.py
- place = reach + int(ends[-1]) + 1 if ends.size else place
+ place = reach + int(ends[-1]) if ends.size else place
# The needle goes before the full stop.
= needle.words evaluation/needle.py
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
= mixture.number data/mixture.py
- return corpus, patterns * self.weights[corpus] + number
+ return corpus, patterns * self.weights[corpus]
# A corpus of a mixture gives one sequence in every pattern, as often as its weight.

== Learning-rate schedule

= schedule.warmup training/optimization/schedule.py
- return config.init_lr + (peak_lr - config.init_lr) * tokens / warmup
+ return config.init_lr + peak_lr * tokens / warmup
# A warm-up that begins above zero ends above the peak.
= schedule.decay_start training/optimization/schedule.py
- decay_start = total - config.decay_tokens
+ decay_start = warmup + config.decay_tokens
# The final decay begins at the wrong end of the run.
= schedule.root training/optimization/schedule.py
- lambda p: 1 - math.sqrt(p)
+ lambda p: math.sqrt(1 - p)
# The decay is another curve with the same ends.

== Step guard

= guard.in_a_row training/faults/step_guard.py
- self._in_a_row = (self._in_a_row + 1) * bad
+ self._in_a_row = self._in_a_row + bad
# Bad steps far apart count as in a row.
= guard.loss training/faults/step_guard.py
- good = torch.isfinite(grad_norm) & torch.isfinite(loss_B).all()
+ good = torch.isfinite(grad_norm)
# A loss that is not finite passes.
= guard.resume training/faults/step_guard.py
- self._skipped = state["guard_skipped"].to(self._device)
+ pass
# A run that continues forgets how many updates it has left out.

== Loss by position

= position.fillers training/records/loss_by_position.py
- weight_BT *= weight_B[:, None]
+ pass
# Packed sequences that only fill up a batch count.
= position.counts training/records/loss_by_position.py
- self.sequences_T[part] += weight_B.sum()
+ self.sequences_T[part] += len(weight_B)
# Sequences that only fill up a batch are divided by.
= position.prefixes training/records/loss_by_position.py
- None if counts_T is None else counts_T[:length]
+ None
# Rare positions weigh as much as frequent ones in means over prefixes.

== Checkpoint write and read

= checkpoint.keep training/checkpoint/writing.py
- for path in older[self.keep_last :]:
+ for path in older[self.keep_last + 1 :]:
# One more checkpoint is kept than was asked for.
= checkpoint.newer training/checkpoint/writing.py
- if NAME.fullmatch(path.name) and step_of(path) <= step and (path / MANIFEST).is_file()
+ if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
# Damaged newer checkpoints count among those to keep, and good ones are deleted.
= checkpoint.permanent training/checkpoint/writing.py
- "permanent": permanent,
+ "permanent": False,
# Checkpoints that should stay are deleted.
= checkpoint.metrics training/checkpoint/writing.py
- before_manifest()
+ pass
# A checkpoint is finished before the metrics up to it are on the disk.

== Continuing

= continuing.defaults training/config/continuing.py
- values = {key: item.default for key, item in keys_of(config_class(flat)).items()} | flat
+ values = flat
# A key that is younger than the run counts as a change.
= continuing.fork_shape training/config/continuing.py
- shape = ("datamodule.train_batch_len", "datamodule.train_batch_size", "model.")
+ shape = ("datamodule.train_batch_len", "model.")
# A fork with another batch size reads from a wrong place.
= continuing.guard training/start/resume.py
- guard.load(origin.callback_state)
+ pass
# The step guard begins with an empty window.

== Parameter groups

= groups.marks training/optimization/building.py
- if getattr(parameter, "_no_weight_decay", False) or not _decays(module, name, config)
+ if not _decays(module, name, config)
# Parameters that modules exempt are decayed.
= groups.norms training/optimization/building.py
- if "Norm" in type(module).__name__:
+ if isinstance(module, nn.RMSNorm | nn.LayerNorm):
# Weights of this package's norms are decayed.
= groups.matrices training/optimization/building.py
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

== Pruning

= pruning.mass ops/forgetting_attention/reference.py
- mass_BHS = torch.logcumsumexp(math.log(STRETCH) - c_BHS, -1) + c_BHS
+ mass_BHS = torch.logcumsumexp(-c_BHS, -1) + c_BHS
# The bound counts one key for each stretch.
= pruning.share ops/forgetting_attention/reference.py
- .clamp(max=num_queries - 1) + num_keys - num_queries) // STRETCH + 1
+ .clamp(max=num_queries - 1) + num_keys - num_queries) // STRETCH
# The share of what is skipped leaves the diagonal out.

== Mixers

= fox.documents model/span.py
- return None if self.cu_seqlens is None or self.position_BT is None else self.position_BT == 0
+ return None
# Keys and values are shifted from one document into the next.
= fox.output_gate model/mixers/forgetting_attention.py
- out_BTE = ACTIVATIONS[self.ogate_act](gate_BTE) * out_BTE
+ out_BTE = gate_BTE * out_BTE
# The output gate without a norm has no activation.
= mamba2.step_limit model/mixers/mamba2.py
- F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.time_step_limit)
+ F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype))
# Bounds of step sizes have no effect.
= mamba2.norm_groups model/mixers/mamba2.py
- self.norm = GatedRMSNorm(n_groups, self.inner_size, norm_eps, gate_first=True)
+ self.norm = GatedRMSNorm(1, self.inner_size, norm_eps, gate_first=True)
# Groups are normalised together.
= delta_net.beta model/mixers/delta_net.py
- beta=context.to_heads(self.b_proj(hidden_BTE).float().sigmoid())
+ beta=context.to_heads(self.b_proj(hidden_BTE).float())
# What is replaced of the old value exceeds it.
= attention.oldest model/generation/cached_attention.py
- oldest_B = (slot.end_B - window).clamp(min=0)
+ oldest_B = (slot.end_B - window - 1).clamp(min=0)
# A window shows one key more where the cache is static.
= attention.dropped model/generation/cached_attention.py
- seq_start_B = (seq_start_B - held.first).clamp(min=0)
+ seq_start_B = seq_start_B.clamp(min=0)
# Padding is counted from tokens that a window's cache has dropped.
= attention.position model/span.py
- return 0 if self.cache is None else self.cache.get_seq_length()
+ return 0
# Tokens behind a cache are rotated as if they were the first.
= transformer.visible_keys model/mixers/transformer.py
- return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
+ return (window * (window - 1) / 2 + (seq_len - window) * window) / seq_len
# FLOPs leave out that a token sees itself.

== Caches

= cache.dropped model/generation/cache.py
- self.num_dropped += surplus
+ self.num_dropped = surplus
# A window's cache forgets how many tokens it has dropped before.
= cache.recurrent model/mixers/recurrent.py
- self.num_tokens += num_new_tokens
+ self.num_tokens = num_new_tokens
# A recurrent cache counts the last tokens only.

== Corpus

= packed.lengths data/packed.py
- shares = (found * count).double() / (found * count).sum()
+ shares = count.double() / count.sum()
# FLOPs are counted with shares of documents instead of shares of tokens.
= sparse.stored_row data/sparse.py
- block = int(np.searchsorted(self._firsts, document, side="right")) - 1
+ block = int(np.searchsorted(self._firsts, document, side="left")) - 1
# The first document behind missing ones is looked for among these.

== Packing

= packing.middle data/prepare/layout.py
- self.order * self.doc_len + self.doc_len // 2, side="right"
+ self.order * self.doc_len, side="right"
# A row belongs to the group of its first token.
= packing.cut data/prepare/layout.py
- held_starts = np.insert(held_starts, place, stop - missing)
+ held_starts = np.insert(held_starts, place, stop - target)
# A cut text holds out what other groups hold out already.

== Statistics

= statistics.clusters analysis/statistics.py
- return float(deviation * math.sqrt(len(labels) / (len(labels) - 1)))
+ return float(deviation)
# The standard error over clusters is too small.
= statistics.freedom studies/engine/noise.py
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
