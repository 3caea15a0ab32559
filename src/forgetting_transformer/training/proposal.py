"""The second half of `preflight=true`: which micro-batch, checkpointing, compilation and strategy are fastest and fit.

None of them changes the training: the same global batches, learning rates and updates, up to the order of additions.
The search begins with the settings as they are, and goes on from the fastest found so far. Each candidate is measured
in processes of its own (candidate.py), so that one that runs out of memory or crashes is a row of the table. This
process touches no GPU.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from forgetting_transformer import console, elastic, ports
from forgetting_transformer.files import size_in_words
from forgetting_transformer.ranges import divisors
from forgetting_transformer.training import execution
from forgetting_transformer.training.candidate import NO_MEMORY, OUT_OF_MEMORY
from forgetting_transformer.training.checkpoint import steps_in
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.graphs import are_possible
from forgetting_transformer.training.hardware import peak_of
from forgetting_transformer.training.launch import expected_world_size
from forgetting_transformer.training.run_directory import RunDirectory

log = logging.getLogger(__name__)

#: Of the whole search. What is under way then is ended, and the best so far is proposed.
LIMIT_SECONDS = 1800.0
#: Micro-batches of one candidate, from one sequence to all that a rank has.
_MOST_POINTS = 8
#: A larger micro-batch is proposed although it is slower by no more than this.
_EQUAL = 0.01
#: When the candidate of another rank has ended with an error, this rank's may be waiting for it.
_GRACE_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Shape:
    """How a step is computed, besides its micro-batch."""

    checkpointing: bool
    compile: bool
    strategy: str
    graphs: bool = False

    def __str__(self) -> str:
        checkpointing = "with checkpointing" if self.checkpointing else "without checkpointing"
        compiled = "compiled" if self.compile else "not compiled"
        return f"{checkpointing}, {compiled}{', CUDA graphs' if self.graphs else ''}, strategy {self.strategy}"


@dataclass(frozen=True)
class Point:
    """A measured micro-batch.

    Attributes:
        sequences: of a rank's micro-batch. tokens_per_second: of the job; 0 where no step was made.
        memory: peak of a rank in bytes. problem: why it cannot be used; "" if it can.
    """

    shape: Shape
    sequences: int
    tokens_per_second: float = 0.0
    memory: float = 0.0
    problem: str = ""


def search(start: Shape, choices: Sequence[Shape], measure: Callable[[Shape], list[Point] | None]) -> list[Point]:
    """Measures `start`, then what is near the best so far, while there is any such shape left in `choices`.

    Args:
        measure: the points of a shape; None ends the search.
    """
    points: list[Point] = []
    tried: list[Shape] = []
    queue = [start]
    while queue:
        found = measure(queue[0])
        tried.append(queue[0])
        if found is None:
            break
        points += found
        winner = best(points)
        around = tried if winner is None else [winner.shape]
        queue = [shape for shape in choices if shape not in tried and any(_is_near(shape, other) for other in around)]
    return points


def _is_near(shape: Shape, other: Shape) -> bool:
    """Checkpointing and strategy both trade memory for speed, so they vary together; compilation varies by itself, and
    so do CUDA graphs."""
    if shape.graphs != other.graphs:
        return dataclasses.replace(shape, graphs=other.graphs) == other
    return shape.compile == other.compile or dataclasses.replace(shape, compile=other.compile) == other


def with_cuda_graphs(shapes: Sequence[Shape], world_size: int, context: int) -> list[Shape]:
    """Those of the shapes that `train.cuda_graphs=true` is not refused for, with it.

    Args:
        context: `strategy.context`.
    """
    return [
        dataclasses.replace(shape, graphs=True)
        for shape in shapes
        if are_possible(shape.compile, shape.checkpointing, world_size, shape.strategy == "ddp", context)
    ]


def best(points: Sequence[Point]) -> Point | None:
    """The fastest of those that can be used; of equally fast ones of its shape the largest micro-batch."""
    usable = [point for point in points if not point.problem]
    if not usable:
        return None
    fastest = max(usable, key=lambda point: point.tokens_per_second)
    enough = (1 - _EQUAL) * fastest.tokens_per_second
    alike = [p for p in usable if p.shape == fastest.shape and p.tokens_per_second >= enough]
    return max(alike, key=lambda point: point.sequences)


def table(points: Sequence[Point], length: int) -> str:
    """What was tried, a row for each micro-batch.

    Args:
        length: tokens of a sequence.
    """
    rows: list[tuple[str, ...]] = [
        ("checkpointing", "compiled", "strategy", "grad_acc_tokens", "tokens/s", "memory", "")
    ]
    for point in points:
        speed = f"{point.tokens_per_second:,.0f}" if point.tokens_per_second else "-"
        memory = size_in_words(point.memory) if point.memory else "-"
        checkpointing = "yes" if point.shape.checkpointing else "no"
        compiled = "yes, graphs" if point.shape.graphs else "yes" if point.shape.compile else "no"
        micro = f"{point.sequences * length:,}" if point.sequences else "-"
        rows.append((checkpointing, compiled, point.shape.strategy, micro, speed, memory, point.problem))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 3 <= k <= 5 else cell.ljust(width) for k, (cell, width) in enumerate(cells)
        ).rstrip()
        for cells in ([*zip(row, widths, strict=True)] for row in rows)
    )


def overrides(point: Point, length: int, compiles: bool, several: bool, graphs: bool = False) -> str:
    """The settings of a point, for a command line.

    Args:
        compiles: whether compilation was varied. several: whether there are several processes.
        graphs: whether CUDA graphs were varied.
    """
    words = [
        f"train.grad_acc_tokens={point.sequences * length}",
        f"train.gradient_checkpointing={str(point.shape.checkpointing).lower()}",
        *([f"train.compile={str(point.shape.compile).lower()}"] if compiles else []),
        *([f"train.cuda_graphs={str(point.shape.graphs).lower()}"] if graphs else []),
        *([f"strategy.name={point.shape.strategy}"] if several else []),
    ]
    return " ".join(words)


def propose(config: Config) -> str:
    """Checks `config` as `preflight=check` does, then measures candidates and prints the table and the best settings.

    Every rank of a launcher calls it. Nothing is written outside of temporary folders but what the checks write.

    Returns:
        "done", or "preempted" after a signal, which ends the search with what was found so far.
    """
    with _Ranks() as ranks, tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        code = ranks.run(Path(folder), dataclasses.replace(config, preflight="check"), [], None, math.inf)
        codes = ranks.gather(code)
        if ranks.stopped_anywhere():
            return "preempted"
        if wrong := [one for one in codes if one not in (0, OUT_OF_MEMORY)]:
            elastic.record_reason("the checks have said why")
            sys.exit(1 if wrong[0] < 0 else wrong[0])
        return _Proposal(config, ranks, Path(folder)).run()


class _Proposal:
    def __init__(self, config: Config, ranks: "_Ranks", folder: Path) -> None:
        self.config, self.ranks, self.folder = config, ranks, folder
        self.world_size = expected_world_size(config)
        data = config.datamodule
        self.tokens = data.train_batch_size * data.train_batch_len
        self.local = data.train_batch_size // (self.world_size // config.strategy.context)
        counts = divisors(self.local)
        self.sequences = counts if len(counts) <= _MOST_POINTS else [*counts[: _MOST_POINTS - 1], counts[-1]]
        self.deadline = time.monotonic() + LIMIT_SECONDS
        self.compiles = self._compiles()
        name = config.strategy.name
        usual = "ddp" if self.world_size > 1 else name
        train = config.train

        def recorded(shapes: Sequence[Shape]) -> list[Shape]:
            return with_cuda_graphs(shapes, self.world_size, config.strategy.context) if _on_gpu(config) else []

        self.start = Shape(
            train.gradient_checkpointing, self.compiles[0], usual if name == "auto" else name, train.cuda_graphs is True
        )
        found = recorded([self.start]) if train.cuda_graphs == "auto" else []
        if found and peak_of(config.fabric, torch.device("cuda", 0)) is not None:
            # Where its peak is known, `auto` leaves out only graphs that change the speed little.
            self.start = found[0]
        self.choices = [
            Shape(checkpointing, compiled, strategy)
            for strategy in self._strategies()
            for compiled in self.compiles
            for checkpointing in (False, True)
        ]
        #: Whether CUDA graphs are varied.
        self.graphs = bool(graphs := recorded(self.choices))
        self.choices += graphs
        self.memory = _memory_on_cpu(config, self.world_size)

    def run(self) -> str:
        if self.ranks.first:
            log.info(
                "measuring up to %d ways to compute a step, each in its own process, for at most %d minutes; "
                "Ctrl-C ends this with what was found so far",
                len({self.start, *self.choices}),
                LIMIT_SECONDS // 60,
            )
        points = search(self.start, self.choices, self._measure)
        stopped = self.ranks.stopped_anywhere()
        if self.ranks.first:
            print(self._report(points), flush=True)
        return "preempted" if stopped else "done"

    def _report(self, points: Sequence[Point]) -> str:
        length = self.config.datamodule.train_batch_len
        winner = best(points)
        if not points:
            return "no candidate was measured"
        lines = ["", table(points, length), ""]
        if winner is None:
            lines.append("none of them can be used; use more devices, or a smaller model or train_batch_len")
            return "\n".join(lines)
        micro = min(self.config.train.grad_acc_tokens // length, self.local)
        now = [p for p in points if (p.shape, p.sequences) == (self.start, micro) and not p.problem]
        gain = (
            f", {winner.tokens_per_second / now[0].tokens_per_second:.2f} times the speed of this command"
            if now
            else ""
        )
        lines.append(f"fastest that fits ({winner.tokens_per_second:,.0f} tokens/s{gain}):")
        lines.append("  " + overrides(winner, length, len(self.compiles) > 1, self.world_size > 1, self.graphs))
        return "\n".join(lines)

    def _measure(self, shape: Shape) -> list[Point] | None:
        if time.monotonic() > self.deadline or self.ranks.stopped_anywhere():
            return None
        if self.ranks.first:
            log.info("measuring: %s%s", shape, " (compiling takes up to minutes)" if shape.compile else "")
        place = Path(tempfile.mkdtemp(dir=self.folder))
        config = dataclasses.replace(
            self.config,
            preflight="check",
            strategy=dataclasses.replace(self.config.strategy, name=shape.strategy),
            train=dataclasses.replace(
                self.config.train,
                gradient_checkpointing=shape.checkpointing,
                compile=shape.compile,
                cuda_graphs=shape.graphs,
                grad_acc_tokens=self.config.datamodule.train_batch_len,
            ),
        )
        code = self.ranks.run(place, config, self.sequences, self.memory, self.deadline)
        mine = [json.loads(file.read_text()) for file in sorted(place.glob("points-*.json"))]
        everyones = [points for found in self.ranks.gather(mine) for points in found]
        reason = next((said for said in self.ranks.gather(self._why(code, place)) if said), "")
        points = self._together(shape, everyones)
        if reason and not (points and points[-1].problem):
            count = next((n for n in self.sequences if not points or n > points[-1].sequences), 0)
            points.append(Point(shape, count, problem=reason))
        if self.ranks.first:
            good = best(points)
            log.info("%s", f"{good.tokens_per_second:,.0f} tokens/s" if good else points[-1].problem)
        return points

    def _together(self, shape: Shape, of_ranks: Sequence[list[dict[str, Any]]]) -> list[Point]:
        """What all ranks together have measured: as slow, and as full, as the worst of them."""
        points = []
        for count in sorted({p["sequences"] for one in of_ranks for p in one}):
            same = [p for one in of_ranks for p in one if p["sequences"] == count]
            problem = next((p["problem"] for p in same if "problem" in p), "")
            seconds = max(p.get("seconds", math.inf) for p in same)
            memory = max(p.get("memory", 0.0) for p in same)
            points.append(Point(shape, count, self.tokens / seconds, memory, problem))
        return points

    def _why(self, code: int, place: Path) -> str:
        """Why a candidate of this rank gave no more points."""
        if code in (0, OUT_OF_MEMORY):
            return ""
        if self.ranks.stopped:
            return "stopped"
        if time.monotonic() > self.deadline:
            return f"not done after {LIMIT_SECONDS / 60:.0f} minutes"
        if code == -signal.SIGKILL:
            return "" if self.ranks.ended_it else f"killed by SIGKILL, perhaps {NO_MEMORY}"
        said = [line for line in (place / "said").read_text(errors="replace").splitlines() if line.strip()]
        return f"failed: {said[-1].strip()[:200] if said else f'exit code {code}'}"

    def _compiles(self) -> list[bool]:
        """Whether to compile: as the config says, and on a GPU the other way too. A run that goes on stays as it is:
        a change would keep it from being bitwise the run that was not interrupted."""
        wanted = self.config.train.compile
        folder = RunDirectory(self.config.output_dir).checkpoints
        on_gpu = _on_gpu(self.config)
        if self.config.resume and (steps := steps_in(folder)):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                before = execution.recorded(json.loads((folder / f"step-{steps[-1]:015d}/trainer.json").read_text()))
                if wanted == "auto" and before is not None:
                    return [before.compile]
            return [on_gpu if wanted == "auto" else wanted]
        if wanted == "auto":
            return [True, False] if on_gpu else [False]
        return [wanted, not wanted] if on_gpu or wanted else [wanted]

    def _strategies(self) -> list[str]:
        if self.world_size == 1:
            return [self.config.strategy.name]
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        return ["ddp", "fsdp", "hsdp"] if 1 < nodes < self.world_size else ["ddp", "fsdp"]


class _Ranks:
    """This process among those that a launcher has started; each runs the same candidates at the same time."""

    def __init__(self) -> None:
        #: srun gives no address of the ranks; Fabric finds it out in the same way.
        try:
            self._slurm = SLURMEnvironment() if "WORLD_SIZE" not in os.environ and SLURMEnvironment.detect() else None
        except RuntimeError as error:  # tasks that are not so many per node
            raise ConfigError(f"SLURM: {' '.join(str(error).split())}") from error
        self.world_size = self._slurm.world_size() if self._slurm else int(os.environ.get("WORLD_SIZE", 1))
        self.first = console.rank() == 0
        self.stopped = False
        #: Whether the last candidate was ended because another rank's had failed.
        self.ended_it = False
        self._count = 0
        self._store: Any = None

    def __enter__(self) -> "_Ranks":
        self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        if self.world_size > 1:
            place: dict[str, Any] = {}
            if self._slurm:
                address = f"tcp://{self._slurm.main_address}:{self._slurm.main_port}"
                place = {"init_method": address, "rank": self._slurm.global_rank(), "world_size": self.world_size}
            dist.init_process_group("gloo", timeout=timedelta(seconds=4 * LIMIT_SECONDS), **place)
            self._store = dist.PrefixStore("preflight", dist.distributed_c10d._get_default_store())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._store is not None:
            dist.destroy_process_group()

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def gather(self, mine: Any) -> list[Any]:
        """What every rank gives."""
        if self._store is None:
            return [mine]
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, mine)
        return everyones

    def stopped_anywhere(self) -> bool:
        return any(self.gather(self.stopped))

    def run(self, place: Path, config: Config, sequences: Sequence[int], memory: float | None, deadline: float) -> int:
        """Runs one candidate on all ranks and returns how this rank's has ended.

        What it prints goes to the terminal while nothing is measured, and otherwise into `place`.
        """
        job = place / "job.json"
        job.write_text(
            json.dumps({"config": dataclasses.asdict(config), "sequences": [*sequences], "memory_bytes": memory})
        )
        self._count, self.ended_it = self._count + 1, False
        environment = {
            k: v for k, v in os.environ.items() if k not in (elastic.OUTCOME_VARIABLE, "TORCHELASTIC_ERROR_FILE")
        }
        if self._store is not None:
            port = self.gather(ports.free_port() if self.first else 0)[0]
            environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with _output(place / "said" if sequences else None) as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "forgetting_transformer.training.candidate", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for this process, which ends its candidate
            )
            try:
                self._watch(process, deadline)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            self._tell_that_it_failed()
        return process.returncode

    def _watch(self, process: "subprocess.Popen[bytes]", deadline: float) -> None:
        """Until the candidate has ended, or is to be ended."""
        seen: float | None = None
        while process.poll() is None and not self.stopped and time.monotonic() < deadline:
            time.sleep(0.1)
            if seen is None and self._has_failed():
                seen = time.monotonic()
            if seen is not None and time.monotonic() > seen + _GRACE_SECONDS:
                self.ended_it = True
                return

    def _tell_that_it_failed(self) -> None:
        if self._store is not None:
            self._store.set(f"failed {self._count}", "1")

    def _has_failed(self) -> bool:
        """Whether any rank's candidate has."""
        return self._store is not None and self._store.check([f"failed {self._count}"])


@contextlib.contextmanager
def _output(file: Path | None) -> Iterator[Any]:
    if file is None:
        yield None
        return
    with file.open("wb") as opened:
        yield opened


def _accelerator(config: Config) -> str:
    return os.environ.get("LT_ACCELERATOR", config.fabric.accelerator)


def _on_gpu(config: Config) -> bool:
    return torch.cuda.is_available() and _accelerator(config) != "cpu"


def _memory_on_cpu(config: Config, world_size: int) -> float | None:
    """What a process may use without a GPU: its share of what this machine has left."""
    if _on_gpu(config):
        return None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 / here
    return None
