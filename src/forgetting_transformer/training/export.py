"""From a training checkpoint, of any strategy and at any step, to a Hugging Face folder."""

import contextlib
import difflib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers.processors import Sequence, TemplateProcessing
from transformers import GenerationConfig, PreTrainedModel

from forgetting_transformer import plugins
from forgetting_transformer.analysis import model_card
from forgetting_transformer.command_line import one_line
from forgetting_transformer.data.checksums import sha256_of
from forgetting_transformer.files import LocksUnsupportedError, explain, locked, naming, write_atomically
from forgetting_transformer.model import registry
from forgetting_transformer.model_tokenizer import load_tokenizer
from forgetting_transformer.tokenizer import JSONGPT2Tokenizer
from forgetting_transformer.training import official_checkpoint
from forgetting_transformer.training.callbacks.base import LARGE
from forgetting_transformer.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_weights,
    load_weights,
    read_newest,
    read_weights,
    steps_in,
)
from forgetting_transformer.training.continuing import decisive
from forgetting_transformer.training.run_directory import RunDirectory, belongs_to
from forgetting_transformer.versions import how_to_install

log = logging.getLogger(__name__)

#: Written into every export: which checkpoint it was made from, and which files of a model an export may replace.
MARK = "exported_from.json"
#: What a mark may say of the weights besides.
_OF_WEIGHTS = ("average_of", "weights", "weights_from")
_STANDARD = {"config.json", "generation_config.json", "model.safetensors"}
#: In a mark instead of a digest: of a card that was edited before this export.
_EDITED = "edited"
_OF_THE_CARD = {model_card.CARD, model_card.FIGURE}
_OF_MODELS = (".safetensors", ".bin", ".index.json")
_WHERE_FROM = (
    "Name one with --tokenizer FOLDER_OR_HUB_ID; for LongCrawl64 a folder with GPT-2's vocab.json and merges.txt will "
    "do, or " + how_to_install("gpt2")
)


class ExportError(RuntimeError):
    """The export could not be completed; the message says what is missing and how to give it."""


def export(
    run_folder: Path,
    save_folder: Path,
    step: int | None = None,
    tokenizer: str | None = None,
    model_id: str | None = None,
    weights: str | None = None,
    licence: str | None = None,
    replace: bool = False,
) -> str:
    """Writes `save_folder` and returns a line that says what was written.

    A model card (README.md) is written too. Of one that was edited, the marked part is renewed and the rest kept; one
    that no export wrote, or whose marked part was edited, is kept as it is.

    Args:
        run_folder: output_dir of a training run, of this project or of the authors' code; it may still be training.
        step: training tokens of the checkpoint; None for the newest valid one.
        tokenizer: folder or hub id; None for the run's own.
        model_id: what the card's example loads, such as the id on a hub; None for the folder.
        weights: the callback whose average of the weights is exported, such as "ema"; None for the weights themselves.
        licence: for the card, as the hub calls it; None for that in the header of the card that is there, or for none.
        replace: replace another run's export too.

    Raises:
        CheckpointError: no valid checkpoint (at that step), or none of these weights in it.
        ExportError: another export is writing there, the folder is a run's or a corpus's, holds another model, another
            run's export or files of somebody else, or cannot be written, or the tokenizer cannot be used. Also where
            LongCrawl64's is not there; then the model is written all the same.
    """
    check_place(save_folder)
    directory = RunDirectory(run_folder)
    _check_run(run_folder, directory)
    found: tuple[Checkpoint, dict[str, Any], PreTrainedModel] | None
    if official_checkpoint.is_official(directory) and weights is None:
        found = official_checkpoint.load_model(directory, step)
    else:
        found = read_newest(directory.checkpoints, lambda checkpoint: load_checkpoint(checkpoint, weights), step)
    if found is None:
        wanted = "no valid checkpoint" if step is None else f"no valid checkpoint at step {step}"
        raise CheckpointError(
            f"{wanted} in {directory.checkpoints}; it holds {steps_in(directory.checkpoints) or 'nothing'}"
        )
    what, about = f"checkpoint {found[0].path.name} of {run_folder}", {}
    if weights is not None:
        what, about = f"{weights} in {what}", {"weights": weights}
    options: dict[str, Any] = {"about": about, "model_id": model_id, "licence": licence, "replace": replace}
    return write(directory, *found, save_folder, tokenizer, what, **options)


