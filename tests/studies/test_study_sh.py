"""studies/study.sh with a stand-in for Python: its stages name what they skip, and exit codes are passed on."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from studies import run as run_command
from tests.waiting import HANG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

ROOT = Path(__file__).parents[2]

#: Says what it was called with; code that is given by -c prints nothing, as on a machine without GPUs.
PYTHON = """#!/usr/bin/env bash
[[ "$1" != -c || "$2" != *named_in* ]] || exec REAL_PYTHON "$@"
[ "$1" != -c ] || exit 0
echo "$*" >> "$CALLS"
[ -z "${PATHS:-}" ] || echo "$FORGETTING_TRANSFORMER_PLUGINS" >> "$PATHS"
case "$1" in
studies/run.py) sleep "${TRAIN_SECONDS:-0}"; exit "${TRAIN_CODE:-0}" ;;
eval/per_token_loss/*) [[ "$4$*" != *"runs/${FAILING:-none} "* ]] ;;
studies/code_tasks.py) exit "${TASKS_CODE:-0}" ;;
*) exit 0 ;;
esac
"""


#: What the script reads of its environment, which a test sets or leaves at its default.
SETTINGS = (
    "STUDY", "TOKENS", "SEARCH_TOKENS", "ABLATION_TOKENS", "SEEDS", "SPEED_SEEDS", "JOBS_PER_GPU", "MODELS", "SOURCES",
    "VOCABULARY", "DOC_LEN", "HELDOUT_DOCS", "OVERRIDES", "SECONDS_TO_TRAIN", "QUESTIONS", "NEEDLE", "LONGBENCH_DATA",
    "LM_EVAL_TASKS", "SPEED_LEN", "SPEED_BATCH", "EVAL_BATCH", "EVAL_JOBS", "GLOB",
)  # fmt: skip


@pytest.fixture
def study_sh(tmp_path, monkeypatch):
    """Runs stages of the script on runs that are there; returns exit code, output and the calls of Python."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    python.write_text(PYTHON.replace("REAL_PYTHON", sys.executable))
    python.chmod(0o755)

    def run(*stages: str, runs: str = "mamba2_seed0 fox_pro_seed0", **environment: str) -> tuple[int, str, list[str]]:
        for name in runs.split():
            (tmp_path / "study/runs" / name / "checkpoints").mkdir(parents=True, exist_ok=True)
        calls = tmp_path / "calls"
        calls.write_text("")
        settings = {
            "PYTHON": str(python),
            "CALLS": str(calls),
            "MODELS": "mamba2 hgrn2 fox_pro",
            **environment,
        }
        command = ["bash", str(ROOT / "studies/study.sh"), str(tmp_path / "study"), *stages]
        done = subprocess.run(
            command,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG,
        )
        return done.returncode, done.stdout, calls.read_text().splitlines()

    return run


def test_a_study_whose_training_fails_goes_on_with_what_there_is_and_fails(study_sh):
    code, out, calls = study_sh("train", "collect", TRAIN_CODE="3")
    assert code == 3 and "training is not complete: exit code 3" in out
    assert [call.split()[0] for call in calls] == ["studies/run.py", "studies/report.py"]
    assert study_sh("train")[0] == 0


def test_a_study_that_was_given_so_many_seconds_to_train_has_not_failed(study_sh):
    code, out, _ = study_sh("train", "collect", TRAIN_SECONDS="5", SECONDS_TO_TRAIN="1")
    assert code == 0 and "training was stopped after 1 s" in out


def test_a_corpus_leaves_near_duplicates_out_unless_it_was_begun_with_them(study_sh, tmp_path):
    def prepares() -> str:
        return next(call for call in study_sh("corpus")[2] if call.startswith("scripts/prepare_data.py"))

    assert " --dedup " in prepares()
    begun = tmp_path / "study/data/python_code/manifest.json"
    begun.parent.mkdir(parents=True)
    begun.write_text('{"settings": {\n"dedup": 0.8}}')
    assert " --dedup " in prepares()
    begun.write_text('{"settings": {"doc_len": 16384}}')
    assert "--dedup" not in prepares()


def test_sources_are_those_of_the_folder_in_which_it_is_started(study_sh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    code, out, (call,) = study_sh("corpus", SOURCES="texts", GLOB="*.md")
    assert code == 0 and call.startswith(f"scripts/prepare_data.py {tmp_path}/texts --glob *.md "), out
    code, out, calls = study_sh("corpus", SOURCES="texts text")
    assert code == 2 and calls == [] and f"SOURCES=texts text: there is no text in {tmp_path}" in out
    assert study_sh("collect", SOURCES="text")[0] == 0, "which reads none of them"
    (tmp_path / "link").symlink_to("texts")
    assert study_sh("corpus", SOURCES="link")[2][0].startswith(f"scripts/prepare_data.py {tmp_path}/link ")


def test_every_stage_gets_the_plug_ins_of_the_overrides(study_sh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study_sh("train")
    (tmp_path / "study/runs/fox_pro_seed0/status.json").write_text('{"status": "done"}')
    (tmp_path / "texts").mkdir()
    overrides = "optimizer.lr=1e-3 plugins=[my_lab,my_other]"
    stages = ("train", "evaluate", "downstream", "collect")
    code, out, calls = study_sh(*stages, OVERRIDES=overrides, PATHS=str(tmp_path / "paths"), LONGBENCH_DATA="texts")
    assert code == 0, out
    assert " plugins=[my_lab,my_other] " in calls[0] and calls[0].startswith("studies/run.py")
    scripts = {call.split()[0] for call in calls if " --plugins my_lab my_other" in call}
    assert {Path(script).name for script in scripts} == {
        "run_per_token_loss.py", "training.py", "run_niah.py", "run_longbench.py", "run_lm_eval.py", "study_report.py",
    }  # fmt: skip
    assert sum(f"--data_dir {tmp_path}/texts " in call for call in calls) == 1
    assert {*(tmp_path / "paths").read_text().splitlines()} == {str(tmp_path)}
    code, out, calls = study_sh("evaluate", OVERRIDES="plugins=['my_lab']")
    assert code == 0 and calls[0].endswith("--plugins my_lab")
    code, out, calls = study_sh("evaluate", OVERRIDES="plugins=[my_lab, my_other]")
    assert code == 2 and calls == [] and "OVERRIDES: plugins=[my_lab, is not a list" in out


def test_a_folder_without_runs_is_no_success(study_sh):
    code, out, calls = study_sh("evaluate", "downstream", "collect", runs="")
    assert code == 1 and [call.split()[0] for call in calls] == ["studies/report.py"]
    assert out.count("has no runs; give the FOLDER that they were trained in") == 2
    # Training may have ended before the first run began, as with SECONDS_TO_TRAIN.
    code, out, calls = study_sh("train", "evaluate", runs="")
    assert code == 0 and "has no runs" not in out


def test_an_evaluation_that_fails_makes_the_script_fail_after_the_others(study_sh):
    code, out, calls = study_sh("evaluate", "collect", FAILING="mamba2_seed0")
    assert code == 1 and "position_loss of mamba2_seed0 failed" in out
    assert "position_loss of hgrn2_seed0 is skipped" in out
    assert sum("per_token_loss" in call for call in calls) == 2 and "study_report.py collect" in calls[-1]


def test_what_was_evaluated_is_not_evaluated_again_until_the_run_goes_on(study_sh, tmp_path):
    assert study_sh("evaluate")[0] == 0
    for name in ("mamba2_seed0", "fox_pro_seed0"):
        results = tmp_path / "study/position_loss" / name / "results.json"
        results.parent.mkdir(parents=True)
        results.write_text("{}")
        (tmp_path / "study/speed" / f"{name}.json").write_text('{"status": "ok"}')
    newest = (tmp_path / "study/speed/mamba2_seed0.json").stat().st_mtime
    for checkpoints, calls in ((newest - 10, 0), (newest + 10, 2)):
        os.utime(tmp_path / "study/runs/mamba2_seed0/checkpoints", (checkpoints, checkpoints))
        os.utime(tmp_path / "study/runs/fox_pro_seed0/checkpoints", (newest - 10, newest - 10))
        code, out, made = study_sh("evaluate")
        assert code == 0 and len(made) == calls and "position_loss/fox_pro_seed0/results.json is there already" in out
    assert all("runs/mamba2_seed0" in call for call in made) and "--no-resume" in made[0]


def test_finished_runs_are_asked_once_and_again_when_they_have_gone_on(study_sh, tmp_path):
    study_sh("train")  # makes the folders of two runs
    run = tmp_path / "study/runs/fox_pro_seed0"
    (run / "status.json").write_text('{"status": "done"}')
    code, out, calls = study_sh("downstream")
    assert code == 0 and "downstream tasks of mamba2_seed0 are skipped: it is not finished" in out
    assert "needle of hgrn2_seed0 is skipped: there is no such run yet" in out
    scripts = [call.split()[0] for call in calls]
    assert scripts == [
        "eval/niah/run_niah.py", "eval/niah/run_niah.py", "studies/code_tasks.py", "eval/longbench/run_longbench.py",
        "eval/lm_eval_harness/run_lm_eval.py",
    ]  # fmt: skip
    assert "--mode paper " in calls[0] and "--mode paper_easy " in calls[1] and "fox_pro_seed0" in calls[0]
    results = [
        tmp_path / "study/downstream" / name
        for name in (
            "needle/fox_pro_seed0/paper/scores.json", "needle/fox_pro_seed0/paper_easy/scores.json",
            "next_line/fox_pro_seed0/results.json", "lm_eval/fox_pro_seed0/results.json",
        )
    ]  # fmt: skip
    for file in results:
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        (file.parent / "settings.json").write_text("{}")
    newest = max(file.stat().st_mtime for file in results)
    os.utime(run / "checkpoints", (newest - 10, newest - 10))
    code, out, calls = study_sh("downstream")
    assert code == 0 and [call.split()[0] for call in calls] == ["studies/code_tasks.py"]
    assert "next_line/fox_pro_seed0/results.json is there already" in out
    # Answers that are not complete go on, as long as they are of these weights.
    results[0].unlink()
    assert ["--mode paper " in call for call in study_sh("downstream")[2]] == [True, False]
    assert (results[0].parent / "settings.json").is_file()
    os.utime(run / "checkpoints", (newest + 10, newest + 10))
    assert len(study_sh("downstream")[2]) == 5 and not any(file.parent.exists() for file in results)


def test_no_model_is_asked_other_questions_than_the_others_were(study_sh, tmp_path):
    study_sh("train")
    (tmp_path / "study/runs/fox_pro_seed0/status.json").write_text('{"status": "done"}')
    (tmp_path / "study/tasks").mkdir()
    (tmp_path / "study/tasks/next_line.yaml").write_text("of 500 questions")
    code, out, calls = study_sh("downstream", "collect", QUESTIONS="20", TASKS_CODE="1")
    assert code == 1 and "no model is asked for the next line of code" in out
    assert [call.split()[0] for call in calls[2:]] == ["studies/code_tasks.py", "studies/report.py"]
    assert " --questions 20 " in calls[2]


def test_answers_of_older_weights_are_moved_aside_with_what_else_lies_there(study_sh, tmp_path):
    run, downstream = tmp_path / "study/runs/fox_pro_seed0", tmp_path / "study/downstream"
    answers, aside = downstream / "next_line/fox_pro_seed0", downstream / "previous/next_line"
    study_sh("train")
    (run / "status.json").write_text('{"status": "done"}')
    for notes in ("first", "second"):
        answers.mkdir(parents=True)
        (answers / "settings.json").write_text("{}")
        (answers / "my_notes.md").write_text(notes)
        newer = (answers / "settings.json").stat().st_mtime + 10
        os.utime(run / "checkpoints", (newer, newer))
        assert study_sh("downstream")[0] == 0 and not answers.exists()
    assert {file.read_text() for file in aside.glob("*/my_notes.md")} == {"first", "second"}


