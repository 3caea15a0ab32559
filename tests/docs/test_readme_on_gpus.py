"""The commands of README.md for a GPU node: they run against a small mirror, and their data suffice for their run."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from forgetting_transformer.data.order import ReadingOrder
from forgetting_transformer.data.tools.download import MIRROR, documents_needed, download
from forgetting_transformer.sweep.composer import compose_config
from tests.data.mirror import DOC_LEN, serve, write_layout
from tests.docs.commands import ROOT, Shell, blocks, parsed, shell_commands
from tests.processes import run_command
from tests.tiny import tiny_config
from tests.training.conftest import changed, refused

README = (ROOT / "README.md").read_text(encoding="utf-8")
(BLOCK,) = (block for block in blocks(README, "bash") if "download_longcrawl64" in block)
#: Appended to the command of train.py.
SMALL = """
    --devices=1 --accelerator=cpu fabric.precision=32-true wandb.mode=disabled
    scale.hidden_size=32 scale.num_hidden_layers=1 scale.heads_of_64=1
    datamodule.train_batch_len=24 datamodule.train_batch_size=4 datamodule.train_num_workers=0
    train.max_tokens=1536 train.grad_acc_tokens=48 schedule.warmup_tokens=96 eval.min_val_length=8
    log_interval=96 train_eval_interval=384 checkpoint_interval=768
"""
#: A script in a process that has imported what reads HF_ENDPOINT and HF_HUB_OFFLINE.
AT_THE_MIRROR = """
import runpy, sys
from huggingface_hub import constants
constants.ENDPOINT, constants.HF_HUB_OFFLINE, sys.argv = {!r}, False, {!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def mirror(tmp_path):
    """The mirror that is the default source, with few and short documents and with gaps."""
    write_layout(tmp_path / "mirror/train.zarr", ("1.0", "1.1", "1.2", "1.3", "3.3"))
    write_layout(tmp_path / "mirror/heldout.zarr")
    repository, _, revision = MIRROR.removeprefix("hf://datasets/").partition("@")
    with serve(tmp_path / "mirror", repository=repository, revision=revision) as mirror:
        yield mirror


@pytest.mark.slow
def test_the_commands_for_gpus_run_as_written(mirror, tmp_path):
    for name in ("scripts", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert BLOCK.count("--documents 40960") == 1 and BLOCK.endswith("    resume=true\n")
    page = f"```bash\n{BLOCK.rstrip()} {' '.join(SMALL.split())}\n```\n".replace("40960", "16")
    shell, printed, ran = Shell(), "", []
    for words in filter(None, map(shell.expand, shell_commands(page))):
        ran.append(words[0])
        if words[0] != "pip":
            script = ["-c", AT_THE_MIRROR.format(mirror.url, words)]
            if words[0] == "fabric":
                script = [str(Path(sys.executable).with_name("fabric")), *words[1:]]
            done = run_command(*script, folder=tmp_path)
            assert done.returncode == 0, done.stderr
            printed += done.stdout
    download = "scripts/download_longcrawl64.py"
    assert ran == ["pip", download, download, "scripts/verify_data.py", "fabric"]
    assert f"the source has: 28 documents of {DOC_LEN} tokens" in printed
    assert f"asked for: 16 documents of {DOC_LEN} tokens" in printed
    assert sum(name.startswith("train.zarr/") for name in mirror.fetched()) == 8
    run = tmp_path / "output/model/fox_pro_125m_2b"
    assert (run / "checkpoints/step-000000000001536").is_dir()


def needed(experiment: str) -> int:
    chosen = f"+experiment/longcrawl64/forgetting_transformer={experiment}"
    config = compose_config([chosen, "output_dir=x", "data_dir=x"])
    shape = (65_536, config.datamodule.train_batch_len, config.datamodule.train_batch_size)
    documents, tokens = documents_needed(config.train.max_tokens, *shape), config.train.max_tokens
    enough, fewer = (ReadingOrder(number, *shape).batches for number in (documents, documents - 1))
    assert fewer * shape[1] * shape[2] < tokens <= enough * shape[1] * shape[2]
    return documents


def test_the_documents_that_are_fetched_suffice_for_the_run():
    (trained,) = re.findall(r"forgetting_transformer=(\w+)", BLOCK)
    (fetched,) = re.findall(r"--documents (\d+)", BLOCK)
    assert int(fetched) == needed(trained)
    for experiment in ("pro_760m_16b", "pro_760m_48b"):
        assert re.search(rf"`{experiment}`,?\s(?:which )?needs\s{needed(experiment):,}", README), experiment


def test_too_few_documents_are_refused_with_their_number_and_the_command_that_fetches_them(mirror, tmp_path):
    data = tmp_path / "longcrawl64"
    download(mirror.url, "train", data, documents=8)
    run = tiny_config(tmp_path / "run", tmp_path) | {"skip_eval": True}
    corpus = {"dataset": "longcrawl64", "missing_chunks": "skip", "vocab_size": None, "bos_token_id": None}
    config = changed(run, **{f"datamodule__{key}": value for key, value in corpus.items()})
    # 9 batches of 4 sequences of 32 tokens, three of them in a document.
    said = refused(changed(config, train__max_tokens=9 * 128))
    assert f"train.max_tokens=1,152 is more than the 768 tokens of {data / 'train.zarr'}" in said
    command = re.search(r"or fetch the 12 documents that it needs: scripts/download_longcrawl64\.py (.*)", said)[1]
    wanted = ["train", "--documents", "12", "--tokens", "96", "--out", str(data), "--source", mirror.url]
    assert shlex.split(command) == wanted
    assert parsed(ROOT / "scripts/download_longcrawl64.py", tuple(wanted), False).documents == 12
