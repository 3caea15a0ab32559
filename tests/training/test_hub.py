"""An export goes to a hub only when that is asked for, and whatever goes wrong there, the folder here is whole."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from forgetting_transformer.training.export import MARK, ExportError, export, hub
from forgetting_transformer.training.export.card import CARD
from tests.processes import ROOT, shell_environment
from tests.tiny import STEP
from tests.training.hub_stand_in import TOKEN, Hub, stand_in
from tests.training.test_export import word_tokenizer

pytestmark = pytest.mark.slow
REPO = "somebody/fox"


@pytest.fixture
def there() -> Iterator[Hub]:
    with stand_in() as running:
        yield running


@pytest.fixture
def logged_in(there, monkeypatch):
    """In this process, which has read the environment already."""
    monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint=there.url))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def exported(tiny, tmp_path, finished) -> Callable[..., Path]:
    """Exports a run at some step and returns the folder."""
    tokenizer = str(word_tokenizer(tmp_path / "tokenizer"))

    def make(step: int = 20 * STEP) -> Path:
        export(Path(finished(tiny)), tmp_path / "hf", step=step, tokenizer=tokenizer, model_id=REPO)
        return tmp_path / "hf"

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_the_export_wrote_is_uploaded_and_nothing_else(there, logged_in, exported):
    folder = exported()
    (folder / "diary.txt").write_text("not for the hub")
    said = hub.push(folder, REPO, private=True)
    assert said == f"pushed to {there.url}/{REPO}"
    expected = contents(folder)
    del expected["diary.txt"]
    assert there.repos[REPO]["main"] == expected and {CARD, MARK, "model.safetensors"} <= expected.keys()
    assert [made["visibility"] for made in there.created] == ["private"]
    assert f'model_id = "{REPO}"' in expected[CARD].decode()


def test_the_next_push_replaces_the_export_on_its_branch_and_leaves_other_files(there, logged_in, exported):
    hub.push(exported(8 * STEP), REPO, revision="small")
    files = there.repos[REPO]["small"]
    mark = json.loads(files[MARK])
    files |= {"old.safetensors": b"x", "notes.txt": b"mine"}
    files[MARK] = json.dumps(mark | {"files": mark["files"] | {"old.safetensors": "digest"}}).encode()
    assert hub.push(exported(), REPO, revision="small") == f"pushed to {there.url}/{REPO}, branch small"
    assert files == contents(exported()) | {"notes.txt": b"mine"} and there.repos[REPO]["main"] == {}
    assert there.commits == [f"Checkpoint at {step * STEP:,} training tokens" for step in (8, 20)]


def test_a_card_that_was_edited_is_kept_there_and_one_that_no_export_wrote_stays_here(
    there, logged_in, exported, tmp_path
):
    folder = exported()
    hub.push(folder, REPO)
    files = there.repos[REPO]["main"]
    files[CARD] += b" Written there."
    card = files[CARD]
    for _ in range(2):
        assert f"; {CARD} there is not as an export wrote it and is kept" in hub.push(exported(8 * STEP), REPO)
        assert files[CARD] == card and files["model.safetensors"] == contents(folder)["model.safetensors"]
    mark = json.loads((folder / MARK).read_text())
    del mark["files"][CARD]
    (folder / MARK).write_text(json.dumps(mark))
    hub.push(folder, "somebody/else")
    assert CARD not in there.repos["somebody/else"]["main"]


@pytest.mark.parametrize(
    "files",
    [{"pytorch_model.bin": b"another"}, {MARK: b'{"files": 3}'}],
    ids=["model", "mark"],
)
def test_a_repository_with_another_model_is_refused(there, logged_in, exported, files):
    there.repos[REPO] = {"main": dict(files)}
    with pytest.raises(ExportError, match=rf"holds {min(files)}, which is not from an export") as caught:
        hub.push(exported(), REPO)
    assert "\n" not in str(caught.value) and there.repos[REPO]["main"] == files


def test_another_runs_export_is_replaced_where_that_is_asked_for_alone(there, logged_in, exported):
    folder = exported()
    hub.push(folder, REPO)
    before = dict(there.repos[REPO]["main"])
    mark = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps(mark | {"run": "another"}))
    with pytest.raises(ExportError, match=rf"{REPO} holds the export of another run .*replace it with --replace"):
        hub.push(folder, REPO)
    assert there.repos[REPO]["main"] == before
    hub.push(folder, REPO, replace=True)
    assert json.loads(there.repos[REPO]["main"][MARK])["run"] == "another"


def test_private_is_never_an_upload_to_a_public_repository(there, logged_in, exported):
    """The hub does not change the visibility of a repository that exists."""
    there.repos[REPO] = {"main": {".gitattributes": b""}}
    with pytest.raises(ExportError, match=rf"{REPO} exists and is public; make it private in its settings on the hub"):
        hub.push(exported(), REPO, private=True, revision="secret")
    assert there.repos[REPO] == {"main": {".gitattributes": b""}}
    there.private.add(REPO)
    hub.push(exported(), REPO, private=True)
    assert MARK in there.repos[REPO]["main"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no token", "there is no token; run `hf auth login` or set HF_TOKEN"),
        ("wrong token", "401"),
        ("offline", "HF_HUB_OFFLINE"),
        ("no network", "onnect"),
        ("a card that the hub refuses", '"license" must be one of a list'),
    ],
)
def test_what_went_wrong_is_one_line_and_the_export_is_whole(there, logged_in, exported, monkeypatch, change, said):
    folder = exported()
    if change == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no such file"))
    elif change == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    elif change == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif change == "no network":
        monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint="http://127.0.0.1:9"))
    else:
        text = (folder / CARD).read_text()
        (folder / CARD).write_text(text.replace("---\n", "---\nlicense: wrong\n", 1))
    before = contents(folder)
    with pytest.raises(ExportError, match=f"the export is whole in {folder}, but not on the hub: .*{said}") as caught:
        hub.push(folder, REPO)
    assert str(caught.value).endswith("then run the same command again") and "\n" not in str(caught.value)
    assert "hf_of_another" not in str(caught.value) and contents(folder) == before
    assert not there.repos.get(REPO, {}).get("main")


@pytest.mark.parametrize("name", ["fox", "a/b/c", "somebody/fox!"])
def test_what_is_no_repository_is_refused_before_anything_is_written(name):
    with pytest.raises(ExportError, match=r"^--push_to_hub=.* is no repository of a hub .*; give ACCOUNT/NAME$"):
        hub.check_repo_id(name)


def test_the_command_pushes_to_the_hub_that_the_environment_names(there, tiny, tmp_path, finished):
    """In a new process, which reads the environment as a user's does."""
    flags = ["--hf_load_dir", finished(tiny), "--hf_save_dir", str(tmp_path / "hf")]
    flags += ["--tokenizer", str(word_tokenizer(tmp_path / "tokenizer")), "--push_to_hub", REPO]
    environment = shell_environment() | {
        "HF_ENDPOINT": there.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "save_model.py"), *flags], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"pushed to {there.url}/{REPO}"
    assert there.repos[REPO]["main"] == contents(tmp_path / "hf")