def test_models_that_prune_are_timed_without_pruning_too(study_sh, tmp_path):
    study_sh("train")
    (tmp_path / "study/runs/fox_pro_seed0/config.yaml").write_text("    log_pruning_tolerance: -10.0\n")
    (tmp_path / "study/runs/mamba2_seed0/config.yaml").write_text("    log_pruning_tolerance: null\n")
    calls = [call for call in study_sh("evaluate")[2] if call.startswith("benchmarks/")]
    unpruned = [call for call in calls if call.endswith("--overrides model.config.log_pruning_tolerance=null")]
    assert len(calls) == 3 and len(unpruned) == 1 and "speed/unpruned/fox_pro_seed0.json" in unpruned[0]


def test_ablations_are_those_of_the_models_that_were_chosen(study_sh):
    _, _, (call,) = study_sh("train", MODELS="mamba2 transformer_llama", TOKENS="2000", ABLATION_TOKENS="160")
    assert call.endswith(
        "--models mamba2 transformer_llama --seeds 0 --variant train.max_tokens=160 schedule.warmup_tokens=10"
    )
    arguments = run_command.parse_args(call.split()[1:])
    assert arguments.variants == [["transformer_llama", "transformer_llama", "transformer_llama_no_rope"]]
    assert arguments.variant == ["train.max_tokens=160", "schedule.warmup_tokens=10"]
    assert arguments.overrides[-2:] == ["train.max_tokens=2000", "schedule.warmup_tokens=100"]
    assert "train.max_tokens=6291456" in arguments.search, "what the study says, where nothing else is said"
    _, _, (call,) = study_sh("train", ABLATION_TOKENS="0")
    assert run_command.parse_args(call.split()[1:]).variants == []


