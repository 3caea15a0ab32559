"""Runs on other corpora than one array: packed documents, and a mixture. Resume is exact with each of them."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.tiny import DOC_LEN, DOCUMENTS, VOCAB
from tests.training.conftest import STEP, changed, lines, losses, made_once, refused, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def texts(shared_folder) -> Path:
    """Two corpora, "tales" and "notes", in whose rows a text begins with token 0 every few tokens."""
    folder = shared_folder / "texts"
    with made_once(folder) as missing:
        if missing:
            for seed, name in enumerate(("notes", "tales")):
                generator = np.random.default_rng(seed)
                for split in ("train", "heldout"):
                    tokens = generator.integers(1, VOCAB // 4, size=(DOCUMENTS, DOC_LEN)).astype(np.uint16)
                    tokens[generator.random(tokens.shape) < 0.1] = 0
                    array = zarr.create_array(
                        folder / name / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(16, 32)
                    )
                    array[:] = tokens
    return folder


MIXTURE = {"datamodule__name": "mixture", "datamodule__parts": {"tales": 3, "notes": 1}}


@pytest.fixture(params=["packed", "mixture"])
def config(request, tiny, texts) -> dict:
    tiny = changed(tiny, data_dir=str(texts), datamodule__name="packed", datamodule__dataset="tales")
    return changed(tiny, **MIXTURE, datamodule__packed=True) if request.param == "mixture" else tiny


def test_straight_run_equals_interrupted_run_bitwise(config, continued):
    continued(config)


@pytest.mark.parametrize("config", ["mixture"], indirect=True)
def test_the_number_of_processes_may_change(config, finished, interrupted):
    config = changed(config, strategy__name="ddp")
    interrupted(config, 12, 2)
    train(changed(config, strategy__name="auto"))
    expected = losses(finished(changed(config, strategy__name="auto")))
    assert losses(config["output_dir"]) == pytest.approx(expected, abs=1e-4)


def test_a_position_is_that_in_the_document(config, finished):
    run = finished(config)
    window = lines(run, "train_eval")[0]
    assert window["train_eval/window_token_count"] == 6 * STEP
    assert window["train_eval/window_seq_count"] > 2 * 6 * 4, "documents and not rows"
    logged = [losses(run)[step * STEP] for step in range(1, 7)]
    assert window["train_eval/loss_avg_len_32"] == pytest.approx(sum(logged) / 6), "each token counts once"
    assert lines(run, "val")[0]["val/loss"] == pytest.approx(lines(run, "val")[0]["val/loss_avg_len_32"])
    with np.load(Path(run) / f"metrics/npz/train_eval/step-{6 * STEP:015d}.npz") as arrays:
        assert np.isfinite(arrays["train_eval/loss_per_token"][:8]).all()


def test_flops_are_those_of_documents_that_do_not_see_each_other(config, finished):
    whole = {"packed": False} if config["datamodule"]["name"] == "mixture" else {"name": "longcrawl64"}
    config = changed(config, train__max_tokens=STEP)
    flops = [
        lines(finished(changed(config, datamodule=config["datamodule"] | kind)), "model_info")[0]
        for kind in ({}, whole)
    ]
    assert flops[0]["model_info/flops_per_token"] < flops[1]["model_info/flops_per_token"]


def test_a_mixture_whose_parts_end_within_a_batch_reads_them_again(tiny, texts):
    tiny = changed(tiny, data_dir=str(texts), **MIXTURE)
    tiny = changed(tiny, datamodule__train_batch_size=512, datamodule__repeat=True, train__max_tokens=2 * 512 * 32)
    tiny = changed(tiny, train__grad_acc_tokens=512 * 32, skip_eval=True)
    train(tiny)
    assert [line["step"] for line in lines(tiny["output_dir"], "train")] == [512 * 32, 2 * 512 * 32]
    assert "set datamodule.repeat=true to read the data again" in refused(changed(tiny, datamodule__repeat=False))


def test_other_parts_and_models_that_carry_a_state_are_refused(tiny, texts, tmp_path):
    mixture = changed(tiny, data_dir=str(texts), train__max_tokens=4 * STEP, **MIXTURE)
    train(mixture)
    said = refused(changed(mixture, datamodule__parts={"tales": 1, "notes": 1}, train__max_tokens=8 * STEP))
    assert "datamodule.parts.tales: 3.0 -> 1.0" in said
    packed = changed(tiny, data_dir=str(texts), datamodule__name="packed", datamodule__dataset="tales")
    packed = changed(packed, output_dir=str(tmp_path / "other"), model__name="hgrn2")
    packed["model"]["config"] = {"hidden_size": 32, "num_hidden_layers": 1, "expand_ratio": 16}
    said = refused(packed)
    assert "ConfigError: datamodule.name=packed keeps documents apart, and model.name=hgrn2 would carry a state" in said
