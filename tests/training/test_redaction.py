"""A password in a URL is used, and neither written nor printed."""

from pathlib import Path

import pytest

from forgetting_transformer.console import redact, redact_tree
from tests.data.mirror import serve
from tests.training.conftest import STEP, changed, losses, refused, train

SECRET = "hunter2@1"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://reader:hunter2@host/data", "https://***@host/data"),
        ("s3://KEY:a@b:c@bucket/data and ftp://u:p@h", "s3://***@bucket/data and ftp://***@h"),
        ("https://gho_token@host/data", "https://***@host/data"),
        ("simplecache::https://u:p@host", "simplecache::https://***@host"),
        ("https://host/a?X-Amz-Signature=ab%2F&part=1&api_key=x#b", "https://host/a?X-Amz-Signature=***&part=1&api_key=***#b"),
        ("data_dir='http://u:p@h/d'", "data_dir='http://***@h/d'"),
        ("hf://datasets/OWNER/NAME@REVISION/a", "hf://datasets/OWNER/NAME@REVISION/a"),
        ("mail me@host", "mail me@host"),
    ],
)  # fmt: skip
def test_what_is_shown_of_a_url(text, shown):
    assert redact(text) == shown and redact(shown) == shown
    assert redact_tree({"a": [text, 1, None], "b": {"c": text}}) == {"a": [shown, 1, None], "b": {"c": shown}}


@pytest.mark.slow
def test_a_run_on_a_url_with_a_password_trains_resumes_and_writes_it_nowhere(tiny, tmp_path):
    pytest.importorskip("wandb")
    with serve(Path(tiny["data_dir"]), password=SECRET) as mirror:
        url = mirror.url.replace("://", f"://reader:{SECRET}@")
        places = {"datamodule__cache_dir": str(tmp_path / "cache"), "wandb__mode": "offline"}
        config = changed(tiny, data_dir=url, skip_eval=True, train__max_tokens=4 * STEP, **places)
        # As on a command line, whose arguments wandb records.
        patch = f"""
import os, sys
sys.argv = ["train.py", "data_dir={url}"]
printed = os.open({str(tmp_path / "printed")!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(printed, 1), os.dup2(printed, 2)
"""
        train(config, patch=patch)
        train(changed(config, train__max_tokens=8 * STEP, wandb__mode="disabled"), patch=patch)
        wrong = refused(changed(config, data_dir=url.replace(SECRET, "hunter2@2")), patch=patch)
        assert "401" in wrong and "http://***@127.0.0.1" in wrong
    run = Path(tiny["output_dir"])
    assert sorted(losses(tiny["output_dir"])) == [STEP * n for n in range(1, 9)]
    assert "http://***@" in (run / "config.yaml").read_text()
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()]
