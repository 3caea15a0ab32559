"""Uploads an export to the Hugging Face hub. HF_ENDPOINT names another hub, as everywhere in huggingface_hub."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi, errors, get_token
from huggingface_hub.utils import validate_repo_id

from forgetting_transformer.command_line import one_line
from forgetting_transformer.data.storage.checksums import sha256_of
from forgetting_transformer.training.export.card import CARD
from forgetting_transformer.training.export.mark import MARK, ExportError, check_replaceable, is_of_a_model, read_mark


def check_repo_id(repo_id: str) -> None:
    """Refuses what is no id of a repository with its account, which the card's example needs.

    Raises:
        ExportError: naming what is wrong.
    """
    try:
        validate_repo_id(repo_id)
        problem = "" if "/" in repo_id else "it names no account"
    except errors.HFValidationError as error:
        problem = one_line(error)
    if problem:
        raise ExportError(f"--push_to_hub={repo_id} is no repository of a hub ({problem}); give ACCOUNT/NAME")


def push(
    folder: Path, repo_id: str, private: bool | None = None, revision: str | None = None, replace: bool = False
) -> str:
    """Uploads what an export wrote as one commit; makes the repository and the branch if needed.

    A card that is there and that no export wrote, or that was edited, is kept. Files of the export before that this one
    lacks are removed in the same commit; nothing else is.

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
    if get_token() is None:
        raise ExportError(f"{here}: there is no token; run `hf auth login` or set HF_TOKEN, {again}")
    try:
        api = HfApi()
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
        kept = {CARD} if edited else set()
        there = {name for name in present - {CARD} if is_of_a_model(name) or name in (MARK, *mark["files"])}
        check_replaceable(there, before, mark, f"{here}: {repo_id}", "repository or --revision", replace)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            revision=revision,
            allow_patterns=[MARK, *(mark["files"].keys() - kept)],
            delete_patterns=[*(before.get("files", {}).keys() - mark["files"].keys() - kept)],
            commit_message=f"Checkpoint at {mark['checkpoint']:,} training tokens",
        )
    # An error of the HTTP library that huggingface_hub uses is no OSError; a ValueError is what the hub says of a card.
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError) as error:
        raise ExportError(f"{here}: {one_line(error)}; mend this, {again}") from error
    note = f"; {CARD} there is not as an export wrote it and is kept" if edited else ""
    return f"pushed to {url}{'' if revision is None else f', branch {revision}'}{note}"
