"""The loop that every benchmark is: a table of cases, each measured once and saved as a row.

A script parses its options (`parser`, `parse`), lists its cases and says how one is measured; `run` does the rest. A
case is a dictionary that tells its row from the others. A file of results, which --out names, is JSON:

    benchmark     the script's name, such as "attention"
    environment   command, date (UTC), commit, changed (whether code differed from that commit), hardware, versions
    settings      every option that changes what is measured
    rows          one object per case: its values, "status", and what was measured

The same command with the same --out measures the missing rows. A change of the command, the commit, the packages or
the hardware is refused, so that no file mixes them; --replace measures everything again. A `status` is "ok", "out of
memory", "stopped after N s" or "failed: …"; only the last makes the exit code 1.
"""

import argparse
import gc
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgetting_transformer import command_line, console
from forgetting_transformer.command_line import CommandError, installed_versions
from forgetting_transformer.files import flatten, write_atomically
from forgetting_transformer.sweep.composer import compose_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
#: Says which commit a copy of the repository without its .git was made from.
COMMIT_VARIABLE = "BENCHMARK_COMMIT"
#: Options that do not change what is measured: all have a value, but for the flags.
_FLAGS = ("replace", "dry_run")
_UNMEASURED = ("out", "time_limit", "folder", "worker", *_FLAGS)
#: Rows whose status begins with one of these measured nothing, and are tried again.
_UNFINISHED = ("failed", "stopped")

Case = dict[str, Any]
Measure = Callable[[Case], Mapping[str, Any]]


class NotMeasured(Exception):
    """A case has no measurement; the message, its row's status, says why."""


class RecordError(CommandError):
    """The file of --out cannot take the results of this command; the message says why, and what to do."""


# Options of all benchmarks.


