"""How a process of train.py ends, what its launcher adds, and what is said of a typo."""

import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
import types

import pytest

from forgetting_transformer import console, train
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.composer import compose_config
from forgetting_transformer.training import ConfigError
from tests.processes import ROOT, run_command, run_here
from tests.waiting import HANG


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """Makes this process a rank of an elastic launcher; returns a function that says which one."""

    def be(number: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv(console.OUTCOME_VARIABLE, str(tmp_path / "outcome"))

    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "NODE_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return be


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


def test_a_signal_after_a_preempted_run_changes_nothing_also_where_the_start_was_guarded(rank):
    """A scheduler and a launcher both send it: `python -m forgetting_transformer.train` has no other guard."""
    console.end_on_signals()
    assert console.exit_code("preempted") == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_preempted_process_ends_with_75_and_a_rank_of_a_launcher_with_0(rank, monkeypatch, tmp_path):
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


def test_what_all_ranks_find_wrong_is_said_by_the_first(rank, monkeypatch, capsys, tmp_path):
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
    monkeypatch.setattr(console.time, "sleep", lambda _: sys.exit("ended by the launcher"))
    with pytest.raises(SystemExit, match="ended by the launcher"):
        console.fail("ConfigError: train.max_tokens")
    assert capsys.readouterr().err == ""
    assert "ConfigError: train.max_tokens" in (tmp_path / "rank-1.log").read_text()


def test_a_config_is_printed_by_the_first_rank(rank, monkeypatch, capsys):
    for number in (0, 1):
        rank(number)
        monkeypatch.setattr(sys, "argv", ["train.py", "+experiment/demo=fox_pro", "--cfg", "job"])
        assert train.compose_or_explain() is None
        assert ("max_tokens" in capsys.readouterr().out) is (number == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_process_whose_parent_has_ended_already_ends_too():
    script = "from forgetting_transformer import console; console.die_with_parent(0); print('lives')"
    done = run_command("-c", script)
    assert done.returncode == -signal.SIGTERM and not done.stdout


DEMO = "+experiment/demo=fox_pro output_dir=out"
#: Overrides -> what is said, or how it begins.
TYPOS = {
    "+experiment/demo=fox_prro": "there is no experiment/demo=fox_prro; did you mean 'fox_pro'?",
    "+experiment/dmo=fox_pro": "there is no group 'experiment/dmo'; did you mean 'experiment/demo'? (or name the ",
    "+experiment=zzz": "there is no experiment=zzz; choices are in the groups experiment/demo, ",
    "train.max_token=3": "unknown config key 'train.max_token'; did you mean 'train.max_tokens'?",
    "learning_rate=1e-3": "unknown config key 'learning_rate'; did you mean 'optimizer.lr'?",
    f"{DEMO} optimizer.learning_rat=1": "unknown config key 'optimizer.learning_rat'; did you mean 'optimizer.lr'?",
    f"{DEMO} optimizer.xyz=1": "unknown config key 'optimizer.xyz'; keys of optimizer: betas, ",
    "xyz=1": "unknown config key 'xyz'; --help shows all keys",
    "train.max_tokens": "'train.max_tokens' is not of the form key=value",
    f"{DEMO} callbacks.needle.depth=[1]": "unknown config key 'callbacks.needle.depth'; did you mean 'callbacks.needle",
    f"{DEMO} callbacks.lm_eval.limit=8": "no value for callbacks.lm_eval.interval, callbacks.lm_eval.tasks: give it",
    f"{DEMO} callbacks.needle=null": "callbacks.needle=null: leave needle out of callbacks=[…] to train without it",
    f"{DEMO} callbacks={{needle:{{lengths:[8]}}}}": "callbacks is a list of names, as in callbacks=[needle]; keys ",
    "callbacks=[lm_eval,zzz]": "there is no callbacks=zzz; choices: ",
    "optimizer=": "optimizer= is empty (a variable that is not set?); choices: adamw, muon",
    "hydra/launcher=nope": "there is no hydra/launcher=nope; choices: basic, fabric",
    "tag=[a": "tag=[a cannot be read; give text that holds a space, = , : ; ~ quotes, brackets or letters such ",
    "output_dir=out/ä": "output_dir=out/ä cannot be read; give text that holds a space, ",
}


@pytest.mark.parametrize("overrides", TYPOS)
def test_a_typo_is_answered_in_one_line_with_the_closest_name(overrides):
    with pytest.raises((SweepError, ConfigError)) as raised:
        compose_config([*overrides.split(), "data_dir=data"])
    assert str(raised.value).startswith(TYPOS[overrides]) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["output_dri=x"], "ConfigError: unknown config key 'output_dri'; did you mean 'output_dir'?"),
     (["--resolve"], "ConfigError: The --resolve flag"),
     (["--device", "2"], "ConfigError: train.py has no option --device; did you mean --devices of `fabric run` and "),
     (["--confg-dir=x"], "ConfigError: train.py has no option --confg-dir; did you mean --config-dir?"),
     (["--config-name=foo"], "ConfigError: --config-name=foo: there is no such file; leave it out, or name config"),
     (["+experiment/demo=fox_pro", "data_dir=data", "output_dir= "], "ConfigError: output_dir"),
     (["+experiment/demo=fox_pro"], "ConfigError: no value for data_dir, output_dir: give it on the command line")],
)  # fmt: skip
def test_what_hydra_raises_raw_is_one_line(said_by_train, tmp_path, arguments, said):
    assert said_by_train(*arguments).startswith(said)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def said_by_train(rank, monkeypatch, capsys, tmp_path):
    """Starts train.py in an empty folder; returns the one line with which it ends."""

    def start(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(console, "_has_log", False)
        code, error = run_here("train.py", *arguments), capsys.readouterr().err
        assert code == 1 and error.count("\n") == 1
        return error

    return start


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(said_by_train, monkeypatch):
    """Beside other work a step on threads that spin takes many times as long."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    said_by_train("=3")
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    said_by_train("=3")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seed: 1\n\tx: 2\n", ", line 2, column 1: not valid YAML: found character '\\t' that cannot start any token"),
        (b"seed: 1\n\xfc: 2\n", ", line 2, column 1: the byte 0xfc is not UTF-8"),
        (b"# @package\nseed: 1\n", ": Expected header format: KEY VALUE, got '@package'"),
        (b"# @package _global_\n- a\n", ": a config holds lines `key: value`"),
    ],
)
def test_a_config_of_ones_own_that_is_broken_is_one_line(said_by_train, tmp_path, content, said):
    file = tmp_path / "mine/experiment/my_model.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert said_by_train("--config-dir=mine", "+experiment=my_model").startswith(f"ConfigError: {file}{said}")


def test_a_config_with_a_byte_order_mark_is_read(said_by_train, tmp_path):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    text = "# @package _global_\nseed: x\n"
    (tmp_path / "mine/experiment/a.yaml").write_text(text, encoding="utf-8-sig")
    options = ["--config-dir=mine", "+experiment/demo=fox_pro", "+experiment=a", "output_dir=o", "data_dir=d"]
    assert said_by_train(*options).startswith("ConfigError: seed=x must be a whole number")
