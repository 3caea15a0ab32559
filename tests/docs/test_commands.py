"""Commands of README.md and docs: those without GPU and network are run, all others are checked to the first step."""

import re
from pathlib import Path

import pytest

from forgetting_transformer.sweep.composer import compose_config
from tests.docs.commands import MORE, PAGES, ROOT, CommandError, Shell, blocks, shell_commands
from tests.evaluation.conftest import quickstart  # noqa: F401 (a fixture)
from tests.processes import run_here


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def check_page(text: str) -> None:
    shell = Shell()
    for words in shell_commands(text):
        shell.check(words)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page != PAGES[0])) for page in PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_command_of_a_page_would_be_taken(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_page(read(page))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("python train.py -m +experiment/demo=fox_pro,mamba2 train.max_tokns=1,2 output_dir=x data_dir=x", "max_tokns"),
        ("fabric run train.py --devices 5 +experiment/demo=fox_pro output_dir=x data_dir=x", "train_batch_size"),
        ("python scripts/sweep_lr.py +experiment/demo=fox_pro output_dir=x data_dir=x --sead 0,1", "SystemExit"),
        ("python -m studies.run studies/three_seeds/study.yaml x --models fox_po", "fox_po"),
        ('pip install -e ".[train,gpu]"', "no extra gpu"),
    ],
)
def test_a_wrong_command_is_noticed(wrong, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(CommandError, match=re.escape(message)):
        check_page(f"```bash\n{wrong}\n```\n")


# Commands that are run.


@pytest.mark.slow
def test_the_commands_of_the_readme_that_work_offline_work(quickstart, monkeypatch, tmp_path, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    offline = ("save_model", "verify_data", "compare", "plot_run", "report", "generate")
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR/results.json").write_text('{"piqa": {"acc,none": 0.5}}')
    values = {"RUN": str(quickstart.run), "quickstart/hf": str(quickstart.hf)}
    values |= {"$DATA_DIR/longcrawl64": str(quickstart.data / "words"), "$OUTPUT_DIR": str(quickstart.run)}
    ran = set()
    for words in shell_commands(read(ROOT / "README.md")):
        script = next((word for word in words if word.endswith(".py")), "")
        words = [word for word in words if word != MORE]
        if Path(script).stem in offline and words[-1] != script:
            for name, value in values.items():
                words = [word.replace(name, value) if name in word else word for word in words]
            assert not run_here(*words[words[0] == "python" :])
            ran.add(Path(script).stem)
    assert ran == set(offline)
    assert (tmp_path / "output/hf/fox-pro-125m-2b/model.safetensors").is_file()


def test_the_python_of_the_readme_runs(quickstart, monkeypatch, tmp_path):  # noqa: F811
    folder = tmp_path / "output" / "hf" / "fox-pro-125m-2b"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(quickstart.hf)
    monkeypatch.chdir(tmp_path)
    load, op = blocks(read(ROOT / "README.md"), "python")
    loaded, computed = {}, {}
    exec(load, loaded)
    assert loaded["model"].config.model_type.startswith("forgetting_transformer") and loaded["tokenizer"]("the cat")
    assert len(loaded["texts"]) == 2 and all(isinstance(text, str) for text in loaded["texts"])
    exec(op, computed)
    assert computed["out"].shape == computed["q"].shape
    computed["out"].sum().backward()
    assert computed["k"].grad.isfinite().all()


def test_the_yaml_of_the_page_on_training_is_an_experiment(tmp_path):
    (experiment,) = blocks(read(ROOT / "docs/train.md"), "yaml")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/my_fox.yaml").write_text(experiment)
    own = f"hydra.searchpath=[file://{tmp_path}]"  # what --config-dir adds
    config = compose_config([own, "+experiment=my_fox", "output_dir=x", "data_dir=x"])
    assert config.tag == "my_fox" and config.model.config["num_hidden_layers"] == 2


def test_the_python_of_the_page_on_data_is_what_the_corpus_takes(monkeypatch):
    (block,) = blocks(read(ROOT / "docs/data.md"), "python")
    calls = []

    def prepare_corpus(settings, out, workers):
        calls.append(settings)
        return {"unigram_entropy_nats": 5.0}

    monkeypatch.setattr("forgetting_transformer.data.prepare.prepare_corpus", prepare_corpus)
    exec(block, {})
    assert calls[0].tokenizer == "train:8192" and calls[0].heldout_docs == 32
