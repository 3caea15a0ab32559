"""The evaluation commands of the paper's repository, as docs/coming_from_the_paper.md lists them, one after another."""

import json
import re
import shlex
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from lightning.fabric.cli import _run as fabric_run

from forgetting_transformer.evaluation import longbench, needle
from forgetting_transformer.evaluation.models import EvaluationError, load_model
from forgetting_transformer.files import write_json
from tests.evaluation.conftest import DOC_LEN, DOCUMENTS, Quickstart, sentences
from tests.evaluation.scripts import ROOT, run_script, short_answers

PAGE = ROOT / "docs/coming_from_the_paper.md"
MODEL = "fox-pro-760m-longcrawl64-48b"
# What the commands leave in their folder, and with them who has tried them in a checkout.
LEFT_THERE = ("prompts", "pred", "pred_e", "results", "figures", "PaulGrahamEssays")


def commands(folder: str) -> list[str]:
    """The first cells of the page's rows whose command is started in eval/<folder>."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Evaluation\n")[1]
    cells = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    found = [cell.removeprefix(f"cd eval/{folder} && ") for cell in cells if cell.startswith(f"cd eval/{folder} && ")]
    assert found, folder
    return found


class Reader:
    """Types the commands of the page, in a copy of their folder."""

    def __init__(self, folder: Path, variables: dict[str, object]) -> None:
        self.folder, self.variables = folder, variables

    def type(self, command: str):
        words = [re.sub(r"\$(\w+)", lambda name: str(self.variables[name[1]]), word) for word in shlex.split(command)]
        if words[:2] == ["fabric", "run"]:
            # What the launcher leaves of the command for its one process.
            options = fabric_run.make_context("run", words[2:]).params
            assert int(options["devices"]) == 1
            words = ["python", options["script"], *options["script_args"]]
        assert words[0] == "python"
        return run_script(self.folder / words[1], *words[2:])

    def type_all(self, lines: list[str]) -> None:
        for line in lines:
            done = self.type(line)
            assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.fixture
def reader(quickstart: Quickstart, tmp_path, monkeypatch, request):
    """In tmp_path/eval/<the test's parameter>, with the tiny model and corpus."""
    folder = tmp_path / "eval" / request.param
    shutil.copytree(ROOT / "eval" / request.param, folder, ignore=shutil.ignore_patterns("*.png", *LEFT_THERE))
    monkeypatch.chdir(folder)
    corpus = tmp_path / "data/longcrawl64"
    corpus.parent.mkdir()
    corpus.symlink_to(quickstart.data / "words")
    variables = {"MODEL": quickstart.hf, "DATA_DIR": corpus.parent, "SAVE_DIR": "results", "FIGURE_DIR": "figures"}
    return Reader(folder, {**variables, "API_KEY": "secret"})


@pytest.mark.parametrize("reader", ["per_token_loss"], indirect=True)
def test_loss_at_every_position(reader):
    run, plot = commands("per_token_loss")
    assert "--resume --save_interval 128" in run and "--figure_dir" in plot
    reader.type_all([run, plot])
    with np.load(reader.folder / "results" / MODEL / "results.npz") as arrays:
        assert arrays["val/loss_per_token"].shape == (DOC_LEN,) and arrays["eval_tokens"] == DOCUMENTS * DOC_LEN
    for suffix in ("png", "pdf"):
        assert (reader.folder / f"figures/main_loss_64k_line.{suffix}").is_file()
    assert "| FoX (Pro) |" in (reader.folder / "figures/slopes.md").read_text()


@pytest.mark.parametrize("reader", ["niah"], indirect=True)
def test_needle_in_a_haystack(reader, quickstart, monkeypatch, endpoint):
    essays = reader.folder / "PaulGrahamEssays"
    essays.mkdir()
    (essays / "one.txt").write_text(sentences(0, 500))
    for file in reader.folder.glob("config-prompt-*.yaml"):
        # Four prompts for a tiny model, counted with its tokenizer.
        text = file.read_text().replace("interval: 11", "interval: 2").replace("min_len: 1000", "min_len: 300")
        text = text.replace("max_len: 32000", "max_len: 400")
        file.write_text(text.replace("zhixuan-lin/longcrawl64-json-gpt2-tokenizer", str(quickstart.hf)))
    asked = short_answers(monkeypatch)
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    lines = commands("niah")
    assert [line.split()[1] for line in lines] == [
        f"{step}.py" for step in ("prompt", "prompt", "pred", "pred", "eval", "eval", "plot_niah")
    ]
    reader.type_all(lines)
    assert asked == [1024] * 8
    names = {f"Huggingface_len_{length}_depth_{depth}" for length in (300, 400) for depth in (0, 10000)}
    for exp in ("max_len_32k_easy", "max_len_32k_standard"):
        # The authors' pred.py reads Huggingface_*_prompts.json and leaves the settings alone.
        prompts = {f"{name}_prompts.json" for name in names}
        assert {file.name for file in Path("prompts", exp).iterdir()} == prompts | {"settings.json"}
        answers = {file.name for file in Path("pred", exp, MODEL).glob("*.txt*")}
        assert answers == {f"{name}.txt" for name in names} | {f"{name}.txt.done" for name in names}
        (ratings,) = Path("results", exp, MODEL).glob("*.json")  # plot_niah.py there draws every one
        assert ratings.name == "OpenAI_gpt-4o-2024-08-06_eval.json"
        rated = json.loads(ratings.read_text())
        assert rated.keys() == names and all(entry["score"] == 7 for entry in rated.values())
        for suffix in ("png", "pdf"):
            assert Path("figures", exp, f"needle_{exp}_{MODEL}.{suffix}").is_file()
    # The answers of both modes may be equal, and are then asked about once.
    path, key, body = endpoint.requests[0]
    assert (path, key, body["model"]) == (f"{endpoint.url}/chat/completions", "Bearer secret", "gpt-4o-2024-08-06")
    reader.type_all(lines[2:6])
    assert len(asked) == 8, "nothing is asked again"


