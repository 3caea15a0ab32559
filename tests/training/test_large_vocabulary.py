"""Vocabularies over 65,536 ids, as those of Llama 3 and Qwen, take four bytes an id, from the text to the export."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forgetting_transformer.data import LongCrawl64DataModule
from forgetting_transformer.data.mixture import MixtureDataModule
from forgetting_transformer.data.vocabulary import token_dtype
from forgetting_transformer.training.export import export
from tests.data.corpus_helpers import array_of, prepare, rows, write_tree
from tests.evaluation.scripts import run_script
from tests.tiny import tiny_config
from tests.training.conftest import STEP, changed, made_once, train
from tests.training.test_resume import assert_same_run, lines

WORDS = 70_000  # also the vocabulary's size: <eos> and <unk> stand in the places of two words
DOC_LEN = 64


def sentence(number: int, length: int) -> str:
    """Words of which most have ids over 65,535."""
    pick = random.Random(number)
    return " ".join(f"w{pick.choice((pick.randrange(2, 1000), pick.randrange(69_000, WORDS)))}" for _ in range(length))


def make_tokenizer(folder: Path) -> str:
    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<eos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def wide(shared_folder) -> Path:
    """A folder with the corpora "wide", of uint32, and "narrow", of uint16, both made with `tokenizer/`."""
    folder = shared_folder / "large_vocabulary"
    with made_once(folder) as missing:
        if missing:
            tokenizer = make_tokenizer(folder / "tokenizer")
            texts = write_tree(folder / "texts", {f"{n}/a.txt": sentence(n, 300) for n in range(40)})
            prepare(folder / "wide", texts, tokenizer=tokenizer, doc_len=DOC_LEN, heldout_docs=12)
            shutil.copytree(folder / "wide", folder / "narrow")
            for split in ("train", "heldout"):
                # An array of a stranger, whose ids happen to fit into two bytes.
                tokens = rows(folder / "wide", split)
                shutil.rmtree(folder / f"narrow/{split}.zarr")
                (folder / f"narrow/{split}.sha256").unlink()
                small = np.where(tokens > 1000, tokens % 1000 + 1, tokens).astype(np.uint16)
                zarr.create_array(folder / f"narrow/{split}.zarr", data=small, chunks=(16, 32))
    return folder


def labels(data: LongCrawl64DataModule | MixtureDataModule, batches: int = 4) -> np.ndarray:
    return np.concatenate([batch["labels"].numpy() for batch in data.train_loader(0, batches, 0, 1)])


def module(data_dir: Path | str, dataset: str = "wide", **changes) -> LongCrawl64DataModule:
    return LongCrawl64DataModule(str(data_dir), dataset=dataset, **{**SHAPE, **changes})


SHAPE = {
    "train_batch_len": 32,
    "train_batch_size": 4,
    "eval_batch_len": 32,
    "eval_local_batch_size": 4,
    "train_num_workers": 0,
    "eval_num_workers": 0,
}


# The corpus ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (151_936, "uint32")]
)
def test_two_bytes_where_they_suffice(ids: int, dtype: str) -> None:
    assert token_dtype(ids) == dtype
    assert token_dtype(ids).type(ids - 1) == ids - 1


@pytest.mark.slow
def test_the_arrays_hold_the_ids_of_the_texts(wide: Path, tmp_path: Path) -> None:
    text = " ".join(f"w{n}" for n in random.Random(7).sample(range(60_000, WORDS), 600))
    (tmp_path / "a.txt").write_text(text)
    manifest = prepare(
        tmp_path / "out", tmp_path / "a.txt", tokenizer=str(wide / "tokenizer"), doc_len=100, workers=2,
    )  # fmt: skip
    expected = [int(word[1:]) for word in text.split()]  # and 0 ends the text
    assert manifest["vocab_size"] == WORDS
    stored = np.concatenate([rows(tmp_path / "out", name) for name in ("train", "heldout")])
    assert stored.dtype == array_of(tmp_path / "out/train.zarr").dtype == np.uint32
    for row in stored.tolist():
        begin = expected.index(row[0])
        assert [*expected, 0][begin : begin + 100] == row


# The model ----------------------------------------------------------------------------------------------------


CONTINUES = pytest.mark.rare("tests/training/test_large_vocabulary.py::test_a_run_continues_bitwise")


@pytest.fixture(
    params=["longcrawl64", pytest.param("packed", marks=CONTINUES), pytest.param("mixture", marks=CONTINUES)]
)
def config(request, wide: Path, tmp_path: Path) -> dict:
    settings = changed(
        tiny_config(tmp_path / "run", wide), datamodule__dataset="wide", datamodule__name=request.param,
        datamodule__vocab_size=None, datamodule__bos_token_id=None, train__max_tokens=12 * STEP,
        model__config__hidden_size=16, datamodule__eval_tokens=None, eval_interval=4 * STEP,
    )  # fmt: skip
    return changed(settings, datamodule__parts={"wide": 1, "narrow": 1}) if request.param == "mixture" else settings


@pytest.mark.slow
def test_a_run_continues_bitwise(config: dict, finished) -> None:
    shutil.copytree(finished(config), config["output_dir"])
    shutil.rmtree(Path(config["output_dir"]) / f"checkpoints/step-{12 * STEP:015d}")
    train(config)
    assert_same_run(finished(config), config["output_dir"], 12 * STEP)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["longcrawl64"], indirect=True)
def test_an_export_generates_and_has_the_held_out_loss_of_the_run(
    config: dict, finished, wide: Path, tmp_path: Path
) -> None:
    run = finished(config)
    export(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == WORDS
    said = run_script(
        "eval/per_token_loss/run_per_token_loss.py", "--model_path", tmp_path / "hf", "--data_path", wide / "wide",
        "--eval_len", 32, "--save_dir", tmp_path / "results", "--device", "cpu",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    found = json.loads(next((tmp_path / "results").rglob("results.json")).read_text())
    assert found["val/loss_avg_len_32"] == pytest.approx(lines(run, "val")[-1]["val/loss"], rel=1e-4)
    said = run_script(
        "scripts/generate.py", tmp_path / "hf", "--prompt", "w69123 w2", "--max_new_tokens", 8, "--device", "cpu"
    )
    assert said.returncode == 0, said.stderr
    assert sum(word.startswith("w") for word in said.stdout.split()) >= 2
