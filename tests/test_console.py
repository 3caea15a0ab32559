"""How a process of train.py ends, what its launcher adds, and what is said of a typo."""

import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from forgetting_transformer import console, signals, train
from forgetting_transformer.train import hydra_errors
from tests.processes import run_command
from tests.waiting import HANG

ROOT = Path(__file__).parents[1]


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """Makes this process a rank of an elastic launcher; returns a function that says which one."""

    def be(number: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{number}.json"))
        monkeypatch.setenv(signals.OUTCOME_VARIABLE, str(tmp_path / "outcome"))

    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "NODE_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return be


@pytest.fixture
def kept_signals():
    """Handlers as they were before the test."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def _import_and_hang() -> None:
    class Train(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(HANG)

    sys.modules["forgetting_transformer.train"] = Train("forgetting_transformer.train")
    runpy.run_path(str(ROOT / "train.py"))


def test_a_signal_while_modules_are_imported_ends_with_75():
    process = multiprocessing.get_context("fork").Process(target=_import_and_hang)
    process.start()
    process.join(HANG)
    assert process.exitcode == 75


def test_signals_are_heard_before_anything_slow_is_imported():
    code = (
        "import sys; before = {*sys.modules}; import forgetting_transformer.signals;"
        "print(*{'typing', 'pathlib', 'logging'} & ({*sys.modules} - before))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not found.stdout.strip()


def test_a_signal_after_a_preempted_run_changes_nothing_also_where_the_start_was_guarded(rank, kept_signals):
    """A scheduler and a launcher both send it: `python -m forgetting_transformer.train` has no other guard."""
    with signals.StartEnds():
        assert console.exit_code("preempted") == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_preempted_process_ends_with_75_and_a_rank_of_a_launcher_with_0(rank, kept_signals, monkeypatch, tmp_path):
    assert console.exit_code("done") == 0
    assert console.exit_code("preempted") == 75
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert console.exit_code("preempted") == 0, "srun would take 75 of another rank for a failure"
    rank(0)
    assert console.exit_code("preempted") == 0
    outcome = tmp_path / "outcome"
    assert outcome.read_text() == "preempted"
    rank(1)
    console.exit_code("done")
    assert outcome.read_text() == "preempted", "one rank of a node speaks"


def test_what_all_ranks_find_wrong_is_said_by_the_first(rank, kept_signals, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(console, "_SECONDS_FOR_THE_FIRST", 0.0)
    monkeypatch.setattr(console, "_has_log", False)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    rank(0)
    console.start_log()
    with pytest.raises(SystemExit) as end:
        console.fail("ConfigError: train.max_tokens")
    assert end.value.code == 1 and (tmp_path / "outcome").read_text() == "failed"
    assert capsys.readouterr().err.count("ConfigError: train.max_tokens") == 1
    rank(1)
    console.start_log()
    root.handlers.append(logging.FileHandler(tmp_path / "rank-1.log"))
    monkeypatch.setattr(console, "leave_it_to_the_first", lambda: sys.exit("ended by the launcher"))
    with pytest.raises(SystemExit, match="ended by the launcher"):
        console.fail("ConfigError: train.max_tokens")
    assert capsys.readouterr().err == ""
    assert "ConfigError: train.max_tokens" in (tmp_path / "rank-1.log").read_text()
    assert json.loads((tmp_path / "1.json").read_text())["message"]["message"] == "ConfigError: train.max_tokens"


def error_of(*overrides: str) -> str:
    with pytest.raises(Exception) as raised, initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        compose("config", overrides=list(overrides))
    return hydra_errors.explain(raised.value, ROOT / "configs")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_process_whose_parent_has_ended_already_ends_too():
    script = "from forgetting_transformer import console; console.die_with_parent(0); print('lives')"
    done = run_command("-c", script)
    assert done.returncode == -signal.SIGTERM and not done.stdout


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["+experiment/demo=fox_prro"], "ConfigError: there is no experiment/demo=fox_prro; did you mean 'fox_pro'?"),
        (["train.max_token=3"], "ConfigError: unknown config key 'train.max_token'; did you mean 'train.max_tokens'?"),
        (["trian.max_tokens=3"], "ConfigError: unknown config key 'trian'; did you mean 'train'?"),
        (
            ["strategy.keep_gathered=true"],
            "ConfigError: unknown config key 'strategy.keep_gathered'; it is a key of strategy=fsdp",
        ),
        (["learning_rate=1e-3"], "ConfigError: unknown config key 'learning_rate'; did you mean 'optimizer.lr'?"),
        (
            ["+experiment=fox_pro"],
            "ConfigError: there is no experiment=fox_pro; did you mean +experiment/demo=fox_pro?",
        ),
        (
            ["train.max_tokens"],
            "ConfigError: 'train.max_tokens' is not of the form key=value",
        ),
        (
            ["model.config.mine=3"],
            "ConfigError: unknown config key 'model.config.mine'; a field that the model's YAML does not list is added "
            "with +model.config.mine=…",
        ),
        (
            ["callbacks=[gate_statistics]", "callbacks.gate_statistics.intervl=3"],
            "ConfigError: unknown config key 'callbacks.gate_statistics.intervl'; did you mean "
            "'callbacks.gate_statistics.interval'?",
        ),
        (
            ["callbacks.lm_eval.tasks=[a]"],
            "ConfigError: unknown config key 'callbacks.lm_eval.tasks'; choose the callback first, as in "
            "callbacks=[lm_eval]",
        ),
        (["callbacks=[lm_evil]"], "ConfigError: there is no callbacks=lm_evil; did you mean 'lm_eval'?"),
        (
            ["callbacks=[lm_eval,zzz]"],
            "ConfigError: there is no callbacks=zzz; choices: gate_statistics, lm_eval, needle, samples, or "
            "those of a plug-in, which is named first: plugins=[…]",
        ),
        (["optimizer="], "ConfigError: optimizer= is empty (a variable that is not set?); choices: adamw, muon"),
        *(
            (
                [f"{key}={value}"],
                f"ConfigError: {key}={value} cannot be read; give text that holds a space, = , : ; ~ quotes, brackets "
                f"or letters such as ä in two pairs of quotes: '{key}=\"…\"'",
            )
            for key, value in (("tag", "[a"), ("output_dir", "out/ä"), ("+datamodule.cache_dir", "~/zzz"))
        ),
        (["ätag=a"], "ConfigError: 'ätag=a' is not of the form key=value"),
    ],
)
def test_a_typo_is_answered_in_one_line_with_the_closest_name(overrides, text):
    assert error_of(*overrides) == text


def test_an_experiment_without_its_group_is_answered_with_the_groups():
    said = error_of("+experiment=zzz")
    assert said.startswith("ConfigError: there is no experiment=zzz; choices are in the groups experiment/demo, ")
    assert "as in +experiment/demo=delta_net" in said and "\n" not in said


def test_a_group_that_does_not_exist_is_named():
    """Hydra takes it for a new key of the config."""
    groups = ROOT / "configs"
    assert hydra_errors.unknown_group(["train", "model"], groups) is None
    said = hydra_errors.unknown_group(["train", "experiment/dmo"], groups)
    assert said == (
        "there is no group 'experiment/dmo'; did you mean 'experiment/demo'? (or name the plug-in that has it: "
        "plugins=[…])"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["=3"], "ConfigError: '=3' has no key; write key=value"), (["--resolve"], "ConfigError: The --resolve flag"),
     (["--config-name=foo"], "ConfigError: --config-name=foo: there is no such file in "),
     (["+experiment/demo=fox_pro", "data_dir=data", "output_dir= "], "ConfigError: output_dir")],
)  # fmt: skip
def test_what_hydra_raises_raw_is_one_line(said_by_train, tmp_path, arguments, said):
    assert said_by_train(*arguments).startswith(said)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def said_by_train(rank, monkeypatch, capsys, tmp_path):
    """Starts train.py in an empty folder; returns the one line with which it ends."""

    def start(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        monkeypatch.setattr(console, "_has_log", False)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        error = capsys.readouterr().err
        assert end.value.code == 1 and error.count("\n") == 1
        return error

    return start


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seed: 1\n\tx: 2\n", ", line 2, column 1: not valid YAML: found character '\\t' that cannot start any token"),
        (b"# @package\nseed: 1\n", ": Expected header format: KEY VALUE, got '@package'"),
        (b"# @package _global_\n- a\n", ": a config holds lines `key: value`"),
    ],
)
def test_a_config_of_ones_own_that_is_broken_is_one_line(said_by_train, tmp_path, content, said):
    file = tmp_path / "mine/experiment/my_model.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert said_by_train("--config-dir=mine", "+experiment=my_model").startswith(f"ConfigError: {file}{said}")


def test_a_config_with_a_byte_order_mark_is_read(monkeypatch, tmp_path):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/a.yaml").write_text("# @package _global_\nseed: 7\n", encoding="utf-8-sig")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir=mine", "+experiment=a", "output_dir=o", "data_dir=d"])
    composed = train.compose_or_explain()
    assert composed is not None and composed.seed == 7 and "experiment" not in composed


@pytest.mark.slow
def test_a_typo_on_two_ranks_is_one_line(tmp_path):
    flags = ["--accelerator", "cpu", "--devices", "2", "+experiment/demo=fox_prro", f"output_dir={tmp_path}/run"]
    done = run_command("scripts/launch.py", *flags)
    said = "ConfigError: there is no experiment/demo=fox_prro; did you mean 'fox_pro'?"
    assert (done.returncode, done.stderr.splitlines(), done.stdout) == (1, [said], "")
