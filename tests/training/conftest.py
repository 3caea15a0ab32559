"""A tiny corpus, a tiny configuration and real training processes.

A run costs the same in a process that is forked as in the test's own, and leaves nothing there. Several processes get
the environment that `fabric run` would give them. Runs that several tests begin with are trained once: `finished`.
"""

import contextlib
import copy
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.files import flatten
from tests.processes import Command, free_port, server, start_as_by_default
from tests.tiny import STEP, VOCAB, make_corpus, tiny_config
from tests.waiting import HANG, wait_until


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether `folder` is still to be made, by the one that is told so: others wait until it is there."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder.with_name(f"{folder.name}.made")
        yield not made.exists()
        made.touch()


@pytest.fixture(scope="session")
def corpus(shared_folder) -> Path:
    """Documents in which the next token depends on the last, so that losses fall and differ from step to step."""
    folder = shared_folder / "corpus"
    with made_once(folder) as missing:
        if missing:
            make_corpus(folder)
    return folder


@pytest.fixture
def tiny(corpus, tmp_path) -> dict:
    return tiny_config(tmp_path / "run", corpus)


def changed(config: dict, **changes) -> dict:
    """A copy with `section__key=value` replaced."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return config


class Job:
    """Training processes that run `config`; rank k's error, if any, is in `errors()`."""

    def __init__(self, config: dict, world_size: int = 1, patch: str | None = None, accelerator: str = "cpu") -> None:
        self.folder = Path(config["output_dir"]).with_name(Path(config["output_dir"]).name + ".errors")
        self.folder.mkdir(exist_ok=True)
        environment = {}
        if world_size > 1:
            environment = {
                "LT_CLI_USED": "1",
                "LT_DEVICES": str(world_size),
                "LT_ACCELERATOR": accelerator,
                "LT_NUM_NODES": "1",
                "TORCHELASTIC_RUN_ID": "test",
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
        self.processes = []
        for rank in range(world_size):
            error_file = self.folder / f"{rank}.txt"
            error_file.unlink(missing_ok=True)
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} if world_size > 1 else {}
            process = server.Process(target=_train, args=(config, environment | ranks, error_file, patch))
            process.start()
            self.processes.append(process)

    def wait(self) -> list[int]:
        for process in self.processes:
            process.join(HANG)
            if process.exitcode is None:
                codes = [process.exitcode for process in self.processes]
                pytest.fail(f"a process hangs: not ended within {HANG} s. Exit codes: {codes}. {self.errors()}")
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def errors(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.txt")))


def _train(config: dict, environment: dict, error_file: Path, patch: str | None) -> None:
    start_as_by_default()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if patch:
        exec(patch, {})  # a fault to inject, written in the test that needs it
    try:
        training.run(training.parse(OmegaConf.create(config)))
    except Exception:
        error_file.write_text(traceback.format_exc())
        os._exit(1)


def train(config: dict, world_size: int = 1, accelerator: str = "cpu", patch: str | None = None) -> None:
    """Trains to the end and expects that to work."""
    job = Job(config, world_size, patch, accelerator)
    assert job.wait() == [0] * world_size, job.errors()


@pytest.fixture
def finished(shared_folder) -> Callable[..., str]:
    """The output_dir of a run of `config`, trained to its end by the first test that asks for it. To be read only."""

    def run(config: dict, world_size: int = 1) -> str:
        settings = dataclasses.asdict(training.parse(OmegaConf.create(config))) | {"output_dir": ""}
        digest = hashlib.sha256(json.dumps([settings, world_size], sort_keys=True).encode()).hexdigest()[:16]
        folder = shared_folder / f"run-{digest}"
        with made_once(folder) as missing:
            if missing:
                train(changed(config, output_dir=str(folder)), world_size)
        return str(folder)

    return run


@pytest.fixture
def interrupted(finished) -> Callable[..., None]:
    """Leaves in output_dir what a job leaves that reached its time limit after so many steps of `config`."""

    def run(config: dict, steps: int, world_size: int = 1) -> None:
        source = finished(changed(config, train__max_tokens=steps * STEP), world_size)
        shutil.copytree(source, config["output_dir"])

    return run


def refused(config: dict, world_size: int = 1, patch: str | None = None) -> str:
    """Expects the run to stop with an error, and returns it."""
    job = Job(config, world_size, patch)
    assert job.wait() == [1] * world_size, "the run should have been refused"
    return job.errors()


def checkpoint_tensors(output_dir: str, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name: weights and moments, whatever the strategy that wrote them."""
    reader = dcp.FileSystemReader(Path(output_dir) / "checkpoints" / f"step-{step:015d}" / "state")
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def status(config: dict) -> dict:
    return json.loads((Path(config["output_dir"]) / "status.json").read_text())


def rank_log(config: dict, rank: int) -> str:
    return (Path(config["output_dir"]) / f"logs/rank-{rank}.log").read_text()


def lines(output_dir: str, kind: str) -> list[dict]:
    return [
        json.loads(line) for line in (Path(output_dir) / f"metrics/jsonlines/{kind}.jsonl").read_text().splitlines()
    ]


def assert_same_tensors(a: str, b: str, step: int, other: int | None = None) -> None:
    """Weights and moments of two runs after so many tokens (the second: after `other`), bitwise."""
    first, second = checkpoint_tensors(a, step), checkpoint_tensors(b, other or step)
    assert first.keys() == second.keys() and len(first) > 20
    assert not [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def losses(output_dir: str) -> dict[int, float]:
    entries = lines(output_dir, "train")
    assert len({e["step"] for e in entries}) == len(entries), "a step was logged twice"
    return {e["step"]: e["train/loss"] for e in entries}


def untimed(names: Iterable[str]) -> list[str]:
    """Names of reports, without those of what clocks say."""
    return [name for name in names if "time" not in name and "per_second" not in name]


def assert_same_run(a: str, b: str) -> None:
    """Bitwise: last weights and moments, logged losses and norms, loss at every position, held-out losses."""
    step = max(int(path.name.removeprefix("step-")) for path in Path(a).glob("checkpoints/step-*"))
    assert_same_tensors(a, b, step)
    assert losses(a) == losses(b)
    for kind in ("train", "norm", "train_eval", "val"):
        for x, y in zip(lines(a, kind), lines(b, kind), strict=True):
            assert {k: x[k] for k in untimed(x)} == {k: y[k] for k in untimed(y)}
    files = sorted(p.relative_to(a) for p in Path(a).glob("metrics/npz/*/*.npz"))
    assert files == sorted(p.relative_to(b) for p in Path(b).glob("metrics/npz/*/*.npz")) and len(files) >= 4
    for file in files:
        x, y = np.load(Path(a) / file), np.load(Path(b) / file)
        assert x.files == y.files and all(np.array_equal(x[k], y[k], equal_nan=True) for k in untimed(x.files))


def blocks(output_dir: str) -> list[dict[str, str]]:
    """The rows of every block in rank 0's log."""
    found: list[dict[str, str]] = []
    for line in (Path(output_dir) / "logs/rank-0.log").read_text().splitlines():
        if "about to train" in line:
            found.append({})
        elif found and line.startswith("  "):
            name, _, value = line.strip().partition(" ")
            found[-1].setdefault(name, value.strip())
    return found


def word_tokenizer(
    folder: Path, vocabulary: dict[str, int] | None = None, template: str | None = None, **special: str
) -> Path:
    """Saves one whose tokens are words, by default those of the tiny corpus: token n is the word "wn".

    Args:
        template: which special tokens go around a text, as in "<s> $A".
        special: the words that are tokens such as `bos_token` and `unk_token`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = vocabulary or {f"w{n}": n for n in range(VOCAB)}
    special = {"bos_token": "w0", "eos_token": "w0"} | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special.get("unk_token", "w1")))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template is not None:
        marks = [(word, vocabulary[word]) for word in (special["bos_token"], special["eos_token"])]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tmp_path) -> str:
    """A folder with the tokenizer of the tiny corpus."""
    return str(word_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def continued(finished) -> Callable[..., str]:
    """Ends a run of `config` that was killed soon after its checkpoint at step 8, which must be the run that was not.

    The output_dir of that one is returned.
    """

    def run(config: dict, world_size: int = 1) -> str:
        straight = finished(config, world_size)
        shutil.copytree(straight, config["output_dir"])
        for path in Path(config["output_dir"]).glob("checkpoints/step-*"):
            if int(path.name.removeprefix("step-")) > 8 * STEP:
                shutil.rmtree(path)
        train(config, world_size)
        assert_same_run(straight, config["output_dir"])
        return straight

    return run


# Faults that are injected into training processes: code, which runs before anything else does.


def before(owner: str, method: str, what: str, condition: str = "True", arguments: str = "self, *arguments") -> str:
    """Does `what` in a method, or a function of a module, before its own work, where `condition` holds."""
    original = f"{owner}_{method}".replace(".", "_")
    return f"""
import os, pkgutil, signal, sys, time, torch
from forgetting_transformer.training.faults import watchdog
owner = pkgutil.resolve_name("forgetting_transformer.{owner}")
{original} = owner.{method}
def patched({arguments}, **options):
    if {condition}:
{textwrap.indent(what, "        ")}
    return {original}({arguments}, **options)
owner.{method} = patched
"""


def in_step(what: str, batch: int = 9, ranks: str = "0") -> str:
    """Before the update with so many before it, on these ranks."""
    condition = f"self.counters.batch_count == {batch} and str(self.fabric.global_rank) in '{ranks}'"
    return before("training.trainer.Trainer", "step", what, condition, "self, batch")


def dies(batch: int) -> str:
    """The process is gone in place of the update with so many before it."""
    return in_step("os._exit(9)", batch)


#: A signal comes, and is heard.
STOP = "os.kill(os.getpid(), signal.SIGTERM)"
HEARD = "\nwhile self.watchdog.request is None:\n    time.sleep(0.001)"


ENDLESS = ["train.max_tokens=99999999", "datamodule.repeat=true", "skip_eval=true"]


def command_line(tiny: dict, output_dir: Path) -> list[str]:
    """The tiny configuration as overrides of an experiment, but for where it runs."""
    config = flatten(tiny_config(output_dir, tiny["data_dir"]))
    given = [f"{key}={value}" for key, value in config.items() if not key.startswith("fabric.")]
    return ["+experiment/demo=fox_pro", *given]


def wait_for_training(folder: Path, launcher: Command) -> None:
    """Until the run has logged a step."""
    logged, printed = folder / "metrics/jsonlines/train.jsonl", folder / "printed"
    wait_until(logged.exists, lambda: launcher.poll() is None, printed.read_text)


def start(tiny: dict, folder: Path, *command: str) -> Command:
    """A run without an end in `folder`, which takes what it prints too. The ranks are started as users start them."""
    folder.mkdir()
    printed = folder / "printed"
    return Command(*command, *command_line(tiny, folder), *ENDLESS, output=printed, errors=printed)
