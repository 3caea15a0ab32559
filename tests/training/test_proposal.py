"""preflight=true proposes the fastest settings that fit; a candidate that fails is a row, and the run is left alone."""

import dataclasses
import json
import re
import types
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer.training import proposal
from forgetting_transformer.training.candidate import OUT_OF_MEMORY
from forgetting_transformer.training.config import ConfigError, check
from forgetting_transformer.training.parsing import parse
from forgetting_transformer.training.proposal import (
    Point,
    Shape,
    best,
    overrides,
    search,
    table,
    with_cuda_graphs,
)
from tests.processes import Command, free_port, shell_environment
from tests.training.conftest import STEP, Job, changed, train

CHOICES = [
    Shape(checkpointing, compiled, strategy)
    for strategy in ("ddp", "fsdp")
    for compiled in (True, False)
    for checkpointing in (False, True)
]


def device(memory: float, tried: list[Shape]):
    """A stand-in: what a step of a large model takes and how fast it is, by shape and sequences at a time."""

    def measure(shape: Shape) -> list[Point]:
        tried.append(shape)
        points = []
        for sequences in (1, 2, 4, 8):
            used = (40 if shape.strategy == "ddp" else 20) + sequences * (3 if shape.checkpointing else 20)
            if used > memory:
                return [*points, Point(shape, sequences, problem="out of memory")]
            speed = 100 * sequences / (sequences + 0.5)
            speed *= (0.75 if shape.checkpointing else 1) * (1 if shape.compile else 0.5)
            points.append(Point(shape, sequences, speed * (1 if shape.strategy == "ddp" else 0.95), used))
        return points

    return measure


@pytest.mark.parametrize("memory", [1000, 140, 70, 50, 30, 10])
@pytest.mark.parametrize("start", CHOICES)
def test_the_fastest_of_all_is_found_from_wherever_the_search_begins(memory, start):
    tried: list[Shape] = []
    found = best(search(start, CHOICES, device(memory, tried)))
    assert len(tried) == len(set(tried)) and tried[0] == start
    assert found == best([point for shape in CHOICES for point in device(memory, [])(shape)])
    assert (found is None) == (memory == 10)
    if memory == 1000 and start.compile:
        assert len(tried) == 5, "what is slower uncompiled is not measured uncompiled with everything else"


