"""Shared by all benchmarks: where a measurement was made, and a file that receives every row as soon as it is measured.

A file of results, which --out names, is JSON; studies/pages.py makes the tables of the documentation from such files:

    benchmark     the script's name, such as "decode"
    source        only where the script did not write the file: the source of its numbers
    environment   command, date (UTC), commit, changed (whether code differed from that commit), hardware, versions
    settings      every option of the command
    rows          one object per measurement, in order

The same command with the same --out measures the missing rows. A change of the command, the commit, the packages or
the hardware is refused, so that no file mixes them; --replace measures everything again.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgetting_transformer import command_line

#: Says which commit a copy of the repository without its .git was made from.
COMMIT_VARIABLE = "BENCHMARK_COMMIT"
#: Options that say where results go, and not what is measured.
_OUTPUT_OPTIONS = ("out", "replace")
#: Rows whose status begins with one of these measured nothing, and are tried again.
_UNFINISHED = ("failed", "stopped")
#: What Ctrl-C is answered with.
INTERRUPTED = "interrupted; with --out the rows so far are saved, and the same command goes on"


class RecordError(ValueError):
    """The file of --out cannot take the results of this command; the message says why, and what to do."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --out and --replace."""
    parser.add_argument(
        "--out",
        type=command_line.path,
        help="JSON file that gets each row when it is measured; the same command continues it",
    )
    parser.add_argument("--replace", action="store_true", help="measure again what --out already has")


class Record:
    """The rows of one command, in memory and in its --out.

    Args:
        name: of the benchmark.
        args: its options, with those of `add_options`.
        argv: its command line without the script; None: that of this process.
        device: "cuda" or "cpu", what it measures.
        leave_out: options of one value that do not change what is measured, such as where files are.
        packages: whose versions matter beside those of training.

    Raises:
        RecordError: --out holds something else.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        argv: Sequence[str] | None,
        device: str,
        leave_out: Sequence[str] = (),
        packages: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.file: Path | None = args.out
        self.environment = environment(
            command(name, sys.argv[1:] if argv is None else argv, leave_out), device, packages
        )
        options = {key: value for key, value in vars(args).items() if key not in (*_OUTPUT_OPTIONS, *leave_out)}
        self.settings: dict[str, Any] = _as_json(options)
        self.rows: list[dict[str, Any]] = []
        if self.file is not None and self.file.exists() and not args.replace:
            self._take_over(self.file)

    def row(self, case: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The row of `case`; measures it unless the file has it.

        Args:
            case: the values that tell this row from the others.
            measure: returns the values that are measured.
        """
        return self.find(case) or self.add({**case, **measure()})

    def find(self, case: Mapping[str, Any]) -> dict[str, Any] | None:
        wanted = _as_json(case)
        return next((row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())), None)

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a row and saves the file."""
        self.rows.append(_as_json(row))
        if self.file is not None:
            # Imported here: it imports PyTorch, for which --help need not wait.
            from forgetting_transformer.files import write_atomically

            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, dumps(self.content))
        return self.rows[-1]

    def start_over(self, reason: str) -> None:
        """Forgets the rows; the file keeps them until the first new one."""
        print(f"{self.file}: {reason}; measuring again from the first row", file=sys.stderr)
        self.rows.clear()

    @property
    def failed(self) -> bool:
        """Whether a row has failed. Running out of memory, or of the time that it was given, is a result."""
        return any(str(row.get("status")).startswith("failed") for row in self.rows)

    @property
    def content(self) -> dict[str, Any]:
        """What the file holds."""
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
        if "source" in old:
            raise RecordError(f"--out {file} was not written by a benchmark ({old['source']}); --replace replaces it")
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
    from forgetting_transformer.training.provenance import PACKAGES, git_state
    from forgetting_transformer.versions import installed_versions

    state = git_state(Path(__file__).parent)
    # Results and pages are written beside the code; only code changes what is measured.
    changed = re.findall(r"^diff --git a/(?!.*\.(?:json|md|png)\b)", state.get("patch", ""), re.MULTILINE)
    versions = installed_versions((*PACKAGES, *packages))
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


def command(name: str, argv: Sequence[str], leave_out: Sequence[str] = ()) -> str:
    """The command line, without where results go and without the options `leave_out`, which have one value each."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser)
    for option in leave_out:
        parser.add_argument(f"--{option}")
    return shlex.join(["python", f"benchmarks/{name}.py", *parser.parse_known_args(list(argv))[1]])


def device_name(environment: Mapping[str, Any]) -> str:
    """The GPU that was measured, or the processor."""
    hardware = environment["hardware"]
    return hardware.get("device") or hardware["cpu"]


def run_main(main: Callable[[], int | None], interrupted: str = INTERRUPTED) -> int | None:
    """Calls a benchmark's `main` and returns the exit code. Ctrl-C is answered with the line `interrupted`."""
    return command_line.run(main, interrupted)


def end_with_parent() -> None:
    """Makes a process that is being started (preexec_fn) end with the one that starts it.

    Linux ends it when its parent has ended, however that was: the GPU would stay taken. Ctrl-C, which a terminal sends
    to both, is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _identity(content: Mapping[str, Any]) -> dict[str, Any]:
    """What two commands must share for their rows to belong in one file, by dotted names."""
    where = {key: content["environment"][key] for key in ("commit", "changed", "hardware", "versions")}
    return _flat({"benchmark": content["benchmark"], **content["settings"], **where})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


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
