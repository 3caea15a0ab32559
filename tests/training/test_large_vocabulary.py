"""Vocabularies over 65,536 ids, as those of Llama 3 and Qwen, take four bytes an id, from the text to the export."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forgetting_transformer.data import DataError, LongCrawl64DataModule, TokenArray
from forgetting_transformer.data.mixture import MixtureDataModule
from forgetting_transformer.data.prepare import shards
from forgetting_transformer.data.tools.verify import verify
from forgetting_transformer.data.vocabulary import token_dtype
from forgetting_transformer.training.export import export
from tests.data.corpus_helpers import all_files, array_of, prepare, rows, write_tree
from tests.data.mirror import serve
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


@pytest.mark.slow
def test_an_interrupted_corpus_is_the_same_byte_for_byte(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    settings = {"tokenizer": str(wide / "tokenizer"), "doc_len": DOC_LEN, "heldout_docs": 12}
    calls, append = [], shards._append

    def die(path: Path, data: bytes) -> None:
        calls.append(path)
        append(path, data[: len(data) // 2] if len(calls) == 8 else data)
        if len(calls) == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "_append", die)
        prepare(tmp_path / "out", wide / "texts", **settings)
    prepare(tmp_path / "out", wide / "texts", **settings)
    assert all_files(tmp_path / "out") == all_files(wide / "wide")


def test_a_sound_array_is_called_sound_and_an_id_too_high_is_named(wide: Path, tmp_path: Path) -> None:
    shutil.copytree(wide / "wide", tmp_path / "copy")
    report = verify(tmp_path / "copy/train.zarr", WORDS)
    assert not report.problems
    assert {"content hash": "as manifest.json says"}.items() <= dict(report.lines).items()
    array = zarr.open_array(tmp_path / "copy/train.zarr", mode="r+")
    array[3, 5] = WORDS
    (tmp_path / "copy/train.sha256").unlink()
    (problem,) = verify(tmp_path / "copy/train.zarr", WORDS).problems
    assert "token id 70000 in document 3 at position 5 is not below vocab_size=70000" in problem
    with pytest.raises(DataError, match=r"train\.zarr: token id 70000 in document 3 at position 5 is not below"):
        labels(module(tmp_path, "copy"), 20)


def test_other_integers_are_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "train.zarr", data=np.ones((8, 64), dtype=np.int64), chunks=(8, 64))
    with pytest.raises(DataError, match=r"dtype int64; expected \(documents, doc_len\) of uint16 or uint32"):
        TokenArray(tmp_path / "train.zarr", WORDS)


@pytest.fixture
def remote(wide: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("forgetting_transformer.data.remote.FIRST_WAIT", 0.01)
    with serve(wide) as mirror:
        yield mirror.url


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_url_gives_the_same_tokens(wide: Path, remote: str, tmp_path: Path, workers: int) -> None:
    """Workers share decoded chunks and hand tokens over, so both are of the array's type."""
    local = module(wide)
    far = module(remote, cache_dir=str(tmp_path / "cache"), train_num_workers=workers, eval_num_workers=workers)
    assert far.train_info().fingerprint == local.train_info().fingerprint
    np.testing.assert_array_equal(labels(far), labels(local))
    assert labels(far).max() > 1 << 16
    held_out = [batch["labels"] for batch in far.eval_loader(0, 1)]
    assert torch.equal(torch.cat(held_out), torch.cat([batch["labels"] for batch in local.eval_loader(0, 1)]))


def test_the_room_for_batches_in_flight_is_reckoned_with_four_bytes(remote: str, tmp_path: Path) -> None:
    chunk = 16 * DOC_LEN * 4
    enough = {"cache_dir": str(tmp_path / "cache"), "train_num_workers": 0}
    module(remote, cache_gb=2 * chunk / 1e9, **enough).check_cache(1, evaluates=False)
    with pytest.raises(DataError, match=r"datamodule\.cache_gb=.* is less than"):
        module(remote, cache_gb=(2 * chunk - 1) / 1e9, **enough).check_cache(1, evaluates=False)


def test_parts_of_a_mixture_may_be_stored_differently(wide: Path) -> None:
    mixture = MixtureDataModule(str(wide), parts={"wide": 1, "narrow": 1}, **SHAPE)
    narrow, large = module(wide, "narrow", train_batch_size=2), module(wide, "wide", train_batch_size=2)
    found = labels(mixture).reshape(4, 4, 32)
    np.testing.assert_array_equal(found[:, ::2].reshape(8, 32), labels(narrow))  # in the order of names
    np.testing.assert_array_equal(found[:, 1::2].reshape(8, 32), labels(large))
    held_out = torch.cat([batch["labels"] for batch in mixture.eval_loader(0, 1)])
    assert held_out.max() > 1 << 16 and (held_out[: 2 * 12] < 1 << 16).all()


def test_parts_of_a_mixture_have_one_vocabulary(wide: Path, tmp_path: Path) -> None:
    for name in ("wide", "narrow"):
        shutil.copytree(wide / name, tmp_path / name)
    manifest = tmp_path / "narrow/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "vocab_size": 65_536}))
    with pytest.raises(DataError, match=r"different vocabularies \(narrow: 65,536 ids, BOS 0, EOS 0, wide: 70,000 ids"):
        MixtureDataModule(str(tmp_path), parts={"wide": 1, "narrow": 1}, **SHAPE)


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