def parser(description: str | None, time_limit: float = 900) -> argparse.ArgumentParser:
    made = command_line.make_parser(description)
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    made.add_argument(
        "--time_limit",
        type=command_line.positive,
        default=time_limit,
        help="seconds that a row may take (default %(default)s)",
    )
    made.add_argument(
        "--out", type=command_line.path, help="JSON file to which each row is added; the same command continues it"
    )
    made.add_argument("--replace", action="store_true", help="measure again what --out already has")
    made.add_argument("--dry_run", action="store_true", help="print the cases, and measure none")
    made.add_argument("--worker", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    return made


def parse(
    made: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    on_gpu: Mapping[str, Any] | None = None,
    on_cpu: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """The options; those that were not given are `on_gpu` or `on_cpu`.

    An experiment is a file, perhaps with overrides behind it (`split`), or the output_dir of a run.
    """
    args = made.parse_args(argv)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for key, value in ((on_gpu if args.device == "cuda" else on_cpu) or {}).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    for name in [getattr(args, "experiment", None), *getattr(args, "experiments", [])]:
        if name is not None and not experiment_file(split(name)[0]).is_file() and not is_run(name):
            folder = CONFIGS / "experiment"
            known = sorted(str(f.relative_to(folder).with_suffix("")) for f in folder.glob("**/*.yaml"))
            made.error(f"there is no experiment {name!r}; choose from {', '.join(known)}")
    return args


def experiment_file(name: str) -> Path:
    """`mamba2/760m_16b` is short for `longcrawl64/mamba2/760m_16b`."""
    file = CONFIGS / "experiment" / f"{name}.yaml"
    return file if file.is_file() else CONFIGS / "experiment" / "longcrawl64" / f"{name}.yaml"


def is_run(name: str) -> bool:
    """Whether this is the output_dir of a run with checkpoints."""
    return (Path(name) / "checkpoints").is_dir()


def split(experiment: str) -> tuple[str, list[str]]:
    """Name and overrides of an experiment such as `delta_net/760m_16b model=kda`."""
    name, *overrides = [experiment] if is_run(experiment) else experiment.split()
    return name, overrides


def experiment_overrides(experiment: str) -> list[str]:
    """Arguments of train.py that choose an experiment."""
    name, overrides = split(experiment)
    group, file = str(experiment_file(name).relative_to(CONFIGS).with_suffix("")).rsplit("/", 1)
    return [f"+{group}={file}", *overrides]


def compose(experiment: str, overrides: Sequence[str]) -> Any:
    chosen = experiment_overrides(experiment)
    return compose_config([*chosen, *overrides, "output_dir=unused", "data_dir=unused"])


# The loop.


def run(
    script: str,
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    cases: Sequence[Case],
    measure: Measure,
    ranks: Callable[[Case], int] | None = None,
    packages: Sequence[str] = (),
    gpu_only: bool = False,
) -> int:
    """Measures the cases that --out lacks, prints all rows, and returns the exit code.

    Args:
        script: the benchmark's `__file__`.
        argv: its command line without the script; None: that of this process.
        ranks: processes of a case, which are started for it; None: a case is measured in this one.
        packages: whose versions matter beside those of training.
        gpu_only: what is measured are GPU kernels.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if args.worker:
        return _work(measure, *args.worker)
    if args.dry_run:
        print(*map(describe, cases), sep="\n")
        return 0
    if gpu_only and args.device == "cpu":
        raise CommandError("this benchmark measures GPU kernels, and PyTorch sees no GPU")
    record = Record(Path(script).stem, args, given, packages)
    print(device_name(record.environment), flush=True)
    for case in cases:
        row = record.find(case)
        if row is None and ranks is not None:
            command = [sys.executable, script, *given, "--device", args.device, "--worker", json.dumps(case)]
            row = record.add(case | _in_processes(command, args, ranks(case)))
        elif row is None:
            row = record.add(case | attempt(measure, case))
        print(describe(row), flush=True)
    return 1 if record.failed else 0


def attempt(measure: Measure, case: Case) -> dict[str, Any]:
    """The measurement with the status "ok", or the status that says why there is none."""
    import torch

    try:
        return {"status": "ok", **measure(case)}
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None  # it holds the frames, and these hold the tensors
        return {"status": "out of memory"}
    except NotMeasured as reason:
        return {"status": str(reason)}
    except Exception as error:
        error.__traceback__ = None
        return {"status": f"failed: {type(error).__name__}: {command_line.one_line(error)}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _work(measure: Measure, case: str, file: str) -> int:
    """Measures in another process. The file gets the row of rank 0, or of the first rank that fails."""
    rank = int(os.environ.get("RANK", 0))
    row = attempt(measure, json.loads(case))
    if rank == 0 or row["status"] != "ok":
        own = Path(f"{file}.{rank}")
        own.write_text(json.dumps(row), encoding="utf-8")
        own.replace(file)
    # At once: the others may wait in the middle of a step, and what this process has open may wait for them.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0 if row["status"] == "ok" else 1)


def _in_processes(command: Sequence[str], args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The row that the processes of a case write, or the status that says why there is none."""
    from lightning.fabric.plugins.environments.lightning import find_free_network_port

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        shared = dict(os.environ)
        if ranks > 1:
            shared |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "GROUP_WORLD_SIZE": "1"}
            shared |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
            shared |= {"LT_CLI_USED": "1", "LT_DEVICES": f"{ranks}", "LT_ACCELERATOR": args.device}
            shared["TORCHELASTIC_RUN_ID"] = "benchmark"
        processes = [
            subprocess.Popen(
                [*command, str(file)],
                env=shared | ({"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if ranks > 1 else {}),
                preexec_fn=end_with_parent,
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + args.time_limit
        try:
            while not file.exists() and any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    return {"status": f"stopped after {args.time_limit:g} s"}
                time.sleep(0.05)
            if not file.exists():
                return {"status": f"failed: processes ended with {[process.poll() for process in processes]}"}
            return json.loads(file.read_text(encoding="utf-8"))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def describe(row: Mapping[str, Any]) -> str:
    """A row in one line; of several numbers their median."""
    cells = []
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], float):
            value = statistics.median(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
            value = ",".join(map(str, value))
        if value is not None and not isinstance(value, list | dict):
            cells.append(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}")
    return "  ".join(cells)


# The file of results.


class Record:
    """The rows of one command, in memory and in its --out.

    Args:
        name: of the benchmark.
        args: its options.
        argv: its command line without the script.
        packages: whose versions matter beside those of training.

    Raises:
        RecordError: --out holds something else.
    """

    def __init__(self, name: str, args: argparse.Namespace, argv: Sequence[str], packages: Sequence[str] = ()) -> None:
        self.name = name
        self.file: Path | None = args.out
        self.environment = environment(command(name, argv), args.device, packages)
        self.settings = _as_json({key: value for key, value in vars(args).items() if key not in _UNMEASURED})
        self.rows: list[dict[str, Any]] = []
        if self.file is not None and self.file.exists() and not args.replace:
            self._take_over(self.file)

    def find(self, case: Mapping[str, Any]) -> dict[str, Any] | None:
        wanted = _as_json(case)
        return next((row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())), None)

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a row and saves the file."""
        self.rows.append(_as_json(row))
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, dumps(self.content))
        return self.rows[-1]

    @property
    def failed(self) -> bool:
        """Whether a row has failed. Running out of memory, or of the time that it was given, is a result."""
        return any(str(row.get("status")).startswith("failed") for row in self.rows)

    @property
    def content(self) -> dict[str, Any]:
        """Rows and conditions that the file holds."""
        head = {"benchmark": self.name, "environment": self.environment, "settings": self.settings}
        return {**head, "rows": self.rows}

    def _take_over(self, file: Path) -> None:
        """Keeps the rows that an earlier start of the same command measured."""
        try:
            old = json.loads(file.read_text(encoding="utf-8"))
            kept = [row for row in old["rows"] if not str(row.get("status")).startswith(_UNFINISHED)]
            there, here = _identity(old), _identity(self.content)
            date = old["environment"]["date"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RecordError(f"--out {file} is not a file of results; give another name") from None
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                raise RecordError(
                    f"--out {file} has results with {key}={there.get(key)!r}, and now it is {here.get(key)!r}; give "
                    "another --out, or --replace to measure all of them again"
                )
        self.rows = kept
        self.environment["date"] = date
        print(f"{file} has {len(kept)} rows, which are kept; --replace measures them again", file=sys.stderr)


def dumps(content: Mapping[str, Any]) -> str:
    """A file of results as text: a line per row, so that versions of it can be compared."""
    parts = [
        f"{json.dumps(key)}: {json.dumps(value, indent=1, ensure_ascii=False)}"
        for key, value in content.items()
        if key != "rows"
    ]
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in content["rows"])
    return "{\n" + ",\n".join([*parts, f'"rows": [\n{rows}\n]']) + "\n}\n"


def environment(command_line: str, device: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Command, date, commit, hardware and versions of a measurement on `device` ("cuda" or "cpu")."""
    from forgetting_transformer.training.records.descriptions import PACKAGES, git_state

    state = git_state(Path(__file__).parent)
    # Results and pages are written beside the code; only code changes what is measured.
    changed = re.findall(r"^diff --git a/(?!.*\.(?:json|md|png)\b)", state.get("patch", ""), re.MULTILINE)
    versions: dict[str, Any] = installed_versions((*PACKAGES, *packages))
    hardware: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count()}
    if device == "cuda":
        import torch

        hardware = {"device": torch.cuda.get_device_name(), "driver": _driver(), **hardware}
        # What is imported, which need not be what is installed: another Triton may stand first on the path.
        versions |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        versions["triton"] = _imported_version("triton")
    return _as_json({
        "command": command_line,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": state.get("commit") or os.environ.get(COMMIT_VARIABLE),
        "changed": bool(changed),
        "hardware": hardware,
        "versions": versions,
    })  # fmt: skip


def command(name: str, argv: Sequence[str]) -> str:
    """The command line without the options that do not change what is measured."""
    unmeasured = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in _UNMEASURED:
        unmeasured.add_argument(f"--{option}", action="store_true" if option in _FLAGS else "store")
    return shlex.join(["python", f"benchmarks/{name}.py", *unmeasured.parse_known_args(list(argv))[1]])


def device_name(environment: Mapping[str, Any]) -> str:
    """The GPU that was measured, or the processor."""
    hardware = environment["hardware"]
    return hardware.get("device") or hardware["cpu"]


def run_main(main: Callable[[], int | None]) -> int | None:
    """Calls a benchmark's `main` and returns the exit code. Ctrl-C is answered with one line."""
    return command_line.run(main, "interrupted; with --out the rows so far are saved, and the same command continues")


def end_with_parent() -> None:
    """Makes a process that is being started (preexec_fn) end with the one that starts it.

    Linux ends it when its parent has ended, however that was: the GPU would stay taken. Ctrl-C, which a terminal sends
    to both, is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    console.die_with_parent(os.getppid())


def _identity(content: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that two commands must share for their rows to belong in one file, by dotted names."""
    where = {key: content["environment"][key] for key in ("commit", "changed", "hardware", "versions")}
    return flatten({"benchmark": content["benchmark"], **content["settings"], **where})


def _as_json(value: Any) -> Any:
    """As it comes back from a JSON file: tuples as lists, paths as text."""
    return json.loads(json.dumps(value, default=str))


def _imported_version(package: str) -> str | None:
    try:
        return __import__(package).__version__
    except Exception:  # an installation that is broken can raise anything
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _driver() -> str | None:
    """Version of NVIDIA's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
