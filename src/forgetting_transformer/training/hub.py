"""Uploads an export to the Hugging Face hub. HF_ENDPOINT names another hub, as everywhere in huggingface_hub."""

import json
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from forgetting_transformer.analysis.model_card import CARD, FIGURE, public_origin, renewed
from forgetting_transformer.command_line import one_line
from forgetting_transformer.data.checksums import sha256_of
from forgetting_transformer.training.export import (
    MARK,
    ExportError,
    card_step,
    is_of_another_run,
    outdated_card,
    read_card,
)

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

    Of a card that was edited on the hub, the marked part is renewed and the rest kept; where that part was edited, all
    of it. Files of an earlier export that this one lacks are removed
    in the same commit; nothing else is.

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
    here = f"the export is whole in {folder}, but not on the hub"
    again = "then run the same command again"
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
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        outdated, kept, card_of, edited_there = _look(api, url.repo_id, revision, here, None if replace else mark)
        # A card and a figure that are in no mark are somebody else's.
        names = {name for name in mark["files"] if (folder / name).is_file()} - kept
        merged = None
        if kept and CARD in mark["files"] and (local := read_card(folder / CARD)) is not None:
            merged = renewed(edited_there, local)
        if merged is not None:
            names |= {name for name in (FIGURE,) if name in mark["files"] and (folder / name).is_file()}
            note = f"; of {CARD}, which was edited there, the marked part is new and the rest is kept"
        elif kept:
            mark["card"], note = card_of, f"; {CARD} was edited there and is kept"
        elif CARD not in names and (folder / CARD).is_file():
            note = f"; {CARD} in {folder} is not from an export and stays there"
        elif CARD in names and mark["files"][CARD] != sha256_of(folder / CARD):
            note = f"; {CARD} as you edited it is there"
        else:
            note = ""
        if note and (kept or CARD in names):
            note += outdated_card(card_step(mark), mark["checkpoint"])
        contents: dict[str, Path | bytes] = {name: folder / name for name in sorted(names)}
        if merged is not None:
            contents[CARD] = merged.encode()
        elif CARD in names:  # so that the next push knows whether it was edited there
            mark["files"][CARD] = sha256_of(folder / CARD)
        # The mark says where weights came from, which may be a folder of this machine.
        contents[MARK] = json.dumps(public_origin(mark), indent=1, sort_keys=True).encode()
        api.create_commit(
            url.repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *(CommitOperationDelete(name) for name in sorted(outdated - contents.keys())),
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
    return f"pushed to {url}{'' if revision is None else f', branch {revision}'}{note}"


def _look(
    api: HfApi, repo_id: str, revision: str | None, here: str, of_run: dict[str, Any] | None
) -> tuple[set[str], set[str], int | None, str]:
    """What the repository holds: files of the export before, files that are not as an export wrote them, the card's
    checkpoint, and its text where it was edited there.

    Args:
        of_run: mark of the run whose export may be there; None for any run's.

    Raises:
        ExportError: a model that no export wrote, or an export of another run.
    """
    present = set(api.list_repo_files(repo_id, revision=revision))
    files: dict[str, Any] = {}
    strangers: list[str] = []
    card_of: int | None = None
    with tempfile.TemporaryDirectory() as cache:

        def fetched(name: str) -> Path:
            return Path(api.hf_hub_download(repo_id, name, revision=revision, cache_dir=cache))

        if MARK in present:
            try:
                mark = json.loads(fetched(MARK).read_text(encoding="utf-8"))
                recorded, card_of = mark["files"], card_step(mark)
                files = dict(recorded) if isinstance(recorded, dict) else dict.fromkeys(recorded)
            except (ValueError, KeyError, TypeError):
                strangers = [MARK]
            else:
                if of_run is not None and is_of_another_run(mark, of_run):
                    raise ExportError(
                        f"{here}: {repo_id} holds the export of another run ({mark.get('tag')}, seed "
                        f"{mark.get('seed')}); choose another repository or --revision, or replace it with --replace"
                    )
        else:
            strangers = sorted(name for name in present if name == "config.json" or name.endswith(_OF_MODELS))
        if strangers:
            raise ExportError(
                f"{here}: {repo_id} holds {strangers[0]}, which is not from an export, and two models would be mixed "
                "there; choose another repository, or a --revision of its own"
            )
        earlier = files.keys() & present
        if CARD not in present or files.get(CARD) == sha256_of(fetched(CARD)):
            return earlier, set(), card_of, ""
        text = read_card(fetched(CARD)) or ""
    return earlier - {CARD, FIGURE}, {CARD, FIGURE}, card_of, text
