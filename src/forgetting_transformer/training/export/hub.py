"""Uploads an export to the Hugging Face hub. HF_ENDPOINT names another hub, as everywhere in huggingface_hub."""

import json
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from forgetting_transformer.command_line import one_line
from forgetting_transformer.data.checksums import sha256_of
from forgetting_transformer.training.export.card import CARD, FIGURE
from forgetting_transformer.training.export.folder import MARK, ExportError, read_mark

_OF_MODELS = (".safetensors", ".bin")
#: Without an answer: an error of the HTTP library that huggingface_hub uses, httpx or httpx2, is no OSError.
_NO_ANSWER: tuple[type[Exception], ...] = (errors.HTTPError, OSError)


def check_repo_id(repo_id: str) -> None:
    """Refuses what is no id of a repository with its account, which the card's example needs.

    Raises:
        ExportError: naming what is wrong.
    """
    try:
        validate_repo_id(repo_id)
        problem = "" if "/" in repo_id else "it names no account"
    except HFValidationError as error:
        problem = one_line(error)
    if problem:
        raise ExportError(f"--push_to_hub={repo_id} is no repository of a hub ({problem}); give ACCOUNT/NAME")


def push(
    folder: Path, repo_id: str, private: bool | None = None, revision: str | None = None, replace: bool = False
) -> str:
    """Uploads what an export wrote, and the card, as one commit; makes the repository and the branch if needed.

    A card that is there and that no export wrote, or that was edited there, is kept with its figure. Files of the
    export before that this one lacks are removed in the same commit; nothing else is.

    Args:
        private: makes the repository a private one, and refuses a public one that exists; None: what the account's
            settings say.
        revision: a branch; None for the main one.
        replace: replace another run's export too.

    Returns:
        a line that says where the model is.

    Raises:
        ExportError: offline, without a token or a right, or the repository is public and should be private, or holds
            a model that is not from an export, or another run's export. The local folder is unchanged.
    """
    here, again = f"the export is whole in {folder}, but not on the hub", "then run the same command again"
    try:
        api = HfApi()
        if get_token() is None:
            raise ExportError(f"{here}: there is no token; run `hf auth login` or set HF_TOKEN, {again}")
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        # A repository that exists stays as visible as it is.
        if private and not api.model_info(url.repo_id).private:
            raise ExportError(
                f"{here}: {repo_id} exists and is public; make it private in its settings on the hub, choose another "
                "repository, or leave out --private"
            )
        if revision is not None:
            api.create_branch(url.repo_id, branch=revision, exist_ok=True)
        mark, present = read_mark(folder), set(api.list_repo_files(url.repo_id, revision=revision))
        with tempfile.TemporaryDirectory() as cache:
            for name in {MARK, CARD} & present:
                api.hf_hub_download(url.repo_id, name, revision=revision, local_dir=cache)
            before, card = read_mark(Path(cache)), Path(cache, CARD)
            edited = card.exists() and before.get("files", {}).get(CARD) != sha256_of(card)
        _check_ours(present, before, mark, f"{here}: {repo_id}", replace)
        names = {name for name in mark["files"] if (folder / name).is_file()} - ({CARD, FIGURE} if edited else set())
        if CARD in names:  # so that the next push knows whether it was edited there
            mark["files"][CARD] = sha256_of(folder / CARD)
        outdated = (before.get("files", {}).keys() & present) - names - {CARD, FIGURE}
        contents: dict[str, Path | bytes] = {name: folder / name for name in sorted(names)}
        contents[MARK] = json.dumps(mark, indent=1).encode()
        api.create_commit(
            url.repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *(CommitOperationDelete(name) for name in sorted(outdated)),
            ],
            commit_message=f"Checkpoint at {mark['checkpoint']:,} training tokens",
            revision=revision,
        )
    except OfflineModeIsEnabled as error:
        raise ExportError(f"{here}: HF_HUB_OFFLINE is set; unset it, {again}") from error
    except HfHubHTTPError as error:
        refused = error.response.status_code in (401, 403, 404)
        cure = "check the token (`hf auth login`), its rights and the name" if refused else "wait"
        raise ExportError(f"{here}: {one_line(error)}; {cure}, {again}") from error
    except ValueError as error:  # what the hub says of the card's header, or an answer that is no hub's
        cure = f"correct the header of {CARD}" if CARD in str(error) else "check HF_ENDPOINT"
        raise ExportError(f"{here}: {one_line(error)}; {cure}, {again}") from error
    except _NO_ANSWER as error:
        raise ExportError(f"{here}: {one_line(error)}; check the network, {again}") from error
    note = f"; {CARD} there is not as an export wrote it and is kept" if edited else ""
    return f"pushed to {url}{'' if revision is None else f', branch {revision}'}{note}"


def _check_ours(present: set[str], before: dict[str, Any], mark: dict[str, Any], where: str, replace: bool) -> None:
    """
    Args:
        present: names of the files there. before: mark of the export there; empty without one. mark: of the new one.
        where: the repository, for messages.

    Raises:
        ExportError: a model that no export wrote, or an export of another run.
    """
    if not before and (strangers := sorted(n for n in present if n in (MARK, "config.json") or n.endswith(_OF_MODELS))):
        raise ExportError(
            f"{where} holds {strangers[0]}, which is not from an export, and two models would be mixed there; choose "
            "another repository, or a --revision of its own"
        )
    if before and before.get("run") != mark["run"] and not replace:
        raise ExportError(
            f"{where} holds the export of another run ({before.get('tag')}, seed {before.get('seed')}); choose another "
            "repository or --revision, or replace it with --replace"
        )
