"""An export goes to a hub only when that is asked for, and whatever goes wrong there, the folder here is whole."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects

from forgetting_transformer.data.storage.checksums import sha256_of
from forgetting_transformer.training.export import MARK, ExportError, hub
from forgetting_transformer.training.export.card import CARD
from tests.training.test_export import contents

REPO = "somebody/fox"


class Hub:
    """A hub in memory, as far as `push` asks one: `repos` has the files of each repository by branch."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []

    def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
        if repo_id not in self.repos:
            self.repos[repo_id] = {"main": {}}
            self.private |= {repo_id} if private else set()
        return type("Url", (str,), {"repo_id": repo_id})(f"https://hub/{repo_id}")

    def model_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=repo_id in self.private)

    def create_branch(self, repo_id: str, branch: str, exist_ok: bool) -> None:
        self.repos[repo_id].setdefault(branch, dict(self.repos[repo_id]["main"]))

    def list_repo_files(self, repo_id: str, revision: str | None) -> list[str]:
        return list(self.repos[repo_id][revision or "main"])

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None, local_dir: str) -> None:
        Path(local_dir, filename).write_bytes(self.repos[repo_id][revision or "main"][filename])

    def upload_folder(self, repo_id, folder_path, revision, allow_patterns, delete_patterns, commit_message) -> None:
        files, here = self.repos[repo_id][revision or "main"], contents(folder_path)
        for name in [*filter_repo_objects(files, allow_patterns=delete_patterns)] if delete_patterns else []:
            del files[name]
        files |= {name: here[name] for name in filter_repo_objects(here, allow_patterns=allow_patterns)}
        self.commits.append(commit_message)


@pytest.fixture
def there(monkeypatch) -> Hub:
    running = Hub()
    monkeypatch.setattr(hub, "HfApi", lambda: running)
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    return running


@pytest.fixture
def exported(tmp_path) -> Callable[..., Path]:
    """Writes the files of an export at some step and returns the folder."""

    def make(step: int = 20) -> Path:
        folder = tmp_path / "hf"
        folder.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors", CARD):
            (folder / name).write_text(f"{name} of step {step}")
        files = {file.name: sha256_of(file) for file in folder.iterdir() if file.name not in (MARK, "diary.txt")}
        mark = {"checkpoint": step, "run": "this", "tag": "debug", "seed": 0, "files": files}
        (folder / MARK).write_text(json.dumps(mark))
        return folder

    return make


def test_the_stand_in_is_called_as_the_library_is():
    for name in ("create_repo", "model_info", "create_branch", "list_repo_files", "hf_hub_download", "upload_folder"):
        asked = inspect.signature(getattr(Hub, name)).parameters
        assert set(asked) <= set(inspect.signature(getattr(HfApi, name)).parameters), name


def test_what_the_export_wrote_is_uploaded_and_nothing_else(there, exported):
    folder = exported()
    (folder / "diary.txt").write_text("not for the hub")
    assert hub.push(folder, REPO, private=True) == f"pushed to https://hub/{REPO}"
    expected = contents(folder)
    del expected["diary.txt"]
    assert there.repos[REPO]["main"] == expected and {CARD, MARK, "model.safetensors"} <= expected.keys()
    assert REPO in there.private


def test_the_next_push_replaces_the_export_on_its_branch_and_leaves_other_files(there, exported):
    hub.push(exported(8), REPO, revision="small")
    files = there.repos[REPO]["small"]
    mark = json.loads(files[MARK])
    files |= {"old.safetensors": b"x", "notes.txt": b"mine"}
    files[MARK] = json.dumps(mark | {"files": mark["files"] | {"old.safetensors": "digest"}}).encode()
    assert hub.push(exported(), REPO, revision="small") == f"pushed to https://hub/{REPO}, branch small"
    assert files == contents(exported()) | {"notes.txt": b"mine"} and there.repos[REPO]["main"] == {}
    assert there.commits == ["Checkpoint at 8 training tokens", "Checkpoint at 20 training tokens"]


def test_a_card_that_was_edited_is_kept_there_and_one_that_no_export_wrote_stays_here(there, exported):
    folder = exported()
    hub.push(folder, REPO)
    files = there.repos[REPO]["main"]
    files[CARD] += b" Written there."
    card = files[CARD]
    for _ in range(2):
        assert f"; {CARD} there is not as an export wrote it and is kept" in hub.push(exported(8), REPO)
        assert files[CARD] == card and files["model.safetensors"] == contents(folder)["model.safetensors"]
    mark = json.loads((folder / MARK).read_text())
    del mark["files"][CARD]
    (folder / MARK).write_text(json.dumps(mark))
    hub.push(folder, "somebody/else")
    assert CARD not in there.repos["somebody/else"]["main"]


@pytest.mark.parametrize("files", [{"pytorch_model.bin": b"another"}, {MARK: b'{"files": 3}'}], ids=["model", "mark"])
def test_a_repository_with_another_model_is_refused(there, exported, files):
    there.repos[REPO] = {"main": dict(files)}
    with pytest.raises(ExportError, match=rf"holds {min(files)}, which is not from an export") as caught:
        hub.push(exported(), REPO)
    assert "\n" not in str(caught.value) and there.repos[REPO]["main"] == files


def test_another_runs_export_is_replaced_where_that_is_asked_for_alone(there, exported):
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


def test_private_is_never_an_upload_to_a_public_repository(there, exported):
    """The hub does not change the visibility of a repository that exists."""
    there.repos[REPO] = {"main": {".gitattributes": b""}}
    with pytest.raises(ExportError, match=rf"{REPO} exists and is public; make it private in its settings on the hub"):
        hub.push(exported(), REPO, private=True, revision="secret")
    assert there.repos[REPO] == {"main": {".gitattributes": b""}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no token", "there is no token; run `hf auth login` or set HF_TOKEN"),
        ("offline", "HF_HUB_OFFLINE"),
        ("no network", "onnect"),
    ],
)
def test_what_went_wrong_is_one_line_and_the_export_is_whole(there, exported, monkeypatch, change, said):
    folder = exported()
    before = contents(folder)
    monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", change == "offline")
    if change == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no such file"))
    with pytest.raises(ExportError, match=f"the export is whole in {folder}, but not on the hub: .*{said}") as caught:
        hub.push(folder, REPO)
    assert str(caught.value).endswith("then run the same command again") and "\n" not in str(caught.value)
    assert "hf_of_mine" not in str(caught.value) and contents(folder) == before


@pytest.mark.parametrize("name", ["fox", "a/b/c", "somebody/fox!"])
def test_what_is_no_repository_is_refused_before_anything_is_written(name):
    with pytest.raises(ExportError, match=r"^--push_to_hub=.* is no repository of a hub .*; give ACCOUNT/NAME$"):
        hub.check_repo_id(name)