def _check_run(run_folder: Path, directory: RunDirectory) -> None:
    """
    Raises:
        CheckpointError: there is no such folder, or no run in it.
    """
    fix = "give the output_dir of a training run"
    if not directory.root.is_dir():
        parent = directory.root.parent
        beside = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
        close = difflib.get_close_matches(directory.root.name, beside, n=1)
        hint = f"did you mean {str(run_folder.parent / close[0])!r}?" if close else fix
        raise CheckpointError(f"--hf_load_dir={run_folder}: there is no such folder; {hint}")
    if not directory.checkpoints.is_dir():
        raise CheckpointError(f"--hf_load_dir={run_folder}: it holds no checkpoints; {fix}")


def check_place(save_folder: Path, flag: str = "--hf_save_dir") -> None:
    """
    Args:
        flag: of the command, for the message.

    Raises:
        ExportError: the folder is a run's or a corpus's.
    """
    if said := belongs_to(save_folder):
        raise ExportError(
            f"{flag}={save_folder} {said}, so an exported model must not go there: what reads that folder "
            f"later would take one for the other; choose another {flag}"
        )


def write(
    directory: RunDirectory,
    checkpoint: Checkpoint,
    state: dict[str, Any],
    model: PreTrainedModel,
    save_folder: Path,
    tokenizer: str | None,
    what: str,
    about: dict[str, Any] | None = None,
    model_id: str | None = None,
    flag: str = "--hf_save_dir",
    licence: str | None = None,
    replace: bool = False,
) -> str:
    """Writes `save_folder` for `export`, which has the errors, and returns its line.

    Args:
        state: trainer.json of the checkpoint. model: on the CPU.
        what: the model, for people. about: what the folder records of it, besides the checkpoint.
        flag: of the command that names the folder, for messages.
    """
    found_tokenizer, why_none = _find_tokenizer(directory, state, tokenizer)
    pad = getattr(found_tokenizer, "pad_token_id", None)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,  # without it generation runs to its length limit
        pad_token_id=model.config.eos_token_id if pad is None else pad,
    )
    if hasattr(model.config, "max_position_embeddings"):
        # No effect on the model; lm_eval and others read it as the context length of training.
        model.config.max_position_embeddings = state["config"]["datamodule"]["train_batch_len"]
    origin: dict[str, Any] = {"checkpoint": checkpoint.step, "tag": state["config"].get("tag"), **(about or {})}
    origin["seed"] = state["config"].get("seed")
    run = [decisive(state["config"]), state.get("data_fingerprint")]
    origin["run"] = hashlib.sha256(json.dumps(run, sort_keys=True, default=str).encode()).hexdigest()[:16]
    if state.get("weights_from"):
        origin["weights_from"] = state["weights_from"]
    names = [state["config"]["model"]["name"], *model.config.mixer_architectures]
    if needed := sorted({plugins.MODELS.plugin_of(name) for name in names} - {""}):
        origin["plugins"] = needed
    exported = model_card.Exported(
        checkpoint.step,
        state["config"],
        model.config.model_type,
        model.num_parameters(),
        found_tokenizer is not None,
        tuple(needed),
        model_id or ".",
        origin,
    )
    try:
        with _only_export(save_folder, flag):
            with tempfile.TemporaryDirectory() as prepared:
                # What a tokenizer consists of is known when it is saved, and is looked at before anything is
                # overwritten.
                if found_tokenizer is not None:
                    with naming(Path(prepared)):
                        _save_tokenizer(found_tokenizer, Path(prepared))
                beside = {str(file.relative_to(prepared)) for file in Path(prepared).rglob("*") if file.is_file()}
                own, before = _check_ours(save_folder, _STANDARD | beside, flag), _read_mark(save_folder)
                if is_of_another_run(before, origin) and not replace:
                    raise ExportError(
                        f"{save_folder} holds the export of another run ({before.get('tag')}, seed "
                        f"{before.get('seed')}, {before['checkpoint']:,} tokens); choose another {flag}, or replace it "
                        "with --replace"
                    )
                card, edited = _free_for_the_card(save_folder, own)
                # First: an export that was killed may be made again. What is not ours keeps its digest or no mention.
                files = dict.fromkeys(sorted(_STANDARD | beside | own.keys() | card))
                files |= {name: own[name] for name in (own.keys() & _OF_THE_CARD) - card}
                if edited is not None:
                    files[model_card.CARD] = own.get(model_card.CARD, _EDITED)
                card_of = checkpoint.step if model_card.CARD in card else card_step(before)
                _mark(save_folder, origin | {"card": card_of, "files": files})
                model.save_pretrained(save_folder)
                for file in save_folder.glob("model*.safetensors"):  # safetensors lets nobody else read them
                    shutil.copymode(save_folder / "config.json", file)
                for name in beside:
                    (save_folder / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(Path(prepared) / name, save_folder / name)
            written = _model_files(save_folder) | {"generation_config.json"} | beside
            digests = _write_card(save_folder, directory.root, exported, card, edited, licence)
            kept = {name: digest for name, digest in own.items() if os.path.lexists(save_folder / name)}
            files = kept | {name: sha256_of(save_folder / name) for name in written} | digests
            _mark(save_folder, origin | {"card": card_of, "files": files})
    except (FileExistsError, NotADirectoryError) as error:
        raise ExportError(f"{save_folder} is a file, or lies under one; choose another {flag}") from error
    except (OSError, SafetensorError) as error:
        reason = explain(error) if isinstance(error, OSError) else one_line(error)
        raise ExportError(
            f"cannot write the export to {save_folder} ({reason}); make room, or choose another {flag}"
        ) from error
    missing = ""
    if found_tokenizer is None:
        data = state["config"]["datamodule"]
        if data["dataset"] == "longcrawl64":  # its tokenizer is known
            raise ExportError(f"the model is in {save_folder}, but without a tokenizer ({why_none}). {_WHERE_FROM}")
        missing = (
            f", without a tokenizer ({why_none}): name one with --tokenizer FOLDER_OR_HUB_ID, or save it as "
            f"{state['config']['data_dir']}/{data['dataset']}/tokenizer, which the next start of the run keeps with it"
        )
    replaced = ""
    # Either may say what the other does not: that the weights are an average, or where their run began.
    compared = ({*origin} | {*_OF_WEIGHTS}) - {"seed", "run"}
    if before and (is_of_another_run(before, origin) or any(before.get(k) != origin.get(k) for k in compared)):
        replaced = f", in place of the one at {before.get('checkpoint'):,} tokens of {before.get('tag')}"
    kept_card = ""
    if edited is not None:
        kept_card = f"; of {model_card.CARD}, which was edited, the marked part is new and the rest is kept"
    if model_card.CARD not in card:
        kept_card = f"; {model_card.CARD} there is not as an export wrote it and is kept"
        kept_card += outdated_card(card_of, checkpoint.step)
    needs = f"; loading it needs `import {', '.join(needed)}`, or --plugins {' '.join(needed)}" if needed else ""
    return f"{what} is now {save_folder}{replaced}{kept_card}{needs}{missing}"


def load_checkpoint(
    checkpoint: Checkpoint, weights: str | None = None
) -> tuple[Checkpoint, dict[str, Any], PreTrainedModel]:
    """A checkpoint, its trainer.json and its model; for `read_newest`.

    Args:
        weights: as of `export`.
    """
    state = checkpoint.trainer_state()
    model = build_from_checkpoint(checkpoint, state)
    if weights is not None:
        parameters = dict(model.named_parameters())
        part = f"{LARGE}{weights}."
        if (average := read_weights(checkpoint, part=part)).keys() != parameters.keys():
            raise CheckpointError(
                f"--weights={weights}: {checkpoint.path} has no such weights; the run must train with "
                f"callbacks=[{weights}]"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(average[name])
        check_weights(model, f"{checkpoint.path}, {weights}")
    return checkpoint, state, model


def _free_for_the_card(folder: Path, own: dict[str, str | None]) -> tuple[set[str], str | None]:
    """Which files of a card an export may write: none that is somebody else's, or was edited since it was written.

    Of an edited card whose marked part is as an export wrote it, that part may be written; the text is given too. A
    card that is kept keeps its figure, since its text speaks of that.
    """

    def free(name: str) -> bool:
        file = folder / name
        return not os.path.lexists(file) or (name in own and file.is_file() and own[name] in (None, sha256_of(file)))

    names = {name for name in _OF_THE_CARD if free(name)}
    if model_card.CARD in names:
        return names, None
    text = read_card(folder / model_card.CARD)
    if text is None or model_card.renewed(text, text) is None:
        return set(), None
    return names | {model_card.CARD}, text


def read_card(file: Path) -> str | None:
    """The text of a card; None where there is none that can be read."""
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, ValueError):
        return None


def _write_card(
    folder: Path,
    run_folder: Path,
    about: model_card.Exported,
    names: set[str],
    edited: str | None,
    licence: str | None,
) -> dict[str, str]:
    """Writes those files of the card that are in `names`. Without it the export is still whole.

    Args:
        edited: the card that is there, where it was edited.
        licence: as of `export`.

    Returns:
        The files that it wrote, each with the SHA-256 of what an export alone would have written.
    """
    if not names:
        return {}
    digests = {}
    licence = licence or model_card.licence_of(read_card(folder / model_card.CARD) or "")
    try:
        if model_card.FIGURE in names and model_card.draw_figure(run_folder, about, folder / model_card.FIGURE):
            digests[model_card.FIGURE] = sha256_of(folder / model_card.FIGURE)
        card = model_card.card(run_folder, about, bool(digests), licence)
    except ValueError as error:
        log.warning("no model card was written: %s", one_line(error))
        return digests
    text = card if edited is None else model_card.renewed(edited, card) or edited
    write_atomically(folder / model_card.CARD, text)
    return digests | {model_card.CARD: hashlib.sha256(card.encode()).hexdigest()}


@contextlib.contextmanager
def _only_export(folder: Path, flag: str) -> Iterator[None]:
    """Keeps other exports out of the folder by a lock on the folder itself, which leaves no file in it.

    Raises:
        ExportError: another export has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, wait=False))
        except BlockingIOError as error:
            raise ExportError(
                f"another export is writing to {folder}; wait for it, or choose another {flag}"
            ) from error
        except LocksUnsupportedError:
            pass  # or none for folders: as without this
        yield


def _model_files(folder: Path) -> set[str]:
    """Names of configurations and weights in a folder, of whatever model."""
    return {name for name in os.listdir(folder) if name == "config.json" or name.endswith(_OF_MODELS)}


def _mark(folder: Path, content: dict[str, Any]) -> None:
    write_atomically(folder / MARK, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _read_mark(folder: Path) -> dict[str, Any]:
    """What the last export wrote of itself; empty if there is nothing to read."""
    try:
        content = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return content if isinstance(content.get("checkpoint"), int) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def is_of_another_run(mark: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two marks are known to be of different runs: by what decides their weights, or by name and seed."""
    keys = ("run",) if "run" in mark and "run" in other else ("tag", "seed")
    return any(key in mark and mark[key] != other.get(key) for key in keys)


def card_step(mark: dict[str, Any]) -> int | None:
    """The checkpoint that the card of an export is of, from its mark; None where no export wrote the card."""
    written = model_card.CARD in mark.get("files", ())
    return mark.get("card", mark.get("checkpoint")) if written else None


def outdated_card(card_of: int | None, step: int) -> str:
    """For the end of a line: whether a card that is kept shows the numbers of another checkpoint than `step`."""
    if card_of in (None, step):
        return ""
    return f": its numbers are of the checkpoint at {card_of:,} tokens, and the weights of {step:,}"


def origin_of(folder: Path) -> tuple[int | None, int | None]:
    """Tokens and seed of the training that an exported model comes from; None for what is not known.

    Weights that have changed since the export, as by fine-tuning, come from elsewhere.
    """
    mark = _read_mark(folder)
    recorded = mark.get("files")
    weights = [file for file in folder.glob("*.safetensors") if file.is_file()] if folder.is_dir() else []
    if not isinstance(recorded, dict) or any(recorded.get(file.name) != sha256_of(file) for file in weights):
        return None, None
    return mark["checkpoint"], mark.get("seed")


def _check_ours(folder: Path, names: set[str], flag: str) -> dict[str, str | None]:
    """What earlier exports may have written there: names, each with its SHA-256 or None where that was not recorded.

    transformers deletes what looks like a part of an earlier model, and what it leaves would be
    loaded with the new one.

    Args:
        names: files that the next export writes.

    Raises:
        ExportError: one of them, or a file of a model, is there and is not from an export, or has changed since: a
            model that was trained further is saved under the same names, and files may be edited.
    """
    models, own = _model_files(folder), _exported_files(folder)
    present = models | {name for name in names if os.path.lexists(folder / name)}
    if own is None:
        present.add(MARK)
    if strangers := sorted(present - (own or {}).keys()):
        if strangers[0] in models | {MARK}:
            what = f"{folder} holds {strangers[0]}, which is not from an export: two models would be mixed there"
        else:
            what = f"{folder}/{strangers[0]} is not from an export, and an export would overwrite it"
        raise ExportError(f"{what}; choose another {flag}")
    assert own is not None  # otherwise MARK is a stranger
    for name in sorted(present):
        if own[name] is not None and (folder / name).is_file() and sha256_of(folder / name) != own[name]:
            raise ExportError(
                f"{folder}/{name} has changed since it was exported, and an export would overwrite it; move it away, "
                f"or choose another {flag}"
            )
    return own


def _exported_files(folder: Path) -> dict[str, str | None] | None:
    """As `_check_ours`, from the mark alone; None where a file of somebody else has the name of the mark."""
    try:
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8"))["files"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        return None


def build_from_checkpoint(checkpoint: Checkpoint, state: dict[str, Any]) -> PreTrainedModel:
    """The model of a checkpoint on the CPU, in fp32 and evaluation mode."""
    model = build_model(checkpoint, state)
    load_weights(checkpoint, model)
    return model.eval()


def build_model(checkpoint: Checkpoint, state: dict[str, Any]) -> PreTrainedModel:
    """The model of a checkpoint without its weights."""
    if said := plugins.missing(state["config"].get("plugins"), f"{checkpoint.path}: this run"):
        raise CheckpointError(said)
    architecture = registry.get(state["config"]["model"]["name"])
    return architecture.lm_class(architecture.config_class.from_dict(state["model_config"]))


def tokenizer_of_run(directory: RunDirectory, state: dict[str, Any], source: str | None = None) -> Any:
    """The tokenizer a run's model was trained with, or the one named by `source`.

    Args:
        state: trainer.json of a checkpoint.
        source: folder or hub id; None for the run's own, or, on LongCrawl64, its tokenizer over GPT-2's vocabulary.

    Raises:
        OSError, ValueError: there is none, it cannot be read, or it has another vocabulary than the model.
    """
    from forgetting_transformer.model_tokenizer import check_vocabulary, longcrawl64_tokenizer

    if source is None and directory.tokenizer.is_dir():
        where, tokenizer = str(directory.tokenizer), load_tokenizer(directory.tokenizer)
    elif state["config"]["datamodule"]["dataset"] == "longcrawl64":
        where, tokenizer = source or "GPT-2's tokenizer", longcrawl64_tokenizer(source or "gpt2")
    elif source is None:
        raise OSError(f"{directory.root} holds no tokenizer")
    else:
        where, tokenizer = source, load_tokenizer(source)
    fields = state["model_config"]
    try:
        check_vocabulary(tokenizer, fields["vocab_size"], fields.get("bos_token_id"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return tokenizer


def _find_tokenizer(directory: RunDirectory, state: dict[str, Any], source: str | None) -> tuple[Any, str]:
    """The tokenizer to export; None and why, where the run has none and none is named.

    Raises:
        ExportError: the one that is named, or the run's own, cannot be used.
    """
    try:
        tokenizer = tokenizer_of_run(directory, state, source)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        if source is None and not directory.tokenizer.is_dir():
            return None, reason
        whose = "the run's tokenizer" if source is None else f"--tokenizer={source}"
        raise ExportError(f"nothing is written: {whose} cannot be used ({reason}). {_WHERE_FROM}") from error
    tokenizer.model_max_length = state["config"]["datamodule"]["train_batch_len"]
    _prepare_prompts(tokenizer, state["model_config"].get("bos_token_id"))
    return tokenizer, ""


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, JSONGPT2Tokenizer):
        # The authors' code reads these two, and not tokenizer.json.
        tokenizer.backend_tokenizer.model.save(str(folder))


def _prepare_prompts(tokenizer: Any, bos_token_id: int | None) -> None:
    """Makes prompts like training data: BOS first, no EOS behind, and padding on the left of the shorter in a batch.

    Corpora are written without BOS, which is put before every training sequence. An EOS behind a prompt would make a
    model begin another text. transformers' pipelines and lm_eval's own models do what the tokenizer does.
    """
    # transformers saves what a tokenizer was made with, and not what was set afterwards.
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    own, bare = tokenizer("").input_ids, tokenizer("", add_special_tokens=False).input_ids
    if bos_token_id is None or own == [bos_token_id, *bare]:
        return
    bos = tokenizer.bos_token = tokenizer.convert_ids_to_tokens(bos_token_id)
    begins = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_token_id)])
    fast = tokenizer.backend_tokenizer
    adds_nothing = fast.post_processor is not None and own == bare  # it has other work, such as character offsets
    fast.post_processor = Sequence([fast.post_processor, begins]) if adds_nothing else begins