@pytest.mark.parametrize(("world_size", "context"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_cuda_graphs_are_proposed_where_they_are_not_refused(tiny, world_size, context):
    shapes = [*CHOICES, *(Shape(checkpointing, True, "hsdp") for checkpointing in (False, True))]
    allowed = []
    for shape in shapes:
        settings = {"train__compile": shape.compile, "train__gradient_checkpointing": shape.checkpointing}
        settings |= {"train__cuda_graphs": True, "strategy__name": shape.strategy, "strategy__context": context}
        try:
            check(parse(OmegaConf.create(changed(tiny, **settings))), world_size)
            allowed.append(dataclasses.replace(shape, graphs=True))
        except ConfigError as error:
            assert "train.cuda_graphs" in str(error)
    assert with_cuda_graphs(shapes, world_size, context) == allowed
    assert len(allowed) == {(1, 1): 3, (2, 1): 1}.get((world_size, context), 0)


@pytest.mark.parametrize(
    ("cuda_graphs", "peak_flops", "compiled", "on"),
    [
        ("auto", 1e15, True, True),
        ("auto", None, True, False),
        ("auto", 1e15, False, False),
        (True, None, True, True),
        (False, 1e15, True, False),
    ],
)
def test_the_search_begins_with_the_graphs_of_the_command(tiny, monkeypatch, cuda_graphs, peak_flops, compiled, on):
    """On a GPU whose peak is unknown `auto` means none."""
    monkeypatch.setattr(proposal, "_on_gpu", lambda config: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU that nobody knows")
    settings = {"train__cuda_graphs": cuda_graphs, "train__compile": compiled, "fabric__peak_flops": peak_flops}
    config = parse(OmegaConf.create(changed(tiny, **settings)))
    search = proposal._Proposal(config, types.SimpleNamespace(first=True), Path())
    assert search.start.graphs is on and search.start.compile is compiled and search.graphs
    assert sum(shape.graphs for shape in search.choices) == 1


def test_a_larger_micro_batch_wins_where_it_is_as_fast():
    shape = CHOICES[0]
    points = [Point(shape, 1, 80), Point(shape, 2, 100), Point(shape, 4, 99.5), Point(shape, 8, 90)]
    assert best(points).sequences == 4
    assert best([*points, Point(shape, 16, 200, problem="leaves too little memory free")]).sequences == 4
    assert best([Point(shape, 1, problem="out of memory")]) is None


@pytest.mark.parametrize("gain", [0.9, 1.3])
@pytest.mark.parametrize(
    "start", [Shape(False, True, "auto"), Shape(True, False, "auto"), Shape(False, True, "auto", True)]
)
def test_cuda_graphs_are_tried_with_the_best_so_far(start, gain):
    choices = [Shape(checkpointing, compiled, "auto") for checkpointing in (False, True) for compiled in (True, False)]
    with_graphs = Shape(False, True, "auto", graphs=True)
    tried: list[Shape] = []

    def measure(shape: Shape) -> list[Point]:
        tried.append(shape)
        speed = (0.75 if shape.checkpointing else 1) * (1 if shape.compile else 0.5) * (gain if shape.graphs else 1)
        return [Point(shape, 1, speed)]

    found = best(search(start, [*choices, with_graphs], measure))
    assert found.shape.graphs == (gain > 1) and found.shape.compile
    assert tried.count(with_graphs) == 1 and len(tried) == len(set(tried))


def test_a_search_that_is_ended_keeps_what_it_has():
    answers = iter([[Point(CHOICES[0], 1, 10.0)], None])
    assert best(search(CHOICES[0], CHOICES, lambda shape: next(answers))).tokens_per_second == 10.0


def test_the_table_and_the_line_to_paste():
    shape = Shape(True, False, "fsdp")
    points = [Point(shape, 2, 12345.6, 3.2e9), Point(shape, 4, problem="out of memory")]
    assert table(points, 512).splitlines() == [
        "checkpointing  compiled  strategy  grad_acc_tokens  tokens/s   memory",
        "yes            no        fsdp                1,024    12,346  3.20 GB",
        "yes            no        fsdp                2,048         -        -  out of memory",
    ]
    line = "train.grad_acc_tokens=1024 train.gradient_checkpointing=true"
    assert overrides(points[0], 512, compiles=False, several=False) == line
    assert overrides(points[0], 512, True, True) == f"{line} train.compile=false strategy.name=fsdp"

    graphs = Point(Shape(False, True, "auto", graphs=True), 1, 15000.0, 4e9)
    assert (
        table([graphs], 512).splitlines()[1]
        == "no             yes, graphs  auto                  512    15,000  4.00 GB"
    )
    line = "train.grad_acc_tokens=512 train.gradient_checkpointing=false train.compile=true train.cuda_graphs=true"
    assert overrides(graphs, 512, compiles=True, several=False, graphs=True) == line
    assert overrides(points[0], 512, compiles=False, several=False, graphs=True).endswith("train.cuda_graphs=false")


#: The process is the candidate; a stand-in for a device says how much memory each micro-batch takes.
CANDIDATE = """
import torch
from pathlib import Path
from forgetting_transformer import training
from forgetting_transformer.training import candidate, trainer
used = iter([100, 200, 300])
candidate._memory = lambda device, most: (next(used), most)
training.run = lambda config: candidate.measure(config, [1, 2, 4], {most}, Path({place!r}))
step = trainer.Trainer.step
def limited(self, batch):
    if self.config.train.grad_acc_tokens > {tokens} and self.fabric.global_rank == 0:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return step(self, batch)
trainer.Trainer.step = limited
"""


def points(place: Path, rank: int) -> list[dict]:
    return json.loads((place / f"points-{rank}.json").read_text())


def test_a_candidate_measures_until_memory_is_full(tiny, tmp_path):
    job = Job(tiny, patch=CANDIDATE.format(most=250, place=str(tmp_path), tokens=10**9))
    assert job.wait() == [0], job.errors()
    found = points(tmp_path, 0)
    assert [(point["sequences"], point.get("problem")) for point in found] == [
        (1, None),
        (2, None),
        (4, "out of memory"),
    ]
    assert all(point["seconds"] > 0 for point in found) and not Path(tiny["output_dir"]).exists()


def test_a_candidate_without_memory_ends_with_what_it_has(tiny, tmp_path):
    job = Job(tiny, patch=CANDIDATE.format(most=10**9, place=str(tmp_path), tokens=32))
    assert job.wait() == [OUT_OF_MEMORY]
    assert [point.get("problem") for point in points(tmp_path, 0)] == [None, "out of memory"]


#: What is printed goes to a file; candidates are fewer, and the one with checkpointing meets what a test wants.
PROPOSAL = """
import os, signal, sys
from forgetting_transformer.training import proposal
if os.environ.get("RANK", "0") == "0":
    sys.stdout = open({said!r}, "a")
proposal._Proposal._strategies = lambda self: [self.start.strategy]
proposal._memory_on_cpu = lambda *_: {memory}
run, watch = proposal._Ranks.run, proposal._Ranks._watch
def run_it(self, place, config, sequences, *rest):
    self.checkpoints = config.train.gradient_checkpointing
    if self.checkpoints and {breaks}:
        config.model.config["nonsense"] = 1
    return run(self, place, config, sequences, *rest)
def watch_it(self, process, deadline):
    if self.checkpoints and {stops} and os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGINT)
    watch(self, process, deadline)
proposal._Ranks.run, proposal._Ranks._watch = run_it, watch_it
"""
#: Candidates are forked, because a new interpreter takes seconds to import PyTorch.
FORKED = """
import os, runpy, subprocess, sys, traceback, types
from forgetting_transformer.training import proposal

class Forked:
    def __init__(self, command, env, stdout, **options):
        self.returncode, self.pid = None, os.fork()
        if self.pid:
            return
        os.setsid()
        os.environ.update(env)
        for number in (1, 2) if stdout else ():
            os.dup2(stdout.fileno(), number)
        sys.stdout, sys.argv = sys.__stdout__, command[2:]
        code = 0
        try:
            runpy.run_module(command[2], run_name="__main__")
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)

    def poll(self, options=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        return self.poll(0)

# For the proposal alone: a candidate asks git for its state through the real one.
proposal.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
"""


@pytest.mark.slow
def test_a_candidate_that_fails_is_a_row_and_the_rest_is_proposed(tiny, tmp_path):
    said = tmp_path / "said"
    patch = PROPOSAL.format(said=str(said), memory=10**12, breaks=True, stops=False) + FORKED
    job = Job(changed(tiny, preflight=True), patch=patch)
    assert job.wait() == [0], job.errors()
    text = said.read_text()
    assert re.search(r"^no +no +auto +128 +[\d,]+ +[\d.]+ [MG]B$", text, re.MULTILINE), text
    assert re.search(r"^yes +no +auto +32 +- +- +failed: .*ConfigError: model.config.*nonsense", text, re.MULTILINE), (
        text
    )
    assert re.search(r"^fastest that fits \([\d,]+ tokens/s, [\d.]+ times the speed of this command\):$", text, re.M), (
        text
    )
    proposed = re.search(r"^  train.grad_acc_tokens=(\d+) train.gradient_checkpointing=false$", text, re.MULTILINE)
    assert proposed, text
    assert not Path(tiny["output_dir"]).exists()
    train(changed(tiny, train__grad_acc_tokens=int(proposed[1]), train__max_tokens=STEP))


@pytest.mark.rare("tests/training/test_proposal.py::test_a_candidate_measures_until_memory_is_full")
@pytest.mark.slow
def test_memory_that_is_full_and_a_signal_to_one_of_two_processes(tiny, tmp_path):
    said = tmp_path / "said"
    patch = PROPOSAL.format(said=str(said), memory=10**6, breaks=False, stops=True)
    job = Job(changed(tiny, preflight=True), 2, patch=patch)
    assert job.wait() == [0, 0], job.errors()
    text = said.read_text()
    assert re.search(r"^no +no +ddp +32 +[\d,]+ +[\d.]+ [MG]B +out of memory$", text, re.MULTILINE), text
    assert re.search(r"^yes +no +ddp +32 +- +- +stopped$", text, re.MULTILINE), text
    assert "none of them can be used" in text
    assert not Path(tiny["output_dir"]).exists()


@pytest.mark.slow
def test_what_the_checks_refuse_is_refused_once(tiny, tmp_path):
    said = tmp_path / "said"
    patch = PROPOSAL.format(said=str(said), memory=None, breaks=False, stops=False)
    job = Job(changed(tiny, preflight=True, train__max_tokens=10**6), patch=patch)
    assert job.wait() == [1]
    assert said.read_text() == "", "nothing was measured"


@pytest.mark.slow
def test_ranks_that_srun_started_know_each_other(tmp_path):
    script = (
        "from forgetting_transformer.training.proposal import _Ranks\n"
        "with _Ranks() as ranks:\n"
        "    print(ranks.gather(ranks.first))\n"
    )
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "localhost"}
    slurm |= {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    printed = [tmp_path / str(rank) for rank in range(2)]
    started = [
        Command(
            *("-c", script),
            output=file,
            environment=shell_environment() | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank, file in enumerate(printed)
    ]
    assert [process.wait() for process in started] == [0, 0]
    assert [file.read_text() for file in printed] == ["[True, False]\n"] * 2