@pytest.mark.parametrize("reader", ["niah"], indirect=True)
def test_a_mistake_in_the_steps_of_the_needle_is_one_line(reader, monkeypatch):
    monkeypatch.setattr(needle.time, "sleep", lambda seconds: None)
    answers = reader.folder / "pred/b/answered"
    answers.mkdir(parents=True)
    (answers / "Huggingface_len_300_depth_0.txt").write_text("red")
    # Port 9, "discard", which nothing listens to.
    nowhere = "--judge_url http://127.0.0.1:9/v1"
    for line, message in (
        ("prompt.py --config config-prompt-esy.yaml --exp a", "there is no config-prompt-esy.yaml; .* has config-"),
        ("prompt.py --config config-prompt-easy.yaml --exp a --tokenizer no/such", "give a folder with --tokenizer"),
        ("pred.py --exp b --model m --model_path $MODEL --device cpu", "there are no prompts in prompts/b .*prompt.py"),
        ("eval.py --exp b --model m --api-key k", "there are no answers in pred/b/m; run pred.py"),
        (f"eval.py --exp b --model answered {nowhere}", "cannot be reached .*--judge_url"),
        ("plot_niah.py --figure_dir figures", "there is no EXP/MODEL/.*_eval.json in .*; run eval.py first"),
    ):
        done = reader.type(f"python {line}")
        assert done.returncode == 1 and re.fullmatch(f"error: .*{message}.*", done.stderr.strip()), done.stderr


@pytest.mark.parametrize("reader", ["lm_eval_harness"], indirect=True)
def test_short_context_tasks(reader, monkeypatch):
    harness = pytest.importorskip(
        "forgetting_transformer.evaluation.harness", reason="the extra `eval` is not installed"
    )
    found = {"piqa": {"acc,none": 0.5}}

    def evaluate(model, folder, workers, *, tasks, max_length, batch_size, **_):
        assert len(tasks) == 11 and (max_length, batch_size, workers.device.type) == (16384, 16, "cpu")
        folder.mkdir(parents=True)
        write_json(folder / "results.json", found)
        (folder / "table.md").write_text("| PIQA acc |\n")

    monkeypatch.setattr(harness, "evaluate", evaluate)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    run, table = commands("lm_eval_harness")
    done = reader.type(run)
    assert done.returncode == 0 and "--device_id=0: this machine has no GPU; running on the CPU" in done.stderr
    done = reader.type(table)
    assert done.returncode == 0 and "| FoX (Pro) | – |" in " ".join(done.stdout.split())
    done = reader.type("python table_lm_eval.py --result_dir result")
    assert done.returncode == 1 and done.stderr.startswith("error: result: there is no MODEL/results.json in it")


@pytest.mark.parametrize("reader", ["longbench"], indirect=True)
def test_long_context_tasks(reader, tmp_path, monkeypatch):
    pytest.importorskip("rouge", reason="the extra `eval` is not installed")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in longbench.SETS:
            example = {"input": "what ?", "context": sentences(0, 20), "answers": ["red"], "all_classes": ["red"]}
            lines = "".join(json.dumps(example | {"length": length}) + "\n" for length in (100, 9000))
            archive.writestr(f"data/{name}.jsonl", lines)
            if name in longbench.E_SETS:
                archive.writestr(f"data/{name}_e.jsonl", lines)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_args, **_options: str(tmp_path / "data.zip"))
    asked = short_answers(monkeypatch)
    pred, pred_e, score, score_e, table = commands("longbench")
    done = reader.type(score)
    assert done.returncode == 1 and "no finished set in pred/fox-pro-760m-longcrawl64-48b" in done.stderr
    reader.type_all([pred, pred_e, score, score_e])
    assert len(asked) == 2 * 14 + 2 * 11
    reader.type_all([pred])
    assert len(asked) == 2 * 14 + 2 * 11, "nothing is asked again"
    for folder, sets in (("pred", longbench.SETS), ("pred_e", longbench.choose_sets(None, even=True))):
        files = {file.name for file in Path(folder, MODEL).glob("*.jsonl*")}
        assert files == {f"{name}.jsonl{end}" for name in sets for end in ("", ".done")}
        record = json.loads(Path(folder, MODEL, "lcc.jsonl").read_text().splitlines()[1])
        assert record.keys() == {"pred", "answers", "all_classes", "length"} and record["length"] == 9000
        scores = json.loads(Path(folder, MODEL, "result.json").read_text())
        assert scores.keys() == set(sets)
        assert set(scores["lcc"]) == set(longbench.RANGES) if folder == "pred_e" else scores["lcc"] >= 0
    done = reader.type(table)
    assert done.returncode == 0 and "| FoX (Pro) | " in done.stdout
    done = reader.type("python pred.py --model $MODEL --model_path $MODEL --max_length 100")
    assert done.returncode == 1 and "must not contain a path separator" in done.stderr


def test_a_hub_id_is_found_in_the_local_cache_and_missed_in_one_line(quickstart, tmp_path, monkeypatch):
    from huggingface_hub import constants

    name = f"zhixuan-lin/{MODEL}"
    snapshot = tmp_path / f"hub/models--{name.replace('/', '--')}/snapshots/0123abc"
    shutil.copytree(quickstart.hf, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = load_model(name)
    assert (found.name, len(found.tokenizer)) == (MODEL, 34)
    with pytest.raises(
        EvaluationError, match=r"cannot load the model zhixuan-lin/fox: .*without a network run `hf download"
    ):
        load_model("zhixuan-lin/fox")
