"""Training from an array elsewhere, or from a partial copy: the same run as from a whole local one, or a refusal."""

import shutil
from pathlib import Path

import pytest
import zarr

from forgetting_transformer.data.storage.checksums import write_list
from forgetting_transformer.training.checkpoint.folder import newest_valid
from tests.data.mirror import serve
from tests.training.conftest import STEP, assert_same_tensors, changed, losses, refused, train


@pytest.mark.slow
def test_a_run_begun_on_a_url_continues_on_a_local_copy_and_is_the_same_run(tiny, tmp_path, finished):
    tiny = changed(tiny, train__max_tokens=8 * STEP, skip_eval=True)
    with serve(Path(tiny["data_dir"])) as mirror:
        elsewhere = {"data_dir": mirror.url, "datamodule__cache_dir": str(tmp_path / "cache")}
        train(changed(tiny, **elsewhere, train__max_tokens=4 * STEP))
    train(tiny)
    assert_same_tensors(finished(tiny), tiny["output_dir"], 8 * STEP)
    assert losses(finished(tiny)) == losses(tiny["output_dir"])


@pytest.mark.slow
def test_a_partial_copy_trains_on_purpose_and_only_goes_on_with_the_same_documents(tiny, tmp_path, corpus):
    shutil.copytree(corpus, tmp_path / "data")
    tiny = changed(tiny, train__max_tokens=8 * STEP, skip_eval=True)
    partial = changed(tiny, data_dir=str(tmp_path / "data"))
    gone = tmp_path / "data/tiny/train.zarr/c/2/1"
    kept = gone.rename(tmp_path / "kept")
    assert "missing chunk" in refused(partial) and "missing_chunks=skip" in refused(partial)
    partial = changed(partial, datamodule__missing_chunks="skip")
    train(changed(partial, train__max_tokens=4 * STEP))
    kept.rename(gone)  # the copy grows: other documents, in another order
    assert "the corpus (fingerprint" in refused(partial)
    gone.rename(kept)
    train(partial)


@pytest.mark.slow
def test_contents_that_changed_under_the_same_name_are_refused(tiny, tmp_path, corpus):
    """By the list of checksums; a new list of other contents is another corpus."""
    shutil.copytree(corpus, tmp_path / "data")
    array = tmp_path / "data/tiny/train.zarr"
    keys = [str(file.relative_to(array)) for file in array.glob("c/*/*")]
    write_list(array, keys)
    tiny = changed(tiny, data_dir=str(tmp_path / "data"), skip_eval=True)
    train(changed(tiny, train__max_tokens=4 * STEP))
    zarr.open_array(array, mode="r+")[1] = 7  # no row that is looked at for the fingerprint
    assert "c/0/0 is not the file that train.sha256 lists" in refused(tiny)
    write_list(array, keys)
    assert "the corpus's list of checksums (its hash" in refused(tiny)
    array.with_suffix(".sha256").unlink()
    checkpoints = Path(tiny["output_dir"]) / "checkpoints"
    listed = newest_valid(checkpoints).trainer_state()["data_checksums"]
    train(changed(tiny, train__max_tokens=8 * STEP))  # without a list there is nothing to compare
    assert newest_valid(checkpoints).trainer_state()["data_checksums"] == listed is not None