def test_a_study_is_a_yaml(study_sh, tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text("group: demo\nmodels: {fox_pro: FoX, mamba2: Mamba-2}\nseeds: [4, 5]\n")
    _, _, (call,) = study_sh("train", STUDY=str(file), MODELS="mamba2")
    arguments = run_command.parse_args(call.split()[1:])
    assert (arguments.group, arguments.models, arguments.search) == ("demo", ["mamba2"], [])


def test_every_seed_is_evaluated_and_the_speed_of_the_first_is_measured(study_sh):
    runs = "mamba2_seed3 fox_pro_seed3 mamba2_seed4"
    code, out, calls = study_sh("train", "evaluate", runs=runs, SEEDS="3 4", MODELS="mamba2 fox_pro")
    assert code == 0 and "--seeds 3 4" in calls[0]
    evaluated = {(call.split("/")[0], name) for call in calls[1:] for name in call.split() if "study/runs/" in name}
    assert {(kind, name.rpartition("/")[2]) for kind, name in evaluated} == {
        ("eval", "mamba2_seed3"), ("eval", "fox_pro_seed3"), ("eval", "mamba2_seed4"),
        ("benchmarks", "mamba2_seed3"), ("benchmarks", "fox_pro_seed3"),
    }  # fmt: skip
    assert "position_loss of fox_pro_seed4 is skipped: there is no such run yet" in out


def test_seeds_that_are_no_numbers_are_refused(study_sh):
    for name, value in (("EVAL_JOBS", "0"), ("EVAL_JOBS", "2.5"), ("JOBS_PER_GPU", "many"), ("SPEED_SEEDS", "1")):
        code, out, calls = study_sh("evaluate", SEEDS="0", **{name: value})
        assert code == 2 and f"{name}={value}: give" in out and not calls
    code, out, calls = study_sh("evaluate", SEEDS="0", SPEED_SEEDS="")
    assert code == 0 and calls and not any("benchmarks/training.py" in call for call in calls)
    code, out, calls = study_sh("train", SEEDS="0,1")
    assert code == 2 and 'SEEDS=0,1: give numbers, as in SEEDS="0 1 2"' in out and not calls


def test_ablations_may_be_trained_without_the_runs(study_sh):
    (train,) = [call for call in study_sh("train", RUNS="0")[2] if call.startswith("studies/run.py")]
    assert "--no_runs" in train.split()
    (train,) = [call for call in study_sh("train", RUNS="1")[2] if call.startswith("studies/run.py")]
    assert "--no_runs" not in train
    for settings in ({"RUNS": "no"}, {"RUNS": " 0"}, {"RUNS": "0", "ABLATION_TOKENS": "0"}):
        code, out, calls = study_sh("train", **settings)
        assert code == 2 and f"RUNS={settings['RUNS']}" in out and not any("study.py" in call for call in calls)


def test_usage_is_the_comment_and_nothing_else():
    done = subprocess.run(["bash", "studies/study.sh"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and len(lines) > 15 and all(line.startswith("#") for line in lines)


def test_what_says_which_program_runs_it_can_be_run():
    """Files that begin with #! are executable, and those that are executable begin with #!."""
    for folder in ("scripts", "benchmarks", "eval"):
        for path in [*ROOT.glob(f"{folder}/**/*.py"), *ROOT.glob(f"{folder}/**/*.sh")]:
            assert path.read_bytes().startswith(b"#!") == os.access(path, os.X_OK), path


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_of_two_starts_in_one_folder_the_second_is_refused(study_sh, tmp_path):
    """Both would start the same runs, and the second one's would be counted as failed."""
    settings = {"PYTHON": str(tmp_path / "python"), "CALLS": str(tmp_path / "first"), "TRAIN_SECONDS": "3600"}
    settings["MODELS"] = "mamba2 fox_pro"
    command = ["bash", str(ROOT / "studies/study.sh"), str(tmp_path / "study"), "train"]
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen(command, env=os.environ | settings, stdout=said, stderr=said, start_new_session=True)
    try:
        wait_until((tmp_path / "first").is_file, lambda: first.poll() is None, (tmp_path / "said").read_text)
        code, out, calls = study_sh("train", "collect")
        assert code == 1 and not calls
        assert f"another study.sh (process {first.pid}) is at work in {tmp_path}/study" in out
        assert len(out.splitlines()) == 1
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    # What it had started was killed too, but may take a moment to be gone.
    wait_until(lambda: is_free(tmp_path / "study/study.lock"), lambda: True)
    assert study_sh("train")[0] == 0, "a start that was killed holds nothing"


@pytest.mark.parametrize(
    ("stages", "settings", "said"),
    [
        (["train"], {"TOKENS": "1e6"}, "TOKENS=1e6: give a number, 1 or more, in digits alone"),
        (["train"], {"ABLATION_TOKENS": "1.5"}, "ABLATION_TOKENS=1.5: give a number of tokens"),
        (["train"], {"SECONDS_TO_TRAIN": "abc"}, "SECONDS_TO_TRAIN=abc: give a number"),
        (["evaluate"], {"EVAL_BATCH": "0"}, "EVAL_BATCH=0: give a number, 1 or more"),
        (["train", "evalute"], {}, "stages are corpus, train, evaluate, downstream and collect, not evalute"),
        (["train"], {"STUDY": "no/such.yaml"}, "STUDY=no/such.yaml: there is no such file"),
        (["train"], {"PYTHON": "no_such_python"}, "there is no command no_such_python; set PYTHON"),
    ],
)
def test_what_is_wrong_with_any_stage_is_said_before_the_first(study_sh, stages, settings, said):
    code, out, calls = study_sh(*stages, **settings)
    assert code == 2 and said in out and not calls


@pytest.mark.parametrize("text", ["seeds: 0 1 2\n", "7\nand what I wrote below\n"])
def test_a_file_of_the_users_that_is_called_like_the_lock_stays(study_sh, tmp_path, text):
    lock = tmp_path / "study/study.lock"
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(text)
    code, out, calls = study_sh("train")
    assert code == 2 and not calls and f"{lock} is not a lock of study.sh" in out
    assert lock.read_text() == text
    lock.write_text("7\n")
    assert study_sh("train")[0] == 0, "that of a start that is gone"
